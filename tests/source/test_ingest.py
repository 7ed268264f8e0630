"""Receiver to log: back-pressure end to end, draining, faults. Real sockets, real files, no Spark."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq

from tests.support import (
    Socket,
    at_failpoints,
    bound,
    channel_of,
    free_endpoint,
    log_rows,
    stop_sooner,
    stream_options,
    wait_for,
)
from zmq_datasource.errors import EndpointError, LogLockedError, LogWriteError, NoPeerError
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.source.ingest import Ingest
from zmq_datasource.source.location import log_storage

Context = zmq.Context[Socket]


def at_each_write(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let the store of the log call this before each write."""
    at_failpoints(monkeypatch, lambda name: name == "log.store.before_write" and act())


def fail() -> None:
    raise OSError(28, "No space left on device")


@contextmanager
def ingesting(location: Path, endpoint: str, **options: object) -> Iterator[Ingest]:
    ingest = Ingest(
        stream_options(connect=endpoint, walLocation=location, **{"socketType": "PULL", **options})
    )
    ingest.start()
    try:
        yield ingest
    finally:
        ingest.stop()


@pytest.fixture(autouse=True)
def _stop_sooner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drain" not in request.node.name:  # no publisher sends when the other tests stop
        stop_sooner(monkeypatch)


def numbers(location: Path) -> list[int]:
    return [int(v) for v in log_rows(location).column("value").to_pylist()]


def send_numbers(sock: Socket, count: int) -> None:
    for i in range(count):
        sock.send(b"%d" % i)


def test_seal_makes_received_messages_durable(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with ingesting(tmp_path, endpoint, walFlushInterval="1h") as ingest:
        send_numbers(push, 10)
        wait_for(lambda: ingest.seal() == 10, "10 durable messages")
        assert numbers(tmp_path) == list(range(10))


def test_messages_become_durable_after_the_flush_interval(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with ingesting(tmp_path, endpoint, walFlushInterval="50ms") as ingest:
        send_numbers(push, 1)
        wait_for(lambda: ingest.log.durable_end == 1, "one durable message without asking")


def test_stop_receives_the_messages_that_the_socket_has(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=200_000)
    with ingesting(tmp_path, endpoint):
        send_numbers(push, 100_000)
    assert numbers(tmp_path) == list(range(100_000))


@pytest.mark.spark  # takes its time
def test_a_full_log_holds_the_sender_back_and_nothing_is_lost(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10, sndbuf=4096)
    count, size, limit = 3000, 10_000, 2 << 20
    sent = 0
    blocked = threading.Event()
    options = {"walMaxBytes": limit, "rcvhwm": 10, "zmq_rcvbuf": 4096}

    def send() -> None:
        nonlocal sent
        assert push.poll(30_000, zmq.POLLOUT)  # connected
        for i in range(count):
            if not push.poll(1000, zmq.POLLOUT):
                blocked.set()
            push.send(b"%d" % i + b" " * size)
            sent += 1

    sending = threading.Thread(target=send)
    memory = psutil.Process()
    with ingesting(tmp_path, endpoint, **options) as ingest:
        before = memory.memory_info().rss
        sending.start()
        assert blocked.wait(30), "the sender was never held back"
        assert sent < count / 2
        assert on_disk(tmp_path) <= limit + (512 << 10)
        assert memory.memory_info().rss - before < 100 << 20
        assert ingest.counters.pauses.total() >= 1  # a moment of a slow disk counts too
        paused = sum(ingest.counters.paused_seconds.values())
        assert paused > 0
        # Spark catches up: it reads everything, and commits a batch when it has planned the next.
        done = 0
        while done < count:
            done = ingest.seal()
            assert on_disk(tmp_path) <= limit + (1 << 20)
            ingest.log.commit(done)
        sending.join(30)
        assert ingest.counters.received == count == done


def on_disk(location: Path) -> int:
    # Not by glob, which also lists a chunk that is just being written and has another name soon.
    return sum(chunk.size for chunk in LogStorage(str(location)).chunks())


def test_the_error_of_a_second_writer_names_the_holder_of_the_lock(context: Context, tmp_path: Path) -> None:
    _, endpoint = bound(context, zmq.PUSH)
    with ingesting(tmp_path, endpoint):
        second = Ingest(stream_options(connect=endpoint, walLocation=tmp_path, socketType="PULL"))
        with pytest.raises(LogLockedError, match=f"held by process {os.getpid()}"):
            second.open(lock_wait=0.1)


def test_a_port_in_use_leaves_the_log_free(context: Context, tmp_path: Path) -> None:
    _, endpoint = bound(context, zmq.PUSH)
    failed = Ingest(stream_options(bind=endpoint, walLocation=tmp_path, socketType="PULL"))
    with pytest.raises(EndpointError, match="binding"):
        failed.start()
    with ingesting(tmp_path, endpoint):
        pass


def test_a_disk_that_fails_ends_receiving_with_its_reason(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    options = {"connect": endpoint, "walLocation": tmp_path, "socketType": "PULL"}
    ingest = Ingest(stream_options(**options), retry_seconds=0.1)
    ingest.start()
    send_numbers(push, 5)
    wait_for(lambda: ingest.seal() == 5, "5 durable messages")

    at_each_write(monkeypatch, fail)
    send_numbers(push, 5)
    with pytest.raises(LogWriteError, match=r"No space left on device.*tried again for 0\.1 s"):
        wait_for(lambda: ingest.seal() == 10, "the failure")
    with pytest.raises(LogWriteError, match="No space left on device"):
        ingest.stop()
    assert any("could not be sealed and are lost" in r.message for r in caplog.records)
    monkeypatch.undo()
    assert numbers(tmp_path) == list(range(5))


def test_receive_for_ends_at_the_timeout_or_after_silence(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with ingesting(tmp_path, endpoint) as ingest:
        assert ingest.receive_for(0.05, None) == 0
        send_numbers(push, 10)
        assert ingest.receive_for(30, 0.3) == 10


def test_each_feed_has_its_own_default_log() -> None:
    one = log_storage(stream_options(connect="tcp://a:1,tcp://b:1")).root
    assert one == log_storage(stream_options(connect="tcp://b:1,tcp://a:1", rcvhwm=5, walMaxBytes="1g")).root
    assert one != log_storage(stream_options(connect="tcp://a:1,tcp://b:1", topics="x")).root
    assert one != log_storage(stream_options(connect="tcp://a:1,tcp://b:1", socketType="PULL")).root


def test_a_pull_takes_each_message_once_beside_another_reader(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    other = context.socket(zmq.PULL)
    other.connect(endpoint)
    with ingesting(tmp_path, endpoint) as ingest:
        wait_for(lambda: len(channel_of(ingest).opened.watch.up), "the connection")
        send_numbers(push, 100)
        theirs: list[int] = []

        def all_taken() -> bool:
            while other.poll(0):
                theirs.append(int(other.recv()))
            return len(theirs) + ingest.seal() >= 100

        wait_for(all_taken, "100 messages by the two of them")
    assert sorted(theirs + numbers(tmp_path)) == list(range(100))


def test_receiving_never_waits_for_sealing(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=100_000)
    go_on = threading.Event()

    with ingesting(tmp_path, endpoint, walFlushInterval="10ms") as ingest:
        at_each_write(monkeypatch, lambda: go_on.wait(60))
        send_numbers(push, 1)
        wait_for(lambda: ingest.log.unsealed, "a chunk in the hands of the disk")
        try:
            for count in range(2, 22):  # through many flush intervals
                until = time.monotonic() + 0.02
                send_numbers(push, 1)
                wait_for(lambda: ingest.received_end == count, f"message {count} taken")  # noqa: B023
                wait_for(lambda: time.monotonic() > until, "the next interval")  # noqa: B023
            send_numbers(push, 50_000)
            wait_for(lambda: ingest.received_end == 50_021, "all messages taken meanwhile")
            assert ingest.log.durable_end == 0
        finally:
            go_on.set()
        wait_for(lambda: ingest.log.durable_end == 50_021, "the disk caught up")
    sealed = list(LogStorage(str(tmp_path)).chunks())
    assert len(sealed) <= 6, "what had come meanwhile is sealed together"
    assert len(numbers(tmp_path)) == 50_021


def test_a_feed_whose_publisher_never_answers_fails_after_connect_timeout(tmp_path: Path) -> None:
    ingest = Ingest(stream_options(walLocation=tmp_path, connect=free_endpoint(), connectTimeout="200ms"))
    ingest.start()
    with pytest.raises(NoPeerError):
        wait_for(ingest.check, "an error")
    with pytest.raises(NoPeerError):
        ingest.stop()
