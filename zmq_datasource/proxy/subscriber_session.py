"""The conversation of a durable subscriber with a proxy, as a state machine. Specified in docs/proxy.md.

The rules:

* One request is open at a time (``transport.session``). It is repeated after ``SILENCE_SECONDS`` without a byte, and
  after twice as many on a new connection. An answer to a request that is not open is ignored.
* The next FETCH leaves when the answer to the one before has come, not when the caller has taken its messages: up to
  two answers are in memory.
* All messages below ``done`` are processed. ``done`` moves past a message when the caller has acknowledged it. It moves
  past ids of other topics, and past lost ids, when all messages before them are acknowledged and the caller asks for
  the next message.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import pyarrow as pa
from msgspec.structs import replace

from zmq_datasource.errors import NoPeerError, SubscriptionError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.proxy.fetch_protocol import (
    MOST_WAIT_MS,
    NO_ROWS,
    SILENCE_SECONDS,
    Batch,
    BatchRows,
    Fetch,
    Forget,
    Forgotten,
    Lost,
    Open,
    Opened,
    Refused,
    decode,
    encode,
    session_number,
    unpack_rows,
)
from zmq_datasource.transport.session import RequestSession

# The next state of a subscription, by its state and what happens (in capital letters: what the proxy says). An event
# that is not here changes nothing.
SUBSCRIPTION_STATES: Mapping[tuple[str, str], str] = {
    ("closed", "open"): "opening",
    ("opening", "OPENED"): "open",
    ("opening", "REFUSED"): "refused",
    ("open", "seek"): "opening",
    ("open", "REFUSED"): "refused",
    ("open", "forget"): "forgetting",
    ("opening", "forget"): "forgetting",
    ("forgetting", "FORGOTTEN"): "forgotten",
    ("forgetting", "REFUSED"): "refused",
}

# How often the proxy gets a position that has moved, if no other request carries it.
_DONE_SECONDS = 1.0
# Answers in memory: the one that the caller is taking messages from, and the next one.
_MOST_ANSWERS = 2


class Start(NamedTuple):
    """Where an unknown name begins.

    Attributes:
        start: ``earliest``, ``latest``, ``last`` or an id.
        since: Instead of ``start``, a time in microseconds since the epoch.
    """

    start: str | int = "earliest"
    since: int | None = None


class Subscription(NamedTuple):
    """What a client asks of a proxy.

    Attributes:
        name, start, topics: As in OPEN.
        max_bytes: Bytes of the rows of one answer, about.
        timeout: Seconds that a proxy which has answered before may be silent while the caller waits; None for ever.
        proxy: The proxy's endpoint, for errors and log lines.
        client: A random number up to ``MOST_CLIENT``, which is in the session of each OPEN; 0 for none.
    """

    name: str
    start: Start
    topics: tuple[bytes, ...]
    max_bytes: int
    timeout: float | None
    proxy: str
    client: int = 0


# A message: its id and its frames.
Received: TypeAlias = tuple[int, tuple[bytes, ...]]


class SubscriberInbox:
    """The messages that have come, and how far the caller has processed them.

    Args:
        position: The first id that the subscriber needs.

    Attributes:
        next: The first id that has not come.
        handed: The id of the last message that the caller has taken; None if there is none.
        done: The caller has processed all messages below this id.
    """

    def __init__(self, position: int = 0) -> None:
        self.next = self.done = position
        self.handed: int | None = None
        # The answers that the caller has not taken to their end: rows, and the id before which the answer ends.
        self._answers: deque[tuple[BatchRows, int]] = deque()
        # The messages of the first answer that the caller has not taken. None before the first one is taken.
        self._messages: Iterator[Received] | None = None
        self._passed: int | None = None  # becomes ``done`` when all messages before it are acknowledged

    @property
    def answers(self) -> int:
        """The number of answers that the caller has not taken to their end."""
        return len(self._answers)

    def add(self, rows: BatchRows, next_id: int) -> None:
        """Add the rows of an answer that ends before ``next_id``."""
        if next_id > self.next:
            self._answers.append((rows, next_id))
            self.next = next_id

    def take(self) -> Received | None:
        """Hand over the next message; None if none has come."""
        self._pass_acknowledged()
        while self._answers:
            if self._messages is None:
                self._messages = self._answers[0][0].messages()
            message = next(self._messages, None)
            if message is not None:
                self.handed = message[0]
                return message
            self._end_answer()
        return None

    def take_batch(self) -> pa.RecordBatch | None:
        """Hand over the rest of an answer, as ``BATCH_SCHEMA``; None if no message has come."""
        self._pass_acknowledged()
        while self._answers:
            rows = self._answers[0][0]
            batch = rows.behind(-1 if self._messages is None or self.handed is None else self.handed)
            self._end_answer()
            if batch.num_rows:
                self.handed = batch.column("id")[-1].as_py()
                return batch
        return None

    def _pass_acknowledged(self) -> None:
        if self._passed is not None and (self.handed is None or self.done > self.handed):
            self.done = max(self.done, self._passed)
            self._passed = None

    def _end_answer(self) -> None:
        _, self._passed = self._answers.popleft()
        self._messages = None

    def ack(self, last: int) -> None:
        """Acknowledge all messages up to this id, which the caller has taken."""
        self.done = max(self.done, last + 1)


class SubscriberSession(RequestSession):
    """A conversation with one proxy; it begins with ``reconnected``.

    Attributes:
        state: The state of the subscription (``SUBSCRIPTION_STATES``).
        new: Whether the proxy did not know the name.
        lost: How many messages the proxy's log no longer had when they were to be sent.
        inbox: The messages that have come.
        confirmed: The value of ``inbox.done`` that is on the proxy's disk.
        refusal: The error with which the proxy has ended the conversation.
    """

    states = SUBSCRIPTION_STATES

    def __init__(self, subscription: Subscription) -> None:
        super().__init__(SILENCE_SECONDS, 2 * SILENCE_SECONDS)
        self._subscription = subscription
        start = subscription.start
        self._open_request = Open(
            name=subscription.name,
            session=session_number(subscription.client, 1),
            start=start.start,
            since=start.since,
        )
        self._request: Open | Fetch | Forget = (
            self._open_request
        )  # the last one; still open while ``waiting``
        self._confirming = False
        self._was_open = self.new = False
        self.state = "closed"
        self.inbox = SubscriberInbox()
        self.confirmed = self.lost = 0
        self.refusal: SubscriptionError | None = None
        self._openings = LimitedLog(__name__, "times that a subscription was opened")
        self._losses = LimitedLog(__name__, "times that messages were deleted")

    @property
    def is_open(self) -> bool:
        """Whether the proxy has given the name to this session."""
        return self.state == "open"

    @property
    def forgotten(self) -> bool:
        """Whether the proxy has ended the subscription."""
        return self.state == "forgotten"

    # The caller.

    def restart_silence(self, now: float) -> None:
        """Count the proxy's silence from now on. Called when the caller begins to wait for an answer."""
        self._last_word = now

    def excuse_silence(self, since: float, now: float) -> None:
        """Take the time since ``since`` out of the proxy's silence: the caller was busy and did not listen."""
        self._last_word = min(now, self._last_word + now - since)

    @property
    def has_unconfirmed(self) -> bool:
        """Whether ``done`` is not known to be on the proxy's disk."""
        return self.is_open and self.confirmed < self.inbox.done

    def confirm(self, confirming: bool, now: float) -> None:
        """Ask the proxy to confirm ``done`` in each answer, or not. Called before and after the caller waits for it."""
        self._confirming = confirming
        if confirming and self.is_open:
            self._fetch(now)

    def forget(self, now: float) -> None:
        """End the subscription."""
        self._step("forget")
        self._ask(Forget(name=self._open_request.name, session=self._open_request.session), now)

    def seek(self, start: Start, now: float) -> None:
        """Continue at another place. Messages that have come and were not taken are dropped."""
        session = self._open_request.session + 1
        self._open_request = replace(
            self._open_request, session=session, start=start.start, since=start.since, seek=True
        )
        self.inbox = SubscriberInbox()
        self._step("seek")
        self._open(now)

    # Requests.

    def _open(self, now: float) -> None:
        self._step("open")
        self._ask(self._open_request, now)

    def _fetch(self, now: float) -> None:
        """Ask for the next messages, and send ``done``."""
        inbox = self.inbox
        has_room = inbox.answers < _MOST_ANSWERS
        self._ask(
            Fetch(
                name=self._open_request.name,
                session=self._open_request.session,
                first=inbox.next,
                done=min(inbox.done, inbox.next),
                max_bytes=self._subscription.max_bytes if has_room else 0,
                wait=MOST_WAIT_MS if has_room and not self._confirming else 0,
                confirm=self._confirming,
            ),
            now,
        )

    def _ask(self, request: Open | Fetch | Forget, now: float) -> None:
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
            NoPeerError: The proxy has been silent for the timeout.
        """
        silent, it = now - self._last_word, self._subscription
        if self.waiting and self._was_open and it.timeout is not None and silent > it.timeout:
            raise NoPeerError(
                f"receiving as {it.name!r} from {it.proxy}: the proxy has been silent for "
                f"{silent:.0f} s; subscribe again to continue after the last acknowledged message"
            )
        super().wake(now)
        self._fetch_if_due(now)

    def receive(self, frames: list[bytes], now: float) -> None:
        """Process a message from the proxy.

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
            case Batch() | Lost():
                self._answered(message, buffers)
            case Forgotten():
                self._step("FORGOTTEN")
                self._mark_answered()
        self._fetch_if_due(now)

    def _opened(self, message: Opened) -> None:
        if not (self.waiting and isinstance(self._request, Open)):
            return
        self._mark_answered()
        it = self._subscription
        self._openings.info("subscribed as %r at %s, from id %d on", it.name, it.proxy, message.next)
        self._step("OPENED")
        self._was_open = True
        self.new = self.new or message.new
        self.inbox = SubscriberInbox(message.next)
        self.confirmed = message.next

    def _answered(self, message: Batch | Lost, buffers: Sequence[bytes]) -> None:
        if not self.is_open:
            return
        self.confirmed = max(self.confirmed, message.done)
        if message.first != self.inbox.next:
            return  # a second answer, to a request that was repeated
        self._mark_answered()
        if isinstance(message, Lost):
            rows = NO_ROWS
            self.lost += message.next - message.first
            self._losses.warn(
                "%r: the proxy deleted the ids %d to %d before they came here",
                self._open_request.name,
                message.first,
                message.next - 1,
            )
        else:
            rows = unpack_rows(message, buffers)
        self.inbox.add(rows, message.next)

    def _refused(self, message: Refused) -> None:
        if message.session not in (None, self._open_request.session):
            return
        if message.code == "gone" and self.state == "forgetting":
            self._step("FORGOTTEN")  # by an earlier request; its answer was lost
            self._mark_answered()
            return
        self._step("REFUSED")
        it = self._subscription
        self.refusal = SubscriptionError(f"subscribing as {it.name!r} at {it.proxy}: {message.reason}")
