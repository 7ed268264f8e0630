"""The conversation of a durable subscriber with a server, as a state machine. Specified in docs/durable-protocol.md.

The rules:

* One request is open at a time (``transport.session``). It is repeated after ``SILENCE_SECONDS`` without a byte, and
  after twice as many on a new connection. An answer to a request that is not open is ignored.
* The next FETCH leaves when the answer to the one before has come, not when the caller has taken its messages: up to
  two answers are in memory.
* A message leaves the inbox when the caller has it (``hand_over``). An exception before that leaves it there.
* All messages below ``done`` are processed: those that the caller has acknowledged. When it has acknowledged all that
  it has, ``done`` also passes ids of other topics, and lost ids, up to the next message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from zmq_datasource.errors import NoPeerError, SubscriptionError
from zmq_datasource.host.log_lines import LimitedLog, printable
from zmq_datasource.serving.protocol import (
    SILENCE_SECONDS,
    Batch,
    Fetch,
    Open,
    Opened,
    Refused,
    decode,
    encode,
    unpack_rows,
)
from zmq_datasource.transport.session import RequestSession

# How often the server gets a position that has moved, if no other request carries it.
_DONE_SECONDS = 1.0
# Answers in memory: the one that the caller is taking messages from, and the next one.
_MOST_ANSWERS = 2
# The time between two calls of ``wake`` counts as silence of the server up to this: if it is longer, the caller was
# busy, or this process was stopped.
_LONGEST_STEP = 1.0
_MOST_CHARACTERS = 2000  # of the server's reason for a refusal


class SubscriberInbox:
    """The messages that have come, and how far the caller has processed them.

    Args:
        position: The first id that the subscriber needs.

    Attributes:
        next: The first id that has not come.
        taken: The id after the last message that the caller has.
        acked: The caller has acknowledged what it has of the ids below.
    """

    def __init__(self, position: int = 0) -> None:
        self.next = self.taken = self.acked = position
        self._answers: tuple[pa.RecordBatch, ...] = ()
        self._row = 0  # the next one of the first answer
        self._lists: list[
            list[Any]
        ] = []  # the columns of the first answer, once a message of it was looked at

    @property
    def answers(self) -> int:
        """The number of answers that the caller has not taken to their end."""
        return 0 if self._first() is None else len(self._answers)

    @property
    def done(self) -> int:
        """The caller has processed all messages below this id."""
        if self.acked < self.taken:
            return self.acked
        message = self.peek()
        return self.next if message is None else message[0]

    def add(self, rows: pa.RecordBatch, next_id: int) -> None:
        """Add the rows of an answer that ends before ``next_id``."""
        answers = (*self._answers, rows) if rows.num_rows else self._answers
        self._answers, self.next = answers, next_id  # without a call between, as in ``hand_over``

    def peek(self) -> tuple[int, tuple[bytes, ...]] | None:
        """The id and the frames of the next message; None if none has come. It stays until ``hand_over``.

        A message of one frame gets an empty topic in front. The tuples are made one at a time: if all of them lived at
        once, Python's garbage collector would look at each of them again and again.
        """
        rows = self._first()
        if rows is None:
            return None
        if not self._lists:
            self._lists = [column.to_pylist() for column in rows.columns]
        ids, topics, values, lists = self._lists
        frames = lists[self._row]
        whole = tuple(frames) if frames and len(frames) > 1 else (topics[self._row], values[self._row])
        return ids[self._row], whole

    def peek_batch(self) -> pa.RecordBatch | None:
        """The rest of an answer, as ``BATCH_SCHEMA``; None if no message has come. It stays until ``hand_over``."""
        rows = self._first()
        return None if rows is None else rows.slice(self._row)

    def hand_over(self, first: int, last: int, count: int = 1) -> None:
        """The caller has the next ``count`` messages, from id ``first`` to id ``last``."""
        if self.acked >= self.taken:
            self.acked = first  # ids before it are of other topics, or lost
        # No signal is handled between these two: CPython looks for signals at calls and jumps.
        self._row += count
        self.taken = last + 1

    def _first(self) -> pa.RecordBatch | None:
        if self._answers and self._row >= self._answers[0].num_rows:
            self._answers, self._row, self._lists = self._answers[1:], 0, []
        return self._answers[0] if self._answers else None


class SubscriberSession(RequestSession):
    """A conversation with one server; it begins with ``reconnected``.

    Args:
        request, topics: The OPEN, and the prefixes behind it.
        max_bytes: Bytes of the rows of one answer, about.
        timeout: Seconds that the server may be silent while the caller waits.
        server: The server's endpoint, for errors and log lines.

    Attributes:
        log: The id of the server's log; None until the server has given the name to this session.
        new: Whether the server did not know the name.
        lost: How many messages the server's log no longer had when they were to be sent.
        inbox: The messages that have come.
        confirmed: The value of ``inbox.done`` that is on the server's disk.
        refusal: The error with which the server has ended the conversation.
    """

    def __init__(
        self, request: Open, topics: Sequence[bytes], max_bytes: int, timeout: float, server: str
    ) -> None:
        super().__init__(SILENCE_SECONDS, 2 * SILENCE_SECONDS)
        self._request, self._topics, self._max_bytes, self._timeout = request, topics, max_bytes, timeout
        self._who = f"subscribing as {request.name!r} at {server}"
        self._sent_done = 0  # of the last FETCH
        self._confirming = self.new = False
        self._silent, self._woken = 0.0, math.inf  # seconds, and when ``wake`` was called last
        self.log: str | None = None
        self.inbox = SubscriberInbox()
        self.confirmed = self.lost = 0
        self.refusal: SubscriptionError | None = None
        self._news = LimitedLog(__name__, "news of a subscription")

    @property
    def is_open(self) -> bool:
        """Whether the server has given the name to this session, and has not refused since."""
        return self.log is not None and self.refusal is None

    # The caller.

    @property
    def has_room(self) -> bool:
        """Whether another answer may be asked for, and is not."""
        return not self.waiting and self.is_open and self.inbox.answers < _MOST_ANSWERS

    @property
    def has_unconfirmed(self) -> bool:
        """Whether ``done`` is not known to be on the server's disk."""
        return self.log is not None and self.confirmed < self.inbox.done

    def confirm(self, now: float) -> None:
        """Ask the server to confirm ``done`` from now on. Called when the caller takes no more messages."""
        self._confirming = True
        if self.is_open:
            self._fetch(now)

    # Requests.

    def _open(self, now: float) -> None:
        self._mark_asked(now)
        self.outbox.append(encode(self._request, self._topics))

    def _fetch(self, now: float) -> None:
        """Ask for the next messages, and send ``done``."""
        self._mark_asked(now)
        inbox = self.inbox
        has_room = inbox.answers < _MOST_ANSWERS and not self._confirming
        self._sent_done = inbox.done
        fetch = Fetch(
            name=self._request.name,
            session=self._request.session,
            first=inbox.next,
            done=self._sent_done,
            max_bytes=self._max_bytes if has_room else 0,
            confirm=self._confirming,
        )
        self.outbox.append(encode(fetch))

    def _repeat(self, now: float) -> None:
        if self.log is None and self.refusal is None:
            self._open(now)
        elif self.waiting:
            self._fetch(now)  # with what is done by now

    def _fetch_if_due(self, now: float) -> None:
        """Send the next FETCH, if no request is open and there is a reason for it."""
        if self.waiting or not self.is_open:
            return
        has_moved = self.inbox.done > self._sent_done and now - self._asked >= _DONE_SECONDS
        if self.has_room or has_moved or (self._confirming and self.has_unconfirmed):
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
        if self.waiting:
            self._silent += min(max(0.0, now - self._woken), _LONGEST_STEP)
        self._woken = now
        if self._silent > self._timeout:
            self._silent = 0.0
            advice = "check that the server runs, and that this is its durable endpoint"
            if self.log is not None:
                advice = "subscribe again to continue after the last acknowledged message"
            raise NoPeerError(f"{self._who}: the server has been silent for {self._timeout:g} s; {advice}")
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
        mine = self._request.session
        match message:
            case Refused() if message.session in (None, mine):
                self._mark_answered()
                self.refusal = SubscriptionError(
                    f"{self._who}: {printable(message.reason, _MOST_CHARACTERS)}"
                )
            case Opened() if message.session == mine:
                self._opened(message)
            case Batch() if message.session == mine:
                self._answered(message, buffers)
        self._fetch_if_due(now)

    def _opened(self, message: Opened) -> None:
        if self.log is None:
            self.new = self.new or message.new
            self.inbox = SubscriberInbox(message.next)
            self.confirmed = self._sent_done = message.next
            self.log = message.log  # after all else, which an interrupt may cut short
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
            what = "%s: the %d messages before id %d were deleted before they came here"
            self._news.warn(what, self._who, message.lost, message.next)
        self.inbox.add(rows, message.next)
        self._mark_answered()
