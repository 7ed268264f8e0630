"""What a query costs before its first row and while no message arrives, beside sources that do nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from benchmarks.measure import Measurement, Sample, Times, measured, temporary_directory, wait_for
from benchmarks.peers import peer
from benchmarks.processes import cpu_seconds, source_runners
from zmq_datasource.log import DirectoryStore, LogStorage, LogWriter
from zmq_datasource.messages.rows import message_rows, times_of

__all__ = ["EMPTY", "FIRST_ROWS", "IDLE", "MANY_CHUNKS", "ZMQ", "measure_idle"]

_MOST_SECONDS = 60.0
_CHUNKS = 20_000
_RATE, EMPTY, ZMQ = "rate", "a Python source that does nothing", "zmq"
MANY_CHUNKS = f"zmq, a log of {_CHUNKS:,} chunks"
FIRST_ROWS = ("first row of a new query", "first row of a restarted query")
IDLE = "idle query"


class EmptyDataSource(DataSource):
    """``format("empty")`` has one more row after each start of its query."""

    @classmethod
    def name(cls) -> str:
        return "empty"

    def schema(self) -> str:
        return "value BINARY"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _EmptyReader()


class _EmptyReader(DataSourceStreamReader):
    _latest: int | None = None

    def initialOffset(self) -> dict[str, int]:
        return {"count": 0}

    def latestOffset(self, start: dict[str, int], limit: object = None) -> dict[str, int]:
        if self._latest is None:
            self._latest = start["count"] + 1
        return {"count": self._latest}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(end["count"])]

    def read(self, partition: InputPartition) -> Iterator[tuple[bytes]]:
        yield (b"row",)


def measure_idle(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Milliseconds to the first row, and the share of a core that a query takes while no message comes."""
    spark.dataSource.register(EmptyDataSource)
    with peer("push", size=100, rate=1000) as push, temporary_directory() as scratch:
        push.go()
        feeds: Mapping[str, Mapping[str, str]] = {
            _RATE: {"format": "rate", "rowsPerSecond": "1000"},
            EMPTY: {"format": "empty"},
            ZMQ: {"format": "zmq", "socketType": "PULL", "connect": push.endpoint},
        }
        for case, restarted in (
            ("first row of a new query", False),
            ("first row of a restarted query", True),
        ):
            methods = {
                name: partial(_first_row, spark, options, scratch, restarted)
                for name, options in feeds.items()
            }
            yield from measured("latency", case, "ms", methods, times)
        push.stop()
    with peer("push") as silent, temporary_directory() as scratch, _many_chunks(scratch / "chunks"):
        pull = {"format": "zmq", "socketType": "PULL", "connect": silent.endpoint}
        methods = {
            EMPTY: partial(_idle, spark, {"format": "empty"}, scratch, times),
            ZMQ: partial(_idle, spark, pull | {"walLocation": str(scratch / "few")}, scratch, times),
            MANY_CHUNKS: partial(
                _idle, spark, pull | {"walLocation": str(scratch / "chunks")}, scratch, times
            ),
        }
        yield from measured("latency", IDLE, "% of a core", methods, times)


def _first_row(spark: SparkSession, options: Mapping[str, str], scratch: Path, restarted: bool) -> Sample:
    """From ``start()`` until the user's function has a row; the second time of one checkpoint, if ``restarted``."""
    directory = scratch / f"{time.monotonic_ns()}"
    if options["format"] == "zmq":
        options = {**options, "walLocation": str(directory / "log")}
    for _ in range(1 + restarted):
        with _query(spark, options, directory / "checkpoint") as first:
            began = time.monotonic()
            wait_for("the first row", lambda: bool(first), _MOST_SECONDS, 0.001)
    return Sample((first[0] - began) * 1000)


def _idle(spark: SparkSession, options: Mapping[str, str], scratch: Path, times: Times) -> Sample:
    """Percent of a core that Spark's processes take while nothing comes."""
    with _query(spark, options, scratch / f"{time.monotonic_ns()}"):
        wait_for("the source runner", lambda: bool(source_runners()), _MOST_SECONDS)
        time.sleep(times.warm_up + 1)
        before = cpu_seconds({})
        time.sleep(times.seconds)
        after = cpu_seconds({})
    # A worker that has ended meanwhile takes its earlier time with it.
    used = sum(max(0.0, after[name] - before.get(name, 0.0)) for name in after)
    return Sample(100 * used / times.seconds)


@contextmanager
def _query(spark: SparkSession, options: Mapping[str, str], checkpoint: Path) -> Iterator[list[float]]:
    """A running query. It fills the list with the time at which its user's function had the first row."""
    first: list[float] = []

    def note(batch: DataFrame, _: int) -> None:
        if not first and batch.toArrow().num_rows:
            first.append(time.monotonic())

    source = options["format"]
    options = {name: value for name, value in options.items() if name != "format"}
    stream = spark.readStream.format(source).options(**options).load()
    query = stream.writeStream.option("checkpointLocation", str(checkpoint)).foreachBatch(note).start()
    try:
        yield first
    finally:
        query.stop()
        wait_for("the source runner to end", lambda: not source_runners(), _MOST_SECONDS)


@contextmanager
def _many_chunks(location: Path) -> Iterator[None]:
    """A log of so many chunks, one message each."""
    log = LogWriter(LogStorage(DirectoryStore(location, sync=False)), chunk_bytes=1 << 20, max_bytes=1 << 40)
    log.open()
    row = message_rows(pa.array([b"row"], pa.binary()), times_of([(0, 1)]))
    for _ in range(_CHUNKS):
        log.append(row)
        log.cut().result(10)
    log.close()
    yield
