"""Helpers for tests that run streaming queries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.support import as_text, wait_for
from zmq_datasource import register
from zmq_datasource.log.storage import LogStorage


def feed(spark: SparkSession, **options: Any) -> DataFrame:
    """A streaming DataFrame over a PULL socket unless told otherwise."""
    return spark.readStream.format("zmq").options(**as_text({"socketType": "PULL", **options})).load()


@contextmanager
def running(df: DataFrame, out: Path, **trigger: Any) -> Iterator[StreamingQuery]:
    """A query from ``df`` into a Parquet directory ``out``, its checkpoint beside it."""
    query = start(df, out, **trigger)
    try:
        yield query
    finally:
        query.stop()


def new_session(
    directory: Path, master: str = "local[2]", conf: Mapping[str, str] = MappingProxyType({})
) -> SparkSession:
    """This process's first session, with the package's source and sink; what Spark writes is below a directory."""
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    places = {"spark.sql.warehouse.dir": f"{directory}/warehouse", "spark.local.dir": f"{directory}/local"}
    for name, value in {**places, **conf}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    register(session)
    return session


def start(df: DataFrame, out: Path, **trigger: Any) -> StreamingQuery:
    writer = df.writeStream.format("parquet").option("path", str(out))
    writer = writer.option("checkpointLocation", str(out) + ".checkpoint")
    if trigger:
        writer = writer.trigger(**trigger)
    return writer.start()


def wait_until_released(log: Path) -> None:
    """Wait until a stopped query has drained its socket: what is sent before is still its own."""
    LogStorage(str(log)).lock(30).release()


def rows_read(query: StreamingQuery, raise_errors: bool = True) -> int:
    """How far the query has come: the next id of its last finished batch."""
    if raise_errors and (error := query.exception()) is not None:
        raise error
    progress = query.lastProgress
    if progress is None or progress["sources"][0]["endOffset"] is None:
        return 0
    offset = json.loads(progress["sources"][0]["endOffset"])
    return int(offset["next"])


def wait_for_rows(query: StreamingQuery, count: int, seconds: float = 90) -> None:
    wait_for(lambda: rows_read(query) >= count, f"{count} rows read", seconds)


@contextmanager
def idle_events(spark: SparkSession) -> Iterator[None]:
    """Queries that start meanwhile tell of themselves often when they are idle; Spark's way is every ten seconds."""
    spark.conf.set("spark.sql.streaming.noDataProgressEventInterval", "300")
    try:
        yield
    finally:
        spark.conf.unset("spark.sql.streaming.noDataProgressEventInterval")


def table(spark: SparkSession, out: Path) -> DataFrame:
    return spark.read.parquet(str(out))


def committed_rows(out: Path) -> pa.Table:
    """What a query has committed to a Parquet directory: only files that the file sink's own log names count."""
    named: set[str] = set()
    for entry in (out / "_spark_metadata").glob("[0-9]*"):
        for line in entry.read_text().splitlines()[1:]:
            named.add(json.loads(line)["path"].removeprefix("file://"))
    return pa.concat_tables(
        [pq.read_table(path, partitioning=None) for path in sorted(named)] or [pa.table({})]
    )


def ids_and_numbers(out: Path) -> list[tuple[int, int]]:
    """All rows of ``out``: ids, and values as numbers, in the order of ids."""
    rows = committed_rows(out).sort_by("id")
    return [(row["id"], int(row["value"])) for row in rows.select(["id", "value"]).to_pylist()]
