"""What the sinks of all queries have done, batch by batch. Data that adds up.

The rule: a batch counts once. All that Spark writes in one execution of a batch adds up
(``foreachBatch`` may write twice); an account of another execution means that the batch was repeated
after a failure, and takes the place of the former.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from zmq_datasource.counters import SinkCounters
from zmq_datasource.monitoring.states import SinkState

__all__ = ["BatchHistory", "BatchWrite", "SinkTotals"]

# Batches of a sink that are kept one by one, beside their total.
_BATCHES = 1000
_QUERIES = 1000


class BatchWrite(NamedTuple):
    """What one execution of a batch wrote to one sink.

    Attributes:
        query: The query's id.
        execution: What the batch ran in.
        batch: The batch's id.
        sink: Socket type and endpoints.
        name: The query's name, if it has one.
        in_query: False for a batch write of its own, whose ``query`` is the name of the write.
    """

    query: str
    execution: str
    batch: int
    sink: str
    counters: SinkCounters
    name: str | None = None
    in_query: bool = True


class SinkTotals(NamedTuple):
    """A sink after a batch.

    Attributes:
        batch: What the batch wrote.
        total: That, and all before it.
        batches: How many batches are in the total.
    """

    batch: SinkCounters
    total: SinkCounters
    batches: int

    def __add__(self, other: SinkTotals) -> SinkTotals:  # type: ignore[override]
        """Of two sinks of one query, which write the same batches."""
        return SinkTotals(
            self.batch + other.batch, self.total + other.total, max(self.batches, other.batches)
        )

    def then(self, later: SinkCounters) -> SinkTotals:
        """The totals after one more batch."""
        return SinkTotals(later, self.total.then(later), self.batches + 1)

    def idle(self) -> SinkTotals:
        """Where the batch wrote nothing; the sockets are as they were."""
        return self._replace(batch=self.total.idle())

    @classmethod
    def none(cls) -> SinkTotals:
        return cls(SinkCounters.none(), SinkCounters.none(), 0)


class _Sink:
    """The batches of one sink of one query."""

    def __init__(self) -> None:
        self._before = SinkTotals.none()  # the sum of the batches that are no longer kept
        self._forgotten = -1  # the newest of those
        # In order: batches, their executions, and the accounts after them.
        self._batches: list[int] = []
        self._executions: list[str] = []
        self._totals: list[SinkTotals] = []
        self.state = SinkState()

    def add(self, execution: str, batch: int, counters: SinkCounters) -> None:
        at = bisect_left(self._batches, batch)
        if at < len(self._batches) and self._batches[at] == batch:
            if self._executions[at] == execution:
                counters = self._totals[at].batch + counters
            self._executions[at] = execution
        else:
            self._batches.insert(at, batch)
            self._executions.insert(at, execution)
            self._totals.insert(at, SinkTotals.none())
        own = [counters, *(totals.batch for totals in self._totals[at + 1 :])]
        for place, later in enumerate(own, at):
            self._totals[place] = (self._totals[place - 1] if place else self._before).then(later)
        if len(self._batches) > _BATCHES:
            self._forgotten, self._before = self._batches.pop(0), self._totals.pop(0)
            self._executions.pop(0)

    def at(self, batch: int) -> SinkTotals | None:
        """The totals as of a batch; None if that batch is forgotten."""
        if batch < self._forgotten:
            return None
        at = bisect_right(self._batches, batch)
        if not at:
            return self._before.idle()
        totals = self._totals[at - 1]
        return totals if self._batches[at - 1] == batch else totals.idle()


class BatchHistory:
    """Sinks by query, those heard last at the end. Written and read by different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queries: dict[str, dict[str, _Sink]] = {}

    def add(self, entry: BatchWrite) -> None:
        """Take in one write; see the module's rule. Tells when a sink begins, or ends, not to send rows."""
        with self._lock:
            sinks = self._queries.pop(entry.query, {})
            self._queries[entry.query] = sinks
            sink = sinks.setdefault(entry.sink, _Sink())
            sink.add(entry.execution, entry.batch, entry.counters)
            sink.state.note(
                f"sink {entry.sink} of query {entry.name or entry.query}", entry.batch, entry.counters
            )
            while len(self._queries) > _QUERIES:
                self._queries.pop(next(iter(self._queries)))

    def totals(self, query: str, batches: Sequence[int]) -> dict[int, dict[str, SinkTotals]]:
        """Each sink of a query, as of each batch; without those that are forgotten."""
        with self._lock:
            sinks = self._queries.get(query, {})
            found = {batch: {name: sink.at(batch) for name, sink in sinks.items()} for batch in batches}
        return {
            batch: {name: totals for name, totals in totals.items() if totals is not None}
            for batch, totals in found.items()
        }
