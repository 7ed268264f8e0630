"""The log as the server process reads it while the live process writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.errors import DataLossError
from zmq_datasource.log import (
    Chunk,
    Deletions,
    LogStorage,
    first_since,
    read_facts,
    read_index,
    read_slices,
    slices,
)
from zmq_datasource.messages.columns import integers_of
from zmq_datasource.messages.framing import raw_messages

# A listing replaces chunks that were merged since; it is made when there are twice as many as in the last one, and so
# many more.
_FEW_CHUNKS = 256


class Progress(NamedTuple):
    """How far a log is. The live process sends it to the server process.

    Attributes:
        earliest: The first id of the log.
        end: The id after the last sealed one.
    """

    earliest: int
    end: int


class LogView:
    """The rows of a log that can be read now.

    Args:
        storage: The log, which another process on this machine writes.
    """

    def __init__(self, storage: LogStorage) -> None:
        self._storage = storage
        self._durable_end = 0
        self.refresh()

    def refresh(self) -> None:
        """List the chunks."""
        self._index = read_index(self._storage)
        self._most = 2 * self._index.chunks + _FEW_CHUNKS

    def follow(self, progress: Progress) -> None:
        """Make the rows readable that the log has by now, and forget those that are deleted.

        Raises:
            DiskFaultError: A file cannot be opened now. Call again.
        """
        self._durable_end = progress.end
        index = self._index
        try:
            # Usually one chunk is new. It is found by its name, without a listing of the directory.
            while index.chunks and index.durable_end < progress.end and index.chunks < self._most:
                found = self._storage.find_chunk(index.durable_end)
                if found is None:
                    break
                end = read_facts(self._storage, found.name).end
                index.add(Chunk(found.first, end, found.size, found.sealed_at))
        except FileNotFoundError:  # merged meanwhile
            pass
        if self._index.durable_end < progress.end or index.chunks >= self._most:
            self.refresh()
        self._index.delete_below(progress.earliest)

    @property
    def earliest(self) -> int:
        """The first id of the log."""
        return self._index.earliest

    @property
    def end(self) -> int:
        """The id after the last one that can be read."""
        return min(self._index.durable_end, self._durable_end)

    def moment(self) -> LogMoment:
        """The log as it is now."""
        return LogMoment(self._storage, self.end)

    def batches(self, start: int) -> Iterator[pa.RecordBatch]:
        """The rows from ``start`` on.

        Raises:
            DataLossError: A chunk was merged or deleted meanwhile.
        """
        end = self.end
        yield from read_slices(self._storage, slices(self._index.covering(start, end), start, end))


class LogMoment(NamedTuple):
    """The log at one moment, for searches in another thread than the view's.

    Attributes:
        storage: Has the chunks.
        end: The id after the last one of the log.
    """

    storage: LogStorage
    end: int

    def earliest(self) -> int:
        """The first id of the log."""
        return read_index(self.storage).earliest

    def first_since(self, time_us: int) -> int:
        """The first id that was received at a time or later, in microseconds; the log's end if there is none."""
        index = read_index(self.storage)
        found = first_since(self.storage, index.covering(index.earliest, self.end), time_us)
        return self.end if found is None else found

    def newest_of_topics(self, start: int, end: int) -> pa.Array:
        """The id of the newest message of each topic among the ids ``[start, end)``, in order."""
        newest: dict[bytes | None, int] = {}
        if start < end:
            index = read_index(self.storage)
            first = max(index.earliest, start)  # chunks below the position may be deleted meanwhile
            moved = Deletions(self.storage, self.storage.log_id(), fails=False)
            pieces = slices(index.covering(first, end), first, end)
            for batch in read_slices(self.storage, pieces, deletions=moved):
                found = pa.table({"topic": topics_of(batch), "id": batch.column("id")})
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
