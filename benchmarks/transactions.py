"""Rows a second from one service to another: into the log of a receiver, and from one Spark job to the next."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.measure import Measurement, Sample, Times, measured, temporary_directory, wait_for
from benchmarks.peers import free_endpoint, listens
from benchmarks.processes import cpu_seconds, per_message
from benchmarks.report import Section, Target
from benchmarks.source import log_end

__all__ = [
    "COLUMNS",
    "SECTION",
    "Between",
    "JobToJobRate",
    "measure_transactions",
    "our_tables",
    "written_to_log",
]

# A DataFrame to read, and a function that writes to it.
Between: TypeAlias = tuple[DataFrame, Callable[[DataFrame], None]]

_ACKNOWLEDGED, _PLAIN, _PARQUET = "DEALER → ROUTER", "PUSH → PULL", "Parquet files"
_JSON, _TABLES = "JSON, a message a row", "valueFormat=arrow"
COLUMNS = "a BIGINT, b INT, c DOUBLE"

_ROWS_A_SECOND = 1_000_000
_TABLE_ROWS_A_SECOND = 300_000  # in the first run; a later one writes as many rows as the run before allows
_PARTITIONS = 2
_MOST_SECONDS = 300.0
SECTION = Section(
    "transactions",
    "From one service to another",
    "Rows a second. *100 B*: rows of 100 bytes, from `df.write` of a cached DataFrame in two partitions until all "
    f"are on disk. *{_ACKNOWLEDGED}*: one transaction, staged, committed and acknowledged, into the log of a "
    f"receiver process. *{_PLAIN}*: plain messages into the same kind of log. *{_PARQUET}*: `df.write.parquet`, in "
    "the same JVM; its encoding saves most of the bytes. *three numbers*: rows of three numeric columns from one "
    "Spark job (`df.write`, two partitions) to another one (a query into the `noop` sink) by PUSH and PULL, from "
    "the call of the one until the other has read them all, both on the same two cores, each chunk forced to the "
    f"disk. *{_JSON}*: `to_json` and `from_json`. *{_TABLES}*: a message for 10,000 rows.",
    targets=(
        Target("100 B", _ACKNOWLEDGED, 1_500_000),
        Target("three numbers", _TABLES, 4_000_000),
    ),
)


def measure_transactions(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Rows of 100 bytes a second until all are on disk, then rows of a table a second from job to job."""
    rows = max(1000, round(_ROWS_A_SECOND * times.seconds))
    df = spark.range(0, rows, 1, _PARTITIONS)
    df = df.selectExpr("cast(lpad(id, 100, 'x') as binary) as value").cache()
    df.count()
    methods: Mapping[str, Callable[[], Sample]] = {
        _ACKNOWLEDGED: partial(written_to_log, df, rows, "DEALER", "ROUTER"),
        _PLAIN: partial(written_to_log, df, rows, "PUSH", "PULL"),
        _PARQUET: partial(_written_to_parquet, df, rows),
    }
    yield from measured("transactions", "100 B", "rows/s", methods, times)
    df.unpersist(blocking=True)
    tables: Mapping[str, Callable[[], Sample]] = {
        _JSON: JobToJobRate(spark, times, partial(_our_json, spark)),
        _TABLES: JobToJobRate(spark, times, partial(our_tables, spark)),
    }
    yield from measured("transactions", "three numbers", "rows/s", tables, times)


def written_to_log(df: DataFrame, rows: int, sink: str, source: str) -> Sample:
    """Rows a second of one ``df.write`` until all are in the log of a receiver process."""
    with temporary_directory() as scratch, _receiver(scratch / "log", source) as (endpoint, pid):
        before, began = cpu_seconds({"receiver": pid}), time.monotonic()
        writer = df.write.format("zmq").mode("append").option("socketType", sink)
        writer.option("connect", endpoint).save()
        wait_for("all rows in the log", lambda: log_end(scratch / "log") >= rows, _MOST_SECONDS)
        seconds, after = time.monotonic() - began, cpu_seconds({"receiver": pid})
        return Sample(rows / seconds, per_message(before, after, rows))


@contextmanager
def _receiver(location: Path, source: str) -> Iterator[tuple[str, int]]:
    """``zmq-datasource receive`` in a process of its own: its endpoint and process id."""
    endpoint = free_endpoint()
    command = [sys.executable, "-m", "zmq_datasource", "receive", "--socket-type", source]
    command += ["--bind", endpoint, "--wal-location", str(location), "-o", "walMaxBytes=1t"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for("the receiver", lambda: listens(endpoint), _MOST_SECONDS)
        yield endpoint, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _written_to_parquet(df: DataFrame, rows: int) -> Sample:
    with temporary_directory() as scratch:
        before, began = cpu_seconds({}), time.monotonic()
        df.write.parquet(str(scratch / "rows"))
        seconds = time.monotonic() - began
        return Sample(rows / seconds, per_message(before, cpu_seconds({}), rows))


class JobToJobRate:
    """Rows a second from the start of a ``df.write`` until a query has read them all.

    Args:
        between: Makes both ends; its argument is a directory for its files.
        peers: Name to process id of other processes; their CPU counts.
    """

    def __init__(
        self,
        spark: SparkSession,
        times: Times,
        between: Callable[[str], Between],
        peers: Mapping[str, int] | None = None,
    ) -> None:
        self._spark, self._times, self._between = spark, times, between
        self._peers = peers or {}
        self._rate = float(_TABLE_ROWS_A_SECOND)

    def __call__(self) -> Sample:
        count = max(10_000, round(self._rate * self._times.seconds))
        with temporary_directory() as scratch:
            stream, write = self._between(str(scratch))
            writer = stream.writeStream.format("noop").option(
                "checkpointLocation", str(scratch / "checkpoint")
            )
            query = writer.start()
            try:
                read = _rows_read(query)
                write(self._rows(1000))  # connects and warms both sides
                wait_for("the first rows", lambda: read() >= 1000, _MOST_SECONDS)
                before, began = cpu_seconds(self._peers), time.monotonic()
                write(self._rows(count))
                wait_for(f"{count} rows", lambda: read() >= 1000 + count, _MOST_SECONDS)
                seconds, after = time.monotonic() - began, cpu_seconds(self._peers)
            finally:
                query.stop()
        self._rate = count / seconds
        return Sample(self._rate, per_message(before, after, count))

    def _rows(self, count: int) -> DataFrame:
        rows = self._spark.range(0, count, 1, _PARTITIONS)
        return rows.selectExpr("id AS a", "int(id % 1000) AS b", "id * 0.5D AS c")


def _rows_read(query: StreamingQuery) -> Callable[[], int]:
    """A function that counts the rows which a query has read, from the progress of each of its micro-batches."""
    batches: dict[int, int] = {}

    def rows() -> int:
        if error := query.exception():
            raise error
        for progress in query.recentProgress:  # has the last hundred
            batches[progress.batchId] = max(batches.get(progress.batchId, 0), progress.numInputRows)
        return sum(batches.values())

    return rows


def our_tables(spark: SparkSession, scratch: str) -> Between:
    """By PUSH and PULL, ``valueFormat=arrow``."""
    endpoint = free_endpoint()
    reader = spark.readStream.format("zmq").schema(COLUMNS).option("valueFormat", "arrow")

    def write(df: DataFrame) -> None:
        df.write.format("zmq").mode("append").option("connect", endpoint).option(
            "valueFormat", "arrow"
        ).save()

    return reader.options(**_ours(endpoint, scratch)).load(), write


def _our_json(spark: SparkSession, scratch: str) -> Between:
    endpoint = free_endpoint()
    stream = spark.readStream.format("zmq").options(**_ours(endpoint, scratch)).load()

    def write(df: DataFrame) -> None:
        json = df.selectExpr("to_json(struct(*)) AS value")
        json.write.format("zmq").mode("append").option("connect", endpoint).save()

    return stream.selectExpr(f"from_json(string(value), '{COLUMNS}') AS row").select("row.*"), write


def _ours(endpoint: str, scratch: str) -> dict[str, str]:
    return {"socketType": "PULL", "bind": endpoint, "walLocation": f"{scratch}/log"}
