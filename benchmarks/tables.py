"""Rows of three numeric columns a second, from one Spark job to another: as tables, and as a message of JSON a row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.measure import Measurement, Sample, Times, measured, temporary_directory, wait_for
from benchmarks.processes import cpu_seconds, per_message
from benchmarks.transactions import free_endpoint

__all__ = ["COLUMNS", "JSON", "TABLES", "Between", "FromJobToJob", "measure_tables", "our_tables"]

# What a query reads, and how to write to it.
Between: TypeAlias = tuple[DataFrame, Callable[[DataFrame], None]]

JSON, TABLES = "JSON, a message a row", "valueFormat=arrow"
COLUMNS = "a BIGINT, b INT, c DOUBLE"

# To begin with; how many rows a run writes follows from the run before.
_ROWS_A_SECOND = 300_000
_TASKS = 2
_MOST_SECONDS = 300.0


def measure_tables(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Both in one session, on the same two cores: the job that writes, and the one that reads."""
    methods: Mapping[str, Callable[[], Sample]] = {
        JSON: FromJobToJob(spark, times, partial(_our_json, spark)),
        TABLES: FromJobToJob(spark, times, partial(our_tables, spark)),
    }
    yield from measured("tables", "three numbers", "rows/s", methods, times)


class FromJobToJob:
    """Rows a second from the start of a ``df.write`` until a query has read them all.

    Args:
        between: Given a directory, makes both.
        peers: Other processes that take part.
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
        self._rate = float(_ROWS_A_SECOND)

    def __call__(self) -> Sample:
        count = max(10_000, round(self._rate * self._times.seconds))
        with temporary_directory() as scratch:
            stream, write = self._between(str(scratch))
            writer = stream.writeStream.format("noop").option(
                "checkpointLocation", str(scratch / "checkpoint")
            )
            query = writer.start()
            try:
                seen = _Seen(query)
                write(self._rows(1000))  # both sides are warm, and know each other
                wait_for("the first rows", lambda: seen.rows() >= 1000, _MOST_SECONDS)
                before, began = cpu_seconds(self._peers), time.monotonic()
                write(self._rows(count))
                wait_for(f"{count} rows", lambda: seen.rows() >= 1000 + count, _MOST_SECONDS)
                seconds, after = time.monotonic() - began, cpu_seconds(self._peers)
            finally:
                query.stop()
        self._rate = count / seconds
        return Sample(self._rate, per_message(before, after, count))

    def _rows(self, count: int) -> DataFrame:
        rows = self._spark.range(0, count, 1, _TASKS)
        return rows.selectExpr("id AS a", "int(id % 1000) AS b", "id * 0.5D AS c")


class _Seen:
    """How many rows a query has read, from the progress of each of its micro-batches."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query
        self._batches: dict[int, int] = {}

    def rows(self) -> int:
        error = self._query.exception()
        if error is not None:
            raise error
        for progress in self._query.recentProgress:  # the last hundred
            self._batches[progress.batchId] = max(
                self._batches.get(progress.batchId, 0), progress.numInputRows
            )
        return sum(self._batches.values())


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
