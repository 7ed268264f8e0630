"""Serves durable subscribers: what each missed, in order, then what comes, without a seam.

The rules:

* A subscriber has at most its credit on the way, and ``_WINDOW`` bytes (or one message). What its system has not
  taken counts too, whatever its credit says: that is our memory.
* A position moves only by what is acknowledged, or past messages of other topics when nothing is on the
  way; it is on disk before ``ACKED`` says so.
* Whoever subscribes under a name that is in use takes it over; the one before is told. But who says again what it
  has said already, on the same connection, is only answered: a large message on its way must not begin anew.
* Nobody waits for anybody: each gets its turn, and what cannot be sent now is tried next time.
* An error at one subscriber's message or turn refuses that subscriber, and is logged with its cause. Only an
  error of the storage of positions, or of the socket, is everybody's.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import zmq

from zmq_datasource.errors import DiskFaultError, LogError, ProtocolError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.durable_protocol import (
    EARLIEST,
    HEARTBEAT_SECONDS,
    LATEST,
    Ack,
    Acked,
    Close,
    Credit,
    Forget,
    Forgotten,
    FromProxy,
    Heartbeat,
    Lost,
    Message,
    Ready,
    Refused,
    Subscribe,
    read_from_client,
    write,
)
from zmq_datasource.proxy.router import Router
from zmq_datasource.proxy.rows import messages_of
from zmq_datasource.proxy.subscriptions import Subscription, Subscriptions
from zmq_datasource.proxy.view import Cursor, LogView
from zmq_datasource.transport.kernel import Taken, find_dead_peers

__all__ = ["DurableServer"]

_log = logging.getLogger(__name__)

# Bytes that one subscriber may have read ahead and on the way; and all together, beside a little for each, so that
# those who take nothing leave something for the others. One message always.
_WINDOW, _BUDGET, _LEAST = 16 << 20, 128 << 20, 128 << 10
_TURN_ROWS, _TURN_BYTES = 512, 4 << 20
_TURN_MESSAGES = 256
_MOST_SUBSCRIPTIONS = 1000
_MOST_DISPLACED = 1000
# What a status tells of them.
_MOST_TOLD, _MOST_TOPICS_TOLD = 100, 10
# Messages that libzmq queues for one: all that bounds a client that lies about what it has taken where the system
# does not tell (ipc).
_SNDHWM = 200
_MOST_SHOWN_BYTES = 60
# What ZMTP writes in front of a frame.
_SMALL_FRAME, _SMALL_HEADER, _LARGE_HEADER = 255, 2, 9
_MOST_REQUEST_BYTES = 1 << 20
_MOST_CREDIT = 1 << 20


class _Wire:
    """What libzmq and the system hold of what was written to one connection, whatever its client says.

    Without a word from the system (ipc) it is nothing, and only credit counts.
    """

    def __init__(self, taken: Taken) -> None:
        self._taken = taken
        self._before = self._left = taken.bytes()
        self._written = self._looked_at = 0

    def write(self, frames: Sequence[bytes]) -> None:
        """These were given to libzmq. (What CURVE adds is not counted: then it looks like less.)"""
        headers = (_SMALL_HEADER if len(frame) <= _SMALL_FRAME else _LARGE_HEADER for frame in frames)
        self._written += sum(map(len, frames)) + sum(headers)
        if self._written - self._looked_at >= _LEAST:
            self.look()

    def look(self) -> None:
        """Ask the system how much of it has left."""
        self._left = self._taken.bytes()
        self._looked_at = self._written

    @property
    def queued(self) -> int:
        """Bytes that wait, as of the last look."""
        if self._before is None or self._left is None:
            return 0
        return max(0, self._written - (self._left - self._before))


@dataclass
class _Session:
    """A subscriber that is there.

    Attributes:
        peer: Where to send.
        number: What the client calls it.
        begin: The id that it was told to come first.
        wire: What was written to its connection, and what has left.
        pending: Read and to be sent.
        sent: Messages of this session.
        credited: For how many of them credit has come since.
        on_way: Of what was sent: which message of the session, its id and its size, until it is credited or
            acknowledged.
        last_sent: The highest id that was sent, or told to be lost.
        wants_acked: Whether it is to be told when its position holds.
    """

    peer: bytes
    number: int
    subscription: Subscription
    cursor: Cursor
    begin: int
    credit: int
    last_sent: int
    wire: _Wire
    pending: deque[Message | Lost] = field(default_factory=deque)
    pending_bytes: int = 0
    sent: int = 0
    credited: int = 0
    on_way: deque[tuple[int, int, int]] = field(default_factory=deque)
    on_way_bytes: int = 0
    wants_acked: bool = False

    def is_again(self, wanted: Subscribe) -> bool:
        """Whether that is what the session began with."""
        known = self.subscription
        return (self.number, known.name, known.topics) == (wanted.session, wanted.name, wanted.topics)

    def make_room(self) -> None:
        """Forget what was credited or acknowledged: it has arrived."""
        on_way, acknowledged = self.on_way, self.subscription.next
        while on_way and (on_way[0][0] < self.credited or on_way[0][1] < acknowledged):
            self.on_way_bytes -= on_way.popleft()[2]

    @property
    def held(self) -> int:
        """Bytes of memory that it costs."""
        return self.pending_bytes + max(self.on_way_bytes, self.wire.queued)


class DurableServer:
    """Use it in one thread; ``router`` is where its clients are.

    Args:
        options: Where it is bound.
        view: The log.
        subscriptions: Who is known.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    def __init__(self, options: ProxyOptions, view: LogView, subscriptions: Subscriptions) -> None:
        self._view = view
        self._subscriptions = subscriptions
        self.router = Router(options, options.durable, _SNDHWM, _MOST_REQUEST_BYTES, find_dead_peers)
        self._sessions: dict[str, _Session] = {}
        self._names: dict[bytes, str] = {}
        # Who had a name until somebody else took it, and what it called its session.
        self._displaced: dict[bytes, tuple[str, int]] = {}
        self._held = 0
        self._next_heartbeat = 0.0
        self._faults = LimitedLog(__name__, "faults of durable subscribers")
        self._errors = LimitedLog(__name__, "unexpected errors at durable subscribers")

    # What comes.

    def _read_inbox(self) -> None:
        for peer, frames, descriptor in self.router.inbox():
            try:
                self._take(peer, frames, descriptor)
            except ProtocolError as e:
                self._faults.warn("a durable subscriber sent %s", e)
                self._send(peer, Refused("protocol", str(e)))
            except (LogError, zmq.ZMQError):
                raise
            except Exception as e:
                self._fail(peer, e)

    def _fail(self, peer: bytes, error: Exception) -> None:
        """Something unexpected: whoever met it begins anew, from what it has acknowledged."""
        self._errors.fault("an unexpected error at a durable subscriber: %r", error, error=error)
        reason = f"an unexpected error of the proxy ({type(error).__name__}), which its log explains"
        self._send(peer, Refused("internal", reason))
        session = self._sessions.get(self._names.get(peer, ""))
        if session is not None:
            self._detach(session)

    def _take(self, peer: bytes, frames: list[bytes], descriptor: int) -> None:
        message = read_from_client(frames)
        if isinstance(message, Subscribe):
            self._subscribe(peer, message, descriptor)
            return
        session = self._sessions.get(self._names.get(peer, ""))
        if session is None:
            self._send(
                peer, Refused("unknown", "nobody is subscribed on this connection; send SUBSCRIBE first")
            )
            return
        match message:
            case Ack(id):
                self._acknowledge(session, id)
            case Credit(messages):
                session.credit = min(session.credit + messages, _MOST_CREDIT)
                session.credited = min(session.credited + messages, session.sent)
                session.make_room()
            case Close():
                self._detach(session)
            case Forget():
                self._detach(session)
                self._subscriptions.remove(session.subscription.name)
                self._subscriptions.save()
                fault = self._subscriptions.unsaved
                self._send(peer, Forgotten() if fault is None else Refused("log", f"forgetting it: {fault}"))

    def _subscribe(self, peer: bytes, wanted: Subscribe, descriptor: int) -> None:
        if self._displaced.get(peer) == (wanted.name, wanted.session):
            self._send(peer, _taken(wanted.name))
            return
        own = self._sessions.get(self._names.get(peer, ""))
        if own is not None and own.is_again(wanted):
            self._send(peer, Ready(wanted.session, own.begin, self._view.end, False))
            return
        known = self._subscriptions.get(wanted.name)
        if wanted.resume is not None and wanted.resume > self._view.end:
            reason = f"resume {wanted.resume} is behind the log's end {self._view.end}: this is another log; begin anew"
            self._send(peer, Refused("ahead", reason))
            return
        if known is None and len(self._subscriptions) >= _MOST_SUBSCRIPTIONS:
            self._send(peer, Refused("full", f"there are {_MOST_SUBSCRIPTIONS} subscriptions already"))
            return
        new = known is None
        if known is None:
            try:
                known = self._begin(wanted)
            except LogError as e:
                _log.error("durable subscriber %r: %s", wanted.name, e)
                self._send(peer, Refused("log", str(e)))
                return
        elif known.topics != wanted.topics:
            known.topics = wanted.topics
            self._subscriptions.change(urgent=True)
        self._displace(peer, wanted.name)
        self._subscriptions.come(wanted.name)
        self._subscriptions.save()  # a new one is not forgotten once it is told that it is ready
        if new and (fault := self._subscriptions.unsaved):
            self._subscriptions.remove(wanted.name)
            self._send(peer, Refused("log", f"it cannot be remembered now: {fault}"))
            return
        begin = max(known.next, wanted.resume or 0)
        session = _Session(
            peer,
            wanted.session,
            known,
            Cursor(self._view, begin),
            begin,
            min(wanted.credit, _MOST_CREDIT),
            last_sent=begin - 1,
            wire=_Wire(Taken(descriptor)) if own is None else own.wire,
        )
        self._sessions[wanted.name] = session
        self._names[peer] = wanted.name
        self._displaced.pop(peer, None)
        self._send(peer, Ready(wanted.session, begin, self._view.end, new))
        _log.info(
            "durable subscriber %r is there, from id %d on%s", wanted.name, begin, " (new)" if new else ""
        )

    def _displace(self, peer: bytes, name: str) -> None:
        """End the sessions that this name and this peer have had."""
        own = self._sessions.get(self._names.get(peer, ""))
        if own is not None:
            self._detach(own)
        other = self._sessions.get(name)
        if other is not None:
            self._detach(other)
            self._displaced[other.peer] = name, other.number
            while len(self._displaced) > _MOST_DISPLACED:
                del self._displaced[next(iter(self._displaced))]
            self._send(other.peer, _taken(name))

    def _begin(self, wanted: Subscribe) -> Subscription:
        """A new subscription, whose first message is not deleted before the writer knows of it."""
        if wanted.start == LATEST:
            first = self._view.end
        else:
            with self._subscriptions.placing():
                self._view.refresh()
                first = self._first(wanted.start)
                self._subscriptions.mark(first)
        known = Subscription(wanted.name, wanted.topics, first, created=time.time())
        self._subscriptions.add(known)
        return known

    def _first(self, start: bytes) -> int:
        if start == EARLIEST:
            return self._view.earliest
        return min(int.from_bytes(start, "big"), self._view.end)

    def _acknowledge(self, session: _Session, acknowledged: int) -> None:
        if acknowledged > session.last_sent:
            raise ProtocolError(f"ACK of id {acknowledged}; {session.last_sent} was the last one sent")
        subscription = session.subscription
        subscription.next = max(subscription.next, acknowledged + 1)
        subscription.acknowledged = time.time()
        session.wants_acked = True
        session.make_room()
        self._subscriptions.change(urgent=True)
        self._step_over(session)

    def _step_over(self, session: _Session) -> None:
        """Past messages of other topics, if all that was sent is acknowledged."""
        subscription = session.subscription
        acknowledged = session.last_sent < subscription.next and not session.pending
        if acknowledged and session.cursor.position > subscription.next:
            subscription.next = session.cursor.position
            self._subscriptions.change(urgent=False)

    def _detach(self, session: _Session) -> None:
        self._sessions.pop(session.subscription.name, None)
        self._names.pop(session.peer, None)
        self._subscriptions.leave(session.subscription.name)
        _log.info(
            "durable subscriber %r has gone, at id %d", session.subscription.name, session.subscription.next
        )

    # What goes.

    def step(self) -> bool:
        """Give everybody a turn; keep what has to be kept, and say so.

        Returns:
            Whether there is more to do at once.

        Raises:
            LogError: Positions cannot be written.
        """
        busy = False
        self.router.stuck = False
        self._read_inbox()
        self._held = sum(session.held for session in self._sessions.values())
        for session in list(self._sessions.values()):
            try:
                busy = self._deliver(session) or busy
            except DiskFaultError as e:  # the next turn may get it
                self._faults.warn("durable subscriber %r: %s", session.subscription.name, e)
            except LogError as e:
                _log.error("durable subscriber %r: %s", session.subscription.name, e)
                self._send(session.peer, Refused("log", str(e)))
                self._detach(session)
            except zmq.ZMQError:
                raise
            except Exception as e:
                self._fail(session.peer, e)
        if self._subscriptions.save():
            for session in list(self._sessions.values()):
                if session.wants_acked and self._send(session.peer, Acked(session.subscription.next)):
                    session.wants_acked = False
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            self._beat()
        return busy

    def _beat(self) -> None:
        self._faults.flush()
        self._errors.flush()
        for session in list(self._sessions.values()):
            self._send(session.peer, Heartbeat(self._view.end))
            session.wire.look()
        self._subscriptions.expire()

    def _deliver(self, session: _Session) -> bool:
        """One turn; whether another would bring something."""
        before = session.held
        try:
            return self._give(session)
        finally:
            self._held += session.held - before

    def _give(self, session: _Session) -> bool:
        for _ in range(_TURN_MESSAGES):
            if session.credit <= 0 or self._is_enough(session):
                return False
            if not session.pending and not self._read(session):
                return not session.cursor.at_end
            message = session.pending[0]
            if isinstance(message, Lost) and not self._subscriptions.is_kept:
                return True  # who has been told comes back behind it, and it would never be counted
            if not self._send(session.peer, message):
                return False
            session.pending.popleft()
            if isinstance(message, Lost):
                # As if it had been sent: who dies before it acknowledges something behind it is told again.
                session.last_sent = message.end - 1
                continue
            size = sum(map(len, message.frames))
            session.pending_bytes -= size
            session.on_way.append((session.sent, message.id, size))
            session.on_way_bytes += size
            session.sent += 1
            session.credit -= 1
            session.last_sent = message.id
            session.subscription.sent += 1
        return True

    def _is_enough(self, session: _Session) -> bool:
        """Whether more on the way would be too much for the queues of this one, or of all."""
        if not session.on_way and not session.wire.queued:
            return False
        most = self._share
        on_way = session.held - session.pending_bytes
        if on_way >= most and session.wire.queued >= most:
            session.wire.look()
            on_way = session.held - session.pending_bytes
        return on_way >= most

    @property
    def _share(self) -> int:
        """What one may hold: as much as the others leave."""
        return max(_LEAST, min(_WINDOW, _BUDGET - self._held))

    def _read(self, session: _Session) -> bool:
        """Find what is to be sent next; whether there is something."""
        if (lost := session.cursor.skip_lost()) is not None:
            self._lose(session, Lost(*lost))
            return True
        # What is read ahead for who takes nothing is memory too.
        room = max(1, self._share - session.held)
        batch = session.cursor.read(_TURN_ROWS, min(_TURN_BYTES, room))
        if batch is None:
            return False
        batch = _matching(batch, session.subscription.topics)
        messages = messages_of(batch)
        for at, number in enumerate(batch.column("id").to_pylist()):
            frames = messages.frames(at)
            session.pending.append(Message(number, tuple(frames if len(frames) > 1 else (b"", *frames))))
            session.pending_bytes += sum(map(len, frames))
        self._step_over(session)
        return bool(session.pending)

    def _lose(self, session: _Session, lost: Lost) -> None:
        subscription = session.subscription
        session.pending.append(lost)
        subscription.lost += max(0, lost.end - max(lost.first, subscription.lost_to))
        subscription.lost_to = max(subscription.lost_to, lost.end)
        self._subscriptions.change(urgent=True)
        _log.warning(
            "durable subscriber %r: the ids %d to %d were deleted before it had them (walMaxBytes)",
            subscription.name,
            lost.first,
            lost.end - 1,
        )

    def _send(self, peer: bytes, message: FromProxy) -> bool:
        """Whether it was taken; a peer that is gone is let go of."""
        frames = write(message)
        session = self._sessions.get(self._names.get(peer, ""))
        try:
            taken = self.router.send([peer, *frames])
            if taken and session is not None:
                session.wire.write(frames)
            return taken
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
        if session is not None:
            self._detach(session)
        return False

    def status(self) -> list[dict[str, Any]]:
        """An account of each subscriber, as plain data: of those that are furthest behind, if there are many."""
        now = time.time()
        accounts = []
        for subscription in heapq.nsmallest(_MOST_TOLD, self._subscriptions, key=lambda s: s.next):
            session = self._sessions.get(subscription.name)
            accounts.append(
                {
                    "name": subscription.name,
                    "topics": [_shown(topic) for topic in subscription.topics[:_MOST_TOPICS_TOLD]],
                    "connected": session is not None,
                    "nextId": subscription.next,
                    "backlog": self._view.end - subscription.next,
                    "onTheWay": 0 if session is None else len(session.on_way),
                    "sent": subscription.sent,
                    "lost": subscription.lost,
                    "lastAckSeconds": None
                    if subscription.acknowledged is None
                    else round(now - subscription.acknowledged, 1),
                    "awaySeconds": round(subscription.away, 1),
                    "ageSeconds": round(now - subscription.created, 1),
                }
            )
        return accounts


def _taken(name: str) -> Refused:
    return Refused("taken", f"another client has subscribed as {name!r}")


def _shown(topic: bytes) -> str:
    return topic[:_MOST_SHOWN_BYTES].decode("utf-8", "backslashreplace")


def _matching(batch: pa.RecordBatch, topics: tuple[bytes, ...]) -> pa.RecordBatch:
    """The rows whose topic begins with one of these; a message without one has the empty topic."""
    if not topics or b"" in topics:
        return batch
    names = pc.fill_null(pc.cast(batch.column("topic"), pa.binary()), b"")
    kept = batch.column("frames")
    if kept.null_count < len(kept):  # where a topic is no text, the column shows something else
        pairs = zip(names.to_pylist(), kept.to_pylist(), strict=True)
        names = pa.array([name if frames is None else frames[0] for name, frames in pairs], pa.binary())
    mask = None
    for topic in topics:
        found = pc.starts_with(names, topic)
        mask = found if mask is None else pc.or_(mask, found)
    return batch.filter(mask)
