"""The plain subscribers' side: an XPUB, who is subscribed to what, and who takes nothing.

What libzmq can tell and what not (docs/zeromq-facts.md): an XPUB says which topics are asked for, not by
whom; what it drops for one subscriber it drops without a word. So nothing here counts drops. A
subscriber sees them itself, as missing ids. What the system can tell is which connection has taken
nothing of what waits for it.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.host.printable import printable
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.journal import Written
from zmq_datasource.proxy.specs import proxy_socket
from zmq_datasource.transport.connections import Connection
from zmq_datasource.transport.core import Outbox, columns_of
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import frame_limit

__all__ = ["NO_SUBSCRIBERS", "REQUEST_BOUNDS", "Backend", "RequestBounds"]

_log = logging.getLogger(__name__)

# libzmq learns from time to time only that a queue has room again; looking at the events makes it
# look. At least so often, or it would drop for subscribers that have kept up.
_REFRESH_EVERY = 64
# Of a request to subscribe.
_MOST_TOPIC_BYTES = 64 << 10
# Requests that are taken at a time: the flow goes on in between.
_MOST_REQUESTS = 256
# libzmq moves requests from a connection's queue into its own memory while it publishes, until the queue is empty. A
# short queue is empty soon, and the connection waits meanwhile.
_REQUEST_HWM = 32
# How often connections are looked at.
_LOOK_SECONDS = 0.25
# And while more requests come than one turn takes.
_BUSY_LOOK_SECONDS = 0.05
_MOST_TOPICS_SHOWN, _MOST_SHOWN = 100, 60
# The status where nothing is published.
NO_SUBSCRIBERS: Mapping[str, Any] = {
    "published": 0,
    "subscribers": 0,
    "subscriptions": [],
    "subscriptionsRefused": 0,
    "stalled": [],
    "disconnected": 0,
    "waitedSeconds": 0.0,
}


@dataclass(frozen=True)
class RequestBounds:
    """How much plain subscribers may ask for.

    libzmq keeps the topics of a connection in memory, without a bound, as long as the connection lasts. Hanging up
    frees them. Short heartbeats and topics that come and go send bytes too, so each second allows some more.

    Attributes:
        upstream_topics, upstream_bytes: Distinct topics that are passed on to publishers, and their bytes together.
        bytes: Of the requests of one connection, beyond its allowance.
        total_bytes: Of the requests of all connections, each beyond its allowance.
        allowed_bytes, allowed_bytes_per_second: The allowance of each connection.
    """

    upstream_topics: int = 10_000
    upstream_bytes: int = 1 << 20
    bytes: int = 4 << 20
    total_bytes: int = 8 << 20
    allowed_bytes: int = 8 << 10
    allowed_bytes_per_second: int = 2000


REQUEST_BOUNDS = RequestBounds()


class _Stalled(NamedTuple):
    """A connection that data waits for, and since when it has taken none."""

    connection: Connection
    since: float


class _Pending(NamedTuple):
    """Messages that were not all published yet, with the ids from ``first`` on."""

    first: int
    rows: int
    outbox: Outbox


class Backend:
    """Publishes to whoever is subscribed; in one thread.

    Args:
        options: Endpoints, high-water marks, and what a slow subscriber means.
        bounds: How much subscribers may ask for.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.

    Attributes:
        published: Messages that were given to libzmq.
        disconnected: Subscribers that were hung up on: they took nothing, or asked for too many topics.
        subscriptions: The topics that subscribers have asked for and that are passed on to publishers.
        refused: Requests for topics that were not passed on: there were too many.
    """

    def __init__(self, options: ProxyOptions, bounds: RequestBounds = REQUEST_BOUNDS) -> None:
        self._options = options
        self._bounds = bounds
        self._waits = options.slow_subscriber == "wait"
        self._hangs_up = options.slow_subscriber == "disconnect"
        self._opened = OpenSocket(proxy_socket(options, "XPUB", options.publish), self._prepare)
        self.socket = self._opened.socket
        self._pending: deque[_Pending] = deque()
        self._at = 0  # how far the first of those has come
        self._blocked_since: float | None = None
        self._stalled: dict[int, _Stalled] = {}
        self._since: dict[int, float] = {}
        self._next_look = 0.0
        self.subscriptions: set[bytes] = set()
        self._upstream_bytes = 0
        self.refused = 0
        self._hang_ups = LimitedLog(__name__, "plain subscribers that were disconnected")
        self._refusals = LimitedLog(__name__, "topics that were not passed on to publishers")
        self.published = 0
        self.disconnected = 0
        self._waited_before = 0.0

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.MAXMSGSIZE, frame_limit(_MOST_TOPIC_BYTES))
        sock.setsockopt(zmq.RCVHWM, _REQUEST_HWM)
        sock.setsockopt(zmq.XPUB_VERBOSE, 1)  # see take_requests
        if self._waits:
            sock.setsockopt(zmq.XPUB_NODROP, 1)

    @property
    def behind(self) -> bool:
        """Whether something waits for room (``wait``)."""
        return bool(self._pending)

    def take_requests(self) -> list[bytes]:
        """What subscribers ask for that nobody asked for before, and what nobody wants any more; for the publishers.

        A topic beyond the bounds is not passed on. Its subscriber still gets what comes by the proxy's own ``topics``
        and by the topics that were passed on. The topic is passed on once there is room and a subscriber asks for it.

        An XPUB passes on a request to leave a topic also where its sender has never asked for it, and others have. So
        what is given back here is balanced, and nobody ends the subscription to the proxy's own ``topics``. What a
        stranger has ended for others begins again with the next one who asks for it; of that one only a verbose XPUB
        tells.
        """
        changes = []
        with suppress(zmq.Again):
            for _ in range(_MOST_REQUESTS):
                request = self.socket.recv(zmq.NOBLOCK)
                kind, topic = request[:1], request[1:]
                if kind == b"\x01" and topic not in self.subscriptions:
                    if self._may_pass_on(topic):
                        self.subscriptions.add(topic)
                        self._upstream_bytes += len(topic)
                        changes.append(request)
                elif kind == b"\x00" and topic in self.subscriptions:
                    self.subscriptions.remove(topic)
                    self._upstream_bytes -= len(topic)
                    changes.append(request)
            self._next_look = min(self._next_look, time.monotonic() + _BUSY_LOOK_SECONDS)
        return changes

    def _may_pass_on(self, topic: bytes) -> bool:
        bounds = self._bounds
        if (
            len(self.subscriptions) < bounds.upstream_topics
            and self._upstream_bytes + len(topic) <= bounds.upstream_bytes
        ):
            return True
        self.refused += 1
        self._refusals.warn(
            "topic '%s' of a plain subscriber is not passed on to the publishers: %d topics of %d bytes are passed on "
            "already, and %d topics of %d bytes are the most; name the prefix in topics of the proxy, or let "
            "subscribers ask for fewer topics",
            printable(topic, _MOST_SHOWN),
            len(self.subscriptions),
            self._upstream_bytes,
            bounds.upstream_topics,
            bounds.upstream_bytes,
        )
        return False

    @property
    def next_id(self) -> int:
        """The id that is published next, if something waits."""
        return self._pending[0].first + self._at if self._pending else -1

    def publish(self, written: Written) -> None:
        """Give the messages of rows to libzmq; with ``wait``, as far as there is room."""
        first, rows = written.first, written.rows.num_rows
        columns = columns_of(raw_messages(written.rows), None if self._options.plain else first)
        self._pending.append(_Pending(first, rows, Outbox(columns, rows)))
        if len(self._pending) == 1:
            self.go_on()

    def go_on(self) -> None:
        """Publish what has waited for room."""
        while self._pending:
            pending = self._pending[0]
            reached = pending.outbox.give(self.socket, self._at, pending.rows, refresh_every=_REFRESH_EVERY)
            self.published += reached - self._at
            self._at = reached
            if reached < pending.rows:
                if self._blocked_since is None:
                    self._blocked_since = time.monotonic()
                return
            self._pending.popleft()
            self._at = 0
        self._waited_before, self._blocked_since = self._waited, None

    # Who is there.

    def look(self) -> None:
        """See who comes and goes, and who takes nothing; hang up where that is asked for."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        self._refusals.flush()
        self._hang_ups.flush()
        self._opened.watch.update()
        current = {c.inode: c for c in self._opened.watch.open_connections().current()}
        for inode in self._stalled.keys() - current.keys():
            del self._stalled[inode]
        for inode, connection in current.items():
            before = self._stalled.get(inode)
            if not connection.unsent:
                self._stalled.pop(inode, None)
            elif before is None or before.connection.taken != connection.taken:
                self._stalled[inode] = _Stalled(connection, now)
            elif self._hangs_up and now - before.since >= self._options.slow_timeout:
                self._hang_ups.warn(
                    "subscriber %s has taken nothing for %.1f s; it is disconnected (slowSubscriber=disconnect)",
                    connection.peer,
                    now - before.since,
                )
                self._opened.watch.open_connections().hang_up(connection)
                self.disconnected += 1
                del self._stalled[inode]
        self.end_floods(current, now)

    def end_floods(self, current: Mapping[int, Connection], now: float) -> None:
        """Hang up on connections that ask for too much, the one that asks for most first.

        Args:
            current: All connections, by inode.
            now: Seconds, monotonic.
        """
        bounds = self._bounds
        self._since = {inode: self._since.get(inode, now) for inode in current}
        excess = {
            inode: connection.received
            - bounds.allowed_bytes
            - round(bounds.allowed_bytes_per_second * (now - self._since[inode]))
            for inode, connection in current.items()
        }
        total = sum(size for size in excess.values() if size > 0)
        for inode, size in sorted(excess.items(), key=lambda item: item[1], reverse=True):
            if size <= bounds.bytes and total <= bounds.total_bytes:
                return
            total -= size
            connection = current[inode]
            self._hang_ups.warn(
                "subscriber %s has sent %d bytes of subscriptions and heartbeats; it is disconnected (at most %d bytes "
                "for each subscriber, %d bytes for all): subscribe to "
                "fewer topics, or to their common prefix, change them less often, and send heartbeats less often "
                "(ZMQ_HEARTBEAT_IVL)",
                connection.peer,
                connection.received,
                bounds.bytes,
                bounds.total_bytes,
            )
            self._opened.watch.open_connections().hang_up(connection)
            self.disconnected += 1

    def status(self) -> dict[str, Any]:
        """The status of the subscribers' side, as plain data."""
        some = heapq.nsmallest(_MOST_TOPICS_SHOWN, self.subscriptions)
        return {
            "published": self.published,
            "subscribers": self._opened.watch.peers,
            "subscriptions": [printable(topic, _MOST_SHOWN) for topic in some],
            "subscriptionsRefused": self.refused,
            "stalled": self._stalled_now(),
            "disconnected": self.disconnected,
            "waitedSeconds": round(self._waited, 1),
        }

    @property
    def _waited(self) -> float:
        """Seconds that publishing has waited for subscribers in all, up to now."""
        now = time.monotonic()
        return self._waited_before + (0 if self._blocked_since is None else now - self._blocked_since)

    def _stalled_now(self) -> list[dict[str, object]]:
        """Connections that have taken nothing for a second or more, though data waits for them."""
        now = time.monotonic()
        return [
            {
                "peer": s.connection.peer,
                "seconds": round(now - s.since, 1),
                "unsentBytes": s.connection.unsent,
            }
            for s in self._stalled.values()
            if now - s.since >= 1
        ]

    def close(self) -> None:
        """Wait for what is queued, up to ``linger``."""
        if not self._opened.close(self._options.linger):
            _log.warning("linger ran out with messages still queued for plain subscribers; the log has them")
