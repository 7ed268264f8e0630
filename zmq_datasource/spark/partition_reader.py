"""The executors' side of reading a log: a range of ids to record batches. Stateless."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from zmq_datasource.log.reader import Slice, read_slices
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.framing import to_rows

__all__ = ["LogInputPartition", "read_log_partition"]


class LogInputPartition(InputPartition):
    """Where to find a share of a batch: pieces of chunks of one log partition."""

    def __init__(self, location: str, partition: int, pieces: Sequence[Slice], include_frames: bool) -> None:
        self.location = location
        self.partition = partition
        self.pieces = tuple(pieces)
        self.include_frames = include_frames

    def __repr__(self) -> str:
        ids = f"{self.pieces[0].start}..{self.pieces[-1].end}" if self.pieces else "none"
        return f"LogInputPartition({self.location!r}, partition {self.partition}, ids {ids})"


def read_log_partition(share: LogInputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a share, in the order of their ids.

    Raises:
        DamagedChunkError, DataLossError: The log no longer gives what was promised.
    """
    for batch in read_slices(LogStorage(share.location, share.partition), share.pieces):
        yield to_rows(batch, share.include_frames)
