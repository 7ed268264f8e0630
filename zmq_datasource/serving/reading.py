"""Reads the rows of the log that a durable subscriber wants, in turns of some milliseconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import reduce
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.errors import DataLossError
from zmq_datasource.log import Deletions, LogStorage, LogWriter, read_slices, slices
from zmq_datasource.messages.columns import number
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.serving.server import Read

# How long rows are read before others have their turn; how long a step of a search takes.
_TURN_SECONDS, _STEP_SECONDS = 0.005, 0.1


class LogRows:
    """Reads the rows of the log that this process writes, also if their chunks are merged meanwhile.

    Args:
        storage: The log.
        contents: Its writer.
    """

    def __init__(self, storage: LogStorage, contents: LogWriter) -> None:
        self._storage, self._contents = storage, contents
        # Where reads have stopped: finding the place in a chunk again takes longer than an answer.
        self._stopped: dict[int, Iterator[pa.RecordBatch]] = {}

    def close_files(self) -> None:
        """Close all files: one that is deleted needs room on the disk while it is open. Called ten times a second."""
        self._stopped.clear()

    def _batches(self, start: int, end: int, fails: bool) -> Iterator[pa.RecordBatch]:
        """The rows from ``start`` to before ``end``.

        Args:
            fails: Whether rows that are deleted meanwhile are an error. Otherwise they are left out.
        """
        pieces = slices(self._contents.covering(start, end), start, end)
        deletions = Deletions(self._storage, self._contents.log_id, fails)
        return read_slices(self._storage, pieces, deletions=deletions)

    def find_newest(self, start: int, end: int, newest: dict[bytes | None, int]) -> int:
        """Note the id of the newest message of each topic, for some ids from ``start`` to before ``end``.

        Returns:
            The id to go on from; ``end`` at the end.
        """
        deadline = time.monotonic() + _STEP_SECONDS
        for batch in self._batches(max(start, self._contents.earliest), end, fails=False):
            found = pa.table({"topic": _topics_of(batch), "id": batch.column("id")})
            for row in found.group_by("topic").aggregate([("id", "max")]).to_pylist():
                newest[row["topic"]] = row["id_max"]
            if time.monotonic() >= deadline:
                return int(batch.column("id")[-1].as_py()) + 1
        return end

    def read(self, read: Read, most_bytes: int) -> tuple[pa.RecordBatch | None, int]:
        """Read wanted rows until there are enough, or this turn is over.

        Returns:
            The rows, None if there are none so far; and the id to go on from.

        Raises:
            LogError: A file is damaged, or cannot be read now.
        """
        deadline = time.monotonic() + _TURN_SECONDS
        found: list[pa.RecordBatch] = []
        at, size = read.waiting.at, 0
        stopped = self._stopped.pop(at, None)
        batches = stopped or self._batches(at, read.end, fails=True)
        for batch in batches:
            part = _first_rows(batch, most_bytes - size)
            at += part.num_rows
            if (wanted := _wanted(part, read)).num_rows:
                found.append(wanted)
                size += wanted.nbytes
            is_over = part.num_rows < batch.num_rows or size >= most_bytes or time.monotonic() >= deadline
            if is_over and at > read.waiting.at:
                self._stopped[at] = chain([batch.slice(part.num_rows)], batches)
                break
        if at == read.waiting.at and stopped is not None:
            return self.read(read, most_bytes)  # there was nothing more when it stopped
        if at == read.waiting.at:
            raise DataLossError(f"reading id {at} for a durable subscriber: it is deleted")
        if len(found) < 2:
            return (found[0] if found else None), at
        schema = found[0].schema.remove_metadata()
        return pa.concat_batches([rows.replace_schema_metadata(None) for rows in found]).cast(schema), at


def _first_rows(batch: pa.RecordBatch, most_bytes: int) -> pa.RecordBatch:
    """The first rows of a batch, one at least; all if it is only a quarter larger than ``most_bytes``."""
    rows = batch.num_rows
    while rows > 1 and 4 * (size := batch.slice(0, rows).nbytes) > 5 * most_bytes:
        # As many as fit if all rows have the same size. If the first ones are larger, the next turn takes fewer.
        rows = max(1, rows * most_bytes // size)
    return batch.slice(0, rows)


def _topics_of(batch: pa.RecordBatch) -> pa.Array:
    """The topic of each row, in bytes: the first of its frames, or empty if it has only one frame."""
    frames = batch.column("frames")
    if frames.null_count < len(frames):  # a topic that is not UTF-8 is as it came only in the frames
        return pc.fill_null(raw_messages(batch).first, b"")
    return pc.fill_null(pc.cast(batch.column("topic"), pa.binary()), b"")


def _wanted(batch: pa.RecordBatch, read: Read) -> pa.RecordBatch:
    """The rows with a wanted topic. Below the snapshot, only those that are the newest of their topic."""
    prefixes = read.notes.topics
    if prefixes and b"" not in prefixes:
        topics = _topics_of(batch)
        batch = batch.filter(reduce(pc.or_, (pc.starts_with(topics, prefix) for prefix in prefixes)))
    ids = batch.column("id")
    if len(ids) and ids[0].as_py() < read.notes.snapshot:
        is_behind_snapshot = pc.greater_equal(ids, number(read.notes.snapshot))
        batch = batch.filter(pc.or_(is_behind_snapshot, pc.is_in(ids, value_set=read.newest)))
    return batch
