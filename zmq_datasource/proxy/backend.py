"""The plain subscribers' side of the live process: an XPUB.

An XPUB reports which topics are subscribed to, but not by which connection, and it does not report what it drops for
one subscriber (docs/zeromq-facts.md). So nothing here counts drops.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import zmq

from zmq_datasource.counters import figures
from zmq_datasource.host.log_lines import LimitedLog, printable
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.figures import PublishedFigures
from zmq_datasource.transport.connections import Connection, Connections
from zmq_datasource.transport.core import Outbox, columns_of
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec, frame_limit

_log = logging.getLogger(__name__)

# libzmq notices only now and then that a queue has room, or when the socket's events are read. ``Outbox.give`` reads
# them after this many messages. Otherwise libzmq drops messages for subscribers that have kept up.
_REFRESH_EVERY = 64
# A longer topic ends the connection. libzmq keeps a topic in a tree with a node of about 50 bytes for each byte.
_MOST_TOPIC_BYTES = 4 << 10
# Requests of subscribers that are read in one round, so that the flow goes on in between.
_MOST_REQUESTS = 256
# In any call of the socket, libzmq moves requests from a connection's queue into its own memory until the queue is
# empty. With long topics that lasts as long as the subscriber sends. Of a connection that is cut, it still reads this
# queue and the kernel's buffer.
_REQUEST_HWM, _REQUEST_RCVBUF = 4, 64 << 10
# How long the proxy waits at its end for plain subscribers: first for messages that wait for libzmq, and then for those
# that libzmq has queued. The log has all of them.
LINGER_SECONDS = 1.0
# How often connections are checked, at least so many times as long as a check takes.
_CHECK_SECONDS, _CHECK_PAUSES = 0.05, 20
_MOST_TOPICS_SHOWN, _MOST_CHARACTERS = 100, 60
_PENDING_CHECK_SECONDS = 0.001
# Publishing waits up to ``_ROOM_SECONDS`` for room before it drops messages, once for each ``sndhwm`` messages.
# libzmq empties the queue of a subscriber that reads in less time. After a wait in vain, publishing drops messages for
# ``_DROPPING_SECONDS`` without waiting, so a subscriber that does not read delays the others by 5 %.
_ROOM_SECONDS, _DROPPING_SECONDS = 0.005, 0.1


@dataclass(frozen=True)
class RequestBounds:
    """How much plain subscribers may ask for.

    libzmq keeps the topics of a connection in memory, without a bound, as long as the connection lasts. Ending the
    connection frees them. Heartbeats, and topics that come and go, send bytes too, so each second allows some more.

    Attributes:
        upstream_topics, upstream_bytes: How many distinct topics are passed on to publishers, and their bytes together.
        bytes: Bytes of the requests of one connection, beyond its allowance.
        total_bytes: Bytes of the requests of all connections, each beyond its allowance.
        allowed_bytes, allowed_bytes_per_second: The allowance of each connection.
    """

    upstream_topics: int = 10_000
    upstream_bytes: int = 1 << 20
    bytes: int = 4 << 20
    total_bytes: int = 8 << 20
    allowed_bytes: int = 8 << 10
    allowed_bytes_per_second: int = 2000


REQUEST_BOUNDS = RequestBounds()


class _Topics:
    """The topics of plain subscribers that are passed on to publishers (``passed_on``)."""

    def __init__(self, bounds: RequestBounds, counters: PublishedFigures) -> None:
        self._bounds = bounds
        self._counters = counters
        self.passed_on: set[bytes] = set()
        self._bytes = 0
        self.refusals = LimitedLog(__name__, "topics that were not passed on to publishers")

    def change(self, request: bytes) -> bool:
        """Subscribe to a topic or unsubscribe from it; return whether publishers must get the request.

        An XPUB also reports an unsubscription by a peer that has never subscribed, even if other peers are subscribed.
        So an unsubscription is passed on only after a subscription, and no peer can end the proxy's own subscription to
        ``topics``. The next subscription to the topic is passed on again; only a verbose XPUB reports it.
        """
        kind, topic = request[:1], request[1:]
        if kind == b"\x01" and topic not in self.passed_on:
            if not self._has_room(topic):
                return False
            self.passed_on.add(topic)
            self._bytes += len(topic)
            return True
        if kind == b"\x00" and topic in self.passed_on:
            self.passed_on.remove(topic)
            self._bytes -= len(topic)
            return True
        return False

    def _has_room(self, topic: bytes) -> bool:
        bounds = self._bounds
        if len(self.passed_on) < bounds.upstream_topics and self._bytes + len(topic) <= bounds.upstream_bytes:
            return True
        self._counters.refused += 1
        self.refusals.warn(
            "topic '%s' of a plain subscriber is not passed on to the publishers: %d topics of %d bytes are passed on "
            "already, and %d topics of %d bytes are the most; name the prefix in topics of the proxy, or let "
            "subscribers ask for fewer topics",
            printable(topic, _MOST_CHARACTERS),
            len(self.passed_on),
            self._bytes,
            bounds.upstream_topics,
            bounds.upstream_bytes,
        )
        return False


class Subscribers:
    """Disconnects plain subscribers that ask for too many topics.

    A thread of its own checks them: the thread that publishes may be inside libzmq for as long as a subscriber sends
    topics.

    Args:
        bounds: How much subscribers may ask for.
        counters: Counts the disconnected subscribers.
    """

    def __init__(self, bounds: RequestBounds, counters: PublishedFigures) -> None:
        self._bounds = bounds
        self._counters = counters
        # By inode, the bytes of disconnected subscribers that libzmq has not freed.
        self._held: dict[int, int] = {}
        self._since: dict[int, float] = {}  # when each connection was seen first
        self._lines = LimitedLog(__name__, "plain subscribers that were disconnected")

    def check(self, connections: Connections, now: float, freed: bool = True) -> None:
        """Disconnect subscribers that ask for too much. Called several times a second.

        Args:
            now: Seconds, monotonic.
            freed: Whether libzmq has freed the topics of those that were disconnected before.
        """
        self._lines.flush()
        current = {connection.inode: connection for connection in connections.current()}
        if freed:
            self._held.clear()
        for connection in self._asking_too_much(current, now):
            connections.hang_up(connection)
            self._counters.disconnected += 1

    def _asking_too_much(self, current: Mapping[int, Connection], now: float) -> Iterator[Connection]:
        """The connections that ask for too much, first the one that asks for most."""
        bounds = self._bounds
        self._since = {inode: self._since.get(inode, now) for inode in current}
        excess = {
            inode: connection.received
            - bounds.allowed_bytes
            - round(bounds.allowed_bytes_per_second * (now - self._since[inode]))
            for inode, connection in current.items()
            if inode not in self._held
        }
        total = sum(self._held.values()) + sum(size for size in excess.values() if size > 0)
        for inode, size in sorted(excess.items(), key=lambda item: item[1], reverse=True):
            if size <= 0 or (size <= bounds.bytes and total <= bounds.total_bytes):
                return
            total -= size
            self._held[inode] = size
            self._lines.warn(
                "subscriber %s has sent %d bytes of subscriptions and heartbeats; it is disconnected (at most %d bytes "
                "for each subscriber, %d bytes for all): subscribe to fewer topics, or to their common prefix, change "
                "them less often, and send heartbeats less often (ZMQ_HEARTBEAT_IVL)",
                current[inode].peer,
                current[inode].received,
                bounds.bytes,
                bounds.total_bytes,
            )
            yield current[inode]


class _Pending(NamedTuple):
    """Messages that are not published to their end."""

    number: int
    outbox: Outbox


class Backend:
    """Publishes messages to plain subscribers; in one thread.

    Args:
        options: Endpoints, high-water marks, and ``slowSubscriber``.
        bounds: How much subscribers may ask for.
        room_seconds: How long publishing waits for room before it drops messages.

    Attributes:
        rounds: The rounds of the thread that publishes. It is outside of libzmq when it counts one.

    Raises:
        OptionError, EndpointError: The socket cannot be opened as asked.
    """

    def __init__(
        self,
        options: ProxyOptions,
        bounds: RequestBounds = REQUEST_BOUNDS,
        room_seconds: float = _ROOM_SECONDS,
    ) -> None:
        self._options = options
        self._room_seconds = room_seconds
        self._opened = OpenSocket(SocketSpec.of_proxy(options, "XPUB", options.publish), self._prepare)
        self.socket = self._opened.socket
        self._counters = PublishedFigures()
        self._subscribers = Subscribers(bounds, self._counters)
        self._topics = _Topics(bounds, self._counters)
        self.rounds = 0
        self._checking = threading.Lock()  # for the watch of the socket
        self._check_failure: Exception | None = None
        self._closing = threading.Event()
        self._checker = threading.Thread(target=self._check_subscribers, name="zmq-subscribers", daemon=True)
        self._checker.start()
        self._pending: deque[_Pending] = deque()
        self._position = 0  # of the next message among the first pending ones
        self._blocked_since: float | None = None
        self._drops = options.slow_subscriber != "wait"
        self._drops_until = 0.0

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.MAXMSGSIZE, frame_limit(_MOST_TOPIC_BYTES))
        sock.setsockopt(zmq.RCVHWM, _REQUEST_HWM)
        if not 0 <= int(sock.getsockopt(zmq.RCVBUF)) <= _REQUEST_RCVBUF:  # a user may want less
            sock.setsockopt(zmq.RCVBUF, _REQUEST_RCVBUF)
        sock.setsockopt(zmq.XPUB_VERBOSE, 1)  # see _Topics.change
        sock.setsockopt(zmq.XPUB_NODROP, 1)

    def take_requests(self) -> list[bytes]:
        """Receive requests; return those for publishers: new topics, and topics that are not needed any more.

        A topic beyond the bounds is not passed on. Its subscriber gets only the messages that the proxy receives for
        its own ``topics`` and for the topics that were passed on.
        """
        changes = []
        with suppress(zmq.Again):
            for _ in range(_MOST_REQUESTS):
                request = self.socket.recv(zmq.NOBLOCK)
                if self._topics.change(request):
                    changes.append(request)
        return changes

    # Publishing.

    @property
    def has_pending(self) -> bool:
        """Whether messages wait until subscribers have room (``slowSubscriber=wait``)."""
        return bool(self._pending)

    def publish(self, messages: RawMessages) -> None:
        """Publish messages, after those that wait; with ``slowSubscriber=wait`` as far as subscribers have room."""
        self._pending.append(_Pending(len(messages), Outbox(columns_of(messages), len(messages))))
        if len(self._pending) == 1:
            self.publish_pending()

    def publish_pending(self) -> None:
        """Publish the messages that wait, as far as subscribers have room by now."""
        while self._pending:
            pending = self._pending[0]
            reached = self._give(pending)
            self._counters.published += reached - self._position
            self._position = reached
            if reached < pending.number:
                if self._blocked_since is None:
                    self._blocked_since = time.monotonic()
                return
            self._pending.popleft()
            self._position = 0
        self._counters.waited_seconds, self._blocked_since = self._waited_seconds, None

    def _give(self, pending: _Pending) -> int:
        """Publish messages from ``_position`` on.

        Returns:
            The message for which a subscriber has no room (``slowSubscriber=wait``), or the number of messages.
        """
        sock, position, count = self.socket, self._position, pending.number
        if not self._drops:
            return pending.outbox.give(sock, position, count, refresh_every=_REFRESH_EVERY)
        while position < count and time.monotonic() >= self._drops_until:
            end = min(count, position + self._options.sndhwm)
            position = pending.outbox.give(sock, position, end, self._room_seconds, _REFRESH_EVERY)
            if position < end:
                self._drops_until = time.monotonic() + _DROPPING_SECONDS
        if position < count:
            sock.setsockopt(zmq.XPUB_NODROP, 0)
            position = pending.outbox.give(sock, position, count, refresh_every=_REFRESH_EVERY)
            sock.setsockopt(zmq.XPUB_NODROP, 1)
        return position

    def publish_within(self, seconds: float) -> None:
        """Publish the messages that wait; after so many seconds log how many are not published."""
        deadline = time.monotonic() + seconds
        while self._pending and time.monotonic() < deadline:
            time.sleep(_PENDING_CHECK_SECONDS)
            self.publish_pending()
        if self._pending:
            _log.warning(
                "plain subscribers took no more for %g s: the last %d messages were not published; the log has them",
                seconds,
                sum(pending.number for pending in self._pending) - self._position,
            )

    # Connections and status.

    def _check_subscribers(self) -> None:
        """Disconnect subscribers that ask for too much, several times a second; until ``close``."""
        pause, ended_in = _CHECK_SECONDS, 0
        try:
            while not self._closing.wait(pause):
                began, before = time.monotonic(), self._counters.disconnected
                # In the first of two rounds libzmq notices that connections have ended.
                freed = self.rounds >= ended_in + 2
                with self._checking:
                    # Only this thread reads the socket's monitor.
                    self._subscribers.check(self._opened.watch.open_connections(), began, freed)
                if self._counters.disconnected != before:
                    ended_in = self.rounds
                pause = max(_CHECK_SECONDS, _CHECK_PAUSES * (time.monotonic() - began))
        except Exception as e:
            self._check_failure = e

    def keep_house(self) -> None:
        """Log refused topics. Called several times a second.

        Raises:
            Exception: The error with which the check of subscribers has ended.
        """
        self._topics.refusals.flush()
        if self._check_failure is not None:
            raise self._check_failure

    @property
    def _waited_seconds(self) -> float:
        """Seconds that publishing has waited for subscribers in all."""
        now = time.monotonic()
        waits = 0 if self._blocked_since is None else now - self._blocked_since
        return self._counters.waited_seconds + waits

    def status(self) -> dict[str, Any]:
        """The plain subscribers' part of the proxy's status."""
        topics = heapq.nsmallest(_MOST_TOPICS_SHOWN, self._topics.passed_on)
        with self._checking:
            peers = self._opened.watch.peers
        numbers = replace(
            self._counters,
            subscribers=peers,
            waited_seconds=round(self._waited_seconds, 1),
        )
        return {
            **figures(numbers),
            "subscriptions": [printable(topic, _MOST_CHARACTERS) for topic in topics],
        }

    def close(self) -> None:
        """Close the socket; wait up to ``LINGER_SECONDS`` for queued messages."""
        self._closing.set()
        self._checker.join()
        if not self._opened.close(round(LINGER_SECONDS * 1000)):
            _log.warning(
                "plain subscribers did not take all queued messages within %g s; the log has them",
                LINGER_SECONDS,
            )
