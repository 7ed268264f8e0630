"""The live process: messages are written, then published, in order."""

from __future__ import annotations

import socket as stdlib_socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from tests.support import Socket, log_rows, need, wait_for
from tests.support.hostile import message, shake_hands
from tests.support.proxies import ProxyThreads, drain, endpoints, publisher, receive, subscriber
from zmq_datasource import LogFormatError, OptionError, Producer
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.options.socket import Endpoint
from zmq_datasource.proxy import backend
from zmq_datasource.proxy.figures import PublishedFigures
from zmq_datasource.transport.connections import Connection, Connections
from zmq_datasource.transport.spec import SocketSpec

pytestmark = pytest.mark.spark  # there are many tests, and each one waits for sockets to connect and close


def test_messages_are_published_as_they_came_and_are_in_the_log(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints("bind", "publish")
    with ProxyThreads(tmp_path, sides) as proxy:
        sub = subscriber(context, proxy, b"")
        pub = publisher(context, sides["bind"])
        sent = [[b"a", b"1"], [b"b", b"2"], [b"alone"], [b"c", b"x", b"y", b"3"], [b"\xff", b"4"], [b"", b""]]
        for message in sent:
            pub.send_multipart(message)
        assert receive(sub, 6) == sent
    rows = log_rows(tmp_path)
    assert rows.column("id").to_pylist() == [0, 1, 2, 3, 4, 5]
    assert rows.column("value").to_pylist() == [b"1", b"2", b"alone", b"3", b"4", b""]
    assert rows.column("frames").to_pylist() == [None, None, None, sent[3], sent[4], None]


def test_a_message_is_published_before_it_is_sealed(context: zmq.Context[Socket], tmp_path: Path) -> None:
    sides = endpoints("pull", "publish")
    with ProxyThreads(tmp_path, sides, walFlushInterval="60s") as proxy:
        sub = subscriber(context, proxy, b"")
        push = context.socket(zmq.PUSH)
        push.connect(sides["pull"])
        push.send(b"1")
        assert receive(sub, 1) == [[b"1"]]
        assert proxy.flow.journal.log.durable_end == 0
    assert log_rows(tmp_path).column("value").to_pylist() == [b"1"]


def test_subscriptions_and_their_ends_are_passed_on_to_publishers(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints("bind", "publish")
    with ProxyThreads(tmp_path, sides, topics="kept.") as proxy:
        pub = publisher(context, sides["bind"], (b"kept.",))
        sub = context.socket(zmq.SUB)
        sub.connect(sides["publish"])
        sub.subscribe(b"live.")
        assert pub.recv() == b"\x01live."
        second = subscriber(context, proxy, b"live.")
        assert pub.recv().startswith(b"\x01marker")
        assert "live." in proxy.flow.status()["subscriptions"]
        second.close(0)
        assert pub.recv().startswith(b"\x00marker")  # and not the topic that another subscriber still has
        for topic in (b"kept.1", b"live.1", b"other"):
            pub.send_multipart([topic, b"v"])
        assert receive(sub, 1) == [[b"live.1", b"v"]]
        sub.close(0)
        assert pub.poll(30_000)
        assert pub.recv() == b"\x00live."
    assert log_rows(tmp_path).column("topic").to_pylist() == ["kept.1", "live.1"]


def test_a_peer_cannot_end_the_subscriptions_of_others(context: zmq.Context[Socket], tmp_path: Path) -> None:
    """libzmq's XPUB passes on a request to unsubscribe from a topic that its sender has never subscribed to."""
    sides = endpoints("bind", "publish")
    with ProxyThreads(tmp_path, sides, topics="kept.") as proxy:
        pub = publisher(context, sides["bind"], (b"kept.",))
        sub = context.socket(zmq.SUB)
        sub.connect(sides["publish"])
        sub.subscribe(b"live.")
        assert pub.recv() == b"\x01live."
        with stdlib_socket.create_connection(Endpoint.read(sides["publish"]).host_port, 30) as stranger:
            requests = (
                b"\x00kept.",
                b"\x00",
                b"\x00live.",
                b"\x01kept.",
                b"\x00kept.",
                b"\x00kept.",
                b"\x01after",
            )
            shake_hands(stranger, b"SUB")
            stranger.sendall(b"".join(message([each]) for each in requests))
            heard = [receive(pub, 1)[0][0]]
            while heard[-1] != b"\x01after":
                assert pub.poll(30_000)
                heard.append(pub.recv())
            # libzmq does not say whether others have subscribed to "live." too.
            assert heard == [b"\x00live.", b"\x01after"]
            for topic in (b"kept.1", b"kept.2"):
                pub.send_multipart([topic, b"v"])
            wait_for(lambda: proxy.flow.counters.received == 2, "the messages of the proxy's own topics")
        # The topic is passed on again for the next subscriber.
        second = context.socket(zmq.SUB)
        second.connect(sides["publish"])
        second.subscribe(b"live.")
        heard = []
        while b"\x01live." not in heard:
            assert pub.poll(30_000), heard
            heard.append(pub.recv())
        pub.send_multipart([b"live.1", b"v"])
        assert receive(sub, 1)[0][0] == b"live.1"


def test_transactions_are_published_once_they_are_committed(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints("router", "pull", "publish")
    for first in (0, 3):  # a second proxy on the same log knows the committed transactions
        with ProxyThreads(tmp_path, sides) as proxy:
            sub = subscriber(context, proxy, b"")
            with Producer(sides["router"], name="desk") as producer:
                for i in range(first, first + 3):
                    with producer.transaction() as rows:
                        rows.send(b"order %d" % i, topic="orders")
            got = receive(sub, 3)
            assert got == [[b"orders", b"order %d" % i] for i in range(first, first + 3)]
            sub.close(0)
    assert log_rows(tmp_path).column("value").to_pylist() == [b"order %d" % i for i in range(6)]


def test_messages_are_dropped_for_a_stalled_subscriber_only(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints("pull", "publish")
    small = {"zmq.sndbuf": 4096, "sndhwm": 10}
    with ProxyThreads(tmp_path, sides, **small) as proxy:
        stalled = subscriber(context, proxy, b"", rcvhwm=10, rcvbuf=4096)
        healthy = subscriber(context, proxy, b"", rcvhwm=100_000)
        push = context.socket(zmq.PUSH)
        push.connect(sides["pull"])
        got = []
        for i in range(2000):
            push.send(b"%d" % i + b"." * 1000)
            if i % 5 == 4:  # it reads so often that its queue of 10 is never full
                got += receive(healthy, 5)
        assert [int(m[0].split(b".")[0]) for m in got] == list(range(2000))
        assert [int(m[0].split(b".")[0]) for m in receive(stalled, 5)] == list(range(5))
        assert len(drain(stalled, 200)) < 1990
        assert len(log_rows(tmp_path)) <= 2000


def test_a_subscriber_that_reads_loses_nothing_of_a_burst_far_larger_than_its_queue(
    context: zmq.Context[Socket],
) -> None:
    sides = endpoints("pull", "publish")
    options = parse(ProxyOptions, {**sides, "walLocation": "/unused", "sndhwm": "10"})
    messages = [[b"t", b"%d" % i] for i in range(20_000)]
    with closing(backend.Backend(options, room_seconds=60.0)) as published, ThreadPoolExecutor() as pool:
        sub = context.socket(zmq.SUB)
        sub.setsockopt(zmq.RCVHWM, 10)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(sides["publish"])
        wait_for(published.take_requests, "the subscription")
        got = pool.submit(receive, sub, len(messages))
        published.publish(raw_of(messages))
        assert got.result() == messages


def test_with_wait_a_full_subscriber_holds_the_publisher_back_and_nothing_is_lost(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints("pull", "publish")
    options = {"zmq.sndbuf": 4096, "zmq.rcvbuf": 4096, "rcvhwm": 10, "sndhwm": 10, "slowSubscriber": "wait"}
    with ProxyThreads(tmp_path, sides, **options) as proxy:
        sub = subscriber(context, proxy, b"", rcvhwm=10, rcvbuf=4096)
        push = context.socket(zmq.PUSH)
        push.setsockopt(zmq.SNDHWM, 10)
        push.setsockopt(zmq.SNDBUF, 4096)
        push.connect(sides["pull"])
        sent = 0
        assert push.poll(30_000, zmq.POLLOUT)  # connected
        while push.poll(500, zmq.POLLOUT):
            push.send(b"%d" % sent + b"." * 1000)
            sent += 1
            assert sent < 100_000, "nothing held the publisher back"
        got = receive(sub, sent)
        assert [int(m[0].split(b".")[0]) for m in got] == list(range(sent))
        assert proxy.flow.status()["waitedSeconds"] > 0


def test_a_full_log_that_is_needed_holds_publishers_back(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints("pull", "publish")
    options = {"walMaxBytes": "1m", "whenFull": "wait", "rcvhwm": 10, "zmq.rcvbuf": 4096}
    with ProxyThreads(tmp_path, sides, **options) as proxy:
        need(proxy.flow.journal.storage, 0)
        push = context.socket(zmq.PUSH)
        push.setsockopt(zmq.SNDHWM, 10)
        push.setsockopt(zmq.SNDBUF, 4096)
        push.connect(sides["pull"])
        sent = 0
        assert push.poll(30_000, zmq.POLLOUT)  # connected
        while push.poll(500, zmq.POLLOUT):
            push.send(b"." * 10_000)
            sent += 1
            assert sent < 10_000, "nothing held the publisher back"
        assert proxy.flow.status()["paused"]
        assert proxy.flow.journal.log.earliest == 0
        need(proxy.flow.journal.storage, proxy.flow.journal.log.durable_end)
        assert push.poll(30_000, zmq.POLLOUT)


def test_a_log_of_a_query_is_refused(tmp_path: Path) -> None:
    from tests.support import stream_options  # noqa: PLC0415
    from zmq_datasource.source.feed_receiver import FeedReceiver  # noqa: PLC0415

    sides = endpoints("pull", "publish")
    context: zmq.Context[Socket] = zmq.Context()
    with context, context.socket(zmq.PUSH) as push:
        port = push.bind_to_random_port("tcp://127.0.0.1")
        ingest = FeedReceiver(
            stream_options(connect=f"tcp://127.0.0.1:{port}", socketType="PULL", walLocation=tmp_path)
        )
        ingest.start()
        push.send(b"x")
        wait_for(lambda: ingest.counters.received == 1, "received")
        ingest.stop()
    with (
        pytest.raises(LogFormatError, match="give the proxy a walLocation of its own"),
        ProxyThreads(tmp_path, sides),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"bind": "tcp://*:5557", "publish": "tcp://*:5556"}, "walLocation is not set"),
        ({"walLocation": "/x", "publish": "tcp://*:5556"}, "no side for publishers"),
        ({"walLocation": "/x", "bind": "tcp://*:5557"}, "no side for subscribers"),
        ({"walLocation": "/x", "bind": "tcp://*:5556", "publish": "tcp://*:5556"}, "named for two sides"),
        (
            {"walLocation": "/x", "bind": "tcp://*:1", "publish": "tcp://*:2", "walMaxBytes": "1k"},
            "walMaxBytes",
        ),
        (
            {"walLocation": "/x", "bind": "tcp://*:1", "durable": "tcp://*:2", "whenFull": "discard"},
            "whenFull=discard needs publish",
        ),
        (
            {"walLocation": "/x", "bind": "tcp://*:1", "publish": "tcp://*:2", "slowSubscriber": "no"},
            "drop or wait",
        ),
        ({"walLocation": "/x", "bind": "tcp://*:1", "publsh": "tcp://*:2"}, "did you mean 'publish'"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, str], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        parse(ProxyOptions, options)


def test_each_side_has_its_own_high_water_mark_over_ipc(
    context: zmq.Context[Socket], tmp_path: Path, ipc_path: Path
) -> None:
    sides = {"pull": f"ipc://{ipc_path}-in", "publish": f"ipc://{ipc_path}-out"}
    with ProxyThreads(tmp_path, sides, rcvhwm=7, sndhwm=8) as proxy:
        spec = SocketSpec.of_proxy(proxy.options, "XPUB", proxy.options.publish)
        assert (spec.rcvhwm, spec.sndhwm) == (7, 8)
        sub = subscriber(context, proxy, b"")
        push = context.socket(zmq.PUSH)
        push.connect(sides["pull"])
        push.send_multipart([b"t", b"v"])
        assert receive(sub, 1) == [[b"t", b"v"]]


class FakeConnections(Connections):
    """Connections of no socket, that have sent so many bytes."""

    def __init__(self, **received: int) -> None:
        super().__init__()
        self._current = [Connection(hash(peer), peer, 0, size) for peer, size in received.items()]
        self.ended: list[str] = []

    def current(self) -> list[Connection]:
        return self._current

    def hang_up(self, connection: Connection) -> None:
        self.ended.append(connection.peer)


def test_heartbeats_of_an_idle_subscriber_are_no_flood(caplog: pytest.LogCaptureFixture) -> None:
    subscribers = backend.Subscribers(backend.REQUEST_BOUNDS, PublishedFigures())

    def ended(now: float, **received: int) -> list[str]:
        connections = FakeConnections(**received)
        subscribers.check(connections, now)
        return connections.ended

    day = 86_400.0
    assert ended(0, idle=0) == []
    assert ended(day, idle=int(1000 * day)) == []  # every 100 ms, with CURVE
    assert ended(day, flood=int(3000 * day)) == ["flood"]
    for advice in ("subscribe to fewer topics", "change them less often", "ZMQ_HEARTBEAT_IVL"):
        assert advice in caplog.text


def test_a_flood_of_subscriptions_delays_no_subscriber_and_is_disconnected(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    bounds = backend.RequestBounds(bytes=2 << 20)
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
        wait_for(lambda: proxy.flow_status()["disconnected"] >= 1, "the flood is ended")
        # Its subscriptions end with it.
        wait_for(lambda: len(proxy.flow_status()["subscriptions"]) < 10, "the end of its subscriptions")


def test_a_flood_of_topics_is_ended_while_the_proxy_is_inside_libzmq(
    context: zmq.Context[Socket],
) -> None:
    """Long topics keep it there. Here the thread that publishes does nothing at all."""
    sides = endpoints("pull", "publish")
    options = parse(ProxyOptions, {**sides, "walLocation": "/unused"})
    bounds = backend.RequestBounds(bytes=10_000)
    with closing(backend.Backend(options, bounds)) as published:
        flood = context.socket(zmq.XSUB)
        flood.setsockopt(zmq.SNDHWM, 0)
        flood.connect(sides["publish"])
        for at in range(100):
            flood.send(b"\x01%0999d" % at)
        wait_for(lambda: published.status()["disconnected"] >= 1, "the flood is ended")


@pytest.mark.parametrize(("wanted", "set_to"), [(None, 64 << 10), (4096, 4096), (1 << 20, 64 << 10)])
def test_the_kernel_keeps_few_requests_of_a_subscriber(wanted: int | None, set_to: int) -> None:
    given = {} if wanted is None else {"zmq.rcvbuf": str(wanted)}
    options = parse(ProxyOptions, {**endpoints("pull", "publish"), "walLocation": "/unused", **given})
    with closing(backend.Backend(options)) as published:
        assert published.socket.getsockopt(zmq.RCVBUF) == set_to


def test_topics_of_ended_subscribers_count_until_libzmq_has_freed_them() -> None:
    bounds = backend.RequestBounds(bytes=1000, total_bytes=2000, allowed_bytes=0, allowed_bytes_per_second=0)
    for freed, expected in ((False, ["b", "c"]), (True, [])):
        subscribers = backend.Subscribers(bounds, PublishedFigures())
        first = FakeConnections(a=1500, honest=0)
        subscribers.check(first, 0.0)
        assert first.ended == ["a"]
        then = FakeConnections(honest=0, b=800, c=700)
        subscribers.check(then, 1.0, freed)
        assert then.ended == expected


def test_topics_beyond_the_bound_are_not_passed_on_to_publishers(
    context: zmq.Context[Socket], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sides = endpoints("bind", "publish")
    bounds = backend.RequestBounds(upstream_topics=4)
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
        wait_for(lambda: proxy.flow_status()["subscriptionsRefused"] == 19, "all others are refused")
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
    bounds = backend.RequestBounds(
        bytes=1000, total_bytes=2000, allowed_bytes=100, allowed_bytes_per_second=10
    )
    counters = PublishedFigures()
    subscribers = backend.Subscribers(bounds, counters)

    def ended(now: float, **received: int) -> list[str]:
        connections = FakeConnections(**received)
        subscribers.check(connections, now)
        return connections.ended

    assert ended(0, honest=100, a=800, b=800, c=700) == []
    assert ended(0, honest=100, a=801, b=800, c=800) == ["a"]
    assert ended(0, honest=100, a=1100, b=1000, c=1000) == ["a"]
    assert ended(0, honest=100, a=1101, b=100, c=100) == ["a"]
    assert ended(100, honest=1100, a=1801, b=1800, c=1800) == ["a"]  # each second allows some more
    assert counters.disconnected == 4
