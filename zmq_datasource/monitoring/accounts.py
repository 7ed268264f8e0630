"""What sinks have written, batch by batch, and the totals of it in the user's driver process.

An *account* is what one write of a batch gave to one sink. It goes to the user's driver process (``BatchHistory``), and
into a file at ``metricsLocation`` (``files``).

The rule: a batch counts once. The writes of one execution of a batch to one sink add up, because ``foreachBatch`` may
write twice. Another execution of the batch repeats it after a failure, and its accounts replace the earlier ones.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from zmq_datasource.counters import Metric, SinkCounters, added, declared, figures, iso

_log = logging.getLogger(__name__)

SINK = declared("zmq_sink", SinkCounters)
TOTAL = (
    Metric(
        "batches",
        "batches",
        "The number of committed micro-batches in this total.",
        "batch",
        series="zmq_sink_batches",
    ),
    *SINK,
)
_NOTHING = figures(SinkCounters.none())
_STATES = tuple(metric.name for metric in SINK if metric.since == "now")


@dataclass(frozen=True)
class Account:
    """What one write of a batch gave to one sink.

    Attributes:
        query, name: The query's id, and its name if it has one; or the name of a batch write outside of a query.
        batch: The batch's id.
        execution: Spark's id of the execution of the batch; a repeated batch has another one.
        write: Spark's id of the write. In ``foreachBatch`` an execution may have several.
        sink: Socket type and endpoints.
        seconds: When the account was made, since the epoch.
        figures: Those of ``SINK``.
    """

    query: str
    name: str | None
    batch: int
    execution: str
    write: str
    sink: str
    seconds: float
    figures: dict[str, Any]

    def to_json(self) -> bytes:
        head = {"timestamp": iso(self.seconds), "query": self.query, "name": self.name, "batch": self.batch}
        return msgspec.json.encode(head | {"execution": self.execution, "sink": self.sink} | self.figures)


class SinkTotals(NamedTuple):
    """The figures of a sink as of a batch.

    Attributes:
        batch: The figures of this batch (``SINK``).
        total: The figures of this batch and all before it (``TOTAL``).
    """

    batch: Mapping[str, Any]
    total: Mapping[str, Any]

    def __add__(self, other: SinkTotals) -> SinkTotals:  # type: ignore[override]
        """The totals of two sinks together. They are sinks of one query, and so have the same batches."""
        batches = max(self.total["batches"], other.total["batches"])
        total = {"batches": batches, **added(SINK, (self.total, other.total))}
        return SinkTotals(added(SINK, (self.batch, other.batch)), total)

    def then(self, later: Mapping[str, Any]) -> SinkTotals:
        """The totals after one more batch. Its states replace the older ones, unless it had no row and so no socket."""
        newest = later if later["sndhwm"] else self.total
        total = {"batches": self.total["batches"] + 1, **added(SINK, (self.total, later))}
        return SinkTotals(later, total | _state(newest))

    def idle(self) -> SinkTotals:
        """The totals after a batch that wrote nothing; the state of the sockets stays."""
        return self._replace(batch=_NOTHING | _state(self.total))

    @classmethod
    def none(cls) -> SinkTotals:
        """The totals before the first batch."""
        return cls(_NOTHING, {"batches": 0, **_NOTHING})


def _state(account: Mapping[str, Any]) -> dict[str, Any]:
    return {name: account[name] for name in _STATES}


class BatchHistory:
    """What the sinks of all queries have written, in the user's driver process. Any thread may call it.

    Args:
        most_batches: How many batches of a sink are kept one by one; older ones are only in the totals. Spark shows the
            newest hundred.
        most_queries: How many queries are remembered: those with the newest accounts.
    """

    def __init__(self, most_batches: int = 200, most_queries: int = 1000) -> None:
        self._most_batches, self._most_queries = most_batches, most_queries
        self._lock = threading.Lock()
        self._queries: dict[str, dict[str, _SinkHistory]] = {}

    def add(self, account: Account) -> None:
        """Count an account. Logs when a sink begins to drop rows or to keep dead letters."""
        with self._lock:
            sinks = self._queries.pop(account.query, {})
            self._queries[account.query] = sinks
            sinks.setdefault(account.sink, _SinkHistory()).add(account, self._most_batches)
            while len(self._queries) > self._most_queries:
                self._queries.pop(next(iter(self._queries)))

    def totals(self, query: str, batches: Sequence[int]) -> dict[int, dict[str, SinkTotals]]:
        """The totals of each sink of a query after each batch. Leaves out a sink that has a batch only in a total."""
        found: dict[int, dict[str, SinkTotals]] = {batch: {} for batch in batches}
        with self._lock:
            for name, history in self._queries.get(query, {}).items():
                for batch, totals in history.totals(found):
                    found[batch][name] = totals
        return found


def _unsent(of: Mapping[str, Any]) -> str:
    kinds = (("dropped", "droppedByReason"), ("kept as dead letters", "deadLetteredByReason"))
    return ", ".join(
        f"{count} {what} ({reason})"
        for what, name in kinds
        for reason, count in sorted(of[name].items())
        if count
    )


@dataclass
class _SinkHistory:
    """The batches of one sink of one query."""

    before: SinkTotals = field(default_factory=SinkTotals.none)  # of batches that are only in the totals
    through: int = -1  # the last of them
    batches: dict[int, tuple[str, dict[str, Mapping[str, Any]]]] = field(default_factory=dict)
    is_unsent: bool = False  # whether the newest batch has not sent all its rows

    def add(self, account: Account, most: int) -> None:
        self._log_unsent(account)
        if account.batch <= self.through:
            return
        execution, writes = self.batches.get(account.batch, (account.execution, {}))
        if execution != account.execution:
            writes = {}
        self.batches[account.batch] = account.execution, {**writes, account.write: account.figures}
        if len(self.batches) > most:
            self.through = min(self.batches)
            self.before = self.before.then(self._figures(self.through))
            del self.batches[self.through]

    def _log_unsent(self, account: Account) -> None:
        """Log a line when the sink begins to drop rows or to keep them as dead letters."""
        unsent = _unsent(account.figures)
        if unsent and not self.is_unsent:
            sink = f"sink {account.sink} of query {account.name or account.query}"
            _log.warning("%s: rows are not being sent since batch %d: %s", sink, account.batch, unsent)
        self.is_unsent = bool(unsent)

    def totals(self, wanted: Iterable[int]) -> Iterator[tuple[int, SinkTotals]]:
        known, totals = sorted(self.batches), self.before
        at = 0
        for batch in sorted(wanted):
            if 0 <= batch <= self.through:
                continue
            while at < len(known) and known[at] <= batch:
                totals = totals.then(self._figures(known[at]))
                at += 1
            yield batch, totals if batch in self.batches else totals.idle()

    def _figures(self, batch: int) -> Mapping[str, Any]:
        return added(SINK, list(self.batches[batch][1].values()))
