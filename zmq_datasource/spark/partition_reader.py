"""The executors' side of reading a log: from a range of ids to record batches. Stateless."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from zmq_datasource.log import Deletions, LogStorage, Slice, read_slices
from zmq_datasource.spark.rows import Rows
from zmq_datasource.spark.worker import set_up_worker

if TYPE_CHECKING:
    from zmq_datasource.log import Store
    from zmq_datasource.source.chunk_protocol import Access

__all__ = ["PATIENCE_SECONDS", "LogInputPartition", "read_log_partition"]


# How long a task waits while no file can be opened or object storage is away. (In local mode Spark does not repeat a
# task that has failed.)
PATIENCE_SECONDS = 60.0


class LogInputPartition(InputPartition):
    """A share of a batch: slices of chunks of one log partition.

    Args:
        store: Where the log is.
        partition: The log partition.
        pieces: The slices, in the order of their ids.
        rows: Makes rows of messages.
        log_id: The log's id.
        fails: The option ``failOnDataLoss``.
        access: How to fetch the chunks from the driver, on an executor that does not see the log; None if the driver
            does not serve them.
        reader: The name of a streaming query; None for a batch read.
    """

    def __init__(
        self,
        store: Store,
        partition: int,
        pieces: Sequence[Slice],
        rows: Rows,
        log_id: str,
        fails: bool,
        *,
        access: Access | None = None,
        reader: str | None = None,
    ) -> None:
        self.log_id = log_id
        self.fails = fails
        self.reader = reader
        self.store = store
        self.access = access
        self.partition = partition
        self.pieces = tuple(pieces)
        self.rows = rows

    def __repr__(self) -> str:
        ids = f"{self.pieces[0].start}..{self.pieces[-1].end}" if self.pieces else "none"
        return f"LogInputPartition({str(self.store)!r}, partition {self.partition}, ids {ids})"


def read_log_partition(share: LogInputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a share, in the order of their ids.

    Raises:
        DamagedChunkError: A chunk is not what was written.
        DataLossError: A chunk is gone. If the log's writer has deleted it and ``failOnDataLoss`` is false, the rows
            continue after it instead.
        DiskFaultError: A chunk could not be read for ``PATIENCE_SECONDS``.
        LogFetchError: This machine does not see the log, and the driver does not answer.
        MalformedMessageError: A value does not fit the schema.
    """
    return share.rows.of(_batches(share))


def _batches(share: LogInputPartition) -> Iterator[pa.RecordBatch]:
    set_up_worker()
    storage = LogStorage(share.store, share.partition, PATIENCE_SECONDS)
    deletions = Deletions(storage, share.log_id, share.fails, share.reader)
    if share.access is None or not share.pieces:
        yield from read_slices(storage, share.pieces, deletions=deletions)
        return
    # Imported only here, because it is not needed where the executors see the log.
    from zmq_datasource.source.remote_chunks import RemoteChunks, RemoteDeletions, chunks_for  # noqa: PLC0415

    with chunks_for(storage, [piece.name for piece in share.pieces], share.access) as chunks:
        if isinstance(chunks, RemoteChunks):
            deletions = RemoteDeletions(chunks, storage, share.fails, share.reader)
        yield from read_slices(chunks, share.pieces, deletions=deletions)
