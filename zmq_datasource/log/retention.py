"""Deletes chunks: expired ones that no reader needs, or the oldest ones to make room.

A chunk has expired when its retention has passed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec

from zmq_datasource.errors import LogError, LogLockedError, LogWriteError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log.head import HeadWriter
from zmq_datasource.log.index import ChunkIndex, Contents
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.reader_records import ReaderRecords
from zmq_datasource.log.readers import Readers
from zmq_datasource.log.storage import LogStorage

_log = logging.getLogger(__name__)

MakeRoom = Literal["none", "done", "any"]
# Reserved for the open chunk, and for messages that arrive during a deletion.
_RESERVED_CHUNKS = 5


class Retention:
    """Deletes chunks of a log, the oldest first. Any thread may call it, unless a method says otherwise.

    Args:
        storage: The log.
        contents: Its contents.
        seconds: The least time for which a committed chunk is kept; readers may want a longer one.
        max_bytes: The size of the log at which ``full`` becomes true.
        chunk_bytes: The size of a chunk.
        make_room: Which chunks are deleted before their retention has passed, so that the log does not get full: none,
            committed ones (``done``), or the oldest, needed or not (``any``).
        readers: The needs of all readers except the one in this process.
        readers_decide: Whether only the records of readers say what is needed, as in a proxy; otherwise ``commit`` does
            too.
        clock: Returns seconds since the epoch, for comparison with modification times.

    Attributes:
        committed: The lowest id that is still needed.
        records_seconds: How often the records of readers are read while only they decide and nothing can be deleted.
        round_seconds: The time after which a round of deletions is interrupted, so that waiting readers get their turn.
    """

    round_seconds = 3.0
    records_seconds = 10.0

    def __init__(
        self,
        storage: LogStorage,
        contents: Contents,
        *,
        seconds: float,
        max_bytes: int,
        chunk_bytes: int,
        make_room: MakeRoom = "none",
        readers: Readers | None = None,
        readers_decide: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._contents = contents
        self._readers = readers or Readers(storage)
        self._readers_decide = readers_decide
        self._faults = LimitedLog(__name__, "faults of the records of readers")
        self._records = ReaderRecords(storage)
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._reserved_bytes = _RESERVED_CHUNKS * chunk_bytes
        self._make_room = make_room
        self._clock = clock
        self._last_time = math.inf
        self._next_deletion = self._next_records = 0.0
        self.committed = 0
        self._head: HeadWriter | None = None
        self._uncached = 0  # chunks below this id are not in the system's memory, or older than this writer
        self._committing = threading.Lock()
        self._removing = threading.Lock()

    @property
    def full(self) -> bool:
        """Whether receiving must pause until more is committed."""
        done = math.inf if self._make_room == "any" else self.committed
        return self._contents.occupied(done) >= self._max_bytes

    def commit(self, end: int) -> None:
        """Note that no id below ``end`` is needed any more, and delete expired chunks."""
        with self._committing:
            self.committed = max(self.committed, end)
        self.remove_expired()

    def begin(self, earliest: int, head: HeadWriter | None = None) -> None:
        """Note the first id of a log that was opened. Nothing is committed yet."""
        self._head = head
        with self._committing:
            self.committed = earliest
        self._uncached = self._contents.durable_end

    def make_room(self) -> None:
        """Delete chunks before their retention has passed, if ``make_room`` allows it and the log needs the room."""
        if self._make_room != "none":
            self.remove_expired()

    def uncache(self) -> None:
        """Drop new chunks that no reader needs any more from the system's memory. For the sealing thread only.

        The next chunks then use the same memory. Otherwise each of them takes memory that was never used, which costs
        a virtual machine ten times as much as the copy into it; and the log takes the memory of other files.
        """
        done = self.committed
        for chunk in self._contents.covering(self._uncached, done):
            if chunk.end <= done:
                self._storage.uncache_chunk(chunk)
                self._uncached = chunk.end

    def oldest_done(self, done: int) -> Chunk | None:
        """The oldest chunk that could be deleted if all ids below ``done`` were committed; None if there is none."""

        def choose(index: ChunkIndex) -> Sequence[Chunk]:
            if len(index) == 1 and index.end <= done:  # it is kept, but does not count: see Contents.occupied
                return index.covering(index.earliest, index.end)
            return self._removable(done, index)

        return next(iter(self._contents.choose(choose)), None)

    def remove_expired(self) -> None:
        """Delete committed chunks that have expired, and chunks that must make room.

        If a file cannot be deleted, a warning reports it, the file counts in the log's size, and a later call repeats
        the deletion. The receiving thread must not call this, because a directory may answer slowly.
        """
        with self._removing:
            if time.monotonic() < self._next_deletion and not self.full:
                return
            contents = self._contents
            if self._readers_decide:
                self._follow_readers()
            if contents.deleting is None and not contents.choose(partial(self._removable, self.committed)):
                return
            try:
                self._storage.check_writer()  # first: ``exclusive`` writes into the store, even if the log is gone
                # A reader that starts has either written its record before this block, or lists the log after it.
                with self._records.exclusive(0.0):
                    self._next_deletion = time.monotonic() + self._storage.request_interval
                    if not self._remove_below(min(self.committed, self._needed_by_readers())):
                        self._next_deletion = 0.0  # continues after waiting readers have had their turn
            except LogLockedError:
                return  # repeated in a moment
            except LogError as e:
                _log.warning("deleting from log %s: %s", self._storage.root, e)

    def _remove_below(self, done: int) -> bool:
        """Delete the chunks that can go if all ids below ``done`` are committed. Returns what ``_remove`` does."""
        contents = self._contents
        begun = contents.deleting
        goes_on = begun is not None and (self._make_room == "any" or begun.end <= done)
        something = goes_on or contents.choose(partial(self._removable, done))
        if not something:
            return True
        self._storage.check_writer()  # again, now under the lock: another writer may have the log
        return self._remove(done)

    def _follow_readers(self) -> None:
        """Take ``committed`` from the records of the readers, if that may let something be deleted.

        Otherwise read the records only every ``records_seconds``; that drops expired readers.
        """
        contents, now = self._contents, time.monotonic()
        if (
            now >= self._next_records
            or self.full
            or contents.choose(partial(self._removable, contents.durable_end))
        ):
            self._next_records = now + self.records_seconds
            needed = self._needed_by_readers()
            with self._committing:
                self.committed = needed  # a new reader may need an earlier id than all before it

    def _needed_by_readers(self) -> int:
        """The lowest id that a reader still needs."""
        try:
            needed = self._readers.needed()
        except LogError as e:  # a record that cannot be read may need any id, so all are kept
            self._faults.warn("%s", e)
            return self._contents.earliest
        return self._contents.durable_end if needed is None else needed

    def _removable(self, done: int, index: ChunkIndex) -> Sequence[Chunk]:
        """The front chunks that end by ``done`` and have expired, or that must make room."""
        chunks = index.removable(done, self._sealed_before(index))
        if self._make_room != "none":
            over = index.size + self._reserved_bytes - self._max_bytes
            below = done if self._make_room == "done" else index.end
            chunks = max(chunks, index.oldest(over, below), key=len)
        return chunks

    def _sealed_before(self, index: ChunkIndex) -> float:
        """Chunks that were sealed by this time have expired; infinity without a retention."""
        seconds = max(self._seconds, self._readers.longest_retention)
        if not seconds:
            return math.inf
        now = self._clock()
        if now < self._last_time:  # the clock was set back
            index.limit_sealing_times(now)
        self._last_time = now
        return now - seconds

    def _remove(self, done: int) -> bool:
        """Delete files. Returns False if the round was interrupted, True if nothing is left or the store refuses."""
        contents, head = self._contents, self._head
        contents.begin_deleting(partial(self._removable, done))
        if head is not None and head.head.deleted < contents.earliest:  # first: see ``head``
            head.write(msgspec.structs.replace(head.head, deleted=contents.earliest))
        deadline = time.monotonic() + self.round_seconds
        # From the front, so that a crash leaves no hole.
        while (chunk := self._contents.deleting) and (self._make_room == "any" or chunk.end <= done):
            try:
                self._storage.delete_chunk(chunk)
            except LogWriteError as e:
                _log.warning("%s", e)
                return True
            self._contents.deleted()
            if time.monotonic() >= deadline:
                return False
        return True
