"""Requests for rows that wait: until there are rows, until their time is over, or for something else."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa

from zmq_datasource.proxy.fetch_protocol import MOST_WAIT_MS, Fetch
from zmq_datasource.proxy.positions import PRESENT_SECONDS
from zmq_datasource.proxy.view import Cursor, LogView

__all__ = ["Cursors", "Owner", "Waiting", "WaitingRequests"]

# A name, or the connection of a request without a name.
Owner: TypeAlias = str | bytes
# Each cursor has an open file, and rows that were read.
_MOST_CURSORS = 64


@dataclass
class Waiting:
    """A FETCH that is not answered yet.

    Attributes:
        cursor: Where in the log its rows are read.
        rows, size: What was read for it, and the bytes of that.
        coming_back: Of a name that was away, whether it is its client's again.
        is_blocked: Whether it waits for something else than messages or its deadline, of which no event tells.
    """

    peer: bytes
    fetch: Fetch
    topics: tuple[bytes, ...]
    cursor: Cursor
    rows: list[pa.RecordBatch] = field(default_factory=list)
    size: int = 0
    coming_back: Future[bool] | None = None
    is_blocked: bool = False

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + min(self.fetch.wait, MOST_WAIT_MS) / 1000


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
