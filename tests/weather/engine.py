"""Spark's micro-batch engine reduced to its order of steps, around the real readers and writers of the package.

``Query`` calls its sources and writes its checkpoint in the order in which Spark's MicroBatchExecution does.
``tests/test_spark_calls.py`` compares it with Spark. Killed anywhere and started again
it goes on as Spark does. ``Source`` is the query that the weather machine runs: one ZeroMQ source, and an idempotent
sink of files. ``sink_batch`` does what Spark does with one batch of a stream writer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import BinaryType, StructField, StructType

from zmq_datasource.host import failpoints
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.options import StreamReadOptions, WriteOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.spark.columns import SinkColumns
from zmq_datasource.spark.partition_reader import LogInputPartition
from zmq_datasource.spark.stream_reader import ZmqStreamReader
from zmq_datasource.spark.write_commit import commit_batch
from zmq_datasource.spark.write_task import run_task

__all__ = ["Query", "Source", "read_end", "read_output", "sink_batch", "write_rows"]

# A directory that an executor looks for in vain.
_ELSEWHERE = DirectoryStore("/nowhere/zmq_datasource")
# spark.sql.streaming.pollingDelay
_POLLING_SECONDS = 0.01


class Query:
    """One streaming query from one or more sources, with a checkpoint in Spark's format below ``directory``.

    Args:
        make: Makes the reader of each source. As in Spark, one makes all calls but ``read``, and another one is only
            pickled for the tasks.
        sink: Gets the number of each batch and what the tasks have read, one partition after the other; for one
            number it may be called again, with the same.
        available_now: Whether it ends when all that is there now is read.
    """

    def __init__(
        self,
        directory: Path,
        make: Sequence[Callable[[], DataSourceStreamReader]],
        sink: Callable[[int, list[Any]], None],
        available_now: bool = False,
    ) -> None:
        self._offsets, self._commits = directory / "offsets", directory / "commits"
        for made in (self._offsets, self._commits):
            made.mkdir(parents=True, exist_ok=True)
        self._make, self._sink, self._available_now = make, sink, available_now
        self._readers: list[DataSourceStreamReader] = []
        self._number = 0
        # Of each source, as JSON text, which is what Spark compares: where the last batch that is done ends; None
        # before the first.
        self._done: list[str | None] = [None] * len(make)
        # Where the next batch ends; None if it is not planned.
        self._planned: list[str] | None = None

    def run(self, stopped: Callable[[], bool]) -> None:
        """Batch after batch, until all is read that was there, or ``stopped`` says so."""
        self._readers = [make() for make in self._make]
        try:
            limits = [self._limit(reader) for reader in self._readers]
            self._recover()
            while not stopped():
                if self._run_trigger(limits):
                    continue
                if self._available_now:
                    return
                time.sleep(_POLLING_SECONDS)
        finally:
            for reader in self._readers:
                reader.stop()

    def _limit(self, reader: DataSourceStreamReader) -> Any:
        if self._available_now:
            assert isinstance(reader, SupportsTriggerAvailableNow)
            reader.prepareForTriggerAvailableNow()
        return reader.getDefaultReadLimit()

    def _recover(self) -> None:
        """Find out which batch is the next; the last one is repeated if it is not done."""
        planned = _newest(self._offsets)
        if planned is None:
            return
        ends = self._read_ends(planned)
        if (self._commits / str(planned)).exists():
            self._number, self._done = planned + 1, ends
            return
        self._number, self._planned = planned, [end or "" for end in ends]
        if planned > 0:
            self._done = self._read_ends(planned - 1)

    def _read_ends(self, batch: int) -> list[str | None]:
        """Where a batch ends in each source; None in one that has joined the query since, as named sources may."""
        ends = _read_offsets(self._offsets / str(batch))
        return [*ends, *[None] * (len(self._readers) - len(ends))]

    def _run_trigger(self, limits: list[Any]) -> bool:
        """Plan a batch if there is something new, and run it; whether there was one."""
        if self._planned is None:
            latest = [self._latest(*each) for each in zip(self._readers, self._done, limits, strict=True)]
            # There is none yet in the first batch, so that one is planned also if there is no data.
            if latest == self._done:
                return False
            _write(self._offsets / str(self._number), "\n".join(["v1", "{}", *latest]))
            failpoints.reach("weather.offsets.after_write")
            self._planned = latest
            if self._number > 0:
                for reader, done in zip(self._readers, self._done, strict=True):
                    reader.commit(json.loads(done or ""))
        self._run_batch(self._planned)
        self._number, self._done, self._planned = self._number + 1, list(self._planned), None
        return True

    def _latest(self, reader: DataSourceStreamReader, done: str | None, limit: Any) -> str:
        start = _json(reader.initialOffset()) if done is None else done
        latest = _json(reader.latestOffset(json.loads(start), limit))
        reader.reportLatestOffset()
        return latest

    def _run_batch(self, ends: list[str]) -> None:
        # Spark does not keep where the first batch begins: it asks again.
        starts = [
            _json(reader.initialOffset()) if done is None else done
            for reader, done in zip(self._readers, self._done, strict=True)
        ]
        tasks = [
            (number, partition)
            for number, (reader, start, end) in enumerate(zip(self._readers, starts, ends, strict=True))
            if self._done[number] != end  # a source without anything new has no part in the batch
            for partition in reader.partitions(json.loads(start), json.loads(end))
        ]
        items = []
        for number, partition in tasks:
            pickled = cloudpickle.dumps((self._make[number](), self.on_executor(partition)))
            reader, share = cloudpickle.loads(pickled)
            items += list(reader.read(share))
        failpoints.reach("weather.output.before_write")
        self._sink(self._number, items)
        failpoints.reach("weather.commits.before_write")
        _write(self._commits / str(self._number), "v1\n{}")

    def on_executor(self, partition: InputPartition) -> InputPartition:
        """A partition as its task gets it."""
        return partition


class Source(Query):
    """One streaming query from a ZeroMQ source into files: a reader, a checkpoint and a sink, below ``directory``.

    Args:
        sees_log: Whether its executors see the directory of the log.
    """

    def __init__(
        self,
        directory: Path,
        options: Mapping[str, str],
        *,
        sees_log: bool = True,
    ) -> None:
        self._sees_log = sees_log
        parsed = parse(StreamReadOptions, options)

        def write(number: int, batches: list[pa.RecordBatch]) -> None:
            columns = ["id", "publisher", "sequence", "value"]
            write_rows(
                directory, number, [list(r.values()) for b in batches for r in b.select(columns).to_pylist()]
            )

        (directory / "out").mkdir(parents=True, exist_ok=True)
        super().__init__(directory, [lambda: ZmqStreamReader(parsed)], write)

    def on_executor(self, partition: InputPartition) -> InputPartition:
        if not self._sees_log:
            assert isinstance(partition, LogInputPartition)
            partition.store = _ELSEWHERE
        return partition


def write_rows(directory: Path, number: int, rows: list[list[Any]]) -> None:
    """The output of one batch: id, publisher, sequence, value or None; again for a repeated batch."""
    texts = [
        [id_, publisher, sequence, None if value is None else bytes(value).decode()]
        for id_, publisher, sequence, value in rows
    ]
    _write(directory / "out" / f"{number:06d}", json.dumps(texts))


def read_output(directory: Path) -> list[list[Any]]:
    """The rows of all batches, in order: id, publisher, sequence, value."""
    paths = sorted((directory / "out").glob("[0-9]*"))
    return [row for path in paths for row in json.loads(path.read_text())]


def read_end(directory: Path) -> dict[str, Any] | None:
    """The offset at which the last batch ends that is done; None before the first. Of the first source, if many."""
    done = _newest(directory / "commits")
    if done is None:
        return None
    offset: dict[str, Any] = json.loads(_read_offsets(directory / "offsets" / str(done))[0])
    return offset


def _newest(log: Path) -> int | None:
    return max((int(path.name) for path in log.glob("[0-9]*")), default=None)


def _read_offsets(path: Path) -> list[str]:
    """The offset of each source, as JSON text: what follows a line with the version and one with the settings."""
    version, _, *offsets = path.read_text().splitlines()
    assert version == "v1", f"{path} is of a version that is not known here: {version}"
    return offsets


def _json(offset: dict[str, Any]) -> str:
    return json.dumps(offset)


def _write(path: Path, content: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(content)
    os.replace(temporary, path)


class _Context:
    """What a task is told by Spark."""

    def __init__(self, query: str, batch: int, partition: int) -> None:
        self._partition = partition
        self._properties = {
            "sql.streaming.queryId": query,
            "streaming.sql.batchId": str(batch),
            "spark.app.id": "weather",
            "spark.sql.execution.root.id": f"{batch}-{time.monotonic_ns()}",
        }

    def partitionId(self) -> int:
        return self._partition

    def attemptNumber(self) -> int:
        return 0

    def getLocalProperty(self, key: str) -> str | None:
        return self._properties.get(key)


def sink_batch(
    options: Mapping[str, str], query: str, batch: int, partitions: Sequence[Sequence[str]]
) -> dict[str, int]:
    """Write one batch, a task for each partition, and commit it; the account of what was done.

    Raises:
        ZmqDataSourceError: As Spark would hear it; it would repeat the batch.
    """
    parsed = parse(WriteOptions, options)
    columns = SinkColumns.of(StructType([StructField("value", BinaryType())]), parsed)
    reports = []
    for partition, values in enumerate(partitions):
        rows = pa.record_batch({"value": pa.array([v.encode() for v in values], pa.binary())})
        with mock.patch("pyspark.TaskContext.get", lambda p=partition: _Context(query, batch, p)):
            reports.append(run_task(parsed, columns, None, iter([rows])))
    total = commit_batch(parsed, reports)
    return {
        "rows": total.rows,
        "sent": total.sent,
        "dropped": total.dropped.total(),
        "deadLettered": total.dead_lettered.total(),
    }
