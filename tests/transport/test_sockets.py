"""Sockets: what libzmq takes in silence is refused or reported."""

from __future__ import annotations

import logging
import socket as stdlib_socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq

from tests.support import (
    Socket,
    bind_when_free,
    bound,
    free_endpoint,
    stream_options,
    wait_for,
    write_options,
)
from tests.support.hostile import message, shake_hands
from zmq_datasource.errors import EndpointError, OptionError
from zmq_datasource.options import ReadOptions, WriteOptions
from zmq_datasource.options.socket import Endpoint
from zmq_datasource.transport import opened
from zmq_datasource.transport.connections import io_threads_sleep, threads
from zmq_datasource.transport.opened import OpenSocket, attach
from zmq_datasource.transport.peers import PeerWatch
from zmq_datasource.transport.spec import SocketSpec, check_socket_options, new_socket

FEED = "tcp://127.0.0.1:5556"
Context = zmq.Context[Socket]


def open_socket(context: Context, options: ReadOptions | WriteOptions) -> tuple[Socket, PeerWatch]:
    spec = SocketSpec.of_source(options) if isinstance(options, ReadOptions) else SocketSpec.of_sink(options)
    sock = new_socket(context, spec)
    watch = PeerWatch(context, sock, spec)
    attach(sock, spec.bind, spec.connect)
    return sock, watch


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("zmq_foo", "1", "no socket option of that name"),
        ("zmq_rcvbuf", "big", "a whole number"),
        ("zmq_rcvbuf", str(2**40), "that libzmq can count"),
        ("zmq_handshake_ivl", "-5", "libzmq refuses it for a SUB socket"),
        ("zmq_heartbeat_ivl", "1000", "while a side pauses, its libzmq reads no heartbeats"),
        ("zmq_router_mandatory", "1", "belongs to a ROUTER"),
        ("zmq_rcvhwm", "1", "use the option rcvhwm"),
        ("zmq_plain_server", "1", "use zmq.curve_server and allowedClients"),
        ("zmq_hwm", "1", "no single high-water mark"),
        ("zmq_subscribe", "a", "use the option topics"),
        ("zmq_conflate", "1", "tears messages of several frames"),
        ("zmq_reconnect_ivl", "-1", "throws away what it has received"),
        ("zmq_reconnect_stop", "1", "takes along what was received"),
    ],
)
def test_an_option_that_cannot_be_set_is_refused(name: str, value: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        check_socket_options(SocketSpec.of_source(stream_options(connect=FEED, **{name: value})))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bind": "tcp://203.0.113.7:5556"}, "binding tcp://203.0.113.7:5556"),  # of another machine
        ({"bind": "tcp://no-such-interface0:5556"}, "binding tcp://no-such-interface0:5556"),
        ({"bind": "ipc:///no/such/directory/s"}, "binding ipc:///no/such/directory/s"),
    ],
)
def test_an_address_that_is_not_there_is_named(context: Context, options: dict[str, str], says: str) -> None:
    with pytest.raises(EndpointError, match=says):
        open_socket(context, stream_options(**options))


def test_a_port_in_use_is_named(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "BIND_SECONDS", 0.1)
    _, endpoint = bound(context, zmq.PULL)
    with pytest.raises(EndpointError, match=rf"binding {endpoint}.*use another port"):
        open_socket(context, stream_options(bind=endpoint))


def test_an_ipc_path_in_use_is_not_taken_over(
    context: Context, ipc_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "BIND_SECONDS", 0.1)
    endpoint = f"ipc://{ipc_path}"
    context.socket(zmq.PULL).bind(endpoint)
    with pytest.raises(EndpointError, match="another process listens there"):
        open_socket(context, stream_options(bind=endpoint))


def test_a_peer_that_reconnects_keeps_the_users_name_of_its_endpoint(context: Context) -> None:
    """After a reconnect libzmq tells the address where the user wrote a host."""
    publisher, endpoint = bound(context, zmq.PUB)
    named = endpoint.replace("127.0.0.1", "localhost")
    _, watch = open_socket(context, stream_options(connect=named))

    def up() -> int:
        watch.update()
        return watch.up.get(named, 0)

    wait_for(up, "the publisher")
    publisher.close()
    wait_for(lambda: not up(), "its end")
    bind_when_free(context.socket(zmq.PUB), endpoint)
    wait_for(up, "its return")
    assert set(watch.up) == {named}


def test_an_endpoint_without_an_answer_is_reported_once(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    _, watch = open_socket(context, stream_options(connect=free_endpoint()))
    with caplog.at_level(logging.WARNING):
        watch.report_absent(60)
        assert not caplog.records
        for _ in range(3):
            watch.report_absent(0)
    assert sum("no answer" in r.message for r in caplog.records) == 1


def test_silent_connections_that_end_do_not_count_as_lost_peers(context: Context) -> None:
    """libzmq tells neither which connection has shaken hands nor which has failed to."""
    sock, watch = open_socket(context, stream_options(bind=free_endpoint(), socketType="PULL"))
    host, port = Endpoint.read(sock.getsockopt(zmq.LAST_ENDPOINT).decode().strip("\0")).host_port

    def shaking(count: int) -> Callable[[], bool]:
        return lambda: (watch.update(), watch.handshakes.shaking)[1] == count

    def up(count: int) -> Callable[[], bool]:
        return lambda: (watch.update(), watch.peers)[1] == count

    with ExitStack() as stack:
        silent = [stack.enter_context(stdlib_socket.create_connection((host, port))) for _ in range(3)]
        wait_for(shaking(3), "three connections")
        push = context.socket(zmq.PUSH)
        push.connect(f"tcp://{host}:{port}")
        wait_for(up(1), "the PUSH")
        silent += [stack.enter_context(stdlib_socket.create_connection((host, port))) for _ in range(2)]
        wait_for(shaking(5), "two more")
    wait_for(shaking(0), "all of the silent ones gone")
    assert (watch.peers, watch.lost, watch.failures) == (1, 0, 5)
    push.close()
    wait_for(up(0), "the PUSH gone")
    assert watch.lost == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_socket_type_that_does_not_match_is_reported_once_and_dialled_until_it_is_mended(
    context: Context, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq never dials again by itself after such a refusal."""
    wrong, endpoint = bound(context, zmq.PULL)
    endpoint = endpoint.replace("127.0.0.1", host)
    sock, watch = open_socket(context, stream_options(connect=endpoint))  # a SUB
    watch.redialer.seconds = 0.01

    def step() -> None:
        watch.update()
        watch.redial()

    with caplog.at_level(logging.WARNING):
        wait_for(lambda: step() or watch.refused, "refusal")
        assert "socket type does not match" in watch.refused[endpoint]
        wait_for(lambda: step() or watch.failures >= 4, "further refusals")
    assert len([r for r in caplog.records if "no handshake" in r.message]) == 1
    wrong.close()
    bind_when_free(context.socket(zmq.PUB), endpoint.replace(host, "127.0.0.1"))
    wait_for(lambda: step() or watch.peers, "handshake with the right peer")
    assert not watch.refused
    assert sock.getsockopt(zmq.TYPE) == zmq.SUB


def test_a_socket_reaches_ipv6_where_an_endpoint_names_such_an_address(context: Context) -> None:
    for connect, options, on in (
        ("tcp://[::1]:5556,tcp://127.0.0.1:5557", {}, 1),
        (FEED, {}, 0),
        (FEED, {"zmq_ipv6": "1"}, 1),
    ):
        with new_socket(context, SocketSpec.of_source(stream_options(connect=connect, **options))) as sock:
            assert sock.getsockopt(zmq.IPV6) == on


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what its threads do")
def test_an_io_thread_with_work_is_seen_and_one_without(context: Context) -> None:
    others = threads()
    pull, endpoint = bound(context, zmq.PULL)
    own = threads() - others  # at once: they have not yet said what they are
    assert own
    push = context.socket(zmq.PUSH)
    push.connect(endpoint)
    wait_for(lambda: io_threads_sleep(own), "the threads to have nothing to do")

    def busy() -> bool:
        push.send(b"x" * 100_000)
        pull.recv()
        push.send(b"x" * 100_000, zmq.NOBLOCK)
        seen = not io_threads_sleep(own)
        pull.recv()
        return seen

    wait_for(busy, "an I/O thread at work")
    wait_for(lambda: io_threads_sleep(own), "the threads to have nothing to do")


def test_a_busy_socket_of_another_context_holds_up_no_close(context: Context) -> None:
    other, address = bound(context, zmq.PULL)
    busy = context.socket(zmq.PUSH)
    busy.connect(address)
    pull, endpoint = bound(context, zmq.PULL)
    ended = threading.Event()

    def keep_busy() -> None:
        while not ended.is_set():
            for _ in range(100):
                busy.send(b"x" * 10_000)
            for _ in range(100):
                other.recv()

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        opened = OpenSocket(SocketSpec.of_sink(write_options(connect=endpoint)))
        opened.socket.send(b"1")
        assert pull.recv() == b"1"
        assert opened.close(10_000)
    finally:
        ended.set()
        thread.join(30)


@pytest.mark.parametrize(("kind", "peer"), [("PUSH", b"PULL"), ("PUB", b"SUB")])
def test_messages_that_peers_send_to_a_sink_are_bounded(kind: str, peer: bytes) -> None:
    """libzmq keeps it, though a PUSH never reads it."""
    endpoint = free_endpoint()
    sink = OpenSocket(SocketSpec.of_sink(write_options(socketType=kind, bind=endpoint)))
    try:
        with stdlib_socket.create_connection(Endpoint.read(endpoint).host_port, timeout=10) as stranger:
            shake_hands(stranger, peer)
            wait_for(lambda: (sink.watch.update(), sink.watch.peers == 1)[1], "the handshake")
            with suppress(OSError):
                stranger.sendall(message([b"\x01" + bytes(2 << 20)]))
            wait_for(lambda: (sink.watch.update(), sink.watch.peers == 0)[1], "the end of the connection")
    finally:
        sink.close(0)


def test_a_server_flag_that_is_off_leaves_the_keys_as_they_are(context: Context) -> None:
    """libzmq takes it for "no security" wherever it comes behind the keys."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    keys = {"zmq_curve_serverkey": public, "zmq_curve_publickey": public, "zmq_curve_secretkey": secret}
    options = stream_options(connect=FEED, **keys, zmq_curve_server="0")
    with new_socket(context, SocketSpec.of_source(options)) as sock:
        assert sock.getsockopt(zmq.MECHANISM) == zmq.CURVE
    with pytest.raises(OptionError, match=r"zmq\.curve_server=00: it takes 1, or 0"):
        stream_options(connect=FEED, **keys, zmq_curve_server="00")
