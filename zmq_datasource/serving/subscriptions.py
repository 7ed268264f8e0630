"""The subscriptions of plain subscribers: which of them publishers get, and which subscribers ask for too much.

An XPUB reports which topics are subscribed to, but not by which connection (docs/zeromq-facts.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zmq_datasource.host.log_lines import LimitedLog, printable
from zmq_datasource.serving.figures import PublishedFigures
from zmq_datasource.transport.connections import Connection, Connections

_MOST_CHARACTERS = 60


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


class Subscriptions:
    """The topics of plain subscribers that are passed on to publishers."""

    def __init__(self, bounds: RequestBounds, counters: PublishedFigures) -> None:
        self._bounds = bounds
        self._counters = counters
        self._passed_on: set[bytes] = set()
        self._bytes = 0
        self.refusals = LimitedLog(__name__, "topics that were not passed on to publishers")

    @property
    def count(self) -> int:
        """How many topics are passed on."""
        return len(self._passed_on)

    def change(self, request: bytes) -> bool:
        """Subscribe to a topic or unsubscribe from it; return whether publishers must get the request.

        An XPUB also reports an unsubscription by a peer that has never subscribed, even if other peers are subscribed.
        So an unsubscription is passed on only after a subscription, and no peer can end the proxy's own subscription to
        ``topics``. The next subscription to the topic is passed on again; only a verbose XPUB reports it.
        """
        kind, topic = request[:1], request[1:]
        if kind == b"\x01" and topic not in self._passed_on:
            if not self._has_room(topic):
                return False
            self._passed_on.add(topic)
            self._bytes += len(topic)
            return True
        if kind == b"\x00" and topic in self._passed_on:
            self._passed_on.remove(topic)
            self._bytes -= len(topic)
            return True
        return False

    def _has_room(self, topic: bytes) -> bool:
        bounds = self._bounds
        if (
            len(self._passed_on) < bounds.upstream_topics
            and self._bytes + len(topic) <= bounds.upstream_bytes
        ):
            return True
        self._counters.refused += 1
        self.refusals.warn(
            "topic '%s' of a plain subscriber is not passed on to the publishers: %d topics of %d bytes are passed on "
            "already, and %d topics of %d bytes are the most; name the prefix in topics of the proxy, or let "
            "subscribers ask for fewer topics",
            printable(topic, _MOST_CHARACTERS),
            len(self._passed_on),
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
