"""The chunks of a log, in order: the index in memory, and the listing that it is made from.

Another process may write the log while it is listed. ``Contents`` is the index for all threads of a process, and
counts the bytes that are not in a chunk yet.
"""

from __future__ import annotations

import errno
import itertools
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from zmq_datasource.errors import DiskFaultError, LogFormatError
from zmq_datasource.log.chunk import read_facts
from zmq_datasource.log.files import MOUNT_AGAIN
from zmq_datasource.log.head import read_head
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.storage import MOST_LISTINGS, ChunkEntry, LogStorage


class ChunkIndex:
    """Chunks with contiguous ids. Chunks are added at the end and removed at the front.

    Finding the chunks of a range takes logarithmic time, and a step for each of these chunks.
    """

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        self._chunks: list[Chunk] = []
        self._firsts: list[int] = []
        # For each chunk, the bytes of all earlier ones, removed ones included.
        self._bytes_before: list[int] = []
        self._bytes = 0
        for chunk in sorted(chunks):
            self.append(chunk)

    @property
    def size(self) -> int:
        """The bytes of all chunks."""
        return self._bytes - self._bytes_before[0] if self._chunks else 0

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def earliest(self) -> int:
        """The first id; ``end`` in an empty index."""
        return self._firsts[0] if self._firsts else 0

    @property
    def end(self) -> int:
        """The id after the last one."""
        return self._chunks[-1].end if self._chunks else 0

    @property
    def newest(self) -> Chunk:
        """The chunk with the highest ids. The index must not be empty."""
        return self._chunks[-1]

    def append(self, chunk: Chunk) -> None:
        """Add the next chunk.

        Raises:
            LogFormatError: Its ids do not follow those of the chunk before.
        """
        if self._chunks and chunk.first != self.end:
            what = "are missing" if chunk.first > self.end else "are there twice"
            low, high = sorted((chunk.first, self.end))
            raise LogFormatError(
                f"ids {low} to {high - 1} {what}, before chunk {chunk.name}; restore the missing file, or give the "
                "query a new walLocation and a new checkpoint"
            )
        self._chunks.append(chunk)
        self._firsts.append(chunk.first)
        self._bytes_before.append(self._bytes)
        self._bytes += chunk.size

    def merge(self, merged: Chunk) -> Sequence[Chunk]:
        """Replace the chunks that lie in a merged one; return them. None of them may be here any more."""
        low, high = bisect_left(self._firsts, merged.first), bisect_left(self._firsts, merged.end)
        parts = self._chunks[low:high]
        if parts:
            whole = merged._replace(first=parts[0].first)
            index = ChunkIndex([*self._chunks[:low], whole, *self._chunks[high:]])
            self._chunks, self._firsts = index._chunks, index._firsts
            self._bytes_before, self._bytes = index._bytes_before, index._bytes
        return parts

    def covering(self, start: int, end: int) -> Sequence[Chunk]:
        """The chunks that have an id in ``[start, end)``, in order."""
        if start >= end or not self._chunks:
            return ()
        low = max(bisect_right(self._firsts, start) - 1, 0)
        high = bisect_right(self._firsts, end - 1)
        if self._chunks[low].end <= start:
            low += 1
        return self._chunks[low:high]

    def size_of(self, start: int, end: int) -> int:
        """About how many bytes the ids ``[start, end)`` have: all messages of a chunk count as equally long."""
        return round(self._bytes_below(end) - self._bytes_below(start)) if start < end else 0

    def _bytes_below(self, limit: int) -> float:
        """The bytes of the ids below a limit, removed chunks included."""
        at = bisect_right(self._firsts, limit) - 1
        if at < 0:
            return self._bytes - self.size
        chunk = self._chunks[at]
        share = (min(limit, chunk.end) - chunk.first) / (chunk.end - chunk.first)
        return self._bytes_before[at] + chunk.size * share

    def limit_sealing_times(self, now: float) -> None:
        """Replace each sealing time after ``now`` by ``now``: the clock was ahead when that chunk was sealed."""
        self._chunks = [c if c.sealed_at <= now else c._replace(sealed_at=now) for c in self._chunks]

    def removable(self, below: int, sealed_before: float) -> Sequence[Chunk]:
        """The oldest chunks, up to the first one with an id at or above ``below``, or sealed after ``sealed_before``;
        never the newest one.
        """
        count = 0
        while (
            count < len(self._chunks) - 1
            and self._chunks[count].end <= below
            and self._chunks[count].sealed_at <= sealed_before
        ):
            count += 1
        return self._chunks[:count]

    def oldest(self, size: int, below: int) -> Sequence[Chunk]:
        """The oldest chunks: only as many as have ``size`` bytes together, and only with ids below ``below``; never the
        newest one.
        """
        count = 0
        while count < len(self._chunks) - 1 and size > 0 and self._chunks[count].end <= below:
            size -= self._chunks[count].size
            count += 1
        return self._chunks[:count]

    def remove_front(self, count: int) -> None:
        """Remove the first ``count`` chunks."""
        del self._chunks[:count], self._firsts[:count], self._bytes_before[:count]

    def remove_below(self, earliest: int) -> None:
        """Remove the chunks that have only ids below ``earliest``; never the newest one."""
        self.remove_front(len(self.oldest(self.size + 1, earliest)))


def read_index(storage: LogStorage) -> ChunkIndex:
    """List the chunks that count.

    The order of the requests leaves no place for what counts for nobody. A chunk that is merged or deleted after it was
    listed lies in a merged chunk that is listed later, or below ``Head.deleted``, which is read last. So does what a
    writer that had lost the log puts in its place.

    Raises:
        DamagedChunkError: The newest chunk is damaged.
        DiskFaultError: The log cannot be listed now, or its chunks are gone.
        LogFormatError: A chunk between others is missing, or listed chunks cannot be opened.
    """
    for _ in range(MOST_LISTINGS - 1):
        with suppress(FileNotFoundError):  # the newest chunk was merged or deleted, so there is a newer one
            return _index_of(storage)
    try:
        return _index_of(storage)
    except FileNotFoundError as e:
        if not storage.chunks():
            raise DiskFaultError(f"reading {storage}: no chunk is there any more. {MOUNT_AGAIN}") from e
        raise LogFormatError(f"reading {storage}: its listing shows chunks that cannot be opened") from e


def _index_of(storage: LogStorage) -> ChunkIndex:
    sealed = storage.chunks()
    end = read_facts(storage, sealed[-1].name).end if sealed else 0
    merged = storage.merged()
    deleted = read_head(storage).deleted
    if sealed and sealed[-1].first < deleted:  # and its key may have been free again when it was opened
        raise FileNotFoundError(errno.ENOENT, "the newest listed chunk is deleted", str(storage))
    index = ChunkIndex(counting(sealed, end, merged, deleted))
    if len(index):
        if index.newest.merged is not None:
            raise FileNotFoundError(errno.ENOENT, "the newest chunk is missing", index.newest.name)
    elif sealed or merged or deleted:  # all were deleted since, so there are newer ones
        raise FileNotFoundError(errno.ENOENT, "all listed chunks are deleted", str(storage))
    return index


def counting(sealed: Sequence[ChunkEntry], end: int, merged: Sequence[Chunk], begin: int) -> Iterator[Chunk]:
    """The listed chunks that count, in order. They hold each id once.

    A sealed chunk counts if it begins where the one before it ends. It lies in a merged chunk otherwise. Merged chunks
    overlap if a writer that had lost the log has merged, too. Both have the same rows, so the second one counts
    from the end of the first one on.

    Args:
        sealed: The chunks as they were sealed.
        end: The end of the newest one.
        begin: All ids below this one are deleted.
    """
    at, begun = begin, False
    for chunk in sorted([*merged, *_chunks_of(sealed, end, merged)], key=_place):
        if chunk.end <= at or (chunk.merged is None and begun and chunk.first < at):
            continue
        yield chunk if chunk.merged is None else chunk._replace(first=max(chunk.first, at))
        at, begun = chunk.end, True


def _place(chunk: Chunk) -> tuple[int, bool, int]:
    """The order in which chunks are looked at: of those with one first id, the longest merged chunk first."""
    return chunk.first, chunk.merged is None, -chunk.end


def _chunks_of(entries: Sequence[ChunkEntry], end: int, merged: Sequence[Chunk]) -> list[Chunk]:
    """The chunks of entries. Each ends where the next one begins, sealed or merged; the last one at ``end``."""
    firsts = sorted({*(it.first for it in entries), *(it.first for it in merged)})
    ends = dict(itertools.pairwise([*firsts, end]))
    return [Chunk(it.first, ends[it.first], it.size, it.sealed_at, None, it.sealed_at) for it in entries]


class Contents:
    """The chunks of a log, and the bytes of messages that are not in a chunk yet or are being deleted.

    The base class of ``LogWriter`` and ``LogFollower``. In the process that writes the log, the receiving thread
    appends messages, the sealing thread makes chunks of them, retention deletes chunks, and any thread may read. In a
    process that follows, a new listing replaces the last one. Each method holds one lock for a moment, and uses no
    file.

    Attributes:
        on_sealed: Called, by the sealing thread, after each new chunk.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.on_sealed: Callable[[], None] = lambda: None
        self._index = ChunkIndex()
        self._unwritten_bytes = 0
        self._deleting: deque[Chunk] = deque()
        self._deleting_bytes = 0

    def replace(self, index: ChunkIndex) -> None:
        """Replace all chunks by those of a listing."""
        with self._lock:
            self._index = index

    # The way of messages: appended, written, sealed.

    def count_appended(self, size: int) -> None:
        """Count bytes that are not in the log yet: in memory, or in a file that will become a chunk."""
        with self._lock:
            self._unwritten_bytes += size

    def seal(self, size: int, chunk: Chunk) -> None:
        """Note a new chunk, which has ``size`` bytes of memory."""
        with self._lock:
            self._unwritten_bytes -= size
            self._index.append(chunk)
        self.on_sealed()

    # The way of chunks: chosen, merged, and deleted.

    def choose(self, choice: Callable[[ChunkIndex], Sequence[Chunk]]) -> Sequence[Chunk]:
        """The front chunks that ``choice`` returns."""
        with self._lock:
            return choice(self._index)

    def merge(self, merged: Chunk) -> Sequence[Chunk]:
        """Replace the chunks that lie in a merged one; return them."""
        with self._lock:
            return self._index.merge(merged)

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
        """The bytes of messages that are in memory only."""
        with self._lock:
            return self._unwritten_bytes

    @property
    def size(self) -> int:
        """Bytes of all chunks on the disk."""
        with self._lock:
            return self._index.size + self._deleting_bytes

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
            done: The ids below this one are not needed any more.
        """
        # The newest chunk is never deleted, because it says which id is next. If it is the only one and not needed, it
        # does not count: otherwise a chunk larger than the limit would end receiving for good.
        with self._lock:
            spent = len(self._index) == 1 and self._index.end <= done
            kept = 0 if spent else self._index.size
            return kept + self._deleting_bytes + self._unwritten_bytes
