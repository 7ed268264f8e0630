"""The conversation of a durable subscriber with a server, as a state machine. Specified in docs/durable-protocol.md.

The rules:

* One request is open at a time (``transport.session``). It is repeated after ``SILENCE_SECONDS`` without a byte, and
  after twice as many on a new connection. An answer to a request that is not open is ignored.
* The next FETCH leaves when the answer to the one before has come, not when the caller has taken its messages: up to
  two answers are in memory.
* A message leaves the inbox when the caller has it (``hand_over``). An exception before that leaves it there.
* All messages below ``done`` are processed. ``done`` moves past a message when the caller has acknowledged it. It moves
  past ids of other topics, and past lost ids, when all messages before them are acknowledged and the caller asks for
  the next message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from zmq_datasource.errors import NoPeerError, SubscriptionError
from zmq_datasource.host.log_lines import LimitedLog, printable
from zmq_datasource.serving.protocol import (
    SILENCE_SECONDS,
    Batch,
    BatchRows,
    Fetch,
    Open,
    Opened,
    Refused,
    decode,
    encode,
    unpack_rows,
)
from zmq_datasource.transport.session import RequestSession

# The next state of a subscription, by its state and what happens (in capital letters: what the server says). An event
# that is not here changes nothing.
SUBSCRIPTION_STATES: Mapping[tuple[str, str], str] = {
    ("closed", "open"): "opening",
    ("opening", "OPENED"): "open",
    ("opening", "REFUSED"): "refused",
    ("open", "REFUSED"): "refused",
}

_MOST_REASON = 2000  # characters
# How often the server gets a position that has moved, if no other request carries it.
_DONE_SECONDS = 1.0
# Answers in memory: the one that the caller is taking messages from, and the next one.
_MOST_ANSWERS = 2
# The time between two calls of ``wake`` counts as silence of the server up to this: if it is longer, the caller was
# busy, or this process was stopped.
_LONGEST_STEP = 1.0


class Subscription(NamedTuple):
    """What a client asks of a server.

    Attributes:
        request, topics: The OPEN, and the prefixes behind it.
        max_bytes: Bytes of the rows of one answer, about.
        timeout: Seconds that a server which has answered before may be silent while the caller waits; None for ever.
        server: The server's endpoint, for errors and log lines.
    """

    request: Open
    topics: tuple[bytes, ...]
    max_bytes: int
    timeout: float | None
    server: str


# A message: its id and its frames.
Received: TypeAlias = tuple[int, tuple[bytes, ...]]


class _Answer:
    """The rows of an answer, the id before which it ends, and how many rows the caller has."""

    def __init__(self, rows: BatchRows, end: int) -> None:
        self.rows, self.end, self.taken = rows, end, 0


class SubscriberInbox:
    """The messages that have come, and how far the caller has processed them.

    Args:
        position: The first id that the subscriber needs.

    Attributes:
        next: The first id that has not come.
        handed: The id of the last message that the caller has; None if there is none.
        done: The caller has processed all messages below this id.
    """

    def __init__(self, position: int = 0) -> None:
        self.next = self.done = position
        self.handed: int | None = None
        self._answers: tuple[_Answer, ...] = ()  # that the caller has not taken to their end
        self._passed: int | None = None  # becomes ``done`` when all messages before it are acknowledged

    @property
    def answers(self) -> int:
        """The number of answers that the caller has not taken to their end."""
        return len(self._answers)

    def add(self, rows: BatchRows, next_id: int) -> None:
        """Add the rows of an answer that ends before ``next_id``."""
        if next_id > self.next:
            answers = (*self._answers, _Answer(rows, next_id))
            self._answers, self.next = answers, next_id  # without a call between, as in ``hand_over``

    def peek(self) -> Received | None:
        """The next message; None if none has come. It stays until ``hand_over``."""
        answer = self._first()
        return None if answer is None else answer.rows.message(answer.taken)

    def peek_batch(self) -> pa.RecordBatch | None:
        """The rest of an answer, as ``BATCH_SCHEMA``; None if no message has come. It stays until ``hand_over``."""
        answer = self._first()
        return None if answer is None else answer.rows.rest(answer.taken)

    def hand_over(self, last: int, count: int = 1) -> None:
        """The caller has the next ``count`` messages, of which ``last`` is the last id."""
        # No signal is handled between these two: CPython looks for signals at calls and jumps.
        self._answers[0].taken += count
        self.handed = last

    def _first(self) -> _Answer | None:
        if self._passed is not None and (self.handed is None or self.done > self.handed):
            self.done = max(self.done, self._passed)
            self._passed = None
        while self._answers:
            answer = self._answers[0]
            if answer.taken < len(answer.rows):
                return answer
            self._passed = answer.end
            self._answers = self._answers[1:]
        return None

    def ack(self, last: int) -> None:
        """Acknowledge all messages up to this id, which the caller has."""
        self.done = max(self.done, last + 1)


class SubscriberSession(RequestSession):
    """A conversation with one server; it begins with ``reconnected``.

    Attributes:
        state: The state of the subscription (``SUBSCRIPTION_STATES``).
        log: The id of the server's log; None before the first OPENED.
        new: Whether the server did not know the name.
        lost: How many messages the server's log no longer had when they were to be sent.
        inbox: The messages that have come.
        confirmed: The value of ``inbox.done`` that is on the server's disk.
        refusal: The error with which the server has ended the conversation.
    """

    states = SUBSCRIPTION_STATES

    def __init__(self, subscription: Subscription) -> None:
        super().__init__(SILENCE_SECONDS, 2 * SILENCE_SECONDS)
        self._subscription = subscription
        self._open_request = subscription.request
        # The last request; still open while ``waiting``.
        self._request: Open | Fetch = self._open_request
        self._confirming = self.new = False
        self._silent, self._woken = 0.0, math.inf  # seconds, and when ``wake`` was called last
        self.state = "closed"
        self.log: str | None = None
        self.inbox = SubscriberInbox()
        self.confirmed = self.lost = 0
        self.refusal: SubscriptionError | None = None
        self._news = LimitedLog(__name__, "news of a subscription")

    @property
    def is_open(self) -> bool:
        """Whether the server has given the name to this session."""
        return self.state == "open"

    # The caller.

    @property
    def has_room(self) -> bool:
        """Whether another answer may be asked for, and is not."""
        return self.is_open and not self.waiting and self.inbox.answers < _MOST_ANSWERS

    @property
    def has_unconfirmed(self) -> bool:
        """Whether ``done`` is not known to be on the server's disk."""
        return self.is_open and self.confirmed < self.inbox.done

    def confirm(self, confirming: bool, now: float) -> None:
        """Ask the server to confirm ``done`` in each answer, or not. Called before and after the caller waits."""
        self._confirming = confirming
        if confirming and self.is_open:
            self._fetch(now)

    # Requests.

    def _open(self, now: float) -> None:
        self._step("open")
        self._ask(self._open_request, now)

    def _fetch(self, now: float) -> None:
        """Ask for the next messages, and send ``done``."""
        inbox = self.inbox
        has_room = inbox.answers < _MOST_ANSWERS and not self._confirming
        self._ask(
            Fetch(
                name=self._open_request.name,
                session=self._open_request.session,
                first=inbox.next,
                done=min(inbox.done, inbox.next),
                max_bytes=self._subscription.max_bytes if has_room else 0,
                confirm=self._confirming,
            ),
            now,
        )

    def _ask(self, request: Open | Fetch, now: float) -> None:
        self._request = request
        self._mark_asked(now)
        topics = self._subscription.topics if isinstance(request, Open) else ()
        self.outbox.append(encode(request, topics))

    def _repeat(self, now: float) -> None:
        if self.state == "closed":
            self._open(now)
        elif self.waiting and isinstance(self._request, Fetch):
            self._fetch(now)  # with what is done by now
        elif self.waiting:
            self._ask(self._request, now)

    def _fetch_if_due(self, now: float) -> None:
        """Send the next FETCH, if no request is open and there is a reason for it."""
        if self.waiting or not self.is_open:
            return
        done, sent = self.inbox.done, self._request
        has_moved = isinstance(sent, Fetch) and done > sent.done and now - self._asked >= _DONE_SECONDS
        must_confirm = self._confirming and self.confirmed < done
        if self.inbox.answers < _MOST_ANSWERS or has_moved or must_confirm:
            self._fetch(now)

    # The connection.

    def blocked(self) -> None:
        """Let ``wake`` make a new connection. Called when the connection takes no more messages."""
        self.outbox.clear()
        self._heard = -math.inf

    def wake(self, now: float) -> None:
        """Do what is due at this time: send a request, repeat one, or make a new connection.

        Raises:
            NoPeerError: The server has been silent for the timeout.
        """
        it = self._subscription
        if self.waiting:
            self._silent += min(max(0.0, now - self._woken), _LONGEST_STEP)
        self._woken = now
        if self.log is not None and it.timeout is not None and self._silent > it.timeout:
            silent, self._silent = self._silent, 0.0
            who = f"receiving as {self._open_request.name!r} from {it.server}"
            raise NoPeerError(
                f"{who}: the server has been silent for {silent:.0f} s; subscribe again to continue after the last "
                "acknowledged message"
            )
        super().wake(now)
        self._fetch_if_due(now)

    def _mark_heard(self, now: float) -> None:
        super()._mark_heard(now)
        self._silent = 0.0

    def receive(self, frames: list[bytes], now: float) -> None:
        """Process a message from the server.

        Raises:
            ProtocolError: It is not a message of this protocol.
        """
        self._mark_heard(now)
        message, buffers = decode(frames)
        if isinstance(message, Refused):
            self._refused(message)
        elif getattr(message, "session", None) != self._open_request.session:
            return  # an answer to an earlier session
        match message:
            case Opened():
                self._opened(message)
            case Batch():
                self._answered(message, buffers)
        self._fetch_if_due(now)

    def _opened(self, message: Opened) -> None:
        if not (self.waiting and isinstance(self._request, Open)):
            return
        it = self._subscription
        self._news.info(
            "subscribed as %r at %s, from id %d on", self._open_request.name, it.server, message.next
        )
        self.new = self.new or message.new
        self.log = message.log
        self.inbox = SubscriberInbox(message.next)
        self.confirmed = message.next
        self._step("OPENED")  # after all else, which an interrupt may cut short
        self._mark_answered()

    def _answered(self, message: Batch, buffers: Sequence[bytes]) -> None:
        if not self.is_open or message.log != self.log:
            return
        self.confirmed = max(self.confirmed, message.done)
        if message.first != self.inbox.next:
            return  # a second answer, to a request that was repeated
        rows = unpack_rows(message, buffers)
        if message.lost:
            self.lost += message.lost
            self._news.warn(
                "%r: %d messages before id %d were deleted before they came here",
                *(self._open_request.name, message.lost, message.next),
            )
        self.inbox.add(rows, message.next)
        self._mark_answered()

    def _refused(self, message: Refused) -> None:
        if message.session not in (None, self._open_request.session):
            return
        self._step("REFUSED")
        it = self._subscription
        self.refusal = SubscriptionError(
            f"subscribing as {self._open_request.name!r} at {it.server}: {printable(message.reason, _MOST_REASON)}"
        )
