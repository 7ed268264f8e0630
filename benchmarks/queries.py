"""Spark for the benchmarks: a session, queries into the ``noop`` sink, and how far they are."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import psutil
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.measure import wait_for
from benchmarks.tutorial import TutorialDataSource
from zmq_datasource import register

__all__ = ["finished_at", "noop_query", "rows_done", "source_runners", "spark_session"]

_RUNNER = "python_streaming_source_runner"
_RUNNER_SECONDS = 60.0


@contextmanager
def spark_session(scratch: Path) -> Iterator[SparkSession]:
    """A local session of two cores that keeps its files in ``scratch``."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("zmq_datasource benchmarks")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", str(scratch))
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.sql.streaming.numRecentProgressUpdates", "100000")
        .getOrCreate()
    )
    try:
        spark.sparkContext.setLogLevel("ERROR")
        register(spark)
        spark.dataSource.register(TutorialDataSource)
        yield spark
    finally:
        spark.stop()


@contextmanager
def noop_query(
    spark: SparkSession, source: str, options: Mapping[str, str], checkpoint: Path, every: str | None = None
) -> Iterator[StreamingQuery]:
    """A running query from ``format(source)`` into Spark's cheapest sink.

    Args:
        every: The processing-time trigger; None is a micro-batch as soon as there is data.
    """
    stream = spark.readStream.format(source).options(**options).load()
    writer = stream.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    if every is not None:
        writer = writer.trigger(processingTime=every)
    query = writer.start()
    try:
        yield query
    finally:
        query.stop()
        # Spark does not wait for it; the next measurement should not share the machine with it.
        wait_for("the source runner to end", lambda: not source_runners(), _RUNNER_SECONDS)


def source_runners() -> list[psutil.Process]:
    """The Python processes in which Spark's driver runs the sources of our queries."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any(_RUNNER in argument for argument in process.cmdline()):
                found.append(process)
    return found


def rows_done(query: StreamingQuery) -> int:
    """How many rows the query's finished micro-batches had, as its newest offset tells.

    Raises:
        StreamingQueryException: The query has failed.
    """
    if not query.isActive:
        error = query.exception()
        raise error if error is not None else RuntimeError("the query has stopped")
    progress = query.lastProgress
    if progress is None or progress.sources[0].endOffset is None:
        return 0
    offset = json.loads(progress.sources[0].endOffset)
    return int(offset["count"] if "count" in offset else offset["next"]["0"])


def finished_at(query: StreamingQuery, rows: int, seconds: float) -> float:
    """Wait until ``rows`` rows are done; when the last micro-batch ended (seconds since the epoch).

    Raises:
        TimeoutError: They were not done within ``seconds``.
        RuntimeError: Spark counted another number of rows.
    """
    wait_for(f"{rows} rows", lambda: rows_done(query) >= rows, seconds)
    batches = [p for p in query.recentProgress if p.numInputRows]
    counted = sum(p.numInputRows for p in batches)
    if counted != rows:
        raise RuntimeError(f"Spark counted {counted} rows of {rows} sent")
    last = batches[-1]
    return datetime.fromisoformat(last.timestamp).timestamp() + last.durationMs["triggerExecution"] / 1000
