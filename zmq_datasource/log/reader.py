"""Reads ranges of a log: finds the first message since a time, splits a range among tasks, and yields its rows.

Nothing here needs the log's writer. The rows of a range depend on the chunks alone, and are always the same.

``Deletions`` decides what happens to ids that the writer has deleted between the planning of a read and the read. The
writer deletes from the front, if the log is full (``whenFull=discard``), or if no query needs the ids and
``walRetention`` has passed. If another chunk has the ids of a missing chunk, it was merged, and that one is read.
Otherwise it counts as deleted if the log begins after it, and as lost if not. With ``failOnDataLoss=false`` reading
continues after it in both cases, but only if the log is there and has the same id: an unmounted directory remains an
error.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.errors import DamagedChunkError, DataLossError, LogError
from zmq_datasource.log.chunk import read_chunk, read_facts
from zmq_datasource.log.facts import ChunkFacts
from zmq_datasource.log.index import read_index
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.retrier import retry_reading
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.columns import number

_TRUE = number(1).cast(pa.bool_())


def slices(chunks: Sequence[Chunk], start: int, end: int) -> list[Chunk]:
    """The parts of chunks, which cover ``[start, end)``, that are in it."""
    return [chunk.part(start, end) for chunk in chunks]


# What a task reads at most, unless one message is larger: a second or two of a core.
_TASK_BYTES = 64 << 20


def split_range(
    chunks: Sequence[Chunk], start: int, end: int, least: int, max_bytes: int = _TASK_BYTES
) -> list[list[Chunk]]:
    """Split ``[start, end)`` into parts of about the same size, for the tasks of a batch.

    The sizes are those on disk. Within a chunk all messages count as equally long.

    Args:
        chunks: The chunks that cover the range.
        least: The minimum number of parts. With fewer messages, each message is a part.
        max_bytes: If ``least`` parts would be larger than this on average, there are more parts.

    Raises:
        DataLossError: The chunks do not cover the range.
    """
    if start >= end:
        return []
    pieces = slices(chunks, start, end)
    if not pieces or (pieces[0].first, pieces[-1].end) != (start, end):
        there = f"only the ids {pieces[0].first} to {pieces[-1].end - 1}" if pieces else "none of them"
        raise DataLossError(
            f"planning a batch of the ids {start} to {end - 1}: the log has {there}. The others were deleted, or their "
            "chunks are gone. Start the query again: then failOnDataLoss decides whether it fails or skips them"
        )
    totals = list(itertools.accumulate(piece.size for piece in pieces))
    parts = max(1, min(max(least, -int(-totals[-1] // max_bytes)), end - start))
    borders = [start]
    for part in range(1, parts):
        wanted = totals[-1] * part / parts
        at = min(bisect_right(totals, wanted), len(pieces) - 1)
        piece, into = pieces[at], wanted - (totals[at] - pieces[at].size)
        share = into / piece.size if piece.size else 0.0  # a lost chunk has no bytes
        border = piece.first + int(share * (piece.end - piece.first))
        # Leave at least one message for each part, also if the sizes are very uneven.
        borders.append(min(max(border, borders[-1] + 1), end - parts + part))
    borders.append(end)
    return [
        [piece.part(low, high) for piece in pieces if piece.first < high and piece.end > low]
        for low, high in itertools.pairwise(borders)
    ]


def first_since(storage: LogStorage, chunks: Sequence[Chunk], time: int) -> int | None:
    """The lowest id that was received at ``time`` or later; None if there is none.

    Opens as many chunks as a binary search needs, and reads the rows of one. If a clock was ahead for a while, and the
    rows of that time are deleted, it opens more. Chunks that the log's writer deletes meanwhile are left out.

    Args:
        chunks: Successive chunks.
        time: Microseconds since the epoch.

    Raises:
        DamagedChunkError: A file is not a chunk.
        DataLossError: A chunk is missing.
        DiskFaultError: The log could not be read within the storage's ``retry_seconds``.
    """
    start, end = (chunks[0].first, chunks[-1].end) if chunks else (0, 0)
    while chunks:
        try:
            return _first_since(storage, chunks, start, time)
        except DataLossError:
            found = retry_reading(partial(read_index, storage), storage.retry_seconds).covering(start, end)
            if [chunk.name for chunk in found] == [chunk.name for chunk in chunks]:
                raise  # a chunk is missing; otherwise it is deleted, or merged
            chunks = found
    return None


def _first_since(storage: LogStorage, chunks: Sequence[Chunk], start: int, time: int) -> int | None:
    # A clock can be set back, so the times of rows need not rise with ids. The latest time so far does.
    at = bisect_left(chunks, time, key=lambda chunk: _read_facts(storage, chunk).past)
    for chunk in chunks[at:]:
        if _read_facts(storage, chunk).latest < time:  # only deleted rows are so late
            continue
        first = max(chunk.first, start)
        for batch in read_chunk(storage, chunk.name, first, chunk.end, modified=chunk.modified):
            times = pc.cast(batch.column("timestamp"), pa.int64())
            found = pc.index(pc.greater_equal(times, number(time)), _TRUE).as_py()
            if found >= 0:
                return int(batch.column("id")[found].as_py())
    return None


def _read_facts(storage: LogStorage, chunk: Chunk) -> ChunkFacts:
    try:
        return retry_reading(partial(read_facts, storage, chunk.name), storage.retry_seconds)
    except FileNotFoundError as e:
        raise DataLossError(f"opening chunk {storage.path_of(chunk.name)}: it does not exist") from e


def read_slices(
    storage: LogStorage, pieces: Sequence[Chunk], deletions: Deletions | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of slices, in order.

    Args:
        pieces: Slices in the order of ids.
        deletions: Decides what happens if a chunk is gone.

    Raises:
        DataLossError: A chunk is gone, and ``deletions`` does not skip it.
    """
    next_id = 0
    for planned in pieces:
        piece = planned._replace(first=max(next_id, planned.first), file=planned.name)
        while piece.first < piece.end:
            try:
                for batch in read_chunk(storage, piece.name, piece.first, piece.end, modified=piece.modified):
                    piece = piece._replace(first=piece.first + batch.num_rows)
                    yield batch
            except DataLossError as e:
                if deletions is None:
                    raise
                piece = deletions.resume(piece, pieces[-1].end, e)
        next_id = piece.first


_log = logging.getLogger(__name__)


def deleted_error(storage: LogStorage, first: int, end: int) -> DataLossError:
    """The error of a read whose ids ``[first, end)`` the log's writer has deleted since the read was planned."""
    return DataLossError(
        f"reading: {_what(storage, first, end)}. Raise walMaxBytes or walRetention where the log is written. To go on "
        "with the ids that are left, set failOnDataLoss=false"
    )


def _what(storage: LogStorage, first: int, end: int) -> str:
    return (
        f"the writer of {storage} deleted the ids {first} to {end - 1} between the planning of the batch and the "
        "reading, because the log was full (whenFull=discard) or their retention had passed"
    )


class Found(NamedTuple):
    """Where a log begins now, and the chunk that has a certain id; None if no chunk has it."""

    begin: int
    chunk: Chunk | None


def find_id(storage: LogStorage, log_id: str, id_: int) -> Found | None:
    """Find the chunk that has an id; None if another log is in its place, or there is no chunk at all.

    Raises:
        LogError: There is no log, or it cannot be listed, or a chunk that is needed for this is damaged.
    """
    if storage.log_id() != log_id:
        return None
    return storage.from_listing(lambda: _find_id(storage, id_))


def _find_id(storage: LogStorage, id_: int) -> Found | None:
    index = read_index(storage)
    if index.newest is None:  # the writer never deletes the newest chunk
        return None
    chunk = next(iter(index.covering(id_, id_ + 1)), None)
    # If a sealed chunk is missing, the one before it covers its ids in the index, and does not have them.
    has_it = chunk is not None and chunk.size and read_facts(storage, chunk.name).end > id_
    return Found(index.earliest, chunk if has_it else None)


def lost_ids(storage: LogStorage, log_id: str, pieces: Sequence[Chunk]) -> list[range]:
    """The ids of these slices that the log no longer has, whether they were deleted or their chunks are missing.

    Raises:
        LogError: As ``find_id``.
    """
    index, lost = read_index(storage), []
    for piece in pieces:
        chunk = next(iter(index.covering(piece.first, piece.first + 1)), None)
        if chunk is None or not chunk.size or chunk.name != piece.name:
            found = find_id(storage, log_id, piece.first)
            if found is None or found.chunk is None:
                lost.append(range(piece.first, piece.end))
    return lost


class Deletions:
    """Says where a read goes on when a chunk is gone: in another chunk that has its ids, or after them, or not at all.

    Args:
        storage: The log.
        log_id: The id of the log for which the read was planned.
        fails: The option ``failOnDataLoss``.
        find: Finds an id, on a machine that does not see the log. Raises LogError if it cannot.
    """

    def __init__(
        self,
        storage: LogStorage,
        log_id: str,
        fails: bool,
        find: Callable[[int], Found | None] | None = None,
    ) -> None:
        self._storage = storage
        self._fails = fails
        act = partial(find_id, storage, log_id)
        self._find = find or (lambda id_: retry_reading(partial(act, id_), storage.retry_seconds))

    def resume(self, piece: Chunk, end: int, gone: DataLossError) -> Chunk:
        """Return what to read next. Called when the ids of ``piece`` are gone. Its end stays.

        Args:
            end: The end of the whole read.
            gone: The error that reading the chunk has raised.

        Raises:
            DamagedChunkError: The chunk with which it was merged is damaged.
            DataLossError: Without the log, ``gone``. With ``failOnDataLoss``, ``gone`` if the chunk is lost, and
                ``deleted_error`` if the writer has deleted it.
        """
        first, chunk_end = piece.first, piece.end
        try:
            found = self._find(first)
        except DamagedChunkError:
            raise  # the file that has these ids now
        except LogError as e:
            raise gone from e
        if found is None:
            raise gone
        chunk = found.chunk
        if chunk is not None and chunk.name != piece.name:  # the chunk was merged with others
            return piece._replace(file=chunk.name, modified=chunk.modified)
        is_deleted = found.begin >= chunk_end
        if self._fails and not is_deleted:
            raise gone
        if self._fails:
            raise deleted_error(self._storage, first, min(found.begin, end)) from gone
        skipped = min(found.begin, end) if is_deleted else chunk_end
        _log.warning(
            "data loss: %s; continuing after these ids because failOnDataLoss=false",
            _what(self._storage, first, skipped) if is_deleted else gone,
        )
        return piece._replace(first=skipped)
