"""Reading a log: which files hold a range, how to share it out, and the rows themselves.

None of this needs the log's writer: a range depends on the files alone and gives the same
rows for ever.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.errors import DamagedChunkError, DataLossError, LogFormatError
from zmq_datasource.log.chunk import OpensChunks, read_chunk, read_facts
from zmq_datasource.log.facts import NO_INCARNATIONS, Incarnations
from zmq_datasource.log.files import patiently
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.storage import ChunkEntry, LogStorage
from zmq_datasource.log.times import first_chunk_since
from zmq_datasource.messages.columns import number

if TYPE_CHECKING:
    from zmq_datasource.log.deletions import Deletions

__all__ = [
    "Slice",
    "chunks_of",
    "end_within_bytes",
    "first_since",
    "read_index",
    "read_slices",
    "slices",
    "split_range",
]


_LISTINGS = 10
_TRUE = number(1).cast(pa.bool_())


class Slice(NamedTuple):
    """The ids ``[start, end)`` of one chunk, which this incarnation has written, where that is known."""

    name: str
    start: int
    end: int
    writer: str | None = None


def read_index(storage: LogStorage) -> ChunkIndex:
    """List a log partition that may be written meanwhile.

    A chunk's name says only where it begins, and where the one before it ends. The end of the newest is in its file.
    The first one is opened, too: one that a writer has put after it had lost the log is left out.

    Raises:
        DamagedChunkError: The newest chunk does not say what it holds.
        DiskFaultError: The partition cannot be listed now.
    """
    for _ in range(_LISTINGS):
        with suppress(FileNotFoundError):  # deleted meanwhile, so there is a newer one
            return _index_of(storage, storage.chunks())
    raise LogFormatError(f"reading {storage}: chunks are listed, and are not there")


def _index_of(storage: LogStorage, entries: list[ChunkEntry]) -> ChunkIndex:
    if not entries:
        return ChunkIndex()
    newest = read_facts(storage, entries[-1].first)
    while len(entries) > 1 and _is_stray(storage, entries[0].first, newest.incarnations):
        del entries[0]
    # While a first chunk is there, the newest one was not deleted since it was listed. Alone it may have been, and what
    # was opened is one that counts for nobody.
    if len(entries) == 1 and entries[0] not in storage.chunks():
        raise FileNotFoundError
    return ChunkIndex(chunks_of(entries, newest.end, newest.incarnations), newest.incarnations)


def _is_stray(storage: LogStorage, first: int, incarnations: Incarnations) -> bool:
    """Whether a chunk is of another writer than the one that has given out its ids."""
    writer = incarnations.of(first)
    if writer is None:  # of one that is forgotten, because all of its chunks were deleted
        return bool(incarnations.writers)
    try:
        return read_facts(storage, first).incarnation != writer
    except DamagedChunkError:  # its reader hears of it
        return False


def chunks_of(
    entries: Sequence[ChunkEntry], end: int, incarnations: Incarnations = NO_INCARNATIONS
) -> list[Chunk]:
    """Successive chunks, the last of which ends there."""
    ends = [*(entry.first for entry in entries[1:]), end]
    return [
        Chunk(it.first, e, it.size, it.sealed_at, incarnations.of(it.first))
        for it, e in zip(entries, ends, strict=True)
    ]


def slices(chunks: Sequence[Chunk], start: int, end: int) -> list[Slice]:
    """Cut ``[start, end)`` at the borders of the chunks that cover it."""
    return [Slice(it.name, max(start, it.first), min(end, it.end), it.writer) for it in chunks]


def split_range(
    chunks: Sequence[Chunk], start: int, end: int, least: int, max_bytes: int
) -> list[list[Slice]]:
    """Share ``[start, end)`` out into parts of about the same size.

    Sizes are those on disk; within a chunk, messages count as equally long.

    Args:
        chunks: The chunks that cover the range.
        least: Least number of parts, if there are as many messages.
        max_bytes: Size at which there are more.

    Raises:
        DataLossError: The chunks do not cover it.
    """
    if start >= end:
        return []
    pieces = slices(chunks, start, end)
    if not pieces or (pieces[0].start, pieces[-1].end) != (start, end):
        there = f"only the ids {pieces[0].start} to {pieces[-1].end - 1}" if pieces else "none of them"
        raise DataLossError(
            f"planning a batch of the ids {start} to {end - 1}: the log has {there}. The others were deleted, or their "
            "chunks are gone. Start the query again: then failOnDataLoss decides how it goes on"
        )
    sizes = [
        chunk.size * (piece.end - piece.start) / (chunk.end - chunk.first)
        for chunk, piece in zip(chunks, pieces, strict=True)
    ]
    totals = list(itertools.accumulate(sizes))
    parts = max(1, min(max(least, -int(-totals[-1] // max_bytes)), end - start))
    borders = [start]
    for part in range(1, parts):
        wanted = totals[-1] * part / parts
        at = min(bisect_right(totals, wanted), len(pieces) - 1)
        piece, before = pieces[at], totals[at] - sizes[at]
        into = int((wanted - before) / sizes[at] * (piece.end - piece.start))
        # Every part has a message, however uneven the sizes.
        borders.append(min(max(piece.start + into, borders[-1] + 1), end - parts + part))
    borders.append(end)
    return [
        [
            p._replace(start=max(p.start, low), end=min(p.end, high))
            for p in pieces
            if p.start < high and p.end > low
        ]
        for low, high in itertools.pairwise(borders)
    ]


def end_within_bytes(
    storage: LogStorage,
    chunks: Sequence[Chunk],
    start: int,
    end: int,
    max_bytes: int,
    deletions: Deletions | None = None,
) -> tuple[int, int]:
    """The largest end with at most ``max_bytes`` of values in ``[start, end)``, and the bytes of those values.

    The end is ``start`` if the first message is larger.

    Args:
        deletions: What to do if a chunk is gone. Ids that are skipped have no bytes.
    """
    left = max_bytes
    for batch in read_slices(storage, slices(chunks, start, end), deletions=deletions):
        running = pc.cumulative_sum(pc.cast(pc.binary_length(batch.column("value")), "int64"))
        if running[-1].as_py() > left:
            fitting = pc.sum(pc.less_equal(running, left)).as_py()
            left -= running[fitting - 1].as_py() if fitting else 0
            return int(batch.column("id")[0].as_py() + fitting), int(max_bytes - left)
        left -= running[-1].as_py()
    return end, int(max_bytes - left)


def first_since(storage: LogStorage, chunks: Sequence[Chunk], time: int) -> int | None:
    """The first message that was received at that time or later, in the order of ids; None if there is none.

    Opens few chunks (see ``first_chunk_since``), and reads the rows of one. Chunks that the log's writer deletes
    meanwhile have none.

    Args:
        chunks: In order.
        time: Microseconds since the epoch.

    Raises:
        DiskFaultError: The log could not be read for as long as the storage's ``patience``.
    """
    while chunks:
        try:
            return _first_since(storage, chunks, time)
        except DataLossError:
            index = patiently(partial(read_index, storage), storage.patience)
            left = [chunk for chunk in chunks if chunk.first >= index.earliest]
            if not len(index) or len(left) == len(chunks):
                raise
            chunks = left
    return None


def _first_since(storage: LogStorage, chunks: Sequence[Chunk], time: int) -> int | None:
    for chunk in chunks[first_chunk_since(storage, chunks, time) :]:
        for batch in read_chunk(storage, chunk.name, chunk.first, chunk.end, writer=chunk.writer):
            at = pc.cast(batch.column("timestamp"), pa.int64())
            first = pc.index(pc.greater_equal(at, number(time)), _TRUE).as_py()
            if first >= 0:
                return int(batch.column("id")[first].as_py())
    return None


def read_slices(
    storage: OpensChunks, pieces: Sequence[Slice], whole: bool = True, deletions: Deletions | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the pieces, in order.

    Args:
        whole: Whether most of each chunk will be read.
        deletions: What to do if a chunk is gone.

    Raises:
        DataLossError: A chunk is gone, and ``deletions`` does not skip it.
    """
    next_id = 0
    for piece in pieces:
        next_id = max(next_id, piece.start)
        if next_id >= piece.end:
            continue
        try:
            for batch in read_chunk(
                storage, piece.name, next_id, piece.end, writer=piece.writer, whole=whole
            ):
                next_id += batch.num_rows
                yield batch
        except DataLossError as e:
            if deletions is None:
                raise
            next_id = deletions.skip(next_id, piece.end, pieces[-1].end, e)
