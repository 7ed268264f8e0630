"""A query on a log that another process fills: what ``Ingest`` is to a query on a socket."""

from __future__ import annotations

import time

from zmq_datasource.counters import SourceCounters
from zmq_datasource.ingest import PARTITION
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.wal.follower import FollowedLog
from zmq_datasource.wal.storage import LogStorage

__all__ = ["Follow"]

_TICK = 0.05


class Follow:
    """Reads along; opens no socket and does not keep the log from its writer.

    Args:
        options: ``walLocation`` and ``reader``.
    """

    judge = None

    def __init__(self, options: StreamReadOptions) -> None:
        assert options.wal_location is not None, "options ask for an endpoint or a log"
        self._options = options
        self.counters = SourceCounters()
        self.reader = options.reader
        self.storage = LogStorage(options.wal_location)
        self.log: FollowedLog
        self.resumed_at = 0

    def start(self) -> None:
        """Find the log.

        Raises:
            LogFormatError: There is none.
            LogLockedError: Another query reads it under this name.
        """
        self.log = FollowedLog(self.storage, PARTITION, self.reader)
        self._lock = self.storage.lock_reader(PARTITION, self.reader)
        self.resumed_at = self.log.durable_end

    def seal(self) -> int:
        """The durable end of the log."""
        self.log.refresh()
        return self.log.durable_end

    def gather(self, timeout: float, idle_timeout: float | None) -> int:
        """Wait for a while for more: until ``timeout`` seconds, or ``idle_timeout`` of silence."""
        now = time.monotonic()
        deadline, idle_from, end = now + timeout, now, self.seal()
        while (now := time.monotonic()) < deadline:
            if (newer := self.seal()) != end:
                end, idle_from = newer, now
            elif idle_timeout is not None and now - idle_from >= idle_timeout:
                break
            time.sleep(_TICK)
        return end

    def commit(self, end: int) -> None:
        """The query is done with what is below ``end``."""
        self.log.commit(end)

    def stop(self) -> None:
        """Let another query have the name."""
        self._lock.release()
