"""Plain subscribers that ask for too many topics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from tests.support import Socket, wait_for
from tests.support.proxies import ProxyThreads, endpoints, publisher, receive, subscriber
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.serving.publishing import Publishing
from zmq_datasource.serving.subscriptions import REQUEST_BOUNDS, RequestBounds, Subscribers
from zmq_datasource.transport.connections import Connection, Connections

pytestmark = pytest.mark.spark  # there are many tests, and each one waits for sockets to connect and close


@contextmanager
def opened(publishing: Publishing) -> Iterator[Publishing]:
    publishing.open()
    yield publishing
    publishing.close()


class FakeConnections(Connections):
    """Connections of no socket, that have sent so many bytes."""

    def __init__(self, **received: int) -> None:
        super().__init__()
        self._current = [
            Connection(hash(peer), peer, received=size, unread=0) for peer, size in received.items()
        ]
        self.ended: list[str] = []

    def current(self) -> list[Connection]:
        return self._current

    def hang_up(self, connection: Connection) -> None:
        self.ended.append(connection.peer)


def test_heartbeats_of_an_idle_subscriber_are_no_flood(caplog: pytest.LogCaptureFixture) -> None:
    subscribers = Subscribers(REQUEST_BOUNDS)

    def ended(now: float, **received: int) -> list[str]:
        connections = FakeConnections(**received)
        subscribers.check(connections, now, 0)
        return connections.ended

    day = 86_400.0
    assert ended(0, idle=0) == []
    assert ended(day, idle=int(1000 * day)) == []  # every 100 ms, with CURVE
    assert ended(day, flood=int(3000 * day)) == ["flood"]
    for advice in ("subscribe to fewer topics", "change them less often", "ZMQ_HEARTBEAT_IVL"):
        assert advice in caplog.text


def test_a_flood_of_subscriptions_delays_no_subscriber_and_is_disconnected(
    context: zmq.Context[Socket], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bounds = RequestBounds(bytes=2 << 20)
    with ProxyThreads(tmp_path, endpoints("bind", "publish"), bounds) as proxy:
        other = subscriber(context, proxy, b"mine")
        pub = publisher(context, proxy.sides["bind"], (b"",))
        flood = context.socket(zmq.XSUB)
        flood.setsockopt(zmq.SNDHWM, 0)
        flood.connect(proxy.sides["publish"])
        for at in range(60_000):
            flood.send(b"\x01%099d" % at)
        for at in range(50):
            pub.send_multipart([b"mine", b"%d" % at])
        assert [frames[-1] for frames in receive(other, 50, 5_000)] == [b"%d" % i for i in range(50)]
        wait_for(lambda: "it is disconnected" in caplog.text, "the flood is ended")
        # Its subscriptions end with it.
        wait_for(lambda: proxy.status()["subscriptions"] < 10, "the end of its subscriptions")


def test_a_flood_of_topics_is_ended_while_the_proxy_is_inside_libzmq(
    context: zmq.Context[Socket], caplog: pytest.LogCaptureFixture
) -> None:
    """Long topics keep it there. Here the thread that publishes does nothing at all."""
    sides = endpoints("pull", "publish")
    options = parse(ProxyOptions, {**sides, "walLocation": "/unused"})
    bounds = RequestBounds(bytes=10_000)
    with opened(Publishing(options, bounds)):
        flood = context.socket(zmq.XSUB)
        flood.setsockopt(zmq.SNDHWM, 0)
        flood.connect(sides["publish"])
        for at in range(100):
            flood.send(b"\x01%0999d" % at)
        wait_for(lambda: "it is disconnected" in caplog.text, "the flood is ended")


def test_topics_of_ended_subscribers_count_until_libzmq_has_freed_them() -> None:
    bounds = RequestBounds(bytes=2000, allowed_bytes_per_second=0)
    for rounds, expected in ((1, ["b", "c"]), (2, [])):
        subscribers = Subscribers(bounds)
        first = FakeConnections(a=2001, honest=0)
        subscribers.check(first, 0.0, 0)
        assert first.ended == ["a"]
        then = FakeConnections(honest=0, b=800, c=700)
        subscribers.check(then, 1.0, rounds)
        assert then.ended == expected


def test_topics_beyond_the_bound_are_not_passed_on_to_publishers(
    context: zmq.Context[Socket], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sides = endpoints("bind", "publish")
    bounds = RequestBounds(upstream_bytes=36)  # of a marker and three topics
    with ProxyThreads(tmp_path, sides, bounds, topics="kept.") as proxy:
        pub = publisher(context, sides["bind"], (b"kept.",))
        flood = subscriber(context, proxy)  # with a marker
        assert pub.recv().startswith(b"\x01marker")
        for at in range(20):
            flood.subscribe(b"flood %02d" % at)
        heard = [received[0] for received in receive(pub, 3)]
        assert heard == [b"\x01flood 00", b"\x01flood 01", b"\x01flood 02"]
        other = context.socket(zmq.SUB)
        other.connect(sides["publish"])
        other.subscribe(b"kept.1")  # not passed on, but within the proxy's own topics
        other.subscribe(b"live.")
        wait_for(lambda: "is not passed on" in caplog.text, "others are refused")
        for topic in (b"live.", b"kept.1"):
            pub.send_multipart([topic, b"v"])
        assert receive(other, 1)[0][0] == b"kept.1"
        assert "name the prefix in topics of the proxy" in caplog.text
        # When there is room again, a topic is passed on for the next subscriber that asks for it.
        flood.close(0)
        assert {pub.recv()[:1] for _ in range(4)} == {b"\x00"}
        another = context.socket(zmq.SUB)
        another.connect(sides["publish"])
        another.subscribe(b"live.")
        assert pub.recv() == b"\x01live."
        pub.send_multipart([b"live.", b"v"])
        assert receive(other, 1)[0][0] == receive(another, 1)[0][0] == b"live."


def test_all_subscribers_share_a_bound_and_the_largest_is_disconnected_first() -> None:
    subscribers = Subscribers(RequestBounds(bytes=2000, allowed_bytes_per_second=10))
    rounds = 0

    def ended(now: float, **received: int) -> list[str]:
        nonlocal rounds
        rounds += 2
        connections = FakeConnections(**received)
        subscribers.check(connections, now, rounds)
        return connections.ended

    assert ended(0, honest=0, a=700, b=700, c=600) == []
    assert ended(0, honest=0, a=701, b=700, c=600) == ["a"]
    assert ended(100, honest=1000, a=1701, b=1700, c=1600) == ["a"], "each second allows some more"
    assert ended(0, honest=0, a=2001, b=100) == ["a"]
