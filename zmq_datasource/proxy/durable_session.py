"""The proxy's side of the conversation with one durable subscriber: what it is owed, and how much it may have.

The rules:

* A subscriber has at most its credit on the way, and its share of our memory (or one message). What its system has
  not taken counts too, whatever its credit says.
* A position moves only by what is acknowledged, or past messages of other topics when nothing is on the way.
"""

from __future__ import annotations

import time
from collections import deque

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.errors import ProtocolError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.proxy.durable_protocol import Acked, Lost, Message, Ready, Subscribe
from zmq_datasource.proxy.subscriptions import Subscription, Subscriptions
from zmq_datasource.proxy.view import Cursor
from zmq_datasource.proxy.wire import Wire

__all__ = ["LEAST", "DurableSession"]

# Bytes that may be read ahead and on the way, however little is left.
LEAST = 128 << 10
_TURN_ROWS, _TURN_BYTES = 512, 4 << 20
_MOST_CREDIT = 1 << 20
# A client whose queue is full is tried again after this; while it takes nothing, after twice as long each time.
_FIRST_TRY_SECONDS, _LAST_TRY_SECONDS = 0.002, 0.256


class DurableSession:
    """What the proxy knows of one connected subscriber.

    Args:
        peer: Where to send.
        wanted: What it has said.
        subscription: Its own, of these ``subscriptions``.
        cursor: Where its messages come from; at the id that READY names as the first.
        wire: What was written to its connection, and what has left.
        losses: Logs what was deleted before subscribers had it.

    Attributes:
        number: What the client calls the session.
        begin: The id that READY names as the first.
        ready: The answer to its SUBSCRIBE, until there was room for it; it comes before all messages.
        added: Which change of the subscriptions has added it, if it is new: it is kept before the answer.
        wants_acked: Whether it waits for its position to be on the disk.
        acked: What is to be said of that, until there was room for it.
        lost_at: Which change of the subscriptions counts what was last found to be lost.
        due: When it is tried again, monotonic; 0 while its queue takes what is sent.
    """

    def __init__(
        self,
        peer: bytes,
        wanted: Subscribe,
        subscription: Subscription,
        subscriptions: Subscriptions,
        cursor: Cursor,
        wire: Wire,
        losses: LimitedLog,
    ) -> None:
        self._losses = losses
        self.peer, self.number = peer, wanted.session
        self.subscription, self._subscriptions = subscription, subscriptions
        self.cursor, self.begin = cursor, cursor.position
        self.ready: Ready | None = None
        self.added = 0
        self.wire = wire
        self._credit = min(wanted.credit, _MOST_CREDIT)
        self._pending: deque[Message | Lost] = deque()  # read and to be sent
        self._pending_bytes = 0
        self._sent = 0  # messages of this session
        self._credited = 0  # for how many of them credit has come since
        # Of what was sent: which message of the session, its id and its size, until it is credited or acknowledged.
        self._on_way: deque[tuple[int, int, int]] = deque()
        self._on_way_bytes = 0
        self._last_sent = self.begin - 1  # the highest id that was sent, or reported as lost
        self.wants_acked = False
        self.acked: Acked | None = None
        self.lost_at = 0
        self.due = 0.0
        self._pause = _FIRST_TRY_SECONDS

    def was_sent_to(self, taken: bool, now: float) -> None:
        """Note whether its queue had room for what was sent."""
        if taken:
            self.due, self._pause = 0.0, _FIRST_TRY_SECONDS
        else:
            self.due = now + self._pause
            self._pause = min(2 * self._pause, _LAST_TRY_SECONDS)

    def is_again(self, wanted: Subscribe) -> bool:
        """Whether a SUBSCRIBE repeats the one that began the session."""
        known = self.subscription
        return (self.number, known.name, known.topics) == (wanted.session, wanted.name, wanted.topics)

    @property
    def on_way(self) -> int:
        """Messages that were sent, and neither credited nor acknowledged."""
        return len(self._on_way)

    @property
    def held(self) -> int:
        """Bytes of memory that the session takes."""
        return self._pending_bytes + max(self._on_way_bytes, self.wire.queued)

    # What the subscriber says.

    def give_credit(self, messages: int) -> None:
        """So many messages more may be sent."""
        self._credit = min(self._credit + messages, _MOST_CREDIT)
        self._credited = min(self._credited + messages, self._sent)
        self._make_room()

    def acknowledge(self, id: int) -> None:  # noqa: A002
        """Everything up to this id is done with.

        Raises:
            ProtocolError: It was not sent yet.
        """
        if id > self._last_sent:
            raise ProtocolError(f"ACK of id {id}; {self._last_sent} was the last one sent")
        subscription = self.subscription
        subscription.next = max(subscription.next, id + 1)
        subscription.acknowledged = time.time()
        self.wants_acked = True
        self._make_room()
        self._subscriptions.change(urgent=True)
        self._step_over()

    def _make_room(self) -> None:
        """Forget what was credited or acknowledged: it has arrived."""
        on_way, acknowledged = self._on_way, self.subscription.next
        while on_way and (on_way[0][0] < self._credited or on_way[0][1] < acknowledged):
            self._on_way_bytes -= on_way.popleft()[2]

    def _step_over(self) -> None:
        """Past messages of other topics, if all that was sent is acknowledged."""
        subscription = self.subscription
        acknowledged = self._last_sent < subscription.next and not self._pending
        if acknowledged and self.cursor.position > subscription.next:
            subscription.next = self.cursor.position
            self._subscriptions.change(urgent=False)

    # What it gets.

    def may_have(self, share: int) -> bool:
        """Whether it has credit, and what is on the way is less than its share of the memory."""
        if self._credit <= 0:
            return False
        queued = self.wire.queued
        if (not self._on_way and not queued) or max(self._on_way_bytes, queued) < share:
            return True
        if queued < share:
            return False
        self.wire.look()
        return max(self._on_way_bytes, self.wire.queued) < share

    def next(self, share: int) -> Message | Lost | None:
        """What is to be sent next, if the log has something; ``sent`` when it was."""
        if not self._pending:
            self._read(share)
        return self._pending[0] if self._pending else None

    def sent(self) -> None:
        """What was next was sent."""
        message = self._pending.popleft()
        if isinstance(message, Lost):
            # As if it had been sent: whoever dies before it acknowledges something after it gets LOST again.
            self._last_sent = message.end - 1
            return
        size = sum(map(len, message.frames))
        self._pending_bytes -= size
        self._on_way.append((self._sent, message.id, size))
        self._on_way_bytes += size
        self._sent += 1
        self._credit -= 1
        self._last_sent = message.id
        self.subscription.sent += 1

    def _read(self, share: int) -> None:
        if (lost := self.cursor.skip_lost()) is not None:
            self._lose(Lost(*lost))
            return
        # What is read ahead for who takes nothing is memory too.
        room = max(1, share - self.held)
        batch = self.cursor.read(_TURN_ROWS, min(_TURN_BYTES, room))
        if batch is None:
            return
        batch = _matching(batch, self.subscription.topics)
        messages = raw_messages(batch).lists().to_pylist()
        for number, frames in zip(batch.column("id").to_pylist(), messages, strict=True):
            self._pending.append(Message(number, tuple(frames if len(frames) > 1 else (b"", *frames))))
            self._pending_bytes += sum(map(len, frames))
        self._step_over()

    def _lose(self, lost: Lost) -> None:
        subscription = self.subscription
        self._pending.append(lost)
        subscription.lost += max(0, lost.end - max(lost.first, subscription.lost_to))
        subscription.lost_to = max(subscription.lost_to, lost.end)
        self.lost_at = self._subscriptions.change(urgent=True)
        self._losses.warn(
            "durable subscriber %r: the ids %d to %d were deleted before it had them (walMaxBytes)",
            subscription.name,
            lost.first,
            lost.end - 1,
        )


def _matching(batch: pa.RecordBatch, topics: tuple[bytes, ...]) -> pa.RecordBatch:
    """The rows whose topic begins with one of these; a message without one has the empty topic."""
    if not topics or b"" in topics:
        return batch
    names = pc.fill_null(pc.cast(batch.column("topic"), pa.binary()), b"")
    kept = batch.column("frames")
    if kept.null_count < len(kept):  # where a topic is no text, the column shows something else
        names = pc.fill_null(raw_messages(batch).first, b"")
    mask = None
    for topic in topics:
        found = pc.starts_with(names, topic)
        mask = found if mask is None else pc.or_(mask, found)
    return batch.filter(mask)
