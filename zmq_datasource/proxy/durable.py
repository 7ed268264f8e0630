"""Serves durable subscribers: what each missed, in order, then what comes, without a seam.

The rules, beside those of each session (``durable_session``):

* A position is on disk before ``ACKED`` says so.
* Whoever subscribes under a name that is in use takes it over; the one before gets REFUSED. But who says again what it
  has said already, on the same connection, is only answered: a large message on its way must not begin anew.
* A client that redials counts its sessions up. A SUBSCRIBE of an earlier one, which comes late by a connection that the
  client has given up, is ignored.
* Nobody waits for anybody: requests are taken for ``_TURN_SECONDS`` at most, then each subscriber gets its turn. What
  cannot be sent now is tried next time.
* An error at one subscriber's message or turn refuses that subscriber, and is logged with its cause. Only an
  error of the storage of positions, or of the socket, is everybody's.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from typing import Any

import zmq

from zmq_datasource.errors import DiskFaultError, LogError, ProtocolError
from zmq_datasource.host import failpoints
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.host.printable import printable
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.durable_protocol import (
    EARLIEST,
    HEARTBEAT_SECONDS,
    LATEST,
    MOST_FRAMES,
    Ack,
    Acked,
    Close,
    Credit,
    Forget,
    Forgotten,
    FromProxy,
    Heartbeat,
    Lost,
    Ready,
    Refused,
    Subscribe,
    client_of,
    read_from_client,
    write,
)
from zmq_datasource.proxy.durable_session import LEAST, DurableSession
from zmq_datasource.proxy.router import Request, Router
from zmq_datasource.proxy.subscriptions import Subscription, Subscriptions, size_of
from zmq_datasource.proxy.view import Cursor, LogView
from zmq_datasource.proxy.wire import Wires
from zmq_datasource.transport.kernel import find_dead_peers

__all__ = ["DurableServer"]

# Bytes that all subscribers together may have read ahead and on the way, beside a little for each, so that those who
# take nothing leave something for the others. One message always.
_BUDGET = 128 << 20
_TURN_MESSAGES = 256
# For taking requests, until subscribers get their turn.
_TURN_SECONDS = 0.005
_MOST_SUBSCRIPTIONS = 1000
# Of the topics of all subscriptions: they are written to the disk with each change of a position.
_MOST_TOPIC_BYTES = 2 << 20
_MOST_DISPLACED = 1000
# What a status tells of them.
_MOST_SHOWN_OF_ALL, _MOST_TOPICS_SHOWN = 100, 10
_MOST_SHOWN = 60  # characters of a topic
# Messages that libzmq queues for one: all that bounds a client that lies about what it has taken where the system
# does not tell (ipc).
_SNDHWM = 200
# Twice what the topics of a subscription may have.
_MOST_REQUEST_BYTES = 64 << 10


class DurableServer:
    """Use it in one thread; ``router`` is where its clients are.

    Args:
        options: Where it is bound.
        view: The log.
        subscriptions: Who is known.

    Attributes:
        window: Bytes that one subscriber may have read ahead and on the way.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    window = 16 << 20

    def __init__(self, options: ProxyOptions, view: LogView, subscriptions: Subscriptions) -> None:
        self._view = view
        self._subscriptions = subscriptions
        self.router = Router(
            options, options.durable, _SNDHWM, _MOST_REQUEST_BYTES, MOST_FRAMES, find_dead_peers
        )
        self._sessions: dict[str, DurableSession] = {}
        self._names: dict[bytes, str] = {}
        self._wires = Wires()
        # Who had a name until somebody else took it, and what it called its session.
        self._displaced: dict[bytes, tuple[str, int]] = {}
        # Answers to peers without a session for which their queues had no room yet.
        self._owed: dict[bytes, FromProxy] = {}
        # Peers that have ended their subscription, and the change that is to be kept before they hear so.
        self._forgetting: dict[bytes, int] = {}
        # Of each name and client, the newest session.
        self._newest: dict[tuple[str, int], int] = {}
        self._requests: deque[Request] = deque()
        self._held = 0
        self._next_heartbeat = 0.0
        self._faults = LimitedLog(__name__, "faults of durable subscribers")
        self._errors = LimitedLog(__name__, "unexpected errors at durable subscribers")
        self._losses = LimitedLog(
            __name__, "times that messages were deleted before a durable subscriber had them"
        )
        self._comings = LimitedLog(__name__, "times that a durable subscriber came or went")

    # What comes.

    def _read_inbox(self) -> None:
        if not self._requests:
            self._requests.extend(self.router.inbox())
        deadline = time.monotonic() + _TURN_SECONDS
        while self._requests and time.monotonic() < deadline:
            request = self._requests.popleft()
            peer = request.peer
            try:
                self._take(request)
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

    def _take(self, request: Request) -> None:
        peer, message = request.peer, read_from_client(request.frames)
        if isinstance(message, Subscribe):
            if request.may_use(message.name):
                self._subscribe(peer, message, request.descriptor)
            else:
                self._send(peer, _forbidden(message.name))
            return
        session = self._sessions.get(self._names.get(peer, ""))
        if session is None:
            if peer in self._owed or peer in self._forgetting:
                return  # it will hear why
            if peer in self._displaced:
                self._send(peer, _taken(self._displaced[peer][0]))
                return
            self._send(
                peer, Refused("unknown", "nobody is subscribed on this connection; send SUBSCRIBE first")
            )
            return
        # Another client may have taken over the routing id.
        if not request.may_use(session.subscription.name):
            self._send(peer, _forbidden(session.subscription.name))
            return
        session.due = 0.0  # a client that sends something may have taken something
        match message:
            case Ack(id):
                session.acknowledge(id)
            case Credit(messages):
                session.give_credit(messages)
            case Close():
                self._detach(session)
            case Forget():
                self._detach(session)
                self._forgetting[peer] = self._subscriptions.remove(session.subscription.name)

    def _subscribe(self, peer: bytes, wanted: Subscribe, descriptor: int) -> None:
        self._owed.pop(peer, None)
        self._forgetting.pop(peer, None)
        if self._is_late(wanted):
            return
        if self._displaced.get(peer) == (wanted.name, wanted.session):
            self._send(peer, _taken(wanted.name))
            return
        own = self._sessions.get(self._names.get(peer, ""))
        if own is not None and own.is_again(wanted):
            answer = Ready(wanted.session, own.begin, self._view.end, False)
            if own.ready is None and not self._send(peer, answer):
                own.ready = answer
            return
        known = self._subscriptions.get(wanted.name)
        if wanted.resume is not None and wanted.resume > self._view.end:
            reason = (
                f"resume {wanted.resume} is beyond the log's end {self._view.end}: it came from another log; subscribe "
                "again without resume"
            )
            self._send(peer, Refused("ahead", reason))
            return
        if known is None and wanted.resume is not None:
            reason = (
                "the proxy does not know the subscription any more: its log was replaced, or the subscription was "
                "removed or has expired. What was not acknowledged by then may be lost. Open the subscriber again: it "
                "begins at its start"
            )
            self._send(peer, Refused("gone", reason))
            return
        if known is None and len(self._subscriptions) >= _MOST_SUBSCRIPTIONS:
            self._send(
                peer,
                Refused(
                    "full",
                    f"there are {_MOST_SUBSCRIPTIONS} subscriptions already; end some with FORGET, or lower "
                    "subscriberExpiry",
                ),
            )
            return
        before = 0 if known is None else size_of(known.topics)
        topic_bytes = self._subscriptions.topic_bytes - before + size_of(wanted.topics)
        if size_of(wanted.topics) > before and topic_bytes > _MOST_TOPIC_BYTES:
            self._send(
                peer,
                Refused(
                    "full",
                    f"the topics of all subscriptions would have {topic_bytes} bytes, and {_MOST_TOPIC_BYTES} are the "
                    "most; subscribe to fewer topics, or to their common prefix, or end some subscriptions with FORGET",
                ),
            )
            return
        new, added = known is None, 0
        if known is None:
            try:
                known, added = self._begin(wanted)
            except LogError as e:
                self._faults.warn("durable subscriber %r: %s", wanted.name, e)
                self._send(peer, Refused("log", str(e)))
                return
        elif known.topics != wanted.topics:
            self._subscriptions.set_topics(known, wanted.topics)
        self._displace(peer, wanted.name)
        self._subscriptions.come(wanted.name)
        begin = max(known.next, wanted.resume or 0)
        wire = self._wires.of(descriptor)
        session = DurableSession(
            peer, wanted, known, self._subscriptions, Cursor(self._view, begin), wire, self._losses
        )
        self._sessions[wanted.name] = session
        self._names[peer] = wanted.name
        self._displaced.pop(peer, None)
        session.ready, session.added = Ready(wanted.session, begin, self._view.end, new), added
        self._comings.info(
            "durable subscriber %r is there, from id %d on%s", wanted.name, begin, " (new)" if new else ""
        )

    def _is_late(self, wanted: Subscribe) -> bool:
        """Whether the client has begun a later session under this name, by another connection."""
        client, number = client_of(wanted.session), wanted.session
        if not client:
            return False
        newest = self._newest.pop((wanted.name, client), number)
        self._newest[wanted.name, client] = max(newest, number)
        while len(self._newest) > _MOST_DISPLACED:
            del self._newest[next(iter(self._newest))]
        return number < newest

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
            self._owe(other.peer, _taken(name))

    def _begin(self, wanted: Subscribe) -> tuple[Subscription, int]:
        """A new subscription, whose first message is not deleted before the writer knows of it; and the change."""
        if wanted.start == LATEST:
            first = self._view.end
        else:
            with self._subscriptions.placing():
                self._view.refresh()
                first = self._first(wanted.start)
                self._subscriptions.hold(first)
        known = Subscription(wanted.name, wanted.topics, first, created=time.time())
        return known, self._subscriptions.add(known)

    def _first(self, start: bytes) -> int:
        if start == EARLIEST:
            return self._view.earliest
        return min(int.from_bytes(start, "big"), self._view.end)

    def _detach(self, session: DurableSession) -> None:
        self._sessions.pop(session.subscription.name, None)
        self._names.pop(session.peer, None)
        self._subscriptions.leave(session.subscription.name)
        self._comings.info(
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
        self._save()
        left_over = self._wires.left_over([session.wire for session in self._sessions.values()])
        self._held = sum(s.held for s in self._sessions.values()) + sum(wire.queued for wire in left_over)
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if now < session.due:
                continue
            session.due = 0.0
            try:
                busy = self._deliver(session) or busy
            except DiskFaultError as e:  # the next turn may get it
                self._faults.warn("durable subscriber %r: %s", session.subscription.name, e)
            except LogError as e:
                self._faults.warn("durable subscriber %r: %s", session.subscription.name, e)
                self._send(session.peer, Refused("log", str(e)))
                self._detach(session)
            except zmq.ZMQError:
                raise
            except Exception as e:
                self._fail(session.peer, e)
        self._confirm()
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            self._beat()
        return busy or bool(self._requests)

    def _save(self) -> None:
        """Keep what has changed; whoever waits for that is to hear of it."""
        if self._subscriptions.save():
            for session in self._sessions.values():
                if session.wants_acked:
                    session.wants_acked, session.acked = False, Acked(session.subscription.next)

    def _confirm(self) -> None:
        """Say what is on the disk, as soon as there is room to say it."""
        fault = self._subscriptions.unsaved
        for peer, change in list(self._forgetting.items()):
            if self._subscriptions.is_kept(change) or fault is not None:
                del self._forgetting[peer]
                self._owe(peer, Forgotten() if fault is None else Refused("log", f"forgetting it: {fault}"))
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if session.acked is not None and session.ready is None and now >= session.due:
                failpoints.reach("proxy.acked.before_answer")
                if self._send(session.peer, session.acked):
                    session.acked = None

    def _beat(self) -> None:
        self._faults.flush()
        self._errors.flush()
        self._comings.flush()
        self._losses.flush()
        for session in list(self._sessions.values()):
            self._send(session.peer, Heartbeat(self._view.end))
        self._wires.look([session.wire for session in self._sessions.values()], time.monotonic())
        for peer, answer in list(self._owed.items()):
            if self._send(peer, answer):
                self._owed.pop(peer, None)
        self._subscriptions.expire()

    def _deliver(self, session: DurableSession) -> bool:
        """Give a subscriber its turn; returns whether another turn would send something."""
        before = session.held
        try:
            return self._give(session)
        finally:
            self._held += session.held - before

    def _give(self, session: DurableSession) -> bool:
        if session.ready is not None:
            # A new subscription is on the disk before its client hears that it is ready.
            if not self._subscriptions.is_kept(session.added):
                if (fault := self._subscriptions.unsaved) is not None:
                    self._subscriptions.remove(session.subscription.name)
                    self._send(session.peer, Refused("log", f"it cannot be remembered now: {fault}"))
                    self._detach(session)
                return False
            # What was sent to the session before, on the same connection, may have left no room for it yet.
            if not self._send(session.peer, session.ready):
                return False
            session.ready = None
        share = self._share
        for _ in range(_TURN_MESSAGES):
            if not session.may_have(share):
                return False
            message = session.next(share)
            if message is None:
                return not session.cursor.at_end
            if isinstance(message, Lost) and not self._subscriptions.is_kept(session.lost_at):
                # Who has heard of it comes back after it, and it would never be counted.
                return self._subscriptions.unsaved is None
            if not self._send(session.peer, message):
                return False
            session.sent()
        return True

    @property
    def _share(self) -> int:
        """What one may hold: as much as the others leave."""
        return max(LEAST, min(self.window, _BUDGET - self._held))

    def _owe(self, peer: bytes, answer: FromProxy) -> None:
        """Answer a peer that has no session any more, now or once there is room."""
        self._owed[peer] = answer
        if self._send(peer, answer):
            del self._owed[peer]
        while len(self._owed) > _MOST_DISPLACED:
            del self._owed[next(iter(self._owed))]

    def _send(self, peer: bytes, message: FromProxy) -> bool:
        """Whether it was taken; a peer that is gone is let go of."""
        frames = write(message)
        session = self._sessions.get(self._names.get(peer, ""))
        try:
            taken = self.router.send([peer, *frames])
            if session is not None:
                session.was_sent_to(taken, time.monotonic())
                if taken:
                    session.wire.write(frames)
            return taken
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
        self._owed.pop(peer, None)
        if session is not None:
            self._detach(session)
        return False

    @property
    def due(self) -> float:
        """When there is something to do of which no event tells, monotonic; infinite if there is nothing."""
        if self._subscriptions.pauses:
            return 0.0
        return min((session.due for session in self._sessions.values() if session.due), default=math.inf)

    def status(self) -> list[dict[str, Any]]:
        """An account of each subscriber, as plain data: of those that are furthest behind, if there are many."""
        now = time.time()
        accounts = []
        for subscription in heapq.nsmallest(_MOST_SHOWN_OF_ALL, self._subscriptions, key=lambda s: s.next):
            session = self._sessions.get(subscription.name)
            accounts.append(
                {
                    "name": subscription.name,
                    "topics": [
                        printable(topic, _MOST_SHOWN) for topic in subscription.topics[:_MOST_TOPICS_SHOWN]
                    ],
                    "connected": session is not None,
                    "nextId": subscription.next,
                    "backlog": self._view.end - subscription.next,
                    "onTheWay": 0 if session is None else session.on_way,
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


def _forbidden(name: str) -> Refused:
    return Refused("forbidden", f"the name {name!r} belongs to another key (allowedClients of the proxy)")


def _taken(name: str) -> Refused:
    return Refused("taken", f"another client has subscribed as {name!r}")
