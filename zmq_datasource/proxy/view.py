"""The log as another process sees it that reads while it grows: sealed chunks, and the open one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pyarrow as pa

from zmq_datasource.errors import DataLossError
from zmq_datasource.log import (
    Chunk,
    ChunkIndex,
    GrowingTail,
    Grown,
    LogStorage,
    read_facts,
    read_index,
    read_slices,
    slices,
)

__all__ = ["Cursor", "LogView", "Progress"]


class Progress(NamedTuple):
    """How far the writer of a log is: its first id, the one after its last sealed one, its open chunk."""

    earliest: int
    sealed: int
    grown: Grown | None

    @classmethod
    def of(cls, line: Sequence[Any]) -> Progress:
        """Read the progress from what the writer sent as JSON."""
        earliest, sealed, grown = line
        return cls(earliest, sealed, None if grown is None else Grown(*grown))


class LogView:
    """What of a log partition can be read now. The open chunk is read once somebody asks for its rows.

    Args:
        storage: The log; written by another process on this machine.
    """

    def __init__(self, storage: LogStorage) -> None:
        self._storage = storage
        self._index = ChunkIndex()
        self._tail: GrowingTail | None = None
        self._grown = Grown(0, 0, 0)  # how far the tail may be read
        self.refresh()

    def refresh(self) -> None:
        """List the chunks."""
        self._index = read_index(self._storage)

    def follow(self, progress: Progress) -> None:
        """Take over how far the writer says that the log has come."""
        earliest, sealed, grown = progress
        if sealed > self._index.end:
            self._append_sealed(sealed)
        self._index.remove_below(earliest)
        tail = self._tail
        if tail is not None and (grown is None or tail.first != grown.first):
            tail.close()
            self._tail = tail = None
        if grown is not None:
            if tail is None:
                try:
                    tail = GrowingTail(self._storage, grown.first)
                except FileNotFoundError:  # it is sealed meanwhile
                    self.refresh()
                    return
                self._tail = tail
            self._grown = grown

    def _append_sealed(self, end: int) -> None:
        """One chunk more, most of the time: a directory of many need not be listed for that."""
        if len(self._index):
            found = self._storage.find_chunk(self._index.end)
            if found is not None and self._ends_at(found.first, end):
                self._index.append(Chunk(found.first, end, found.size, found.sealed_at))
                return
        self.refresh()

    def _ends_at(self, first: int, end: int) -> bool:
        with suppress(FileNotFoundError):
            return read_facts(self._storage, first).end == end
        return False

    @property
    def earliest(self) -> int:
        """The first id there is."""
        if len(self._index) or self._tail is None:
            return self._index.earliest
        return self._tail.first

    @property
    def end(self) -> int:
        """The id after the last one."""
        return self._index.end if self._tail is None else max(self._grown.end, self._index.end)

    def close(self) -> None:
        """Close the open chunk."""
        if self._tail is not None:
            self._tail.close()
            self._tail = None

    def open_batches(self) -> list[pa.RecordBatch]:
        """The rows of the open chunk, as far as the writer says that it has come."""
        if self._tail is None:
            return []
        self._tail.read_to(self._grown.bytes)
        return list(self._tail.batches)

    def batches(self, start: int) -> Iterator[pa.RecordBatch]:
        """Some rows from ``start`` on, if there are any; those of sealed chunks as far as they go.

        Raises:
            DataLossError: A chunk was deleted meanwhile.
            LogFormatError: The open chunk is not what a writer writes.
        """
        tail = self._tail
        if tail is not None and start >= tail.first:
            tail.read_to(self._grown.bytes)
            # One at a time: whoever takes nothing for long would keep all that the chunk had.
            at = bisect_right(tail.batches, start, key=_first_id) - 1
            if at >= 0 and (rest := tail.batches[at].slice(start - _first_id(tail.batches[at]))).num_rows:
                yield rest
            return
        end = self._index.end
        yield from read_slices(self._storage, slices(self._index.covering(start, end), start, end))


class Cursor:
    """A place in the log, going forward.

    Args:
        position: The id that is read next.
    """

    def __init__(self, view: LogView, position: int) -> None:
        self._view = view
        self.position = position
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None

    def read(self, rows: int, most_bytes: int) -> pa.RecordBatch | None:
        """Up to so many rows and bytes, one at least, and step past them; None if there are none now.

        Raises:
            LogError: The log's bytes are not what was written.
        """
        if self._rest is None:
            try:
                self._rest = next(self._batches, None)
                # Below the log's beginning there is a gap, and what follows it has other ids.
                if self._rest is None and self._view.earliest <= self.position < self._view.end:
                    self._batches = self._view.batches(self.position)
                    self._rest = next(self._batches, None)
            except DataLossError:  # deleted under our hands
                self._batches = iter(())
                self._view.refresh()
            if self._rest is None:
                return None
        rows = min(rows, _fitting(self._rest.slice(0, rows), most_bytes))
        batch = self._rest.slice(0, rows)
        self._rest = self._rest.slice(rows) if self._rest.num_rows > rows else None
        self.position += batch.num_rows
        return batch


def _first_id(batch: pa.RecordBatch) -> int:
    return int(batch.column("id")[0].as_py())


def _fitting(batch: pa.RecordBatch, most_bytes: int) -> int:
    """A number of rows that have no more than so many bytes, frames and all; one at least."""
    rows = int(batch.num_rows)
    while rows > 1 and batch.slice(0, rows).nbytes > most_bytes:
        rows //= 2
    return rows
