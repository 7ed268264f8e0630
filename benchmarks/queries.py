"""Spark for the benchmarks: a session, queries into the ``noop`` sink, and how fast they are once they run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from benchmarks.measure import Sample, Times, temporary_directory, wait_for
from benchmarks.others import NothingDataSource, TutorialDataSource
from benchmarks.peers import peer
from benchmarks.processes import cpu_seconds, per_message, source_runners
from zmq_datasource import register

CHECKPOINTS = "Checkpoints are written [as for a local disk](../docs/tuning.md#batches)."

_CHECKPOINT_FILES = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
_RUNNER_SECONDS = 60.0
_MOST_SECONDS = 120.0
# Each look at a query costs the JVM a progress in JSON.
_POLL_SECONDS = 0.1


@contextmanager
def spark_session(scratch: Path, jars: Sequence[str] = ()) -> Iterator[SparkSession]:
    """A local session on two cores that keeps its files in ``scratch``."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("zmq_datasource benchmarks")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.jars", ",".join(jars))
        .config("spark.local.dir", str(scratch))
        # For the peers too; see docs/tuning.md.
        .config("spark.sql.streaming.checkpointFileManagerClass", _CHECKPOINT_FILES)
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .getOrCreate()
    )
    try:
        spark.sparkContext.setLogLevel("ERROR")
        register(spark)
        spark.dataSource.register(TutorialDataSource)
        spark.dataSource.register(NothingDataSource)
        yield spark
    finally:
        spark.stop()


def stream_of(spark: SparkSession, source: str, options: Mapping[str, str]) -> DataFrame:
    """The stream of ``format(source)``."""
    return spark.readStream.format(source).options(**options).load()


def loads_of(spark: SparkSession, options: Mapping[str, str], scratch: Path, loads: int) -> DataFrame:
    """The union of so many PULL sources that share the messages, each with a log of its own."""
    logs = ({"socketType": "PULL", **options, "walLocation": str(scratch / f"log{n}")} for n in range(loads))
    return reduce(DataFrame.union, [stream_of(spark, "zmq", log) for log in logs])


@contextmanager
def running(writer: DataStreamWriter, checkpoint: Path) -> Iterator[StreamingQuery]:
    """The query of this writer, until the end of the block."""
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        yield query
    finally:
        query.stop()
        # Spark does not wait for the source runner, and the next measurement must have the machine alone.
        wait_for("the source runner to end", lambda: not source_runners(), _RUNNER_SECONDS)


class Done(NamedTuple):
    """How far a query is.

    Attributes:
        batch: The newest micro-batch that has ended; -1 if none has, or there was nothing to do since.
        rows: In all of its micro-batches.
        time: When the newest ended, in seconds since the epoch.
    """

    batch: int
    rows: int
    time: float


_NOTHING = Done(-1, 0, 0.0)


def done(query: StreamingQuery) -> Done:
    """How far it is.

    Raises:
        StreamingQueryException: The query has failed.
    """
    if not query.isActive:
        error = query.exception()
        raise error if error is not None else RuntimeError("the query has stopped")
    progress = query.lastProgress
    if progress is None:
        return _NOTHING
    # Spark leaves a source without new messages out of a micro-batch of several sources.
    ends = [source.endOffset or source.startOffset for source in progress.sources]
    if not any(ends):
        return _NOTHING
    ended = datetime.fromisoformat(progress.timestamp).timestamp()
    ended += progress.durationMs.get("triggerExecution", 0) / 1000
    rows = sum(_rows(json.loads(end)) for end in ends if end)
    return Done(progress.batchId if progress.numInputRows else -1, rows, ended)


def next_batch(query: StreamingQuery, batch: int) -> Done:
    """Wait for the end of a micro-batch after this one."""
    latest = _NOTHING

    def ended() -> bool:
        nonlocal latest
        latest = done(query)
        return bool(latest.batch > batch)

    wait_for("a micro-batch", ended, _MOST_SECONDS, _POLL_SECONDS)
    return latest


def steady_rate(query: StreamingQuery, times: Times, peers: Mapping[str, int]) -> Sample:
    """Rows a second of a running query, from the end of one micro-batch to that of another, after a warm-up."""
    warm = time.monotonic() + times.warm_up
    first = next_batch(query, -1)
    while time.monotonic() < warm:
        first = next_batch(query, first.batch)
    before = cpu_seconds(peers)
    last = next_batch(query, first.batch)
    while last.time - first.time < times.seconds:
        last = next_batch(query, last.batch)
    rows = last.rows - first.rows
    return Sample(rows / (last.time - first.time), per_message(before, cpu_seconds(peers), rows))


def live_rate(
    spark: SparkSession,
    source: str,
    options: Mapping[str, str],
    times: Times,
    size: int,
    trigger: str = "",
    loads: int = 1,
) -> Sample:
    """Rows a second from a PUSH that never pauses; ``options`` are without the endpoint and the place of the log.

    Args:
        loads: How many sources, each with a log of its own, share the messages in one query.
    """
    with temporary_directory() as scratch, peer("push", size=size) as push:
        options = {"connect": push.endpoint, **options}
        is_ours = source != "tutorial"
        stream = loads_of(spark, options, scratch, loads) if is_ours else stream_of(spark, source, options)
        writer = stream.writeStream.format("noop")
        if trigger:
            writer = writer.trigger(processingTime=trigger)
        with running(writer, scratch / "checkpoint") as query:
            push.go()
            sample = steady_rate(query, times, {"sender": push.pid})
            push.stop()  # a source that stops takes what is still there
            return sample


def _rows(offset: dict[str, Any]) -> int:
    """How many rows there are up to an offset: the tutorial's, ours, or Kafka's of one topic."""
    if "count" in offset:
        return int(offset["count"])
    if "next" in offset:
        return int(offset["next"])
    (parts,) = offset.values()
    return sum(parts.values())
