"""Journal first: what was received gets its id and is written; then, in order, it may be published."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import pyarrow as pa

from zmq_datasource.log import (
    LOCK_WAIT_SECONDS,
    Carried,
    DirectoryStore,
    FilledFile,
    LogStorage,
    LogWriter,
    Readers,
)
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.view import Progress

__all__ = ["Journal", "Written"]

# A proxy reads for its subscribers, and has no record of its own.
_OWN = "proxy"


class Written(NamedTuple):
    """Rows that are durable, with the ids from ``first`` on."""

    first: int
    rows: pa.RecordBatch


class Journal:
    """The log of a proxy, which is written group by group. Belongs to the live thread.

    It is a ``committer.TransactionLog``.

    Args:
        options: Where it is, and what bounds it.
        carried: What the log keeps beside the rows.
        notify: Called by another thread when something was written.

    Attributes:
        log: Its writer.
    """

    takes_files = False  # subscribers get the rows

    def __init__(self, options: ProxyOptions, carried: Carried, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._chunk_bytes = options.chunk_bytes
        self._written: deque[Written] = deque()
        self.storage = LogStorage(DirectoryStore(options.wal_location, options.wal_sync))
        self._readers = Readers(self.storage, options.wal_retention)
        self._readers.own = _OWN
        self.log = LogWriter(
            self.storage,
            chunk_bytes=options.chunk_bytes,
            max_bytes=options.wal_max_bytes,
            retention=options.wal_retention,
            retry_timeout=options.wal_retry_timeout,
            make_room="any" if options.when_full == "discard" else "done",
            carried=carried,
            readers=self._readers,
            readers_decide=True,
            written=self._note_written,
        )

    def open(self) -> None:
        """Become the log's writer.

        Raises:
            LogError: The log is held by another, damaged, or not writable.
        """
        self.log.open(LOCK_WAIT_SECONDS)
        self._readers.opened()

    def _note_written(self, first: int, batches: Sequence[pa.RecordBatch]) -> None:
        """In the log's thread."""
        for batch in batches:
            self._written.append(Written(first, batch))
            first += batch.num_rows
        self._notify()

    @property
    def progress(self) -> Progress:
        """How far the log has come, for the process that reads its files."""
        grown = self.log.grown  # before the others: a chunk that is sealed in between is reported as both
        return Progress(self.log.earliest, self.log.durable_end, grown)

    @property
    def full(self) -> bool:
        """Whether nothing more is to come for now."""
        return self.log.full

    def append_whole(self, batches: Iterable[pa.RecordBatch], filled: FilledFile | None = None) -> None:
        """Number rows; ``cut`` has them written."""
        assert filled is None, "it takes no files"
        self.log.append_whole(batches)

    def cut(self) -> Future[int]:
        """Have what was appended written; ``written`` gives it back then.

        The chunk ends with it if it is large enough.
        """
        return self.log.cut() if self.log.open_bytes >= self._chunk_bytes else self.log.flush()

    def written(self) -> Iterator[Written]:
        """What is durable and was not given back yet, in order."""
        while self._written:
            yield self._written.popleft()
