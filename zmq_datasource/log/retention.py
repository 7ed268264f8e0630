"""How long chunks stay: until nobody needs them and their time has passed, or their room is needed more."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from zmq_datasource.errors import LogError, LogLockedError, LogWriteError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.log.contents import Contents
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.reader_records import ReaderRecords
from zmq_datasource.log.readers import Readers
from zmq_datasource.log.storage import LogStorage

__all__ = ["MakeRoom", "Retention"]

_log = logging.getLogger(__name__)

MakeRoom = Literal["none", "done", "any"]
# Room for the chunk that grows, and for what comes meanwhile.
_RESERVED_CHUNKS = 5


class Retention:
    """Deletes chunks of a log partition, the oldest first. Any thread may call.

    Args:
        storage: Where the files are.
        contents: What the partition holds.
        seconds: How long a committed chunk stays at least; longer if a reader wants that.
        max_bytes: Size of the log at which ``full`` becomes true.
        chunk_bytes: Size of a chunk.
        make_room: Whether chunks are deleted before their time so that the log never gets full: none, those
            that are committed (``done``), or the oldest, needed or not (``any``).
        readers: Who else needs the messages.
        readers_decide: Whether the records of the readers alone say what is needed, as in a proxy; otherwise ``commit``
            says it, too.
        clock: Seconds since the epoch; compared with the files' modification times.

    Attributes:
        committed: The first id that somebody still needs.
        records_seconds: How often the records of readers are read where they decide and nothing can be deleted.
        round_seconds: After so long a round of deletions makes way for readers that wait.
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
        self._looked_at = math.inf
        self._next_deletion = self._next_records = 0.0
        self.committed = 0
        self._committing = threading.Lock()
        self._removing = threading.Lock()

    @property
    def full(self) -> bool:
        """Whether receiving should stop until more is committed."""
        done = math.inf if self._make_room == "any" else self.committed
        return self._contents.occupied(done) >= self._max_bytes

    def commit(self, end: int) -> None:
        """Nobody will ever again ask for an id below ``end``: delete what is past its retention too."""
        with self._committing:
            self.committed = max(self.committed, end)
        self.remove_expired()

    def begin(self, earliest: int) -> None:
        """The log was opened, and has the messages from this id on: nothing is committed yet."""
        with self._committing:
            self.committed = earliest

    def make_room(self) -> None:
        """Delete chunks before their time, if that is allowed and the log needs the room."""
        if self._make_room != "none":
            self.remove_expired()

    def oldest_done(self, done: int) -> Chunk | None:
        """The oldest chunk, if the log had more room but for those who need an id below ``done``."""

        def choose(index: ChunkIndex) -> Sequence[Chunk]:
            if len(index) == 1 and index.end <= done:  # it stays, but does not count: see Contents.occupied
                return index.covering(index.earliest, index.end)
            return self._removable(done, index)

        return next(iter(self._contents.choose(choose)), None)

    def remove_expired(self) -> None:
        """Delete committed chunks whose retention has passed.

        A file that cannot be deleted is reported and tried again; it counts as part of the
        log's size meanwhile. Not for the receiving thread: a directory may answer slowly.
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
                self._storage.check_writer()  # a store that has lost the log gets no hold either
                # A reader that is just coming has either found what there is and said so, or will look after this.
                with self._records.placing(0.0):
                    self._next_deletion = time.monotonic() + self._storage.leisure
                    if not self._remove_below(min(self.committed, self._needed_by_readers())):
                        self._next_deletion = 0.0  # it goes on when those have had their turn who wait
            except LogLockedError:
                return  # it is tried again in a moment
            except LogError as e:
                _log.warning("deleting from log %s: %s", self._storage.root, e)

    def _remove_below(self, done: int) -> bool:
        """Whether nothing is left to delete for now."""
        contents = self._contents
        begun = contents.deleting
        goes_on = begun is not None and (self._make_room == "any" or begun.end <= done)
        something = goes_on or contents.choose(partial(self._removable, done))
        if not something:
            return True
        self._storage.check_writer()  # one that has lost the log must not delete for another
        return self._remove(done)

    def _follow_readers(self) -> None:
        """Take ``committed`` from the records of the readers, if that may let something be deleted.

        Otherwise they are read now and then, because that drops the readers whose time is over.
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
        """The first id that a reader still needs."""
        try:
            needed = self._readers.needed()
        except LogError as e:  # what it may still need stays
            self._faults.warn("%s", e)
            return self._contents.earliest
        return self._contents.durable_end if needed is None else needed

    def _removable(self, done: int, index: ChunkIndex) -> Sequence[Chunk]:
        """The front chunks that are not needed from id ``done`` on, or whose room is needed more."""
        chunks = index.removable(done, self._sealed_before(index))
        if self._make_room != "none":
            over = index.size + self._reserved_bytes - self._max_bytes
            below = done if self._make_room == "done" else index.end
            chunks = max(chunks, index.oldest(over, below), key=len)
        return chunks

    def _sealed_before(self, index: ChunkIndex) -> float:
        """When a chunk must have been sealed by for its retention to be over; without one no clock is asked."""
        seconds = max(self._seconds, self._readers.retention)
        if not seconds:
            return math.inf
        now = self._clock()
        if now < self._looked_at:  # it was set back, or was ahead when chunks were sealed
            index.sealed_by(now)
        self._looked_at = now
        return now - seconds

    def _remove(self, done: int) -> bool:
        """Whether nothing is left, or nothing more can be done now."""
        self._contents.begin_deleting(partial(self._removable, done))
        deadline = time.monotonic() + self.round_seconds
        # Front first, so that a crash in between leaves no hole.
        while (chunk := self._contents.deleting) and (self._make_room == "any" or chunk.end <= done):
            try:
                self._storage.delete_chunk(chunk.first)
            except LogWriteError as e:
                _log.warning("%s", e)
                return True
            self._contents.deleted()
            if time.monotonic() >= deadline:
                return False
        return True
