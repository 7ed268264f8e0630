"""The subscriptions of plain subscribers: which of them publishers get, and which subscribers ask for too much.

An XPUB reports which topics are subscribed to, but not by which connection (docs/zeromq-facts.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from zmq_datasource.host.log_lines import LimitedLog, printable
from zmq_datasource.transport.connections import Connections

_MOST_CHARACTERS = 60


@dataclass(frozen=True)
class RequestBounds:
    """How much plain subscribers may ask for.

    Attributes:
        upstream_bytes: Bytes of the distinct topics that are passed on to publishers.
        bytes: Bytes of the requests of all connections, each beyond its allowance. libzmq keeps the topics of a
            connection in memory, without a bound, until the connection ends.
        allowed_bytes_per_second: The allowance of each connection: heartbeats, and topics that come and go, are bytes,
            too.
    """

    upstream_bytes: int = 1 << 20
    bytes: int = 8 << 20
    allowed_bytes_per_second: int = 2000


REQUEST_BOUNDS = RequestBounds()


class Subscriptions:
    """The topics of plain subscribers that are passed on to publishers.

    Attributes:
        passed_on: These topics.
    """

    def __init__(self, bounds: RequestBounds) -> None:
        self._bounds = bounds
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
        if kind == b"\x00" and topic in self.passed_on:
            self.passed_on.remove(topic)
            self._bytes -= len(topic)
            return True
        if kind != b"\x01" or topic in self.passed_on:
            return False
        if self._bytes + len(topic) > self._bounds.upstream_bytes:
            self.refusals.warn(
                "topic '%s' of a plain subscriber is not passed on to the publishers: topics of %d bytes are passed on "
                "already, and of %d bytes at most; name the prefix in topics of the proxy, or let subscribers ask for "
                "fewer topics",
                *(printable(topic, _MOST_CHARACTERS), self._bytes, self._bounds.upstream_bytes),
            )
            return False
        self.passed_on.add(topic)
        self._bytes += len(topic)
        return True


class Subscribers:
    """Disconnects plain subscribers that ask for too many topics, first the one that asks for most.

    A thread of its own checks them: the thread that publishes may be inside libzmq for as long as a subscriber sends
    topics.

    Args:
        bounds: How much subscribers may ask for.
    """

    def __init__(self, bounds: RequestBounds) -> None:
        self._bounds = bounds
        # By inode, the bytes of disconnected subscribers that libzmq has not freed.
        self._held: dict[int, int] = {}
        self._freed_in = 0  # the round in which it has
        self._since: dict[int, float] = {}  # when each connection was seen first
        self._lines = LimitedLog(__name__, "plain subscribers that were disconnected")

    def check(self, connections: Connections, now: float, rounds: int) -> None:
        """Disconnect subscribers while all together ask for too much. Called several times a second.

        Args:
            now: Seconds, monotonic.
            rounds: How many rounds the thread that publishes has ended. In the first of two rounds libzmq notices that
                connections have ended, and frees their topics.
        """
        self._lines.flush()
        bounds, current = self._bounds, {each.inode: each for each in connections.current()}
        self._since = {inode: self._since.get(inode, now) for inode in current}
        if rounds >= self._freed_in:
            self._held.clear()
        excess = {
            inode: each.received - round(bounds.allowed_bytes_per_second * (now - self._since[inode]))
            for inode, each in current.items()
            if inode not in self._held
        }
        total = sum(self._held.values()) + sum(size for size in excess.values() if size > 0)
        for inode, size in sorted(excess.items(), key=lambda item: item[1], reverse=True):
            if size <= 0 or total <= bounds.bytes:
                return
            total -= size
            self._held[inode], self._freed_in = size, rounds + 2
            self._lines.warn(
                "subscriber %s has sent %d bytes of subscriptions and heartbeats; it is disconnected (at most %d bytes "
                "for all subscribers): subscribe to fewer topics, or to their common prefix, change them less often, "
                "and send heartbeats less often (ZMQ_HEARTBEAT_IVL)",
                *(current[inode].peer, current[inode].received, bounds.bytes),
            )
            connections.hang_up(current[inode])
