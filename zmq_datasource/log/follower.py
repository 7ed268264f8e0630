"""Follows a log that another process writes, without a lock.

The key of the next chunk is the end of the newest one. So a refresh without news takes three requests, however many
chunks there are: the log's id, the first chunk, and the next chunk. Otherwise the chunks are listed. They are also
listed now and then, because the next chunk may be merged already, and because a shared file system may remember for a
minute that a name was not there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from zmq_datasource.errors import DataLossError, DiskFaultError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log.files import MOUNT_AGAIN
from zmq_datasource.log.index import ChunkIndex, read_index
from zmq_datasource.log.layout import chunk_name, key_of
from zmq_datasource.log.retrier import Retrier
from zmq_datasource.log.storage import LogStorage

# How often the log is refreshed, in a directory and in a bucket (providers charge for requests).
REFRESH_SECONDS = 0.05
_BUCKET_REFRESH_SECONDS = 1.0
_LISTING_SECONDS = 1.0


class LogFollower(ChunkIndex):
    """A log that another process writes.

    Args:
        storage: The log.
        retry_timeout: Seconds for which refusals of the store are tolerated: ``open`` repeats its act, and ``refresh``
            keeps the last listing.
        clock: Returns monotonic seconds.

    Attributes:
        log_id: The id of the log, after ``open``.
    """

    full, fault, unsealed, unsealed_bytes = False, None, 0, 0  # only a writer has these

    def __init__(
        self, storage: LogStorage, retry_timeout: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._storage = storage
        self._retry_timeout = retry_timeout
        self._clock = clock
        self._failing_since: float | None = None
        self._faults = LimitedLog(__name__, "listings that could not be read")
        self._seconds = _BUCKET_REFRESH_SECONDS if storage.request_interval else REFRESH_SECONDS
        self._refreshing = threading.Lock()  # Spark's calls and the thread of the metrics both refresh
        self._next_refresh = self._next_listing = 0.0
        self.log_id = ""

    def open(self) -> None:
        """Find the log, and list its chunks.

        Raises:
            LogFormatError: There is no log.
            LogError: The log cannot be read.
        """
        Retrier(self._retry_timeout).retry(self._find)

    def _find(self) -> None:
        self.log_id = self._storage.log_id()
        self.refresh_now()

    def refresh(self) -> None:
        """Find new and deleted chunks. Does nothing within ``REFRESH_SECONDS`` of the last refresh (in a bucket, 1 s).

        Raises:
            DiskFaultError: All chunks are missing, or the store refuses, for longer than ``retry_timeout``.
            DataLossError: Another log is in the place of this one.
        """
        # One thread at a time: otherwise the older of two listings could replace the newer one.
        with self._refreshing:
            now = self._clock()
            if now < self._next_refresh:
                return
            try:
                self._refresh()
            except DiskFaultError as e:
                if self._failing_since is None:
                    self._failing_since = now
                if now - self._failing_since >= self._retry_timeout:
                    raise
                self._faults.warn("keeping the last listing: %s", e)
            else:
                self._failing_since = None
                self._faults.flush()

    def refresh_now(self) -> None:
        """Find new and deleted chunks now. Raises what ``refresh`` raises; DiskFaultError without waiting."""
        with self._refreshing:
            self._refresh(lists=True)

    def _refresh(self, lists: bool = False) -> None:
        began = self._clock()
        found = self._storage.log_id_again()
        if found != self.log_id:
            raise DataLossError(
                f"following log {self._storage.root}: it was created again ({found}, not {self.log_id}); give the "
                "query a new checkpoint"
            )
        if lists or began >= self._next_listing or self._has_changed():
            self._list()
            self._next_listing = began + _LISTING_SECONDS + self._storage.request_interval
        self._next_refresh = began + self._seconds

    def _has_changed(self) -> bool:
        """Whether the first chunk is gone, or the next one is there."""
        find, first = self._storage.store.find, self.all[:1]
        is_gone = not first or find(key_of(first[0].name)) is None
        return is_gone or find(key_of(chunk_name(self.durable_end))) is not None

    def _list(self) -> None:
        """List all chunks.

        Raises:
            DiskFaultError: Neither the known chunks nor later ones are there.
        """
        index = read_index(self._storage)
        if index.durable_end < self.durable_end:  # the newest chunk is never deleted
            raise DiskFaultError(f"reading {self._storage}: no chunk is there any more. {MOUNT_AGAIN}")
        self.replace(index)
