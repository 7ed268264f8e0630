"""The proxy's log, as the live process fills it: rows get their ids, are written, and may then be published."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import pyarrow as pa

from zmq_datasource.host.wake_pipe import WakePipe
from zmq_datasource.log import (
    LOCK_WAIT_SECONDS,
    STORE_RETRY_SECONDS,
    Carried,
    FilledFile,
    Leases,
    LogStorage,
    LogWriter,
)
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.view import Progress


class Written(NamedTuple):
    """Rows that are written, and the id of the first one."""

    first: int
    rows: pa.RecordBatch


class Journal:
    """A log that is written group by group; it is an ``acknowledged.transactions.TransactionLog``. In one thread.

    Args:
        options: The place of the log, and its bounds.
        carried: The state that the log keeps beside the rows.

    Attributes:
        log: The log's writer.
        descriptor: Readable when the log's thread has written something.

    Raises:
        LogError: Another process writes the log, or it is damaged, or not writable.
    """

    takes_files = False  # because the rows are published

    def __init__(self, options: ProxyOptions, carried: Carried) -> None:
        self._chunk_bytes = options.chunk_bytes
        self._written: deque[Written] = deque()
        self.storage = LogStorage(options.wal_location)
        self.log = LogWriter(
            self.storage,
            chunk_bytes=options.chunk_bytes,
            max_bytes=options.wal_max_bytes,
            retention=options.wal_retention,
            retry_timeout=STORE_RETRY_SECONDS,
            make_room="any" if options.when_full == "discard" else "done",
            carried=carried,
            leases=Leases(self.storage, options.wal_retention, keeps_unread=False),
            written=self._add_written,
        )
        self.log.open(LOCK_WAIT_SECONDS)
        self._wakes = WakePipe()
        self.descriptor = self._wakes.descriptor

    def close(self) -> None:
        """Write what was appended, and let another process write the log.

        Raises:
            LogError: The disk refuses.
        """
        try:
            self.log.close()
        finally:
            self._wakes.close()

    def _add_written(self, first: int, batches: Sequence[pa.RecordBatch]) -> None:
        """Called in the log's thread."""
        for batch in batches:
            self._written.append(Written(first, batch))
            first += batch.num_rows
        self._wakes.wake()

    @property
    def progress(self) -> Progress:
        """How far the log is, for the server process."""
        # The open chunk first: a chunk that is sealed at this moment is then reported as both, not as neither.
        grown = self.log.grown
        return Progress(self.log.earliest, self.log.durable_end, grown)

    @property
    def full(self) -> bool:
        """Whether the log has no room for more rows now."""
        return self.log.full

    def append_whole(self, batches: Iterable[pa.RecordBatch], filled: FilledFile | None = None) -> None:
        """Give ids to rows. ``cut`` writes them."""
        assert filled is None, "takes_files is false"
        self.log.append_whole(batches)

    def cut(self) -> Future[int]:
        """Start writing what was appended, as one group. The group ends the chunk if the chunk is large enough."""
        return self.log.cut() if self.log.open_bytes >= self._chunk_bytes else self.log.flush()

    def written(self) -> Iterator[Written]:
        """The rows that were written since the last call, in order."""
        self._wakes.clear()
        while self._written:
            yield self._written.popleft()
