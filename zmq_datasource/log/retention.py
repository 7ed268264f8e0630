"""Deletes chunks from the front of a log: those that no lease needs and that have expired, or that must make room.

The order, in which no step can be left out:

1. The writer puts a head that announces where the log will begin. A reader that starts after this begins there or
   later.
2. It reads all leases again. A reader that started before this has a lease, and if that needs more, nothing is deleted.
3. It puts a head that says so: from here on, the chunks count for nobody. Then it deletes them, the oldest first.

A chunk has expired when ``walRetention`` has passed, by the wall clock, since it was sealed. So if the wall clock is
wrong, only chunks go too early that no lease needs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from zmq_datasource.errors import LogError, LogLockedError
from zmq_datasource.log.head import HeadWriter
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.silence import Leases
from zmq_datasource.log.storage import LogStorage

_log = logging.getLogger(__name__)

# Reserved for the chunk that is being filled, and for messages that arrive during a deletion.
_RESERVED_CHUNKS = 5
# How often the silence of leases is written, if nothing else is.
_SILENCE_SECONDS = 600.0


class Retention:
    """Deletes chunks of a log. For one thread, but any thread may ask whether the log is full.

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
        # No longer in the index; their files still take room.
        self._deleting: Sequence[Chunk] = ()
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
        deleting = sum(chunk.size for chunk in self._deleting)
        return (0 if spent else index.size) + deleting + self._unsealed_bytes()

    @property
    def needs_room(self) -> bool:
        """Whether the log is full, or will soon be."""
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
        self._look()
        self._write_silence()

    def tidy(self) -> None:
        """Read the leases if it is time for that, and delete what can go.

        If a file cannot be deleted, a warning reports it, the file still takes room, and a later call repeats the
        deletion.

        Raises:
            LogLockedError: Another process has the log.
        """
        with self._tidying:
            now = self._monotonic()
            if now < self._looked_at + self._pause:
                return
            self._looked_at = now
            try:
                self._look()
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
        if not self.needs_room:
            return pause
        if self._discards and (self.full or not self._storage.request_interval):
            return 0.0  # receiving does not wait for a reader, so it need not wait for a look either
        return pause / 4

    def _look(self) -> None:
        self.needed = self._leases.look(self._index.durable_end, self.full)

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
                return
        self._write_head(announced=max(head.announced, below), deleted=below)
        self._deleting = (*self._deleting, *self._index.delete_below(below))

    def _delete(self) -> None:
        while self._deleting:
            self._storage.delete_chunk(self._deleting[0])
            self._deleting = self._deleting[1:]

    def _removable(self) -> int:
        """All ids below this one can go: the chunks have expired and no reader needs them, or they must make room."""
        index, now = self._index, self._clock()
        over, below = index.size + self._reserved_bytes - self._max_bytes, index.earliest
        for chunk in index.all[:-1]:
            is_done = chunk.end <= self.needed
            # While a clock was ahead, chunks of the future were sealed. They do not stay until then.
            has_expired = not self._seconds or abs(now - chunk.sealed_at) >= self._seconds
            if not (is_done and has_expired) and not ((is_done or self._discards) and over > 0):
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
