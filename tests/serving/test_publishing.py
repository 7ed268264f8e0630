"""A proxy publishes what it receives, as it came, and passes subscriptions on."""

from __future__ import annotations

import socket as stdlib_socket
from pathlib import Path

import pytest
import zmq

from tests.support import Socket, log_rows, need, wait_for
from tests.support.hostile import message, shake_hands
from tests.support.proxies import ProxyThreads, drain, endpoints, publisher, receive, subscriber
from zmq_datasource import OptionError
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.options.socket import Endpoint

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
        assert proxy.receiver.log.durable_end == 0
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
        assert proxy.status()["subscriptions"] == 2  # with the marker
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
            wait_for(lambda: proxy.receiver.counters.received == 2, "the messages of the proxy's own topics")
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
        assert proxy.status()["waitedSeconds"] > 0


def test_a_full_log_that_is_needed_holds_publishers_back(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints("pull", "publish")
    options = {"walMaxBytes": "1m", "whenFull": "wait", "rcvhwm": 10, "zmq.rcvbuf": 4096}
    with ProxyThreads(tmp_path, sides, **options) as proxy:
        need(proxy.receiver.storage, 0)
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
        assert proxy.receiver.counters.paused_by == "logFull"
        assert proxy.receiver.log.earliest == 0
        need(proxy.receiver.storage, proxy.receiver.log.durable_end)
        assert push.poll(30_000, zmq.POLLOUT)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"bind": "tcp://*:5557", "publish": "tcp://*:5556"}, "walLocation is not set"),
        ({"walLocation": "/x", "publish": "tcp://*:5556"}, "no side for publishers"),
        ({"walLocation": "/x", "bind": "tcp://*:5557"}, "no side for subscribers"),
        ({"walLocation": "/x", "bind": "tcp://*:5556", "publish": "tcp://*:5556"}, "named for two sides"),
        (
            {"walLocation": "/x", "bind": "tcp://*:1", "publish": "tcp://*:2", "socketType": "PULL"},
            "socketType is for receive",
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
        assert proxy.receiver.counters.rcvhwm == 7
        assert proxy.publishing is not None
        assert proxy.publishing.socket.getsockopt(zmq.SNDHWM) == 8
        sub = subscriber(context, proxy, b"")
        push = context.socket(zmq.PUSH)
        push.connect(sides["pull"])
        push.send_multipart([b"t", b"v"])
        assert receive(sub, 1) == [[b"t", b"v"]]
