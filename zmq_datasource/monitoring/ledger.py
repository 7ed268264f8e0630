"""What the sinks of all queries have done, batch by batch. Pure data that adds up.

The rule: a batch counts once. Within one run of a query, Spark runs a batch once, so accounts of
the same run add up (``foreachBatch`` may write twice); an account of another run means that the
batch was repeated after a restart, and takes the place of the former.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from zmq_datasource.counters import SinkCounters

__all__ = ["Account", "Entry", "Ledger"]

# Batches of a sink that are kept one by one: as many as Spark keeps of a query's progress.
_BATCHES = 100
_QUERIES = 1000


class Entry(NamedTuple):
    """One write of one batch.

    Attributes:
        query: The query's id.
        run: The run of the query.
        batch: The batch's id.
        sink: Socket type and endpoints.
        name: The query's name, if it has one.
    """

    query: str
    run: str
    batch: int
    sink: str
    counters: SinkCounters
    name: str | None = None


class Account(NamedTuple):
    """A sink after a batch.

    Attributes:
        batch: What the batch wrote.
        total: That, and all before it.
        batches: How many batches are in the total.
    """

    batch: SinkCounters
    total: SinkCounters
    batches: int

    def __add__(self, other: Account) -> Account:  # type: ignore[override]
        """Of two sinks of one query, which write the same batches."""
        return Account(self.batch + other.batch, self.total + other.total, max(self.batches, other.batches))

    @classmethod
    def none(cls) -> Account:
        return cls(SinkCounters.none(), SinkCounters.none(), 0)


class _Sink:
    """One sink of one query."""

    def __init__(self) -> None:
        # The sum of the batches that are no longer kept one by one, and their number.
        self._before = SinkCounters.none()
        self._batches_before = 0
        # The newest, in the order in which they were first committed: run and counters.
        self._batches: dict[int, tuple[str, SinkCounters]] = {}

    def add(self, run: str, batch: int, counters: SinkCounters) -> None:
        known = self._batches.get(batch)
        if known is not None and known[0] == run:
            counters = known[1] + counters
        self._batches[batch] = run, counters
        while len(self._batches) > _BATCHES:
            self._before = self._before.then(self._batches.pop(next(iter(self._batches)))[1])
            self._batches_before += 1

    def at(self, batch: int) -> Account:
        total, batches = self._before, self._batches_before
        for number, (_, counters) in self._batches.items():
            if number <= batch:
                total = total.then(counters)
                batches += 1
        _, own = self._batches.get(batch, ("", SinkCounters.none()))
        return Account(own, total, batches)


class Ledger:
    """Sinks by query. Written and read by different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queries: dict[str, dict[str, _Sink]] = {}

    def add(self, entry: Entry) -> None:
        """Take in one write; see the module's rule."""
        with self._lock:
            sinks = self._queries.setdefault(entry.query, {})
            sinks.setdefault(entry.sink, _Sink()).add(entry.run, entry.batch, entry.counters)
            while len(self._queries) > _QUERIES:
                self._queries.pop(next(iter(self._queries)))

    def accounts(self, query: str, batches: Sequence[int]) -> dict[int, dict[str, Account]]:
        """Each sink of a query, as of each batch; zeros where a batch wrote nothing."""
        with self._lock:
            sinks = self._queries.get(query, {})
            return {batch: {name: sink.at(batch) for name, sink in sinks.items()} for batch in batches}
