"""``writeStream`` and ``df.write``: ``write`` runs on executors, and ``commit`` on the driver.

For a stream, each commit runs in a short process of its own. What a failed batch has staged is seen by no reader, and
goes when the batch is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from zmq_datasource.acknowledged.protocol import anonymous_name
from zmq_datasource.options import WriteOptions
from zmq_datasource.spark.columns import SinkColumns

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator

# ruff: noqa: PLC0415 - only the executors send, and only the driver commits


class _Writer:
    """The methods of both writers.

    Args:
        name: The name of a batch write, which is the same for all its tasks; None for a stream.
    """

    def __init__(
        self,
        options: WriteOptions,
        columns: SinkColumns,
        accumulator: Accumulator[Any] | None,
        name: str | None = None,
    ) -> None:
        self._options = options
        self._columns = columns
        self._accumulator = accumulator
        self._name = name

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from zmq_datasource.spark.write_task import run_task

        return run_task(self._options, self._columns, self._name, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int | None = None) -> None:
        from zmq_datasource.spark.write_commit import commit_batch

        commit_batch(self._options, messages, self._accumulator)


class ZmqStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """The writer of a streaming query. Each task knows the number of its batch, so ``batchId`` is not needed."""


class ZmqBatchWriter(_Writer, DataSourceArrowWriter):
    """The writer of one batch write."""

    def __init__(
        self, options: WriteOptions, columns: SinkColumns, accumulator: Accumulator[Any] | None
    ) -> None:
        name = (
            anonymous_name("write") if options.transaction_id is None else f"write-{options.transaction_id}"
        )
        super().__init__(options, columns, accumulator, name)
