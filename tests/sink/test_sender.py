"""The sender: every row is sent or counted as dropped, over tcp and ipc, to fast and stalled consumers."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
import zmq

from tests.support import Consuming, Socket, binary, bound, free_endpoint, take, wait_for, write_options
from zmq_datasource.errors import NoPeerError, SendTimeoutError
from zmq_datasource.sink.sender import Sender

Context = zmq.Context[Socket]
VALUE = b"x" * 100


def consumer(
    context: Context, kind: int, transport: str, ipc_path: Path, **options: int
) -> tuple[Socket, str]:
    sock = context.socket(kind)
    for name, value in options.items():
        sock.setsockopt(getattr(zmq, name.upper()), value)
    if kind == zmq.SUB:
        sock.subscribe(b"")
    sock.bind(f"ipc://{ipc_path}" if transport == "ipc" else "tcp://127.0.0.1:*")
    return sock, sock.getsockopt_string(zmq.LAST_ENDPOINT)


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
@pytest.mark.parametrize("kind", ["PUSH", "PUB"])
def test_a_stalled_consumer_costs_exactly_the_drops_that_are_counted(
    context: Context, ipc_path: Path, kind: str, transport: str
) -> None:
    rows = 5000
    peer = zmq.PULL if kind == "PUSH" else zmq.SUB
    sock, endpoint = consumer(context, peer, transport, ipc_path, rcvhwm=10, rcvbuf=4096)
    options = write_options(
        connect=endpoint, socketType=kind, noblock=True, sndhwm=10, zmq_sndbuf=4096, linger="20s"
    )
    started, stalled, ended = threading.Event(), threading.Event(), threading.Event()
    got: list[list[bytes]] = []

    def stall_then_read() -> None:
        while not started.is_set():
            sock.poll(5)  # lets a SUB subscribe
        stalled.wait(30)
        while sock.poll(20) or not ended.is_set():
            if sock.poll(0):
                got.append(sock.recv_multipart())

    reading = threading.Thread(target=stall_then_read)
    reading.start()
    with Sender(options) as sender:
        started.set()
        sender.send(binary([b"%d" % i + VALUE for i in range(rows)]))
        stalled.set()
        counters = sender.finish()
    wait_for(lambda: len(got) >= counters.sent, "all that was sent")
    ended.set()
    reading.join(60)
    assert counters.balanced
    assert counters.rows == rows
    assert counters.dropped["hwm"] > rows / 2
    assert set(counters.dropped) == {"hwm"}
    assert counters.sent == len(got)
    assert counters.unflushed_tasks == 0


@pytest.mark.parametrize("kind", ["PUSH", "PUB"])
def test_nothing_is_lost_to_a_consumer_that_keeps_up_blocking(
    context: Context, ipc_path: Path, kind: str
) -> None:
    sock, endpoint = consumer(context, zmq.PULL if kind == "PUSH" else zmq.SUB, "tcp", ipc_path)
    options = write_options(connect=endpoint, socketType=kind, sndhwm=10)
    with Consuming(sock) as consuming, Sender(options) as sender:
        sender.send(binary([b"%d" % i for i in range(10_000)]))
        counters = sender.finish()
        consuming.wait_for(10_000)
    assert counters.sent == 10_000
    assert consuming.got == [[b"%d" % i] for i in range(10_000)]


@pytest.mark.parametrize("kind", ["PUSH", "PUB"])
def test_a_task_whose_rows_were_all_dropped_does_not_linger(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it lets libzmq connect, and never answers
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        options = write_options(
            connect=endpoint, socketType=kind, connectTimeout="50ms", noblock=True, linger="20s"
        )
        with Sender(options) as sender:
            sender.send(binary([VALUE] * 7))
            began = time.monotonic()
            counters = sender.finish()
    assert time.monotonic() - began < 10
    assert (counters.sent, dict(counters.dropped), counters.unflushed_tasks) == (0, {"no_peer": 7}, 0)


def test_one_dead_endpoint_of_two_is_an_error_or_left_out(context: Context) -> None:
    dead = free_endpoint()
    pull, alive = bound(context, zmq.PULL)
    both = f"{dead},{alive}"
    with pytest.raises(NoPeerError, match=f"no answer from {dead}.*connectTimeout"):
        Sender(write_options(connect=both, connectTimeout="50ms")).__enter__()
    with Sender(write_options(connect=both, connectTimeout="1s", noblock=True)) as sender:
        sender.send(binary([VALUE] * 100))
        counters = sender.finish()
    assert counters.sent == 100 == len(take(pull, 100))


def test_connections_that_come_and_go_do_not_hold_up_a_peer(context: Context) -> None:
    """Each connection is an event. A full queue of events would stop libzmq's own thread."""
    endpoint = free_endpoint()
    pull = context.socket(zmq.PULL)
    pull.connect(endpoint)
    with (
        Consuming(pull) as consuming,
        Sender(
            # With libzmq's backlog of 100 the kernel would let some of them retry after a second.
            write_options(bind=endpoint, sendTimeout="10s", zmq_backlog=2000)
        ) as sender,
    ):
        host, port = endpoint.removeprefix("tcp://").split(":")
        for _ in range(1500):
            socket.create_connection((host, int(port)), timeout=10).close()
        sender.send(binary([b"%d" % i for i in range(20_000)]))
        counters = sender.finish()
        consuming.wait_for(20_000)
    assert counters.sent == 20_000
    assert len(consuming.got) == 20_000


def test_a_peer_of_the_wrong_type_is_named(context: Context) -> None:
    _, endpoint = bound(context, zmq.SUB)

    def said() -> bool:
        with pytest.raises(NoPeerError) as e:
            Sender(write_options(connect=endpoint, connectTimeout="100ms")).__enter__()
        return "socket type does not match" in str(e.value)

    # libzmq reports the reason only if this end hangs up first, which is a matter of luck.
    wait_for(said, "the reason")


@pytest.mark.parametrize("subscribers", [0, 1, 2])
def test_a_pub_waits_for_its_subscribers(context: Context, subscribers: int) -> None:
    endpoint = free_endpoint()
    patience = "30s" if subscribers == 2 else "100ms"
    options = write_options(bind=endpoint, socketType="PUB", minSubscribers=2, connectTimeout=patience)
    for _ in range(subscribers):
        sub = context.socket(zmq.SUB)
        sub.setsockopt(zmq.RECONNECT_IVL, 10)
        sub.subscribe(b"")
        sub.connect(endpoint)
    if subscribers < 2:

        def said() -> bool:
            with pytest.raises(NoPeerError, match="of minSubscribers=2") as e:
                Sender(options).__enter__()
            return f"{subscribers} of minSubscribers=2" in str(e.value)

        wait_for(said, "as many as there are")  # on a busy machine they may be too late once
    else:
        with Sender(options) as sender:
            sender.send(binary([VALUE]))
            assert sender.finish().sent == 1


def test_a_pub_with_min_subscribers_0_does_not_wait(context: Context) -> None:
    options = write_options(bind=free_endpoint(), socketType="PUB", minSubscribers=0)
    with Sender(options) as sender:
        sender.send(binary([VALUE] * 10))
        assert sender.finish().sent == 10


def test_the_first_message_is_not_lost(context: Context) -> None:
    for _ in range(3):
        endpoint = free_endpoint()
        sub = context.socket(zmq.SUB)
        sub.subscribe(b"")
        sub.connect(endpoint)
        with Sender(write_options(bind=endpoint, socketType="PUB")) as sender:
            sender.send(binary([b"first"]))
            sender.finish()
        assert take(sub, 1) == [[b"first"]]
        sub.close()


@pytest.mark.parametrize("noblock", [False, True])
def test_a_linger_that_runs_out_fails_the_task_or_is_counted(context: Context, noblock: bool) -> None:
    _, endpoint = bound(context, zmq.PULL, rcvhwm=10, rcvbuf=4096)
    options = write_options(connect=endpoint, sndhwm=1000, zmq_sndbuf=4096, linger=50, noblock=noblock)
    with Sender(options) as sender:
        sender.send(binary([VALUE * 10] * 900))
        if noblock:
            assert sender.finish().unflushed_tasks == 1
        else:
            with pytest.raises(SendTimeoutError, match="libzmq cannot tell"):
                sender.finish()


def test_a_task_that_fails_gives_its_queue_up_at_once(context: Context) -> None:
    _, endpoint = bound(context, zmq.PULL, rcvhwm=10, rcvbuf=4096)
    sender = Sender(write_options(connect=endpoint, zmq_sndbuf=4096, linger=-1))

    def fail() -> None:
        with sender:
            sender.send(binary([VALUE * 10] * 900))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
