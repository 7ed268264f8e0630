"""``writeStream``: each micro-batch's partitions to sockets."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from zmq_datasource.options import WriteOptions
from zmq_datasource.spark.worker import set_up_worker
from zmq_datasource.spark.write_task import SinkColumns, report_batch, run_task

__all__ = ["ZmqStreamWriter"]

_log = logging.getLogger(__name__)


class ZmqStreamWriter(DataSourceStreamArrowWriter):
    """``write`` runs on executors; ``commit`` and ``abort`` in a short-lived process on the driver."""

    def __init__(self, options: WriteOptions, columns: SinkColumns) -> None:
        self._options = options
        self._columns = columns

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return run_task(self._options, self._columns, None, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        report_batch(messages, f"batch={batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        set_up_worker()
        _log.warning(
            "sink batch=%d aborted: %d of %d tasks had sent their rows, which Spark will send again",
            batchId,
            sum(m is not None for m in messages),
            len(messages),
        )
