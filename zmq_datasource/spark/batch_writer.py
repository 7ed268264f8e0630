"""``df.write``: sends the partitions of a DataFrame."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from zmq_datasource.options import WriteOptions
from zmq_datasource.spark.accounting import SinkAccumulator
from zmq_datasource.spark.columns import SinkColumns

__all__ = ["ZmqBatchWriter"]


class ZmqBatchWriter(DataSourceArrowWriter):
    """The writer of one batch write. ``write`` runs on executors, ``commit`` and ``abort`` on the driver."""

    def __init__(
        self, options: WriteOptions, columns: SinkColumns, accumulator: SinkAccumulator | None
    ) -> None:
        self._options = options
        self._columns = columns
        self._accumulator = accumulator
        # Chosen on the driver, so that it is the same for all tasks.
        self._name = f"write-{options.transaction_id or uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from zmq_datasource.spark.write_task import run_task  # noqa: PLC0415 - only executors send

        return run_task(self._options, self._columns, self._name, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        from zmq_datasource.spark.write_commit import commit_batch  # noqa: PLC0415

        commit_batch(self._options, messages, self._accumulator)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        from zmq_datasource.spark.write_commit import abort_batch  # noqa: PLC0415

        abort_batch(self._options, messages)
