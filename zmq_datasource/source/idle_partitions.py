"""Delete chunks in log partitions that no receiver fills any more, because the number of receivers has changed."""

from __future__ import annotations

import time

from zmq_datasource.errors import LogLockedError
from zmq_datasource.log import LogStorage, LogWriter, Readers, read_index
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.location import feed_of

__all__ = ["IdlePartition"]


class IdlePartition:
    """A partition that no receiver fills, for a process that receives or follows the feed's other partitions.

    The newest chunk stays, because it has the partition's last state.

    Args:
        storage: The partition.
        options: The options of the feed.

    Attributes:
        check_seconds: How often ``expire`` looks for chunks to delete.
    """

    check_seconds = 10.0

    def __init__(self, storage: LogStorage, options: StreamReadOptions) -> None:
        self._storage = storage
        self._options = options
        self._readers = Readers(storage, options.wal_retention)
        self._next_check = 0.0

    def expire(self) -> None:
        """Delete the chunks that all queries have read, and that are past their retention.

        It waits for no lock. It deletes nothing if another process writes the partition, or no query has read it.
        Most calls do nothing, because it looks only every ``check_seconds``.

        Raises:
            LogError: The partition cannot be read or opened.
        """
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + self.check_seconds + self._storage.leisure
        options, readers = self._options, self._readers
        needed, index = readers.needed(), read_index(self._storage)
        retention = max(float(options.wal_retention), readers.retention)
        if needed is None or not index.removable(needed, time.time() - retention):
            return
        log = LogWriter(
            self._storage,
            chunk_bytes=options.wal_chunk_bytes,
            max_bytes=options.wal_max_bytes,
            retention=retention,
            readers=readers,
        )
        try:
            log.open(0.0, feed_of(options))
        except LogLockedError:  # another process writes the partition
            return
        try:
            log.commit(needed)
        finally:
            log.close()
