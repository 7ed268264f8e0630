"""Rows a second from one service to another: into the log of a receiver, and from one Spark job to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.measure import Measurement, Sample, Times, measured, temporary_directory, wait_for
from benchmarks.peers import free_endpoint, listens, log_end, receiver
from benchmarks.processes import cpu_seconds, per_message
from benchmarks.queries import running, stream_of
from benchmarks.report import Section, Target

_ACKNOWLEDGED = "DEALER → ROUTER"
_JSON, _TABLES = "JSON, a message a row", "valueFormat=arrow"
_COLUMNS = "a BIGINT, b INT, c DOUBLE"

_ROWS_A_SECOND = 1_000_000
_TABLE_ROWS_A_SECOND = {_JSON: 300_000, _TABLES: 1_700_000}
_PARTITIONS = 2
_MOST_SECONDS = 300.0
SECTION = Section(
    "transactions",
    "From one service to another",
    "Rows a second. *100 B*: rows of 100 bytes, from `df.write` of a cached DataFrame in two partitions until all "
    f"are on disk. *{_ACKNOWLEDGED}*: one transaction, staged, committed and acknowledged, into the log of a "
    f"receiver process. *three numbers*: rows of three numeric "
    "columns from one Spark job (`df.write`, two partitions) to another one (a query into the `noop` sink) by PUSH "
    "and PULL, from the call of the one until the other has read them all, both on the same two cores, each chunk "
    f"forced to the disk. *{_JSON}*: `to_json` and `from_json`. *{_TABLES}*: a message for 10,000 rows.",
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
    acknowledged = {_ACKNOWLEDGED: partial(written_to_log, df, rows)}
    yield from measured("transactions", "100 B", "rows/s", acknowledged, times)
    df.unpersist(blocking=True)
    tables = {form: partial(_job_to_job, spark, form, times) for form in _TABLE_ROWS_A_SECOND}
    yield from measured("transactions", "three numbers", "rows/s", tables, times)


def written_to_log(df: DataFrame, rows: int) -> Sample:
    """Rows a second of one transaction until all are in the log of a receiver process."""
    endpoint = free_endpoint()
    with (
        temporary_directory() as scratch,
        receiver(scratch / "log", "--socket-type", "ROUTER", "--bind", endpoint) as pid,
    ):
        wait_for("the receiver", lambda: listens(endpoint), _MOST_SECONDS)
        before, began = cpu_seconds({"receiver": pid}), time.monotonic()
        df.write.format("zmq").mode("append").options(socketType="DEALER", connect=endpoint).save()
        wait_for("all rows in the log", lambda: log_end(scratch / "log") >= rows, _MOST_SECONDS)
        seconds, after = time.monotonic() - began, cpu_seconds({"receiver": pid})
        return Sample(rows / seconds, per_message(before, after, rows))


def _job_to_job(spark: SparkSession, form: str, times: Times) -> Sample:
    """Rows a second from the start of a ``df.write`` until a query has read them all."""
    count = max(10_000, round(_TABLE_ROWS_A_SECOND[form] * times.seconds))
    endpoint = free_endpoint()

    def write(rows: int) -> None:
        df = spark.range(0, rows, 1, _PARTITIONS)
        df = df.selectExpr("id AS a", "int(id % 1000) AS b", "id * 0.5D AS c")
        if form == _JSON:
            df = df.selectExpr("to_json(struct(*)) AS value")
        writer = df.write.format("zmq").mode("append").option("connect", endpoint)
        writer.options(**({"valueFormat": "arrow"} if form == _TABLES else {})).save()

    with temporary_directory() as scratch:
        options = {"socketType": "PULL", "bind": endpoint, "walLocation": str(scratch / "log")}
        if form == _TABLES:
            reader = spark.readStream.format("zmq").schema(_COLUMNS).option("valueFormat", "arrow")
            stream = reader.options(**options).load()
        else:
            stream = stream_of(spark, "zmq", options)
            stream = stream.selectExpr(f"from_json(string(value), '{_COLUMNS}') AS row").select("row.*")
        with running(stream.writeStream.format("noop"), scratch / "checkpoint") as query:
            read = _rows_read(query)
            write(1000)  # connects and warms both sides
            wait_for("the first rows", lambda: read() >= 1000, _MOST_SECONDS)
            before, began = cpu_seconds(), time.monotonic()
            write(count)
            wait_for(f"{count} rows", lambda: read() >= 1000 + count, _MOST_SECONDS)
            seconds, after = time.monotonic() - began, cpu_seconds()
    return Sample(count / seconds, per_message(before, after, count))


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
