"""Requests for rows that wait, and what was read for them."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.messages.columns import number
from zmq_datasource.proxy.fetch_protocol import MOST_WAIT_MS, Fetch
from zmq_datasource.proxy.positions import PRESENT_SECONDS, Position
from zmq_datasource.proxy.topics import matching
from zmq_datasource.proxy.view import Cursor, LogView

__all__ = ["Cursors", "Owner", "Waiting", "WaitingRequests"]

# A name, or the connection of a request without a name.
Owner: TypeAlias = str | bytes
_MOST_ROWS = 1 << 16  # of an answer
# For reading rows of other topics at a turn.
_TURN_SECONDS = 0.005
# Each cursor has an open file, and rows that were read.
_MOST_CURSORS = 64


@dataclass
class Waiting:
    """A FETCH that is not answered yet.

    Attributes:
        cursor: Where in the log its rows are read.
        coming_back: Of a name that was away, whether it is its client's again.
        rows, size: What was read for it, and the bytes of that.
        is_blocked: Whether it waits for something else than messages or its deadline, of which no event tells.
    """

    peer: bytes
    fetch: Fetch
    topics: tuple[bytes, ...]
    cursor: Cursor
    coming_back: Future[bool] | None = None
    rows: list[pa.RecordBatch] = field(default_factory=list)
    size: int = 0
    is_blocked: bool = False

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + min(self.fetch.wait, MOST_WAIT_MS) / 1000

    def read(self, end: int, room: int, position: Position | None) -> bool:
        """Read rows for the answer.

        Args:
            end: The log's end.
            room: Bytes for them; one message at least.
            position: Of the name.

        Returns:
            Whether there may be more of them, and time is over for this turn.
        """
        fetch, cursor = self.fetch, self.cursor
        end = end if fetch.until is None else min(fetch.until, end)
        room = min(fetch.max_bytes, room)
        deadline = time.monotonic() + _TURN_SECONDS
        while fetch.max_bytes and cursor.position < end and self.size < room:
            batch = cursor.read(min(_MOST_ROWS, end - cursor.position), room - self.size)
            if batch is None:
                return not self.rows  # deleted meanwhile: it is looked at again
            batch = _without_older(matching(batch, self.topics), position)
            if batch.num_rows:
                self.rows.append(batch)
                self.size += batch.nbytes
            now = time.monotonic()
            if now >= deadline:
                # One that is asked again begins again where it began: it must have been answered by then.
                return not self.rows and cursor.position < end and now < self.deadline
            if sum(rows.num_rows for rows in self.rows) >= _MOST_ROWS:
                break
        return False

    def is_at_end(self, end: int) -> bool:
        """Whether a range is read to its end, or to the log's."""
        until = end if self.fetch.until is None else self.fetch.until
        return self.fetch.name is None and self.cursor.position >= until

    def batch(self) -> pa.RecordBatch | None:
        """The rows that were read; None if there are none."""
        if len(self.rows) < 2:
            return self.rows[0] if self.rows else None
        schema = self.rows[0].schema.remove_metadata()
        return pa.concat_batches([rows.replace_schema_metadata(None) for rows in self.rows]).cast(schema)


def _without_older(batch: pa.RecordBatch, position: Position | None) -> pa.RecordBatch:
    """Below the snapshot of a position only the newest message of each topic."""
    if position is None or not batch.num_rows or batch.column("id")[0].as_py() >= position.snapshot:
        return batch
    ids = batch.column("id")
    is_live = pc.greater_equal(ids, number(position.snapshot))
    return batch.filter(pc.or_(is_live, pc.is_in(ids, value_set=position.newest)))


class WaitingRequests:
    """The newest FETCH of each owner. A thousand that wait for messages cost nothing until there are some."""

    def __init__(self) -> None:
        self._all: dict[Owner, Waiting] = {}
        self._active: dict[Owner, None] = {}  # to be looked at though the log has not grown
        self._deadlines: list[tuple[float, int, Owner]] = []
        self._count = itertools.count()
        self._seen = (0, 0)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Owner]:
        return iter(self._all)

    def get(self, owner: Owner) -> Waiting | None:
        return self._all.get(owner)

    def put(self, owner: Owner, waiting: Waiting) -> None:
        """Let a FETCH wait, in place of the one before."""
        self._all[owner] = waiting
        self._active[owner] = None
        heapq.heappush(self._deadlines, (waiting.deadline, next(self._count), owner))

    def remove(self, owner: Owner) -> None:
        """Forget the FETCH of an owner, if there is one."""
        self._all.pop(owner, None)

    def activate(self, owner: Owner) -> None:
        """Look at the FETCH of an owner at the next turn."""
        self._active[owner] = None

    def to_look_at(self, view: LogView) -> list[tuple[Owner, Waiting]]:
        """Those that may be answered now: all if the log has changed."""
        active, self._active = self._active, {}
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            active[heapq.heappop(self._deadlines)[2]] = None
        there = view.earliest, view.end
        if there != self._seen:
            self._seen = there
            active = dict.fromkeys(self._all)
        return [(owner, self._all[owner]) for owner in active if owner in self._all]

    @property
    def due(self) -> float | None:
        """The next deadline, monotonic; None if none waits."""
        while self._deadlines:
            deadline, _, owner = self._deadlines[0]
            waiting = self._all.get(owner)
            if waiting is not None and waiting.deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return None


class Cursors:
    """Where the last answers have ended. To find such a place again takes longer than the answer."""

    def __init__(self, view: LogView) -> None:
        self._view = view
        self._left: dict[Owner, tuple[Cursor, float]] = {}

    def take(self, owner: Owner, first: int) -> Cursor:
        """A cursor at an id, which is the owner's of before if that one is there."""
        cursor, _ = self._left.pop(owner, (None, 0.0))
        return cursor if cursor is not None and cursor.position == first else Cursor(self._view, first)

    def leave(self, owner: Owner, cursor: Cursor) -> None:
        """Keep a cursor for the owner's next request."""
        self._left[owner] = cursor, time.monotonic()

    def forget_late(self) -> None:
        """Close files that no client reads on: a deleted one keeps its room on the disk until then."""
        late = time.monotonic() - PRESENT_SECONDS
        while self._left:  # in the order in which they were left
            owner, (_, left) = next(iter(self._left.items()))
            if left > late and len(self._left) <= _MOST_CURSORS:
                return
            del self._left[owner]
