"""A log that another process writes, as a reader sees it: looked at now and then, never locked.

The next chunk can only be at the id where the newest one ends. So a look costs three requests, however many chunks
there are: which log it is, whether the first chunk still is there, and whether the next one is. Once in a while the
names behind the newest are listed all the same: a shared file system remembers for up to a minute that a name was not
there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from zmq_datasource.errors import DataLossError, DiskFaultError, LogFormatError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.log.chunk import read_facts
from zmq_datasource.log.contents import Contents
from zmq_datasource.log.facts import Incarnations
from zmq_datasource.log.files import MOUNT_AGAIN
from zmq_datasource.log.layout import Chunk, chunk_name
from zmq_datasource.log.listing import chunks_of, read_index
from zmq_datasource.log.retrier import Retrier
from zmq_datasource.log.storage import LogStorage

__all__ = ["LOOKING_SECONDS", "LogFollower"]

LOOKING_SECONDS = 0.05
# Requests to a bucket are paid for.
_LOOKING_IN_A_BUCKET_SECONDS = 1.0
_LISTING_SECONDS = 1.0
# After so many chunks that are gone all chunks are listed.
_FEW = 10
# A directory is not listed in one moment: a chunk is missing if it is not there each time.
_LISTINGS = 10


class LogFollower(Contents):
    """A log partition that another process writes.

    Args:
        storage: The partition.
        retry_timeout: Seconds for which a store that refuses is waited for: by ``open``, and by ``refresh``, which goes
            on with what was listed before.
        clock: Seconds, monotonic.

    Attributes:
        log_id: From ``open`` on, the id of the log.
    """

    full, fault = False, None  # the writer's affair
    unsealed = 0  # and so is what is not there yet

    def __init__(
        self, storage: LogStorage, retry_timeout: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._storage = storage
        self._retry_timeout = retry_timeout
        self._clock = clock
        self._failing: float | None = None  # since when
        self._faults = LimitedLog(__name__, "listings that could not be read")
        self._seconds = _LOOKING_IN_A_BUCKET_SECONDS if storage.leisure else LOOKING_SECONDS
        self._looking = threading.Lock()  # Spark's calls and the metrics' thread meet here
        self._next_look = self._next_listing = 0.0
        self.log_id = ""

    def open(self) -> None:
        """Find the log, and list it.

        Raises:
            LogFormatError: There is none.
            LogError: It cannot be read.
        """
        Retrier(self._retry_timeout).retry(self._find)

    def _find(self) -> None:
        self.log_id = self._storage.log_id()
        self.refresh_now()

    def refresh(self) -> None:
        """Look for what has changed, if the last look is not quite new.

        One thread at a time: of two looks at once, the one that began first could be the last to be kept.

        Raises:
            LogFormatError: A chunk after the newest one is missing.
            DiskFaultError: All chunks are, or the store does not answer; for longer than ``retry_timeout``.
            DataLossError: Another log is in the place of this one.
        """
        with self._looking:
            now = self._clock()
            if now < self._next_look:
                return
            try:
                self._look()
            except DiskFaultError as e:
                self._failing = now if self._failing is None else self._failing
                if now - self._failing >= self._retry_timeout:
                    raise
                self._faults.warn("going on with what was listed before: %s", e)
            else:
                self._failing = None
                self._faults.flush()

    def refresh_now(self) -> None:
        """Look for what has changed, in any case. Raises what ``refresh`` does, and DiskFaultError at once."""
        with self._looking:
            self._look(anew=True)

    def _look(self, anew: bool = False) -> None:
        began = self._clock()
        found = self._storage.log_id_again()
        if found != self.log_id:
            raise DataLossError(
                f"reading along log {self._storage.root}: it was made anew ({found}, not {self.log_id}); give the "
                "query a new checkpoint"
            )
        self._forget_deleted()
        forgetful = not self._storage.leisure  # a bucket shows at once what was put
        self._take_up_new(anew or (forgetful and began >= self._next_listing))
        self._next_look = began + self._seconds

    def _check_line(self, message_id: int, incarnations: Incarnations) -> None:
        """Make sure that what has come follows what was known, and is not in its place.

        Raises:
            DataLossError: An older copy of the log was restored and received into.
        """
        known, found = self.incarnations.of(message_id), incarnations.of(message_id)
        if known is not None and found is not None and known != found:
            raise DataLossError(
                f"reading along {self._storage}: id {message_id} was written by {known} and is now by {found}: an "
                "older copy of the log was restored and received into. Restore the log that the query has read, or "
                "give the query a new checkpoint"
            )

    def _forget_deleted(self) -> None:
        gone = 0
        for chunk in self.covering(self.earliest, self.durable_end):
            if self._storage.find_chunk(chunk.first) is not None:
                with self._lock:
                    self._index.remove_front(gone)
                return
            gone += 1
            if gone == _FEW:
                break
        if gone:
            self._begin_anew()

    def _is_there(self, chunk: Chunk) -> bool:
        """Whether a chunk is there, and not a stray in its place."""
        with suppress(FileNotFoundError):
            return read_facts(self._storage, chunk.first).incarnation == chunk.writer
        return False

    def _begin_anew(self) -> None:
        """List all there is.

        Raises:
            DiskFaultError: What was known is not there, nor what has followed it.
        """
        index, newest = read_index(self._storage), self.newest
        if newest is not None:
            if index.end < newest.end:  # the newest always stays
                raise DiskFaultError(f"reading {self._storage}: no chunk is there any more. {MOUNT_AGAIN}")
            self._check_line(newest.end - 1, index.incarnations)
        self.replace(index)
        self._next_listing = self._clock() + _LISTING_SECONDS

    def _add(self, new: Sequence[Chunk], incarnations: Incarnations) -> None:
        with self._lock:
            for chunk in new:
                self._index.append(chunk)
            self.incarnations = incarnations

    def _take_up_new(self, listing: bool) -> None:
        storage = self._storage
        newest = self.newest
        if newest is None:
            self._begin_anew()
            return
        if not listing and storage.find_chunk(newest.end) is None:
            return
        self._next_listing = self._clock() + _LISTING_SECONDS
        for _ in range(_LISTINGS):
            entries = storage.chunks(after=newest.first)
            if not entries:
                return
            if entries[0].first == newest.end:
                with suppress(FileNotFoundError):  # deleted meanwhile, so there is a newer one
                    facts = read_facts(storage, entries[-1].first)
                    # If the newest one was deleted since, the next one may have been, and a stray is in its place.
                    if storage.find_chunk(newest.first) is None or facts.incarnations.of(newest.end) is None:
                        self._begin_anew()
                        return
                    self._check_line(newest.end - 1, facts.incarnations)
                    self._add(chunks_of(entries, facts.end, facts.incarnations), facts.incarnations)
                    return
        if not self._is_there(newest):  # it and its successor were deleted since
            self._begin_anew()
            return
        raise LogFormatError(
            f"reading {storage}: the ids {newest.end} to {entries[0].first - 1} are missing, before chunk "
            f"{storage.path_of(chunk_name(entries[0].first))}; restore the missing file, or give the query a new "
            "walLocation and a new checkpoint"
        )
