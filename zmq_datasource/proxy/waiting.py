"""FETCH requests that wait for rows, and the rows that were read for them."""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.messages.columns import number
from zmq_datasource.proxy.fetch_protocol import MOST_WAIT_MS, Fetch
from zmq_datasource.proxy.positions import PRESENT_SECONDS, Position
from zmq_datasource.proxy.view import Cursor, LogView, matching

_MOST_ROWS = 1 << 16  # of an answer
# How long one request may read rows of other topics before the other requests have their turn.
_TURN_SECONDS = 0.005
# A cursor has an open file, and rows that were read and not sent.
_MOST_CURSORS = 64


@dataclass
class Waiting:
    """A FETCH that is not answered yet.

    Attributes:
        cursor: Reads its rows.
        rows, size: The rows that were read for the answer, and their bytes.
        is_blocked: Whether it waits for a disk or for the client's queue. Then it is tried again in each round.
    """

    peer: bytes
    fetch: Fetch
    topics: tuple[bytes, ...]
    cursor: Cursor
    rows: list[pa.RecordBatch] = field(default_factory=list)
    size: int = 0
    is_blocked: bool = False

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + min(self.fetch.wait, MOST_WAIT_MS) / 1000

    def read(self, end: int, room: int, position: Position) -> bool:
        """Read rows for the answer, until it is full or this turn is over.

        Args:
            end: The log's end.
            room: Bytes for the rows; one message is read in any case.
            position: The position of the name.

        Returns:
            Whether there may be more rows to read at once.
        """
        fetch, cursor = self.fetch, self.cursor
        room = min(fetch.max_bytes, room)
        turn_ends = time.monotonic() + _TURN_SECONDS
        while fetch.max_bytes and cursor.position < end and self.size < room:
            batch = cursor.read(min(_MOST_ROWS, end - cursor.position), room - self.size)
            if batch is None:
                return not self.rows  # deleted meanwhile: the next turn answers LOST
            batch = _without_superseded(matching(batch, self.topics), position)
            if batch.num_rows:
                self.rows.append(batch)
                self.size += batch.nbytes
            now = time.monotonic()
            if now >= turn_ends:
                # Past the deadline it is answered without rows, and the client goes on from ``next``. Otherwise the
                # client would repeat this FETCH, and the search would begin again where this FETCH has begun.
                return not self.rows and cursor.position < end and now < self.deadline
            if sum(rows.num_rows for rows in self.rows) >= _MOST_ROWS:
                break
        return False

    def batch(self) -> pa.RecordBatch | None:
        """The rows that were read, as one batch; None if there are none."""
        if len(self.rows) < 2:
            return self.rows[0] if self.rows else None
        schema = self.rows[0].schema.remove_metadata()
        return pa.concat_batches([rows.replace_schema_metadata(None) for rows in self.rows]).cast(schema)


def _without_superseded(batch: pa.RecordBatch, position: Position) -> pa.RecordBatch:
    """Leave out the rows below the snapshot of a position that are not the newest of their topic."""
    if not batch.num_rows or batch.column("id")[0].as_py() >= position.notes.snapshot:
        return batch
    ids = batch.column("id")
    is_behind_snapshot = pc.greater_equal(ids, number(position.notes.snapshot))
    return batch.filter(pc.or_(is_behind_snapshot, pc.is_in(ids, value_set=position.newest)))


class WaitingRequests:
    """The newest FETCH of each name. A thousand that wait for messages cost no time until a message comes."""

    def __init__(self) -> None:
        self._all: dict[str, Waiting] = {}
        self._active: dict[str, None] = {}  # to be answered though the log has not grown
        self._deadlines: list[tuple[float, int, str]] = []
        self._count = itertools.count()
        self._seen = (0, 0)  # the log's first id and its end

    def get(self, name: str) -> Waiting | None:
        return self._all.get(name)

    def put(self, name: str, waiting: Waiting) -> None:
        """Add a FETCH, in place of the one that the client has sent before."""
        self._all[name] = waiting
        self._active[name] = None
        heapq.heappush(self._deadlines, (waiting.deadline, next(self._count), name))

    def remove(self, name: str) -> None:
        """Remove the FETCH of a name, if there is one."""
        self._all.pop(name, None)

    def activate(self, name: str) -> None:
        """Let the next ``due`` return the FETCH of a name."""
        self._active[name] = None

    def due(self, view: LogView) -> list[tuple[str, Waiting]]:
        """The requests that can perhaps be answered now; all of them if the log has changed."""
        active, self._active = self._active, {}
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            active[heapq.heappop(self._deadlines)[2]] = None
        seen = view.earliest, view.end
        if seen != self._seen:
            self._seen = seen
            active = dict.fromkeys(self._all)
        return [(name, self._all[name]) for name in active if name in self._all]

    @property
    def next_deadline(self) -> float | None:
        """The next deadline, monotonic; None if no request waits."""
        while self._deadlines:
            deadline, _, name = self._deadlines[0]
            waiting = self._all.get(name)
            if waiting is not None and waiting.deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return None


class Cursors:
    """Keeps the cursors where the last answers ended: finding such a place again takes longer than an answer."""

    def __init__(self, view: LogView) -> None:
        self._view = view
        self._kept: dict[str, tuple[Cursor, float]] = {}

    def at(self, name: str, first: int) -> Cursor:
        """A cursor at an id: the one that was kept for the name if it is there, otherwise a new one."""
        cursor, _ = self._kept.pop(name, (None, 0.0))
        return cursor if cursor is not None and cursor.position == first else Cursor(self._view, first)

    def keep(self, name: str, cursor: Cursor) -> None:
        """Keep a cursor for the next request of a name."""
        self._kept[name] = cursor, time.monotonic()

    def drop_old(self) -> None:
        """Drop the cursors of names that are away: a deleted file needs room on the disk until it is closed."""
        oldest = time.monotonic() - PRESENT_SECONDS
        while self._kept:  # in the order in which they were kept
            name, (_, kept_at) = next(iter(self._kept.items()))
            if kept_at > oldest and len(self._kept) <= _MOST_CURSORS:
                return
            del self._kept[name]
