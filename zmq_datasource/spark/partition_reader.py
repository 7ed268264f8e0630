"""The executors' side of reading a log: a range of ids to record batches. Stateless."""

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


# A task outlives that no file can be opened, or that object storage is away, for so long; Spark repeats one that has
# failed, but not everywhere.
PATIENCE_SECONDS = 60.0


class LogInputPartition(InputPartition):
    """Where to find a share of a batch: pieces of chunks of one log partition.

    Args:
        store: Where the log is.
        rows: What Spark gets of the messages.
        log_id: Of the log.
        fails: ``failOnDataLoss``.
        access: How the driver serves them to who does not see them; None if it does not.
        reader: Name of a streaming query; None of a batch read.
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
        DataLossError: A chunk is gone. Not if the log's writer deleted it, and ``failOnDataLoss`` is false: then the
            rows go on after it.
        DiskFaultError: It could not be read for ``PATIENCE_SECONDS``.
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
    # Who sees the log does without what it takes to be served.
    from zmq_datasource.source.remote_chunks import RemoteChunks, RemoteDeletions, chunks_for  # noqa: PLC0415

    with chunks_for(storage, [piece.name for piece in share.pieces], share.access) as chunks:
        if isinstance(chunks, RemoteChunks):
            deletions = RemoteDeletions(chunks, storage, share.fails, share.reader)
        yield from read_slices(chunks, share.pieces, deletions=deletions)
