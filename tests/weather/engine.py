"""Spark's micro-batch engine reduced to its order of steps, around the real readers and writers of the package.

``Source`` does what MicroBatchExecution does with a stream reader: the offsets of a batch are written down first, then
the batch is read, then its commit is written down, and the source is told of a commit when the next batch is planned.
Killed anywhere and started again it repeats the batch that was planned and not committed. ``sink_batch`` does what
Spark does with one batch of a stream writer.
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
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import BinaryType, StructField, StructType

from zmq_datasource.host import failpoints
from zmq_datasource.options import StreamReadOptions, WriteOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.spark.columns import SinkColumns
from zmq_datasource.spark.stream_reader import ZmqStreamReader
from zmq_datasource.spark.write_commit import commit_batch
from zmq_datasource.spark.write_task import run_task

__all__ = ["Source", "read_output", "sink_batch"]

_LIMIT = ReadMaxRows(2**63 - 1)
# A directory that an executor looks for in vain.
_ELSEWHERE = "/nowhere/zmq_datasource"


class Source:
    """One streaming query: a reader, a checkpoint and an idempotent sink of files, below ``directory``.

    Args:
        sees_log: Whether its executors see the directory of the log.
    """

    def __init__(self, directory: Path, options: Mapping[str, str], *, sees_log: bool = True) -> None:
        self._sees_log = sees_log
        self._offsets, self._commits, self._out = (directory / n for n in ("offsets", "commits", "out"))
        for made in (self._offsets, self._commits, self._out):
            made.mkdir(parents=True, exist_ok=True)
        self._reader = ZmqStreamReader(parse(StreamReadOptions, options))

    def run(self, stopped: Callable[[], bool]) -> None:
        """Batch after batch until told to stop."""
        try:
            number, start, before = self._recover()
            while not stopped():
                if start is None:
                    start = self._reader.initialOffset()
                end = self._reader.latestOffset(start, _LIMIT)
                if end == start:
                    if number == 0:
                        start = None  # as Spark, which asks until there is a first batch
                    time.sleep(0.01)
                    continue
                _write(self._offsets / str(number), {"start": start, "end": end})
                failpoints.reach("weather.offsets.after_write")
                if before is not None:
                    self._reader.commit(before)
                self._run_batch(number, start, end)
                self._reader.reportLatestOffset()
                number, start, before = number + 1, end, end
        finally:
            self._reader.stop()

    def _recover(self) -> tuple[int, dict[str, Any] | None, dict[str, Any] | None]:
        planned = sorted(int(path.name) for path in self._offsets.iterdir() if path.name.isdecimal())
        if not planned:
            return 0, None, None
        number = planned[-1]
        batch = json.loads((self._offsets / str(number)).read_text())
        if not (self._commits / str(number)).exists():
            self._run_batch(number, batch["start"], batch["end"])
        return number + 1, batch["end"], batch["end"]

    def _on_executor(self, partition: Any) -> Any:
        if not self._sees_log:
            partition.location = _ELSEWHERE
        return partition

    def _run_batch(self, number: int, start: dict[str, Any], end: dict[str, Any]) -> None:
        rows = [
            [row["id"], row["publisher"], row["sequence"], row["value"].decode(), row["partition"]]
            for partition in map(self._on_executor, self._reader.partitions(start, end))
            for batch in self._reader.read(partition)
            for row in batch.select(["id", "publisher", "sequence", "value", "partition"]).to_pylist()
        ]
        failpoints.reach("weather.output.before_write")
        _write(self._out / f"{number:06d}", rows)
        failpoints.reach("weather.commits.before_write")
        _write(self._commits / str(number), {"end": end})


def read_output(directory: Path) -> list[list[Any]]:
    """The rows of all batches, in order: id, publisher, sequence, value, partition."""
    paths = sorted(p for p in (directory / "out").iterdir() if not p.name.startswith("."))
    return [row for path in paths for row in json.loads(path.read_text())]


def _write(path: Path, content: object) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(content))
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
