"""The cost of more receivers, more log partitions and more readers. Without Spark."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.measure import (
    MEGA,
    Measurement,
    Sample,
    Times,
    measured,
    size_name,
    temporary_directory,
    wait_for,
)
from benchmarks.peers import child, in_process, peer
from benchmarks.processes import cpu_seconds, per_message
from benchmarks.section import Section
from zmq_datasource.log import (
    DirectoryStore,
    LogStorage,
    LogWriter,
    ReaderRecord,
    ReaderRecords,
    Readers,
    read_index,
)
from zmq_datasource.log.chunk import read_chunk
from zmq_datasource.messages.framing import decode_plain
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.source.chunk_server import ChunkServer
from zmq_datasource.source.remote_chunks import RemoteChunks
from zmq_datasource.spark.stream_reader import ZmqStreamReader

__all__ = ["SECTION", "measure_scaling"]

_RECEIVERS, _PARTITIONS, _READERS = (1, 2, 4), (1, 10, 100, 1_000), (1, 10, 100)
_READ_SIZES = (100, 10_000)
_SIZE = 100
_READ_BYTES = 256 << 20
_CALLS = 50
_MOST_SECONDS = 300.0
SECTION = Section(
    "scaling",
    "More receivers, partitions and readers",
    "*receivers*: messages of 100 bytes a second from one sender in C into the log of one program (`zmq-datasource "
    "receive`, PULL, nothing forced to the disk), on two cores for both. *read by one task*: megabytes of `value` a "
    "second that one task reads of a log, from its files, which the system has in memory, or from the driver's "
    "process, encrypted, over loopback. *latestOffset*: median time to plan a batch of a query that follows a log "
    "with this many partitions, in which nothing is new. *what all of them need*: median time to find out which "
    "chunks this many readers still need, before chunks are deleted.",
)


def measure_scaling(times: Times) -> Iterator[Measurement]:
    """Messages a second by receivers, reading by one task, then the cost of planning by partitions and by readers."""
    rates = {f"{count} receivers": partial(_rate, count, times) for count in _RECEIVERS}
    yield from measured("scaling", "100 B, messages/s", "messages/s", rates, times)
    for size in _READ_SIZES:
        reads = {way: partial(_read_rate, size, way, times) for way in ("the files", "from the driver")}
        yield from measured("scaling", f"{size_name(size)}, read by one task", "MB/s", reads, times)
    if times.case:
        return
    for count in _PARTITIONS:
        # A process of its own, because the reader takes over the signals of the one it runs in.
        found = in_process(_time_partitions, count, times.rounds, seconds=_MOST_SECONDS)
        yield Measurement("scaling", f"{count:,} log partitions", "latestOffset", "µs", tuple(found))
    for count in _READERS:
        found = in_process(_time_readers, count, times.rounds, seconds=_MOST_SECONDS)
        yield Measurement("scaling", f"{count} readers", "what all of them need", "µs", tuple(found))


def _rate(receivers: int, times: Times) -> Sample:
    """Messages a second into the log of one program, from one sender in C, without fsync."""
    with temporary_directory() as scratch, peer("push", size=_SIZE) as push:
        log = scratch / "log"
        log.mkdir()  # listed before the program has made it
        command = [sys.executable, "-m", "zmq_datasource", "receive", "--socket-type", "PULL"]
        command += ["--connect", push.endpoint, "--wal-location", str(log), "-o", f"receivers={receivers}"]
        command += ["-o", "walMaxBytes=1t", "-o", "walSync=false"]
        program = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            push.go()
            wait_for("messages from all receivers", lambda: min(_ends(log, receivers)) > 0, _MOST_SECONDS)
            time.sleep(times.warm_up)
            pids = {"sender": push.pid, "receivers": program.pid}
            before, began, cpu = sum(_ends(log, receivers)), time.monotonic(), cpu_seconds(pids)
            time.sleep(times.seconds)
            messages = sum(_ends(log, receivers)) - before
            rate = messages / (time.monotonic() - began)
            return Sample(rate, per_message(cpu, cpu_seconds(pids), messages))
        finally:
            program.kill()
            program.wait(30)


def _read_rate(size: int, way: str, times: Times) -> Sample:
    """Megabytes a second of one task that reads a log repeatedly, from the driver's process or from its files."""
    with temporary_directory() as scratch:
        storage = LogStorage(DirectoryStore(scratch / "log", sync=False))
        writer = LogWriter(storage, chunk_bytes=32 << 20, max_bytes=1 << 40)
        writer.open()
        count = (1 << 20) // size
        for _ in range(_READ_BYTES >> 20):
            writer.append(decode_plain(raw_of([b"x" * size] * count), [(0, count)]))
        writer.close()
        index = read_index(storage)
        chunks = index.covering(0, index.end)
        with child(_serve, storage.root) as (pipe, driver):
            pids = {"driver": driver, "executor": os.getpid()}
            access = pipe.recv()
            where = RemoteChunks(access, storage) if way == "from the driver" else nullcontext(storage)
            with where as opens:
                end, cpu, read = 0.0, cpu_seconds(pids), 0
                warm = time.monotonic() + times.warm_up
                while not end or time.monotonic() < end:
                    if not end and time.monotonic() >= warm:
                        began, cpu, read = time.monotonic(), cpu_seconds(pids), 0
                        end = began + times.seconds
                    for chunk in chunks:
                        for batch in read_chunk(opens, chunk.name, chunk.first, chunk.end):
                            read += batch.num_rows
                seconds = time.monotonic() - began
                return Sample(read * size / seconds / MEGA, per_message(cpu, cpu_seconds(pids), read))


def _serve(pipe: Connection, root: str) -> None:
    storage = LogStorage(root)
    server = ChunkServer(storage, storage.log_id(), "tcp://127.0.0.1:*")
    pipe.send(server.access)
    with suppress(EOFError):
        pipe.recv()
    server.stop()


def _ends(log: Path, receivers: int) -> list[int]:
    return [read_index(LogStorage(str(log), partition)).end for partition in range(receivers)]


def _time_partitions(partitions: int, rounds: int) -> list[float]:
    """Microseconds of ``latestOffset`` for a query that follows a log with this many partitions, without news."""
    with temporary_directory() as scratch:
        for partition in range(partitions):
            _write(scratch / "log", partition)
        reader = ZmqStreamReader(parse(StreamReadOptions, {"walLocation": str(scratch / "log")}))
        try:
            first = reader.initialOffset()
            start = reader.latestOffset(first, reader.getDefaultReadLimit())
            reader.commit(start)
            return [
                _median_time(lambda: reader.latestOffset(start, reader.getDefaultReadLimit()))
                for _ in range(rounds)
            ]
        finally:
            reader.stop()


def _write(log: Path, partition: int) -> None:
    storage = LogStorage(DirectoryStore(log, sync=False), partition)
    writer = LogWriter(storage, chunk_bytes=1, max_bytes=1 << 40)
    writer.open()
    writer.append(decode_plain(raw_of([b"x"]), [(0, 1)]))
    writer.close()


def _time_readers(readers: int, rounds: int) -> list[float]:
    """Microseconds to find out what all readers still need, before chunks are deleted."""
    with temporary_directory() as scratch:
        _write(scratch / "log", 0)
        storage = LogStorage(str(scratch / "log"))
        for number in range(readers):
            ReaderRecords(storage).write(f"reader{number}", ReaderRecord({0: 1}))
        positions = Readers(storage, 3600.0)
        return [_median_time(positions.needed) for _ in range(rounds)]


def _median_time(call: Callable[[], object]) -> float:
    spent = []
    for _ in range(_CALLS):
        time.sleep(0.06)  # a listing is reused for a moment: measure a fresh one
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent) * MEGA
