"""A log that another process writes, as a reader sees it: listed now and then, never locked."""

from __future__ import annotations

import time
from collections.abc import Sequence

from zmq_datasource.errors import DataLossError
from zmq_datasource.wal.index import ChunkIndex
from zmq_datasource.wal.layout import Chunk
from zmq_datasource.wal.reader import read_index
from zmq_datasource.wal.storage import LogStorage

__all__ = ["FollowedLog"]

_LISTING_SECONDS = 0.05


class FollowedLog:
    """What ``LogWriter`` offers to a query, of a log that somebody else writes.

    Args:
        reader: Names who reads, for the writer to know what may be deleted.
    """

    full, fault = False, None  # the writer's affair
    unsealed = unsealed_bytes = 0  # and so is what is not there yet

    def __init__(self, storage: LogStorage, partition: int, reader: str) -> None:
        self._storage = storage
        self._partition = partition
        self._reader = reader
        self._index = ChunkIndex()
        self._next_listing = 0.0
        self._committed = -1
        self.log_id = storage.log_id()
        self.refresh()

    def refresh(self) -> None:
        """List what there is, if the last listing is not quite new."""
        now = time.monotonic()
        if now >= self._next_listing:
            found = self._storage.log_id()
            if found != self.log_id:
                raise DataLossError(
                    f"reading along log {self._storage.root}: it was made anew ({found}, not {self.log_id}); give the "
                    "query a new checkpoint"
                )
            self._index = read_index(self._storage, self._partition)
            self._next_listing = now + _LISTING_SECONDS

    @property
    def earliest(self) -> int:
        return self._index.earliest

    @property
    def durable_end(self) -> int:
        """The id after the last one."""
        return self._index.end

    @property
    def size(self) -> int:
        """Bytes of the chunks there are."""
        return self._index.size

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return len(self._index)

    def covering(self, start: int, end: int) -> Sequence[Chunk]:
        """The chunks that hold any id of ``[start, end)``."""
        return self._index.covering(start, end)

    def commit(self, end: int) -> None:
        """This reader will never again ask for an id below ``end``."""
        if end != self._committed:
            self._storage.write_reader(self._partition, self._reader, end)
            self._committed = end
