"""A disk that refuses for a while: everything that writes waits, holds its senders back, and goes on."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket as stdlib_socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zmq

from tests.support import (
    Socket,
    batch_of,
    bound,
    fill_disk,
    free_endpoint,
    keep_handlers,
    log_rows,
    need,
    offer,
    stream_options,
    wait_for,
)
from tests.support import tiny_disk as a_tiny_disk
from tests.support.proxies import endpoints
from zmq_datasource.errors import DiskFaultError
from zmq_datasource.log.chunk import read_chunk, read_facts
from zmq_datasource.log.layout import Chunk, chunk_name
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.spark.partition_reader import LogInputPartition, MessageRows, read_log_partition
from zmq_datasource.spark.worker import set_up_worker

Context = zmq.Context[Socket]
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounting a tmpfs needs root")
MESSAGES, SIZE = 2000, 500
SOME = 100  # which one look at the socket may take all at once


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with a_tiny_disk(tmp_path / "tiny", "4m") as mount:
        yield mount


@contextmanager
def ingesting(location: Path, connect: str | None = None, **options: Any) -> Iterator[FeedReceiver]:
    given = {"socketType": "PULL", "walFlushInterval": "20ms", **options}
    if connect is not None:
        given["connect"] = connect
    ingest = FeedReceiver(stream_options(walLocation=location, **given))
    ingest.start()
    try:
        yield ingest
    finally:
        ingest.stop()


@contextmanager
def pushing(push: Socket, count: int = MESSAGES, first: int = 0) -> Iterator[Callable[[], int]]:
    """Send numbers from ``first`` on, as fast as they are taken; up to which were."""
    sent = first
    end = threading.Event()

    def run() -> None:
        nonlocal sent
        while sent < count and not end.is_set():
            sent += offer(push, b"%d" % sent + b" " * SIZE)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: sent
    finally:
        end.set()
        thread.join(30)


def numbers(location: Path) -> list[int]:
    return [int(v) for v in log_rows(location).column("value").to_pylist()]


@needs_root
def test_a_query_whose_own_log_has_filled_the_disk_makes_room_by_reading(
    context: Context, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql.streaming.datasource import ReadMaxRows  # noqa: PLC0415 - the others do without

    from zmq_datasource.spark.stream_reader import ZmqStreamReader  # noqa: PLC0415

    keep_handlers(monkeypatch)
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10, sndbuf=4096)
    total = 20_000  # more than twice of what the disk holds
    reader = ZmqStreamReader(
        stream_options(
            connect=endpoint,
            socketType="PULL",
            walLocation=disk / "log",
            walMaxBytes="8m",  # so that a chunk has 512 KiB
            walRetention="0s",
            rcvhwm=10,
        )
    )
    try:
        position = reader.initialOffset()
        reader.latestOffset(position, ReadMaxRows(1))
        faults = 0
        ids: list[int] = []
        with pushing(push, total):
            deadline = time.monotonic() + 60
            assert reader.log is not None
            log = reader.log.contents
            while len(ids) < total and time.monotonic() < deadline:
                if not faults:  # Spark is busy until the disk is full
                    wait_for(lambda: log.fault, "a full disk")
                    faults += 1
                end = reader.latestOffset(position, ReadMaxRows(1))
                for share in reader.partitions(position, end):
                    for batch in reader.read(share):
                        ids += batch.column("id").to_pylist()
                if end != position:
                    position = end
        assert ids == list(range(total))
    finally:
        reader.stop()


@needs_root
def test_a_log_is_opened_and_emptied_on_a_full_disk_again_and_again(disk: Path) -> None:
    def writer() -> LogWriter:
        log = LogWriter(LogStorage(str(disk / "log")), chunk_bytes=1 << 20, max_bytes=1 << 30)
        log.merge_seconds = 1e6
        log.open()
        return log

    log = writer()
    need(disk / "log", 0)
    for _ in range(3):
        for _ in range(3):
            log.append(batch_of([b"x" * 100_000] * 5))
            end = log.cut().result(10)
        log.close()
        blocker = fill_disk(disk)
        log = writer()
        need(disk / "log", end)
        wait_for(lambda log=log, end=end: log.earliest == end - 5, "room")  # type: ignore[misc]
        log.append(batch_of([b"y"]))
        log.cut().result(10)
        blocker.unlink()
    log.close()


@needs_root
@pytest.mark.spark  # a process of its own
@pytest.mark.parametrize("command", ["receive", "proxy"])
def test_the_programs_outlive_a_full_disk(command: str, context: Context, disk: Path) -> None:
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.SNDHWM, 10)
    push.setsockopt(zmq.SNDBUF, 4096)
    sides = endpoints("pull", "publish")
    location = disk / "log"
    sockets = {
        "receive": ["--socket-type", "PULL", "--bind", sides["pull"]],
        "proxy": ["--pull", sides["pull"], "--publish", sides["publish"]],
    }
    marks = ["-o", "rcvhwm=10", "-o", "zmq.rcvbuf=4096", "-o", "walFlushInterval=20ms"]
    arguments = [command, *sockets[command], "--wal-location", str(location), *marks]
    process = subprocess.Popen(
        [sys.executable, "-m", "zmq_datasource", *arguments], stderr=subprocess.PIPE, text=True
    )
    try:
        push.connect(sides["pull"])
        push.send(b"-1")
        wait_for(lambda: location.exists() and list(location.glob("chunks/0*.arrow")), "the first chunk")
        blocker = fill_disk(disk)
        with pushing(push) as sent:
            wait_for(lambda: sent() and not push.poll(300, zmq.POLLOUT), "the sender is held back")
            assert process.poll() is None
            assert sent() < MESSAGES
            blocker.unlink()
            wait_for(lambda: sent() == MESSAGES, "all was sent")
        wait_for(lambda: numbers(location)[-1:] == [MESSAGES - 1], "all is in the log")
    finally:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "No space left on device" in said
    assert numbers(location) == list(range(-1, MESSAGES))


@contextmanager
def no_free_file() -> Iterator[Callable[[], None]]:
    """This process cannot open a file, until the function that it yields is called."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)

    def end() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield end
    finally:
        end()


def test_a_chunk_that_cannot_be_opened_now_is_not_taken_for_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A task waits for a free descriptor; a caller that repeats by itself gets the error at once."""
    with closing(LogWriter(LogStorage(str(tmp_path)), chunk_bytes=1 << 20, max_bytes=1 << 30)) as log:
        log.open()
        log.append(batch_of([b"1", b"2"]))
        log.cut().result(10)
    storage = LogStorage(str(tmp_path))
    name = chunk_name(0)
    reads: list[Callable[[], object]] = [
        lambda: read_facts(storage, chunk_name(0)),
        lambda: list(read_chunk(storage, name, 0, 2)),
    ]
    for read in reads:
        with no_free_file(), pytest.raises(DiskFaultError, match="Too many open files"):
            read()
    share = LogInputPartition(storage.store, [Chunk(0, 2, 1, 0.0, name)], MessageRows(), "a log", True)
    caplog.set_level(logging.INFO)
    set_up_worker()  # which a process does once, and reads a file for
    with no_free_file() as end, ThreadPoolExecutor() as pool:
        rows = pool.submit(lambda: pa.Table.from_batches(read_log_partition(share)))
        wait_for(lambda: "Too many open files" in caplog.text, "a refusal")
        assert not rows.done()
        end()
        assert rows.result(20)["value"].to_pylist() == [b"1", b"2"]


MANY_CONNECTIONS = """
    import resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64 if sys.argv[3] == "hard" else 4096))
    from zmq_datasource.receive import receive_until_stopped
    receive_until_stopped({"socketType": "PULL", "bind": sys.argv[1], "walLocation": sys.argv[2],
                           "rcvhwm": "10", "walFlushInterval": "20ms"})
"""


@pytest.mark.spark  # a process of its own
@pytest.mark.parametrize("limit", ["soft", "hard"])
def test_silent_connections_end_no_receiver(limit: str, context: Context, tmp_path: Path) -> None:
    endpoint = free_endpoint()
    host, port = endpoint.removeprefix("tcp://").split(":")
    push = context.socket(zmq.PUSH)
    said = tmp_path / "said"
    with said.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(MANY_CONNECTIONS), endpoint, str(tmp_path), limit],
            stderr=file,
        )
    silent: list[stdlib_socket.socket] = []
    try:
        push.connect(endpoint)
        push.send(b"0")
        wait_for(lambda: list(tmp_path.glob("chunks/0*.arrow")), "the first chunk")
        silent += [stdlib_socket.create_connection((host, int(port))) for _ in range(100)]
        open_files = Path(f"/proc/{process.pid}/fd")
        wait_for(
            lambda: len(list(open_files.iterdir())) >= (64 if limit == "hard" else 100), "many open files"
        )
        for i in range(1, 10):
            push.send(b"%d" % i)
        if limit == "soft":
            wait_for(lambda: len(numbers(tmp_path)) == 10, "they do no harm")
        else:
            wait_for(lambda: "Too many open files" in said.read_text(), "the fault")
        for sock in silent:
            sock.close()
        wait_for(lambda: len(numbers(tmp_path)) == 10, "all messages")
    finally:
        for sock in silent:
            sock.close()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert process.returncode == 0, said.read_text()
    assert numbers(tmp_path) == list(range(10))
