"""How long a message takes from its sender to the user's function; the first row, and an idle query."""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from benchmarks.measure import Measurement, Sample, Times, measured, temporary_directory, wait_for
from benchmarks.peers import peer
from benchmarks.processes import cpu_seconds, source_runners
from benchmarks.queries import CHECKPOINTS, loads_of, running, stream_of
from benchmarks.report import Section, Target
from zmq_datasource.log import LogStorage, LogWriter
from zmq_datasource.messages.rows import message_rows, times_of

_RATES = (100, 1_000, 10_000, 100_000)
_SIZE, _MOST_SECONDS = 100, 60.0
# Of each micro-batch about this many rows are sampled. All rows are collected all the same: a limit would end Spark's
# Python workers early, and to start others takes most of a second.
_SAMPLED = 1000
_CHUNKS = 20_000
_NOTHING, _ZMQ, _MANY_CHUNKS = "a Python source that does nothing", "zmq", f"zmq, a log of {_CHUNKS:,} chunks"
_Feed: TypeAlias = tuple[str, Mapping[str, str]]  # the source and its options
# The cases, and whether the query has run before with its checkpoint.
_FIRST_ROWS = {"first row of a new query": False, "first row of a restarted query": True}
_IDLE = "idle query"
SECTION = Section(
    "latency",
    "Latency",
    "Milliseconds from the sender's `zmq_send` until the user's function (`foreachBatch`) has the row: messages of "
    "100 bytes at a fixed rate, PULL, each chunk forced to the disk, no trigger interval. *First row*: from "
    "`start()` until the user's function has a row, of a feed that sends 1,000 messages a second. "
    f"*{_NOTHING}* has a row as soon as it is asked. *Idle query*: CPU of the JVM and all of Spark's Python processes "
    "while no message arrives. " + CHECKPOINTS,
    targets=(
        *(Target(case, _ZMQ, 1_000, above=_NOTHING, upper=True) for case in _FIRST_ROWS),
        Target(_IDLE, _ZMQ, 1.0, upper=True),
        Target(_IDLE, _MANY_CHUNKS, 1.0, upper=True),
    ),
)


def measure_latency(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Milliseconds to the first row, CPU of an idle query, then the median by rate."""
    with peer("push", size=_SIZE, rate=1000) as push, temporary_directory() as scratch:
        push.go()
        feeds: dict[str, _Feed] = {
            _NOTHING: ("nothing", {}),
            _ZMQ: ("zmq", {"socketType": "PULL", "connect": push.endpoint}),
        }
        for case, again in _FIRST_ROWS.items():
            methods = {name: partial(_first_row, spark, feed, scratch, again) for name, feed in feeds.items()}
            yield from measured("latency", case, "ms", methods, times)
        push.stop()
    with peer("push") as silent, temporary_directory() as scratch:
        _write_chunks(scratch / "many")
        pull = {"socketType": "PULL", "connect": silent.endpoint}
        feeds = {
            _NOTHING: ("nothing", {}),
            _ZMQ: ("zmq", pull | {"walLocation": str(scratch / "few")}),
            _MANY_CHUNKS: ("zmq", pull | {"walLocation": str(scratch / "many")}),
        }
        methods = {name: partial(_idle, spark, feed, scratch, times) for name, feed in feeds.items()}
        yield from measured("latency", _IDLE, "% of a core", methods, times)
    for rate in _RATES:
        paced = {"p50": partial(our_latency, spark, rate, times)}
        yield from measured("latency", f"{rate:,} messages/s", "ms", paced, times)


def our_latency(spark: SparkSession, rate: int, times: Times, loads: int = 1) -> Sample:
    """The median of messages at this rate through the source, or several that share them in one query."""
    with temporary_directory() as scratch, peer("push", size=_SIZE, rate=rate, shape="stamped") as push:
        push.go()
        stream = loads_of(spark, {"connect": push.endpoint}, scratch, loads)
        found = median_latency(stream.select("value"), times, _sent)
        push.stop()
        return found


def _sent(values: pa.Array) -> list[float]:
    """The stamps of the messages (monotonic clock of this machine), in seconds since the epoch."""
    since = time.time() - time.monotonic()
    return [since + struct.unpack_from("=Q", value)[0] / 1e9 for value in values.to_pylist()]


def median_latency(stream: DataFrame, times: Times, sent: Callable[[pa.Array], list[float]]) -> Sample:
    """Milliseconds from sending until the user's function has the row, of a sample of each micro-batch.

    Args:
        stream: Has one column.
        sent: Values of that column to times of sending, in seconds since the epoch.
    """
    latencies: list[float] = []
    begin = time.monotonic() + times.warm_up

    def sample(batch: DataFrame, _: int) -> None:
        rows = batch.toArrow().column(0).combine_chunks()
        now = time.time()
        if time.monotonic() >= begin and len(rows):
            some = rows.take(pa.array(range(0, len(rows), max(1, len(rows) // _SAMPLED))))
            latencies.extend((now - when) * 1000 for when in sent(some))

    with temporary_directory() as checkpoint, running(stream.writeStream.foreachBatch(sample), checkpoint):
        time.sleep(times.warm_up + times.seconds)
        wait_for("the first rows", lambda: bool(latencies), _MOST_SECONDS)
    return Sample(statistics.median(latencies))


def _first_row(spark: SparkSession, feed: _Feed, scratch: Path, again: bool) -> Sample:
    """From ``start()`` until the user's function has a row; the second time of one checkpoint, if ``again``."""
    directory = scratch / f"{time.monotonic_ns()}"
    for _ in range(1 + again):
        first: list[float] = []

        def note(batch: DataFrame, _: int, first: list[float] = first) -> None:
            if not first and batch.toArrow().num_rows:
                first.append(time.monotonic())

        source, options = feed
        stream = stream_of(spark, source, {**options, "walLocation": str(directory / "log")})
        began = time.monotonic()
        with running(stream.writeStream.foreachBatch(note), directory / "checkpoint"):
            wait_for("the first row", lambda first=first: bool(first), _MOST_SECONDS, 0.001)  # type: ignore[misc]
    return Sample((first[0] - began) * 1000)


def _idle(spark: SparkSession, feed: _Feed, scratch: Path, times: Times) -> Sample:
    """Percent of a core that Spark's processes take while nothing comes."""
    writer = stream_of(spark, *feed).writeStream.foreachBatch(lambda *_: None)
    with running(writer, scratch / f"{time.monotonic_ns()}"):
        wait_for("the source runner", lambda: bool(source_runners()), _MOST_SECONDS)
        time.sleep(times.warm_up + 1)
        before = cpu_seconds()
        time.sleep(times.seconds)
        after = cpu_seconds()
    # A worker that has ended meanwhile takes its earlier time with it.
    used = sum(max(0.0, after[name] - before.get(name, 0.0)) for name in after)
    return Sample(100 * used / times.seconds)


def _write_chunks(location: Path) -> None:
    """A log of so many chunks, one message each."""
    log = LogWriter(LogStorage(str(location)), chunk_bytes=1 << 20, max_bytes=1 << 40)
    log.open()
    row = message_rows(pa.array([b"row"], pa.binary()), times_of([(0, 1)]))
    for _ in range(_CHUNKS):
        log.append(row)
        log.cut().result(10)
    log.close()
