"""Follows a log that another process writes, without a lock.

The key of the next chunk is the end of the newest one. So a refresh takes three requests, however many chunks there
are: the log's id, the first chunk, and the next chunk. Now and then the names after the newest chunk are listed too,
because a shared file system may remember for a minute that a name was not there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from zmq_datasource.errors import DataLossError, DiskFaultError, LogFormatError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log.chunk import read_facts
from zmq_datasource.log.facts import Incarnations
from zmq_datasource.log.files import MOUNT_AGAIN
from zmq_datasource.log.index import Contents, chunks_of, read_index
from zmq_datasource.log.layout import Chunk, chunk_name
from zmq_datasource.log.retrier import Retrier
from zmq_datasource.log.storage import LogStorage

# How often the log is refreshed, in a directory and in a bucket (providers charge for requests).
REFRESH_SECONDS = 0.05
_BUCKET_REFRESH_SECONDS = 1.0
_LISTING_SECONDS = 1.0
# If so many chunks at the front were deleted, all chunks are listed, instead of looking for the next one.
_MOST_DELETED = 10
# While a listing runs, chunks are written and deleted. So a chunk counts as missing only if so many listings lack it.
_LISTINGS = 10


class LogFollower(Contents):
    """A log that another process writes.

    Args:
        storage: The log.
        retry_timeout: Seconds for which refusals of the store are tolerated: ``open`` repeats its act, and ``refresh``
            keeps the last listing.
        clock: Returns monotonic seconds.

    Attributes:
        log_id: The id of the log, after ``open``.
    """

    full, fault, unsealed = False, None, 0  # only a writer has these

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
            LogFormatError: A chunk after the newest known one is missing.
            DiskFaultError: All chunks are missing, or the store refuses, for longer than ``retry_timeout``.
            DataLossError: Another log, or an older copy, is in the place of this one.
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
        self._remove_deleted()
        may_miss = not self._storage.request_interval  # a bucket shows new objects at once
        self._add_new(lists or (may_miss and began >= self._next_listing))
        self._next_refresh = began + self._seconds

    def _check_incarnation(self, message_id: int, incarnations: Incarnations) -> None:
        """Check that new chunks continue the known ones, and do not replace them.

        Raises:
            DataLossError: An older copy of the log was restored and received into.
        """
        known, found = self.incarnations.of(message_id), incarnations.of(message_id)
        if known is not None and found is not None and known != found:
            raise DataLossError(
                f"following {self._storage}: id {message_id} was written by {known} and is now by {found}: an "
                "older copy of the log was restored and received into. Restore the log that the query has read, or "
                "give the query a new checkpoint"
            )

    def _remove_deleted(self) -> None:
        gone = 0
        for chunk in self.covering(self.earliest, self.durable_end):
            if self._storage.find_chunk(chunk.first) is not None:
                with self._lock:
                    self._index.remove_front(gone)
                return
            gone += 1
            if gone == _MOST_DELETED:
                break
        if gone:
            self._list_all()

    def _is_there(self, chunk: Chunk) -> bool:
        """Whether a known chunk is still there. A stray (see ``fence``) in its place does not count."""
        with suppress(FileNotFoundError):
            return read_facts(self._storage, chunk.first).incarnation == chunk.writer
        return False

    def _list_all(self) -> None:
        """List all chunks.

        Raises:
            DiskFaultError: Neither the known chunks nor later ones are there.
        """
        index, newest = read_index(self._storage), self.newest
        if newest is not None:
            if index.end < newest.end:  # the newest chunk is never deleted
                raise DiskFaultError(f"reading {self._storage}: no chunk is there any more. {MOUNT_AGAIN}")
            self._check_incarnation(newest.end - 1, index.incarnations)
        self.replace(index)
        self._next_listing = self._clock() + _LISTING_SECONDS

    def _add(self, new: Sequence[Chunk], incarnations: Incarnations) -> None:
        with self._lock:
            for chunk in new:
                self._index.append(chunk)
            self.incarnations = incarnations

    def _add_new(self, listing: bool) -> None:
        storage = self._storage
        newest = self.newest
        if newest is None:
            self._list_all()
            return
        if not listing and storage.find_chunk(newest.end) is None:
            return
        self._next_listing = self._clock() + _LISTING_SECONDS
        for _ in range(_LISTINGS):
            entries = storage.chunks(after=newest.first)
            if not entries:
                return
            if entries[0].first == newest.end:
                with suppress(FileNotFoundError):  # the last one was deleted, so there is a newer one
                    facts = read_facts(storage, entries[-1].first)
                    # If the newest known chunk was deleted since, the next one may be a stray in a deleted one's place.
                    if storage.find_chunk(newest.first) is None or facts.incarnations.of(newest.end) is None:
                        self._list_all()
                        return
                    self._check_incarnation(newest.end - 1, facts.incarnations)
                    self._add(chunks_of(entries, facts.end, facts.incarnations), facts.incarnations)
                    return
        if not self._is_there(newest):  # the newest known chunk and the next one were deleted since
            self._list_all()
            return
        raise LogFormatError(
            f"reading {storage}: the ids {newest.end} to {entries[0].first - 1} are missing, before chunk "
            f"{storage.path_of(chunk_name(entries[0].first))}; restore the missing file, or give the query a new "
            "walLocation and a new checkpoint"
        )
