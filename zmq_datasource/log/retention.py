"""Deletes chunks from the front of a log: those that no lease needs and that have expired, or that must make room.

The order, in which no step can be left out:

1. The writer puts a head that announces where the log will begin. A reader that starts after this begins there or
   later.
2. It reads all leases again. A reader that started before this has a lease, and if that needs more, nothing is deleted.
3. It puts a head that says so: from here on, the chunks count for nobody. Then it deletes them, the oldest first.

A chunk has expired when ``walRetention`` has passed, by the wall clock, since it was sealed. If the wall clock jumps
ahead, only chunks go that no lease needs. If it is set back, the time of the chunks that are there begins again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from msgspec.structs import replace

from zmq_datasource.errors import LogError, LogLockedError, LogWriteError
from zmq_datasource.log.head import HeadWriter
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.silence import Leases
from zmq_datasource.log.storage import LogStorage

_log = logging.getLogger(__name__)

# Reserved for the chunk that is being filled, and for messages that arrive during a deletion.
_RESERVED_CHUNKS = 5
# How often the silence of leases is written, if nothing else is.
_SILENCE_SECONDS = 600.0
# After this time of deleting, the sealing thread gets its turn.
_ROUND_SECONDS = 3.0


class Retention:
    """Deletes chunks of a log, in the sealing thread.

    Args:
        storage: The log.
        index: Its chunks.
        leases: Its leases.
        seconds: The least time for which a chunk is kept.
        max_bytes: The size of the log at which ``full`` becomes true.
        chunk_bytes: The size of a chunk.
        discards: Whether the oldest chunks are deleted before the log gets full, needed or not (``whenFull=discard``).
            Otherwise only those that no lease needs make room before their retention has passed.
        unsealed_bytes: Returns the bytes of messages that are not in a chunk yet.
        clock: Returns seconds since the epoch.
        monotonic: Returns monotonic seconds.

    Attributes:
        needed: The lowest id that a reader still needs; the first id of the log while that is not known.
        look_seconds: How often the leases are read in a directory; four times as often while the log has little room.
    """

    look_seconds = 1.0

    def __init__(
        self,
        storage: LogStorage,
        index: ChunkIndex,
        leases: Leases,
        *,
        seconds: float,
        max_bytes: int,
        chunk_bytes: int,
        discards: bool = False,
        unsealed_bytes: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._index = index
        self._leases = leases
        self._head = HeadWriter(storage.store)  # until ``begin``
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._reserved_bytes = _RESERVED_CHUNKS * chunk_bytes
        self._discards = discards
        self._unsealed_bytes = unsealed_bytes
        self._clock, self._monotonic = clock, monotonic
        self._looked_at = -math.inf
        self._next_silence = 0.0
        self._tidying = threading.Lock()
        self.needed = 0

    @property
    def full(self) -> bool:
        """Whether receiving must pause until less is needed."""
        return self._occupied >= self._max_bytes

    @property
    def _occupied(self) -> int:
        """The bytes on the disk and in memory that count for the log's limit."""
        # The newest chunk is never deleted, because it says which id is next. If it is the only one and not needed, it
        # does not count: otherwise a chunk larger than the limit would end receiving for good.
        index = self._index
        spent = index.chunks == 1 and (self._discards or index.durable_end <= self.needed)
        return (0 if spent else index.size) + self._unsealed_bytes()

    @property
    def _needs_room(self) -> bool:
        return self._occupied + self._reserved_bytes >= self._max_bytes

    def begin(self, head: HeadWriter) -> None:
        """Take over from the writer before. Called with the lock, and with the contents of the log.

        Raises:
            LogError: The leases cannot be read.
            DataLossError: A reader has read ids that the log does not have.
        """
        self._head = head
        self._leases.continue_from(head.head, self._clock(), self._index.durable_end)
        self.needed = self._index.earliest
        self._looked_at, self._next_silence = -math.inf, self._monotonic() + _SILENCE_SECONDS

    def end(self) -> None:
        """Write the silence of leases for the next writer."""
        self._leases.look()
        self._write_silence()

    def tidy(self) -> None:
        """Read the leases if it is time for that, and delete what can go.

        If a file cannot be deleted, a warning reports it, the file counts in the log's size, and a later call repeats
        the deletion. The receiving thread must not call this, because a directory may answer slowly.

        Raises:
            LogLockedError: Another process has the log.
        """
        with self._tidying:
            now = self._monotonic()
            if now < self._looked_at + self._pause:
                return
            self._looked_at = now
            try:
                self._look(self._index.all[0].end if self.full and self._index.all else 0)
                if self._index.deleting is None:
                    self._begin_deleting()
                self._delete()
                if now >= self._next_silence:
                    self._write_silence()
            except LogLockedError:
                raise
            except LogError as e:
                _log.warning("deleting from log %s: %s", self._storage.root, e)

    @property
    def _pause(self) -> float:
        """Seconds between two looks."""
        pause = max(self.look_seconds, self._storage.request_interval)
        if not self._needs_room:
            return pause
        if self._discards and (self.full or not self._storage.request_interval):
            return 0.0  # receiving does not wait for a reader, so it need not wait for a look either
        return pause / 4

    def _look(self, make_room: int = 0) -> None:
        needed = self._leases.look(make_room)
        self.needed = self._index.durable_end if needed is None else needed

    def _begin_deleting(self) -> None:
        """Choose chunks, and take them out of the log, by the steps at the top of this module."""
        below = self._removable()
        if below == self._index.earliest:
            return
        self._storage.check_writer()
        head = self._head.head
        if below <= self.needed:  # otherwise whenFull=discard deletes them, needed or not
            if head.announced < below:
                self._write_head(announced=below)
                self._look()
            if self.needed < below:  # a new reader was quicker
                self._write_head(announced=max(head.deleted, min(head.announced, self.needed)))
                return
        self._write_head(announced=max(head.announced, below), deleted=below)
        # The merging thread may have made one chunk of some of them and of the next ones. That one stays.
        self._index.delete_below(below)

    def _delete(self) -> None:
        deadline = self._monotonic() + _ROUND_SECONDS
        # From the front, so that a crash leaves no hole.
        while chunk := self._index.deleting:
            try:
                self._storage.delete_chunk(chunk)
            except LogWriteError as e:
                _log.warning("%s", e)
                return
            self._index.deleted()
            if self._monotonic() >= deadline:
                self._looked_at = -math.inf
                return

    def _removable(self) -> int:
        """All ids below this one can go: the chunks have expired and no reader needs them, or they must make room."""
        index, expired = self._index, math.inf
        if self._seconds:
            now = self._clock()
            index.limit_sealing_times(now)  # the clock may have been ahead
            expired = now - self._seconds
        over, below = index.size + self._reserved_bytes - self._max_bytes, index.earliest
        for chunk in index.all[:-1]:
            is_done = chunk.end <= self.needed
            if not (is_done and chunk.sealed_at <= expired) and not (
                (is_done or self._discards) and over > 0
            ):
                break
            over -= chunk.size
            below = chunk.end
        return below

    def _write_head(self, **changes: int) -> None:
        changed = replace(self._head.head, **changes, silent=self._leases.silent, at=self._clock())
        self._head.write(changed)
        self._next_silence = self._monotonic() + _SILENCE_SECONDS

    def _write_silence(self) -> None:
        if self._leases.silent != self._head.head.silent:
            self._write_head()
