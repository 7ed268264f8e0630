"""The contents of a log partition, as all threads of a process see them.

In the process that writes the partition, the receiving thread appends messages, the sealing thread makes chunks of
them, retention deletes chunks, and any thread may read. In a process that follows, a new listing replaces the last one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from zmq_datasource.log.facts import Incarnations
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.open_chunk import Grown

__all__ = ["Contents"]


class Contents:
    """The chunks of a partition, and the bytes of messages that are not in a chunk yet or are being deleted.

    The base class of ``LogWriter`` and ``LogFollower``. Each method holds one lock for a moment, and uses no file.

    Attributes:
        grown: The part of the open chunk that is on the disk; None if there is none.
        incarnations: The writers that the partition has had.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._index = ChunkIndex()
        self._unwritten_bytes = 0
        self._deleting: deque[Chunk] = deque()
        self._deleting_bytes = 0
        self.grown: Grown | None = None
        self.incarnations = Incarnations()

    def replace(self, index: ChunkIndex) -> None:
        """Replace all chunks by those of a listing."""
        with self._lock:
            self._index = index
            self.incarnations = index.incarnations

    # The way of messages: appended, written, sealed.

    def count_appended(self, size: int) -> None:
        """Count bytes in memory that are not on the disk yet."""
        with self._lock:
            self._unwritten_bytes += size

    def grow(self, size: int, grown: Grown) -> None:
        """Note that ``size`` bytes of memory were written to the open chunk."""
        with self._lock:
            self._unwritten_bytes -= size
            self.grown = grown

    def seal(self, size: int, chunk: Chunk) -> None:
        """Note a new chunk, which has ``size`` bytes of memory and the open chunk."""
        with self._lock:
            self._unwritten_bytes -= size
            self._index.append(chunk)
            self.grown = None

    # The way of chunks: chosen, and deleted.

    def choose(self, choice: Callable[[ChunkIndex], Sequence[Chunk]]) -> Sequence[Chunk]:
        """The front chunks that ``choice`` returns."""
        with self._lock:
            return choice(self._index)

    def begin_deleting(self, choice: Callable[[ChunkIndex], Sequence[Chunk]]) -> None:
        """Remove the front chunks that ``choice`` returns from the index, and put them in the queue of deletions."""
        with self._lock:
            chunks = choice(self._index)
            self._index.remove_front(len(chunks))
            self._deleting.extend(chunks)
            self._deleting_bytes += sum(chunk.size for chunk in chunks)

    @property
    def deleting(self) -> Chunk | None:
        """The next chunk to be deleted; None for none. It counts in the log's size until ``deleted``."""
        with self._lock:
            return self._deleting[0] if self._deleting else None

    def deleted(self) -> None:
        """Note that the file of the chunk ``deleting`` was deleted."""
        with self._lock:
            self._deleting_bytes -= self._deleting.popleft().size

    # What there is.

    @property
    def earliest(self) -> int:
        """The first id of the chunks; ``durable_end`` if there is no chunk."""
        with self._lock:
            return self._index.earliest

    @property
    def durable_end(self) -> int:
        """The id after the last chunk."""
        with self._lock:
            return self._index.end

    @property
    def newest(self) -> Chunk | None:
        """The sealed chunk with the highest ids; None if there is none."""
        with self._lock:
            return self._index.newest if len(self._index) else None

    @property
    def unsealed_bytes(self) -> int:
        """The bytes of messages that are in memory only, and of files that will become chunks."""
        with self._lock:
            return self._unwritten_bytes

    @property
    def size(self) -> int:
        """Bytes of all chunks on the disk."""
        with self._lock:
            return self._index.size + self._deleting_bytes + self._open_chunk_bytes

    @property
    def chunks(self) -> int:
        """The number of chunks that have a file."""
        with self._lock:
            return len(self._index) + len(self._deleting)

    def covering(self, start: int, end: int) -> Sequence[Chunk]:
        """The chunks that hold any id of ``[start, end)``."""
        with self._lock:
            return self._index.covering(start, end)

    def size_of(self, start: int, end: int) -> int:
        """The approximate bytes of the ids ``[start, end)`` on the disk: messages of a chunk count as equally long."""
        with self._lock:
            return self._index.size_of(start, end)

    def occupied(self, done: float) -> int:
        """The bytes on the disk and in memory that count for the log's limit.

        Args:
            done: The ids below are not needed any more.
        """
        # The newest chunk is never deleted, because it says which id is next. If it is the only one and not needed, it
        # does not count: otherwise a chunk larger than the limit would end receiving for good.
        with self._lock:
            spent = len(self._index) == 1 and self._index.end <= done
            kept = 0 if spent else self._index.size
            return kept + self._deleting_bytes + self._open_chunk_bytes + self._unwritten_bytes

    @property
    def _open_chunk_bytes(self) -> int:
        return 0 if self.grown is None else self.grown.bytes
