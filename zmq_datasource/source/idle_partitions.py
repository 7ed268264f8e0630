"""Deletes what is done in log partitions that no receiver fills any more, because there are fewer receivers now."""

from __future__ import annotations

import time

from zmq_datasource.errors import LogLockedError
from zmq_datasource.log import LogStorage, LogWriter, Readers, read_index
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.terms import feed_of

__all__ = ["IdlePartition"]


class IdlePartition:
    """One of them, as a process sees it that receives the feed's other partitions, or follows them.

    The newest chunk stays: it has the partition's last state.

    Args:
        storage: Of the partition.
        options: Of the feed.

    Attributes:
        look_seconds: How often it looks for what can be deleted.
    """

    look_seconds = 10.0

    def __init__(self, storage: LogStorage, options: StreamReadOptions) -> None:
        self._storage = storage
        self._options = options
        self._readers = Readers(storage, options.wal_retention)
        self._next_look = 0.0

    def expire(self) -> None:
        """Delete the chunks that all queries have read and whose retention is over; now and then, and without waiting.

        Nothing is deleted where another process writes the partition, or before a first query has read it.

        Raises:
            LogError: The partition cannot be read or opened.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self.look_seconds + self._storage.leisure
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
        except LogLockedError:  # a receiver has it by now
            return
        try:
            log.commit(needed)
        finally:
            log.close()
