"""Reads the rows of the log that a durable subscriber wants, in turns of some milliseconds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.errors import DataLossError
from zmq_datasource.log import Deletions, LogStorage, LogWriter, read_slices, slices
from zmq_datasource.messages.columns import integers_of, number
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.serving.server import Read

_MOST_ROWS = 1 << 16  # of an answer
# How long rows of other topics are read before others have their turn.
_TURN_SECONDS = 0.005


def _batches(
    storage: LogStorage, contents: LogWriter, start: int, end: int, fails: bool
) -> Iterator[pa.RecordBatch]:
    """The rows from ``start`` to before ``end``, also if their chunks are merged meanwhile.

    Args:
        fails: Whether rows that are deleted meanwhile are an error. Otherwise they are left out.
    """
    pieces = slices(contents.covering(start, end), start, end)
    return read_slices(storage, pieces, deletions=Deletions(storage, contents.log_id, fails))


def newest_of_topics(storage: LogStorage, contents: LogWriter, start: int, end: int) -> pa.Array:
    """See ``server.Operations.newest``."""
    newest: dict[bytes | None, int] = {}
    for batch in _batches(storage, contents, max(start, contents.earliest), end, fails=False):
        found = pa.table({"topic": _topics_of(batch), "id": batch.column("id")})
        for row in found.group_by("topic").aggregate([("id", "max")]).to_pylist():
            newest[row["topic"]] = max(row["id_max"], newest.get(row["topic"], -1))
    return integers_of(sorted(newest.values()))


class Cursor:
    """Reads the log that this process writes, forward from an id: finding a place again takes longer than an answer.

    Attributes:
        position: The next id to read.
        used_at: When it was used last, monotonic.
    """

    def __init__(self, storage: LogStorage, contents: LogWriter, position: int) -> None:
        self._storage, self._contents = storage, contents
        self.position = position
        self.used_at = 0.0
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None

    def read(self, read: Read, most_bytes: int) -> pa.RecordBatch | None:
        """Read wanted rows until there are enough, or this turn is over. None if it has found none.

        Raises:
            LogError: A file is damaged, or cannot be read now. The place is then as before.
        """
        self.used_at = now = time.monotonic()
        found: list[pa.RecordBatch] = []
        size = 0
        while self.position < read.end and size < most_bytes and sum(map(len, found)) < _MOST_ROWS:
            if found and time.monotonic() - now >= _TURN_SECONDS:
                break
            batch = _without_superseded(_matching(self._next(read.end, most_bytes - size), read.topics), read)
            if batch.num_rows:
                found.append(batch)
                size += batch.nbytes
            if not found and time.monotonic() - now >= _TURN_SECONDS:
                return None
        if len(found) < 2:
            return found[0] if found else None
        schema = found[0].schema.remove_metadata()
        return pa.concat_batches([rows.replace_schema_metadata(None) for rows in found]).cast(schema)

    def _next(self, end: int, most_bytes: int) -> pa.RecordBatch:
        """The next rows, one at least. A batch of the log that is a quarter larger than ``most_bytes`` comes whole,
        because the parts of a divided batch must be copied later.
        """
        if self._rest is None:
            self._rest = next(self._batches, None)
        if self._rest is None:
            self._batches = _batches(self._storage, self._contents, self.position, end, fails=True)
            self._rest = next(self._batches, None)
        if self._rest is None:
            raise DataLossError(f"reading id {self.position} for a durable subscriber: it is deleted")
        batch = self._rest
        rows, size = min(batch.num_rows, _MOST_ROWS), batch.slice(0, _MOST_ROWS).nbytes
        while rows > 1 and 4 * size > 5 * most_bytes:
            # As many as fit if all rows have the same size. If the first ones are larger, the next turn takes fewer.
            rows = max(1, rows * most_bytes // size)
            size = batch.slice(0, rows).nbytes
        self._rest = batch.slice(rows) if batch.num_rows > rows else None
        self.position += rows
        return batch.slice(0, rows)


def _topics_of(batch: pa.RecordBatch) -> pa.Array:
    """The topic of each row, in bytes: the first of its frames, or empty if it has only one frame."""
    frames = batch.column("frames")
    if frames.null_count < len(frames):  # a topic that is not UTF-8 is as it came only in the frames
        return pc.fill_null(raw_messages(batch).first, b"")
    return pc.fill_null(pc.cast(batch.column("topic"), pa.binary()), b"")


def _matching(batch: pa.RecordBatch, prefixes: tuple[bytes, ...]) -> pa.RecordBatch:
    """The rows with a topic that begins with one of the prefixes; all rows if there are no prefixes."""
    if not prefixes or b"" in prefixes:
        return batch
    topics, mask = _topics_of(batch), None
    for prefix in prefixes:
        found = pc.starts_with(topics, prefix)
        mask = found if mask is None else pc.or_(mask, found)
    return batch.filter(mask)


def _without_superseded(batch: pa.RecordBatch, read: Read) -> pa.RecordBatch:
    """Leave out the rows below the snapshot that are not the newest of their topic."""
    if not batch.num_rows or batch.column("id")[0].as_py() >= read.snapshot:
        return batch
    ids = batch.column("id")
    is_behind_snapshot = pc.greater_equal(ids, number(read.snapshot))
    return batch.filter(pc.or_(is_behind_snapshot, pc.is_in(ids, value_set=read.newest)))
