"""``df.write``: a DataFrame's partitions to sockets."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from zmq_datasource.options import WriteOptions
from zmq_datasource.spark.worker import set_up_worker
from zmq_datasource.spark.write_task import SinkColumns, report_batch, run_task

__all__ = ["ZmqBatchWriter"]

_log = logging.getLogger(__name__)


class ZmqBatchWriter(DataSourceArrowWriter):
    """``write`` runs on executors; ``commit`` and ``abort`` on the driver."""

    def __init__(self, options: WriteOptions, columns: SinkColumns) -> None:
        self._options = options
        self._columns = columns
        # Made on the driver, so that it is the same for all tasks.
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return run_task(self._options, self._columns, self._job, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        report_batch(messages, "write")

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        set_up_worker()
        _log.warning(
            "sink write aborted: %d of %d tasks had sent their rows",
            sum(m is not None for m in messages),
            len(messages),
        )
