"""What a log partition holds, as all threads of a process see it.

In the process that writes it, the receiving thread adds what it appends, the sealing thread makes chunks of that,
retention takes chunks away, and anybody may look. In one that reads along, a new listing replaces the last.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from zmq_datasource.log.facts import Incarnations
from zmq_datasource.log.growing import Grown
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import Chunk

__all__ = ["Contents"]


class Contents:
    """The chunks of a partition, and the bytes of what is no chunk yet or no longer one.

    The base of the log that this process writes (``LogWriter``) and of one that it follows (``LogFollower``). Each
    method holds the one lock for a moment, and touches no file.

    Attributes:
        grown: How far the open chunk has come on the disk; None if nothing of it was written.
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
        """Take over the chunks that were found on the disk."""
        with self._lock:
            self._index = index
            self.incarnations = index.incarnations

    # The way of messages: appended, written, sealed.

    def count_appended(self, size: int) -> None:
        """Count bytes that are in memory and not yet on the disk."""
        with self._lock:
            self._unwritten_bytes += size

    def grow(self, size: int, grown: Grown) -> None:
        """So many bytes of memory are on the disk, in the open chunk."""
        with self._lock:
            self._unwritten_bytes -= size
            self.grown = grown

    def seal(self, size: int, chunk: Chunk) -> None:
        """The next chunk is durable; so many bytes of memory, and the open chunk if it has grown, are in it."""
        with self._lock:
            self._unwritten_bytes -= size
            self._index.append(chunk)
            self.grown = None

    # The way of chunks: chosen, and deleted.

    def choose(self, choice: Callable[[ChunkIndex], Sequence[Chunk]]) -> Sequence[Chunk]:
        """The chunks, from the oldest on, that ``choice`` picks."""
        with self._lock:
            return choice(self._index)

    def begin_deleting(self, choice: Callable[[ChunkIndex], Sequence[Chunk]]) -> None:
        """Offer the front chunks that ``choice`` picks to nobody any more."""
        with self._lock:
            chunks = choice(self._index)
            self._index.remove_front(len(chunks))
            self._deleting.extend(chunks)
            self._deleting_bytes += sum(chunk.size for chunk in chunks)

    @property
    def deleting(self) -> Chunk | None:
        """The first chunk whose file is to be deleted; it counts as part of the log's size until it is."""
        with self._lock:
            return self._deleting[0] if self._deleting else None

    def deleted(self) -> None:
        """Note that a chunk's file was deleted."""
        with self._lock:
            self._deleting_bytes -= self._deleting.popleft().size

    # What there is.

    @property
    def earliest(self) -> int:
        """The first id there is; ``durable_end`` if there is none."""
        with self._lock:
            return self._index.earliest

    @property
    def durable_end(self) -> int:
        """The id after the last one that is sealed."""
        with self._lock:
            return self._index.end

    @property
    def newest(self) -> Chunk | None:
        """The sealed chunk with the highest ids; None if there is none."""
        with self._lock:
            return self._index.newest if len(self._index) else None

    @property
    def unsealed_bytes(self) -> int:
        """Bytes of messages in memory that are not on the disk, and of files that are to become chunks."""
        with self._lock:
            return self._unwritten_bytes

    @property
    def size(self) -> int:
        """Bytes of all chunks on the disk."""
        with self._lock:
            return self._index.size + self._deleting_bytes + self._growing_bytes

    @property
    def chunks(self) -> int:
        """How many chunks have a file."""
        with self._lock:
            return len(self._index) + len(self._deleting)

    def covering(self, start: int, end: int) -> Sequence[Chunk]:
        """The chunks that hold any id of ``[start, end)``."""
        with self._lock:
            return self._index.covering(start, end)

    def size_of(self, start: int, end: int) -> int:
        """Bytes of the ids ``[start, end)`` on the disk, about: within a chunk, messages count as equally long."""
        with self._lock:
            return self._index.size_of(start, end)

    def occupied(self, done: float) -> int:
        """Bytes on the disk and in memory.

        The newest chunk stays for ever, because it says which id comes next; alone, and if nobody needs an id below
        ``done``, it does not count, or a chunk larger than the log's limit would end the feed.
        """
        with self._lock:
            spent = len(self._index) == 1 and self._index.end <= done
            kept = 0 if spent else self._index.size
            return kept + self._deleting_bytes + self._growing_bytes + self._unwritten_bytes

    @property
    def _growing_bytes(self) -> int:
        return 0 if self.grown is None else self.grown.bytes
