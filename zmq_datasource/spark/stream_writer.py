"""``writeStream``: sends the partitions of each micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from zmq_datasource.options import WriteOptions
from zmq_datasource.spark.accounting import SinkAccumulator
from zmq_datasource.spark.columns import SinkColumns

__all__ = ["ZmqStreamWriter"]


class ZmqStreamWriter(DataSourceStreamArrowWriter):
    """The writer of a query. ``write`` runs on executors, ``commit`` and ``abort`` in short processes on the driver."""

    def __init__(
        self, options: WriteOptions, columns: SinkColumns, accumulator: SinkAccumulator | None
    ) -> None:
        self._options = options
        self._columns = columns
        self._accumulator = accumulator

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from zmq_datasource.spark.write_task import run_task  # noqa: PLC0415 - only executors send

        return run_task(self._options, self._columns, None, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        from zmq_datasource.spark.write_commit import commit_batch  # noqa: PLC0415

        commit_batch(self._options, messages, self._accumulator)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        from zmq_datasource.spark.write_commit import abort_batch  # noqa: PLC0415

        abort_batch(self._options, messages)
