"""Several logs in one query, and what reading costs where an executor does not see the log."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from pyspark.sql import SparkSession

from benchmarks.latency import our_latency
from benchmarks.measure import MEGA, Measurement, Sample, Times, measured, size_name, temporary_directory
from benchmarks.peers import child
from benchmarks.processes import cpu_seconds, per_message
from benchmarks.queries import live_rate
from benchmarks.report import Section
from zmq_datasource.log import LogStorage, LogWriter, read_index
from zmq_datasource.log.chunk import read_chunk
from zmq_datasource.messages.framing import decode_plain
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.source.chunk_server import ChunkServer
from zmq_datasource.source.remote_chunks import RemoteChunks

_LOADS = (1, 2, 4)
_READ_SIZES = (100, 10_000)
_READ_BYTES = 256 << 20
_FILES, _DRIVER = "the files", "from the driver"
SECTION = Section(
    "scaling",
    "Several logs, and reading elsewhere",
    "*several logs*: messages of 100 bytes a second of one query in which so many loads of a PULL, each with a log of "
    "its own, share the messages of one PUSH that never pauses (two cores for all). *One message a second*: the "
    "milliseconds from sending a message until the user's function has it, each after a second of silence. "
    "*read by one task*: megabytes of `value` a second that one task reads of a log, from its files, which the system "
    "has in memory, or from the driver's process, encrypted, over loopback.",
)


def measure_loads(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Messages a second, and milliseconds after silence, of a query with one, two and four loads."""
    names = {loads: f"{loads} load{'s' * (loads > 1)}" for loads in _LOADS}
    rates = {
        name: partial(live_rate, spark, "zmq", {}, times, size=100, loads=n) for n, name in names.items()
    }
    yield from measured("scaling", "100 B, several logs", "messages/s", rates, times)
    delays = {name: partial(our_latency, spark, 1, times, loads=n) for n, name in names.items()}
    yield from measured("scaling", "one message a second", "ms", delays, times)


def measure_scaling(times: Times) -> Iterator[Measurement]:
    """Megabytes a second of one task, from the files and from the driver."""
    for size in _READ_SIZES:
        reads = {way: partial(_read_rate, size, way, times) for way in (_FILES, _DRIVER)}
        yield from measured("scaling", f"{size_name(size)}, read by one task", "MB/s", reads, times)


def _log(location: Path, value: bytes, batches: int, rows: int) -> LogStorage:
    storage = LogStorage(str(location))
    writer = LogWriter(storage, chunk_bytes=32 << 20, max_bytes=1 << 40)
    writer.open()
    for _ in range(batches):
        writer.append(decode_plain(raw_of([value] * rows), [(0, rows)]))
    writer.close()
    return storage


def _read_rate(size: int, way: str, times: Times) -> Sample:
    """Megabytes a second of one task that reads a log repeatedly, from the driver's process or from its files."""
    with temporary_directory() as scratch:
        storage = _log(scratch / "log", b"x" * size, _READ_BYTES >> 20, (1 << 20) // size)
        index = read_index(storage)
        chunks = index.all
        with child(_serve, storage.root) as (pipe, driver):
            pids = {"driver": driver, "executor": os.getpid()}
            access = pipe.recv()
            with RemoteChunks(access, storage) if way == _DRIVER else nullcontext(storage) as opens:

                def read_for(seconds: float) -> int:
                    read, end = 0, time.monotonic() + seconds
                    while not read or time.monotonic() < end:
                        for chunk in chunks:
                            for batch in read_chunk(opens, chunk.name, chunk.first, chunk.end):
                                read += batch.num_rows
                    return read

                read_for(times.warm_up)
                began, cpu = time.monotonic(), cpu_seconds(pids)
                rows = read_for(times.seconds)
                rate = rows * size / (time.monotonic() - began) / MEGA
                return Sample(rate, per_message(cpu, cpu_seconds(pids), rows))


def _serve(pipe: Connection, root: str) -> None:
    storage = LogStorage(root)
    server = ChunkServer(storage, storage.log_id(), "tcp://127.0.0.1:*")
    pipe.send(server.access)
    with suppress(EOFError):
        pipe.recv()
    server.stop()
