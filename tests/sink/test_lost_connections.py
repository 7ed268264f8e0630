"""A PUSH sink loses a connection: its rows are sent again or counted, and never reported as sent and gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from pyarrow import parquet

from tests.support import (
    Consuming,
    Socket,
    binary,
    bind_when_free,
    bound,
    free_endpoint,
    take,
    wait_for,
    write_options,
)
from tests.support.middlebox import Middlebox
from zmq_datasource.errors import ConnectionLostError, SendTimeoutError, SocketError
from zmq_datasource.options.types import Location
from zmq_datasource.sink.dead_letters import StagedDeadLetters
from zmq_datasource.sink.sender import Sender

Context = zmq.Context[Socket]
FILL = b"x" * 100


def rows(count: int) -> list[bytes]:
    return [b"%d %s" % (i, FILL) for i in range(count)]


def send(sender: Sender, values: list[bytes], at_once: int = 1000) -> None:
    for at in range(0, len(values), at_once):
        sender.send(binary(values[at : at + at_once]))


def wait_for_all(values: list[bytes], *consumers: Consuming) -> None:
    missing = set(values)

    def all_there() -> bool:
        for consuming in consumers:
            missing.difference_update(message[-1] for message in consuming.got)
        return not missing

    wait_for(all_there, "every row at least once")


def lose(sender: Sender) -> None:
    """Wait until libzmq has reported a lost connection."""
    before = sender.socket.watch.possibly_lost
    wait_for(
        lambda: (sender.socket.watch.update(), sender.socket.watch.possibly_lost > before)[1], "the loss"
    )


def test_rows_that_a_middlebox_has_taken_and_not_forwarded_are_sent_again(context: Context) -> None:
    """All queues of this machine are empty before the reset."""
    pull, endpoint = bound(context, zmq.PULL)
    values = rows(5000)
    with (
        Middlebox(endpoint, holds=1 << 30) as middlebox,
        Consuming(pull) as consuming,
        Sender(write_options(connect=middlebox.endpoint)) as sender,
    ):
        middlebox.forwarding = False
        send(sender, values[:4000])
        wait_for(lambda: middlebox.taken > sum(map(len, values[:4000])), "all of it in the middlebox")
        assert sender.socket.wait_until_flushed(1.0)
        middlebox.forwarding = True
        middlebox.reset()
        lose(sender)
        send(sender, values[4000:])
        counters = sender.finish()
        wait_for_all(values, consuming)
    assert (counters.sent, counters.resent) == (5000, 4000)


def test_a_reset_during_the_last_flush_costs_no_row(context: Context) -> None:
    pull, endpoint = bound(context, zmq.PULL)
    values = rows(20_000)
    with (
        Middlebox(endpoint, holds=1 << 14) as middlebox,
        Consuming(pull) as consuming,
        Sender(write_options(connect=middlebox.endpoint, sndhwm=100_000, zmq_sndbuf=4096)) as sender,
    ):
        middlebox.forwarding = False
        send(sender, values)
        assert not sender.socket.wait_until_flushed(0.02)

        def reset() -> None:
            middlebox.reset()
            middlebox.forwarding = True

        resetting = threading.Timer(0.05, reset)
        resetting.start()
        counters = sender.finish()
        resetting.join(30)
        wait_for_all(values, consuming)
    assert (counters.rows, counters.sent) == (20_000, 20_000)
    assert counters.resent >= 20_000


def listen(context: Context, endpoint: str, **options: int) -> Socket:
    sock = context.socket(zmq.PULL)
    for name, value in options.items():
        sock.setsockopt(getattr(zmq, name.upper()), value)
    bind_when_free(sock, endpoint)
    return sock


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
@pytest.mark.parametrize("again", [False, True])
def test_a_consumer_that_restarts_costs_no_row(
    context: Context, ipc_path: Path, transport: str, again: bool
) -> None:
    """It had received rows and not read them. Its successor binds within milliseconds."""
    endpoint = f"ipc://{ipc_path}" if transport == "ipc" else free_endpoint()
    first = listen(context, endpoint, rcvhwm=1, rcvbuf=4096)
    values = rows(6000)
    with Sender(write_options(connect=endpoint, zmq_sndbuf=4096, sndhwm=5000)) as sender:
        send(sender, values[:3000])
        read = [first.recv() for _ in range(100)]
        first.close(linger=0)
        if again:
            listen(context, endpoint).close(linger=0)
        with Consuming(listen(context, endpoint)) as consuming:
            send(sender, values[3000:])
            counters = sender.finish()
            wait_for_all(sorted(set(values) - set(read)), consuming)
    assert (counters.rows, counters.sent) == (6000, 6000)
    assert counters.resent >= 3000


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
@pytest.mark.parametrize("last", [False, True])
def test_a_worker_that_dies_leaves_its_rows_to_the_others(
    context: Context, ipc_path: Path, transport: str, last: bool
) -> None:
    """A PUSH that binds loses the whole queue of a connection, and does not know which rows were in it."""
    endpoint = f"ipc://{ipc_path}" if transport == "ipc" else free_endpoint()
    dying, other = context.socket(zmq.PULL), context.socket(zmq.PULL)
    dying.setsockopt(zmq.RCVHWM, 1)
    for sock in (dying, other):
        sock.connect(endpoint)
    values = rows(1500)
    with Sender(write_options(bind=endpoint)) as sender:
        wait_for(lambda: (sender.socket.watch.update(), sender.socket.watch.peers == 2)[1], "both workers")
        send(sender, values[:1000])
        dying.recv()
        if last:
            send(sender, values[1000:])
        dying.close(linger=0)
        lose(sender)
        with Consuming(other) as consuming:
            if not last:
                send(sender, values[1000:])
            counters = sender.finish()
            wait_for_all(values, consuming)
    assert (counters.rows, counters.sent) == (1500, 1500)
    assert counters.resent >= 1000


@pytest.mark.parametrize("side", ["bind", "connect"])
def test_nothing_is_sent_again_when_a_consumer_leaves_with_the_last_row(context: Context, side: str) -> None:
    endpoint = free_endpoint()
    pull = context.socket(zmq.PULL)
    (pull.connect if side == "bind" else pull.bind)(endpoint)
    with Sender(write_options(**{side: endpoint}, connectTimeout="2s")) as sender:
        send(sender, rows(500))
        assert len(take(pull, 500)) == 500
        pull.close()
        lose(sender)
        counters = sender.finish()
    assert (counters.sent, counters.resent) == (500, 0)


def test_a_task_fails_if_no_consumer_comes_back(context: Context) -> None:
    pull, endpoint = bound(context, zmq.PULL, rcvhwm=1, rcvbuf=4096)
    options = write_options(connect=endpoint, connectTimeout="2s", zmq_sndbuf=4096, sendTimeout="300ms")
    with Sender(options) as sender:
        sender.send(binary(rows(900)))
        pull.recv()
        threading.Timer(0.05, pull.close, [0]).start()
        with pytest.raises(SocketError, match="0 peers up"):
            sender.finish()


def test_a_task_ends_if_each_consumer_hangs_at_its_last_rows_and_is_replaced(context: Context) -> None:
    """Each one lives longer than sendTimeout, so a connection is lost rarely."""
    endpoint, ended = free_endpoint(), threading.Event()

    def supervise() -> None:
        while not ended.is_set():
            with context.socket(zmq.PULL) as consumer:
                consumer.set_hwm(1)
                consumer.linger = 0
                bind_when_free(consumer, endpoint)
                ended.wait(1.5)

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    try:
        options = write_options(socketType="PUSH", connect=endpoint, sendTimeout="500ms", linger=3000)
        with Sender(options) as sender:
            sender.send(binary([bytes(100_000)] * 200))
            with pytest.raises(ConnectionLostError, match="one after the other for 3"):
                sender.finish()
    finally:
        ended.set()
        supervisor.join()


def test_a_row_larger_than_the_peer_takes_fails_the_task(context: Context) -> None:
    """The peer hangs up each time the row comes."""
    _, endpoint = bound(context, zmq.PULL, maxmsgsize=1000)
    options = write_options(connect=endpoint, sendTimeout="300ms", zmq_reconnect_ivl=10)
    with Sender(options) as sender, pytest.raises(ConnectionLostError, match=r"zmq\.maxmsgsize"):
        sender.send(binary([b"x" * 2000]))
        sender.finish()


def test_rows_that_are_sent_again_keep_their_sequences(context: Context) -> None:
    pull, endpoint = bound(context, zmq.PULL)
    values = rows(3000)
    with (
        Middlebox(endpoint, reset_after=1 << 17) as middlebox,
        Consuming(pull) as consuming,
        Sender(write_options(connect=middlebox.endpoint, framing="sequenced"), publisher="p") as sender,
    ):
        send(sender, values)
        assert sender.finish().resent > 0
        wait_for_all(values, consuming)
        wait_for(lambda: len(consuming.got[-1]) == 3, "the end")
    assert consuming.got[-1] == [b"", b"p", (3000).to_bytes(8, "big")]
    numbered = {(message[2], message[3]) for message in consuming.got if len(message) == 4}
    assert numbered == {(at.to_bytes(8, "big"), value) for at, value in enumerate(values)}


def test_rows_that_may_be_lost_become_dead_letters(context: Context, tmp_path: Path) -> None:
    pull, endpoint = bound(context, zmq.PULL, rcvhwm=1, rcvbuf=4096)
    options = write_options(
        connect=endpoint,
        deadLetterLocation=tmp_path,
        zmq_sndbuf=4096,
        connectTimeout="1s",
        sendTimeout="300ms",
    )
    values = rows(900)
    assert options.dead_letter_location is not None
    with (
        StagedDeadLetters(options.dead_letter_location, "q", 0, 0) as letters,
        Sender(options, letters) as sender,
    ):
        topics = [b"t" if at % 2 else None for at in range(900)]
        sender.send(binary(values), binary(topics))
        pull.recv()
        threading.Timer(0.05, pull.close, [0]).start()
        counters = sender.finish()
    assert counters.balanced
    assert (counters.sent, counters.bytes, dict(counters.dead_lettered)) == (0, 0, {"no_peer": 900})
    kept = parquet.read_table(tmp_path / "_staging" / "q-0" / letters.names[0]).to_pylist()
    assert {(row["topic"], row["value"]) for row in kept} == set(zip(topics, values, strict=True))
    assert len(kept) == 900


def test_a_pub_loses_nothing_with_a_subscriber(context: Context) -> None:
    sub, endpoint = bound(context, zmq.SUB)
    sub.subscribe(b"")
    with (
        Consuming(sub),
        Middlebox(endpoint) as middlebox,
        Sender(write_options(connect=middlebox.endpoint, socketType="PUB")) as sender,
    ):
        send(sender, rows(500))
        middlebox.reset()
        lose(sender)
        send(sender, rows(500))
        counters = sender.finish()
    assert (counters.rows, counters.sent, counters.resent) == (1000, 1000, 0)
    assert not counters.dropped


def test_a_loss_is_noticed_beside_a_silent_connection(context: Context) -> None:
    """libzmq does not tell whether the handshake was that of the worker or of the health check beside it."""
    endpoint = free_endpoint()
    host, port = endpoint.removeprefix("tcp://").split(":")
    pull = context.socket(zmq.PULL)
    silent: list[Any] = []

    def arrive() -> None:
        wait_for(lambda: _connected(silent, host, int(port)), "the listener")
        pull.connect(endpoint)

    arriving = threading.Thread(target=arrive)
    arriving.start()
    with Sender(write_options(bind=endpoint)) as sender:
        arriving.join(30)
        sender.send(binary(rows(10)))
        take(pull, 10)
        pull.close()
        lose(sender)
    silent[0].close()


def _connected(into: list[Any], host: str, port: int) -> bool:
    try:
        into.append(socket.create_connection((host, port)))
    except OSError:
        return False
    return True


def test_a_reset_costs_no_row_and_the_rows_kept_to_be_sent_again_are_bounded(context: Context) -> None:
    pull, endpoint = bound(context, zmq.PULL, rcvbuf=1 << 15)
    values = rows(50_000)
    keep, most = 500_000, 0
    with (
        Middlebox(endpoint, holds=1 << 14, reset_after=4 << 20, kernel_holds=1 << 15) as middlebox,
        Consuming(pull) as consuming,
        Sender(write_options(connect=middlebox.endpoint), keep=keep) as sender,
    ):
        for at in range(0, len(values), 100):
            sender.send(binary(values[at : at + 100]))
            most = max(most, sender.in_flight.bytes)
        counters = sender.finish()
        wait_for_all(values, consuming)
    assert middlebox.resets == 1
    assert (counters.rows, counters.sent, counters.bytes) == (50_000, 50_000, sum(map(len, values)))
    assert counters.balanced
    assert most <= 3 * keep
    assert 0 < counters.resent < 25_000
    assert "resent=" in str(counters)


# A consumer that stalls while another one takes the rest: the queues never become empty.


@contextmanager
def stalled_and_consuming(context: Context, endpoint: str) -> Iterator[tuple[Socket, Consuming]]:
    stalled, other = context.socket(zmq.PULL), context.socket(zmq.PULL)
    for sock in (stalled, other):
        sock.setsockopt(zmq.RCVBUF, 4096)
        sock.setsockopt(zmq.RCVHWM, 10)
        sock.connect(endpoint)
    with Consuming(other) as consuming:
        yield stalled, consuming


def test_a_stalled_consumer_that_dies_costs_no_row_and_the_task_has_waited_for_it(context: Context) -> None:
    endpoint, values, keep, most = free_endpoint(), rows(60_000), 100_000, 0
    with (
        stalled_and_consuming(context, endpoint) as (stalled, consuming),
        Sender(write_options(bind=endpoint, zmq_sndbuf=4096), keep=keep) as sender,
        ThreadPoolExecutor() as pool,
    ):
        wait_for(lambda: sender.socket.peers_now() == 2, "both workers")

        def send_all() -> None:
            nonlocal most
            for at in range(0, len(values), 100):
                sender.send(binary(values[at : at + 100]))
                most = max(most, sender.in_flight.bytes)

        sending = pool.submit(send_all)
        wait_for(lambda: sender.in_flight.is_full, "as many rows as the task may keep")
        stalled.close(linger=0)
        sending.result(60)
        counters = sender.finish()
        wait_for_all(values, consuming)
    assert most <= 3 * keep
    assert (counters.rows, counters.sent) == (60_000, 60_000)
    assert 0 < counters.resent < 10_000


@pytest.mark.parametrize("kept", [False, True])
def test_a_consumer_that_stalls_for_too_long_fails_the_task_or_makes_dead_letters(
    context: Context, tmp_path: Path, kept: bool
) -> None:
    endpoint, values, keep = free_endpoint(), rows(10_000), 100_000
    location = {"deadLetterLocation": tmp_path} if kept else {}
    options = write_options(bind=endpoint, zmq_sndbuf=4096, sendTimeout="300ms", linger="300ms", **location)
    with (
        stalled_and_consuming(context, endpoint),
        StagedDeadLetters(Location(tmp_path), "q", 0, 0) as letters,
        Sender(options, letters if kept else None, keep=keep) as sender,
    ):
        wait_for(lambda: sender.socket.peers_now() == 2, "both workers")
        if kept:
            send(sender, values, at_once=100)
            assert sender.counters.balanced
            assert sender.counters.dead_lettered["timeout"] > 5000
        with pytest.raises(SendTimeoutError, match="linger" if kept else "there was no room"):
            send(sender, values, at_once=100)
            sender.finish()
        assert sender.in_flight.bytes <= 3 * keep
