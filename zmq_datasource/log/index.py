"""The chunks of a log, in order: the index in memory, and the listing that it is made from.

Another process may write the log while it is listed.
"""

from __future__ import annotations

import errno
import itertools
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from zmq_datasource.log.chunk import read_facts
from zmq_datasource.log.head import read_head
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.storage import LogStorage


class _State(NamedTuple):
    """What an index holds at one time: chunks with contiguous ids, and the bytes of all."""

    chunks: tuple[Chunk, ...]
    size: int


class ChunkIndex:
    """The chunks of a log. New ones are added at the end, and old ones deleted from the front.

    The base class of ``LogWriter`` and ``LogFollower``. Any thread may use it: its state is a value, which a change
    replaces as a whole. No method uses a file. Finding the chunks of a range takes logarithmic time, and a step for
    each of these chunks.

    Args:
        chunks: Chunks with contiguous ids, in order.
    """

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        there = tuple(chunks)
        self._state = _State(there, _size_of(there))
        self._changing = threading.Lock()

    # Changes.

    def replace(self, index: ChunkIndex) -> None:
        """Replace all chunks by those of another index, which is a new listing."""
        with self._changing:
            self._state = index._state

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk."""
        with self._changing:
            chunks, size = self._state
            assert not chunks or chunk.first == chunks[-1].end, (chunk, chunks[-1])
            self._state = _State((*chunks, chunk), size + chunk.size)

    def merge(self, merged: Chunk) -> None:
        """Replace the chunks that lie in a merged one."""
        with self._changing:
            chunks, size = self._state
            low, high = _place(chunks, merged.first), _place(chunks, merged.end)
            parts = chunks[low:high]
            self._state = _State(
                (*chunks[:low], merged, *chunks[high:]), size + merged.size - _size_of(parts)
            )

    def delete_below(self, id_: int) -> Sequence[Chunk]:
        """Remove the chunks that have only ids below this one, but never the newest one; return them."""
        with self._changing:
            chunks, size = self._state
            gone = bisect_right(chunks[:-1], id_, key=_end)
            self._state = _State(chunks[gone:], size - _size_of(chunks[:gone]))
            return chunks[:gone]

    # What there is.

    @property
    def earliest(self) -> int:
        """The first id; ``durable_end`` if there is no chunk."""
        chunks = self._state.chunks
        return chunks[0].first if chunks else 0

    @property
    def durable_end(self) -> int:
        """The id after the last chunk."""
        chunks = self._state.chunks
        return chunks[-1].end if chunks else 0

    @property
    def newest(self) -> Chunk | None:
        """The chunk with the highest ids; None if there is none."""
        chunks = self._state.chunks
        return chunks[-1] if chunks else None

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return len(self._state.chunks)

    @property
    def size(self) -> int:
        """The bytes of all chunks."""
        return self._state.size

    @property
    def all(self) -> Sequence[Chunk]:
        """All chunks, in order."""
        return self._state.chunks

    def covering(self, start: int, end: int) -> Sequence[Chunk]:
        """The chunks that have an id in ``[start, end)``, in order."""
        chunks = self._state.chunks
        return chunks[bisect_right(chunks, start, key=_end) : _place(chunks, end)] if start < end else ()

    def size_of(self, start: int, end: int) -> int:
        """About how many bytes the ids ``[start, end)`` have: all messages of a chunk count as equally long."""
        return sum(chunk.part(start, end).size for chunk in self.covering(start, end))

    def end_within_bytes(self, start: int, end: int, max_bytes: int) -> int:
        """The largest end at which ``[start, end)`` has at most about ``max_bytes``, measured as by ``size_of``."""
        for chunk in self.covering(start, end):
            part = chunk.part(start, end)
            if part.size > max_bytes:
                return part.first + max_bytes * (part.end - part.first) // part.size
            max_bytes -= part.size
        return end


def _end(chunk: Chunk) -> int:
    return chunk.end


def _size_of(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.size for chunk in chunks)


def _place(chunks: Sequence[Chunk], id_: int) -> int:
    """How many chunks begin before an id."""
    return bisect_left(chunks, id_, key=lambda chunk: chunk.first)


def read_index(storage: LogStorage) -> ChunkIndex:
    """List the chunks that count.

    The order of the requests leaves no place for what counts for nobody. A chunk that is merged or deleted after it was
    listed lies in a merged chunk that is listed later, or below ``Head.deleted``, which is read last. So does what a
    writer that had lost the log puts in its place.

    Raises:
        DamagedChunkError: The newest chunk is damaged.
        DiskFaultError, LogFormatError: See ``LogStorage.from_listing``.
    """
    return storage.from_listing(lambda: _index_of(storage))


def _index_of(storage: LogStorage) -> ChunkIndex:
    sealed = storage.chunks()
    end = read_facts(storage, sealed[-1].name).end if sealed else 0
    merged = storage.merged()
    deleted = read_head(storage.store).deleted
    if sealed and sealed[-1].first < deleted:  # and its key may have been free again when it was opened
        raise FileNotFoundError(errno.ENOENT, "the newest listed chunk is deleted", str(storage))
    index = ChunkIndex(counting(sealed, end, merged, deleted))
    if index.newest is not None:
        if index.newest.is_merged:
            raise FileNotFoundError(errno.ENOENT, "the newest chunk is missing", index.newest.name)
    elif sealed or merged or deleted:  # all were deleted since, so there are newer ones
        raise FileNotFoundError(errno.ENOENT, "all listed chunks are deleted", str(storage))
    return index


def counting(sealed: Sequence[Chunk], end: int, merged: Sequence[Chunk], begin: int) -> Iterator[Chunk]:
    """The listed chunks that count, in order. They hold each id once.

    A sealed chunk that begins before the end of the one before it lies in a merged chunk. Merged chunks overlap if a
    writer that had lost the log has merged, too. Both have the same rows, so the second one counts from the end of the
    first one on. If no chunk has an id, the chunk with it was lost, and a chunk without a file stands for it.

    Args:
        sealed: The chunks as they were sealed.
        end: The end of the newest one.
        begin: ``Head.deleted``: all ids below this one are deleted, and none of the others.
    """
    at = begin
    for chunk in sorted([*merged, *_chunks_of(sealed, end, merged)], key=_order):
        if chunk.end <= at or (not chunk.is_merged and chunk.first < at):
            continue
        if chunk.first > at:
            yield Chunk(at, chunk.first, 0, chunk.sealed_at)
        yield chunk._replace(first=max(chunk.first, at))
        at = chunk.end


def _order(chunk: Chunk) -> tuple[int, bool, int]:
    """The order in which chunks are looked at: of those with one first id, the longest merged chunk first."""
    return chunk.first, not chunk.is_merged, -chunk.end


def _chunks_of(sealed: Sequence[Chunk], end: int, merged: Sequence[Chunk]) -> list[Chunk]:
    """Let each chunk end where the next one begins, sealed or merged; the last one at ``end``."""
    ends = dict(itertools.pairwise([*sorted({it.first for it in (*sealed, *merged)}), end]))
    return [chunk._replace(end=ends[chunk.first]) for chunk in sealed]
