"""The log as the server process reads it while the live process writes it: sealed chunks, and the open one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.errors import DataLossError
from zmq_datasource.log import (
    Chunk,
    ChunkIndex,
    Grown,
    LogStorage,
    OpenChunkTail,
    first_since,
    read_facts,
    read_index,
    read_slices,
    slices,
)
from zmq_datasource.messages.columns import integers_of, number
from zmq_datasource.messages.framing import raw_messages


class Progress(NamedTuple):
    """How far a log is. The live process sends it to the server process.

    Attributes:
        earliest: The first id of the log.
        sealed: The id after the last one of the sealed chunks.
        grown: How far the open chunk is written; None if there is none.
    """

    earliest: int
    sealed: int
    grown: Grown | None

    @classmethod
    def of(cls, value: Sequence[Any]) -> Progress:
        """The progress in a list, as it comes from JSON."""
        earliest, sealed, grown = value
        return cls(earliest, sealed, None if grown is None else Grown(*grown))


class LogView:
    """The rows of a log that can be read now. The open chunk is read only when its rows are asked for.

    Args:
        storage: The log, which another process on this machine writes.
    """

    def __init__(self, storage: LogStorage) -> None:
        self._storage = storage
        self._index = ChunkIndex()
        self._tail: OpenChunkTail | None = None
        self._grown = Grown(0, 0, 0)  # how far the tail may be read
        self.refresh()

    def refresh(self) -> None:
        """List the chunks."""
        self._index = read_index(self._storage)

    def follow(self, progress: Progress) -> None:
        """Make the rows readable that the log has by now, and forget those that are deleted.

        Raises:
            DiskFaultError: A file cannot be opened now. Call again.
        """
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
                    tail = OpenChunkTail(self._storage, grown.first)
                except FileNotFoundError:  # the writer has sealed it meanwhile
                    self.refresh()
                    return
                self._tail = tail
            self._grown = grown

    def _append_sealed(self, end: int) -> None:
        # Usually one chunk is new. It is found by its name, without a listing of the directory.
        if len(self._index):
            found = self._storage.find_chunk(self._index.end)
            if found is not None and self._ends_at(found.name, end):
                self._index.append(Chunk(found.first, end, found.size, found.sealed_at))
                return
        self.refresh()

    def _ends_at(self, name: str, end: int) -> bool:
        with suppress(FileNotFoundError):
            return read_facts(self._storage, name).end == end
        return False

    @property
    def earliest(self) -> int:
        """The first id of the log."""
        if len(self._index) or self._tail is None:
            return self._index.earliest
        return self._tail.first

    @property
    def end(self) -> int:
        """The id after the last one of the log."""
        return self._index.end if self._tail is None else max(self._grown.end, self._index.end)

    def close(self) -> None:
        """Close the open chunk."""
        if self._tail is not None:
            self._tail.close()
            self._tail = None

    def moment(self) -> LogMoment:
        """The log as it is now, with the rows of the open chunk as far as it is written."""
        rows: list[pa.RecordBatch] = []
        if self._tail is not None:
            self._tail.read_to(self._grown.bytes)
            rows += self._tail.batches
        return LogMoment(self._storage, self.end, rows)

    def batches(self, start: int) -> Iterator[pa.RecordBatch]:
        """The rows of the sealed chunks from ``start`` on; or, if ``start`` is in the open chunk, some of its rows.

        Raises:
            DataLossError: A chunk was deleted meanwhile.
            LogFormatError: The open chunk is damaged.
        """
        tail = self._tail
        if tail is not None and start >= tail.first:
            tail.read_to(self._grown.bytes)
            # One batch at a time: a client that reads nothing for long must not keep the whole chunk in memory.
            at = bisect_right(tail.batches, start, key=_first_id) - 1
            if at >= 0 and (rest := tail.batches[at].slice(start - _first_id(tail.batches[at]))).num_rows:
                yield rest
            return
        end = self._index.end
        yield from read_slices(self._storage, slices(self._index.covering(start, end), start, end))


class LogMoment(NamedTuple):
    """The log at one moment, for searches in another thread than the view's.

    Attributes:
        storage: Has the sealed chunks.
        end: The id after the last one of the log.
        open_rows: The rows of the open chunk.
    """

    storage: LogStorage
    end: int
    open_rows: list[pa.RecordBatch]

    def earliest(self) -> int:
        """The first id of the log."""
        index = read_index(self.storage)
        if len(index):
            return index.earliest
        return _first_id(self.open_rows[0]) if self.open_rows else self.end

    def first_since(self, time_us: int) -> int:
        """The first id that was received at a time or later, in microseconds; the log's end if there is none."""
        index = read_index(self.storage)
        found = first_since(self.storage, index.covering(index.earliest, index.end), time_us)
        if found is not None:
            return found
        for batch in self.open_rows:
            times = batch.column("timestamp").cast(pa.int64())
            late = pc.index(pc.greater_equal(times, number(time_us)), True).as_py()
            if late >= 0:
                return int(batch.column("id")[late].as_py())
        return self.end

    def newest_of_topics(self, start: int, end: int) -> pa.Array:
        """The id of the newest message of each topic among the ids ``[start, end)``, in order."""
        newest: dict[bytes | None, int] = {}
        if start < end:
            index = read_index(self.storage)
            sealed = min(index.end, end)
            first = max(index.earliest, start)  # chunks below the position may be deleted meanwhile
            pieces = slices(index.covering(first, sealed), first, sealed)
            for batch in [*read_slices(self.storage, pieces), *self.open_rows]:
                found = pa.table({"topic": topics_of(batch), "id": batch.column("id")})
                found = found.filter(pc.less(found.column("id"), number(end)))
                for row in found.group_by("topic").aggregate([("id", "max")]).to_pylist():
                    newest[row["topic"]] = max(row["id_max"], newest.get(row["topic"], -1))
        return integers_of(sorted(newest.values()))


class Cursor:
    """Reads the log forward from an id.

    Args:
        position: The next id to read.
    """

    def __init__(self, view: LogView, position: int) -> None:
        self._view = view
        self.position = position
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None

    def read(self, rows: int, most_bytes: int) -> pa.RecordBatch | None:
        """Return the next rows, and move past them; None if there are none now.

        Args:
            rows: The most rows.
            most_bytes: About how many bytes they have. One row is returned at least, and a batch of the log that is a
                quarter larger is returned whole, because the parts of a divided batch must be copied later.

        Raises:
            LogError: A file is damaged.
        """
        if self._rest is None:
            try:
                self._rest = next(self._batches, None)
                # Below the log's first id there are no rows: ``batches`` would begin with the log's first row instead.
                if self._rest is None and self._view.earliest <= self.position < self._view.end:
                    self._batches = self._view.batches(self.position)
                    self._rest = next(self._batches, None)
            except DataLossError:  # deleted since the listing
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
    """How many rows of a batch fit into so many bytes and a quarter; one at least."""
    rows, size = int(batch.num_rows), batch.nbytes
    while rows > 1 and 4 * size > 5 * most_bytes:
        # As many as fit if all rows have the same size. If the first ones are larger, the next turn takes fewer.
        rows = max(1, rows * most_bytes // size)
        size = batch.slice(0, rows).nbytes
    return rows


def topics_of(batch: pa.RecordBatch) -> pa.Array:
    """The topic of each row, in bytes: the first of its frames, or empty if it has only one frame."""
    frames = batch.column("frames")
    if frames.null_count < len(
        frames
    ):  # a topic that is not UTF-8 is in hex, and as it came only in the frames
        return pc.fill_null(raw_messages(batch).first, b"")
    return pc.fill_null(pc.cast(batch.column("topic"), pa.binary()), b"")


def matching(batch: pa.RecordBatch, prefixes: tuple[bytes, ...]) -> pa.RecordBatch:
    """The rows with a topic that begins with one of the prefixes; all rows if there are no prefixes."""
    if not prefixes or b"" in prefixes:
        return batch
    topics, mask = topics_of(batch), None
    for prefix in prefixes:
        found = pc.starts_with(topics, prefix)
        mask = found if mask is None else pc.or_(mask, found)
    return batch.filter(mask)
