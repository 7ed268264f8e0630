"""What sinks have written, batch by batch, and the totals that readers make of it.

An *account* is what one batch wrote to one sink. It goes to the user's driver process and into a file of its own
(``store``). Accounts add up, and readers make the totals: ``BatchHistory`` in the driver, ``MetricsStore`` from files.

The rule: a batch counts once. The writes of one execution of a batch to one sink add up, because ``foreachBatch`` may
write twice; each of them counts once. Another execution of the batch repeats it after a failure, and its account
replaces the earlier one.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from zmq_datasource.counters import Metric, SinkCounters, added, declared, figures

__all__ = [
    "FORMAT",
    "SINK",
    "TOTAL",
    "Account",
    "BatchHistory",
    "SinkHistory",
    "SinkTotals",
]

_log = logging.getLogger(__name__)

# Of the files at ``metricsLocation``.
FORMAT = 2

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


class Account(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="kind", tag="sink"):
    """What one execution of a batch wrote to one sink. As JSON it is a file at ``metricsLocation``.

    Attributes:
        query: The query's id.
        execution: Spark's id of the execution of the batch; a repeated batch has another one.
        batch: The batch's id.
        sink: Socket type and endpoints.
        figures: Those of ``SINK``.
        writes: The writes in it: the query's own, or those of its ``foreachBatch``.
        name: The query's name, if it has one.
        in_query: False for a batch write of its own, whose ``query`` is the name of the write.
        timestamp: When the account was made; UTC, ISO 8601.
    """

    format: int = FORMAT
    query: str
    execution: str
    batch: int
    sink: str
    figures: dict[str, int | dict[str, int]] = msgspec.field(name="sinkMetrics")
    writes: tuple[str, ...]
    timestamp: str
    name: str | None = None
    in_query: bool = True

    def __post_init__(self) -> None:
        datetime.fromisoformat(self.timestamp)

    def joined(self, before: Account | None) -> Account:
        """This account, added to the one before it if the rule of the module says so.

        Args:
            before: The account of the same batch and sink so far.
        """
        if before is None or before.execution != self.execution:
            return self
        if set(self.writes) <= set(before.writes):
            return before
        return msgspec.structs.replace(
            self,
            figures=added(SINK, (before.figures, self.figures)),
            writes=before.writes + self.writes,
        )


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
        return cls.after({})

    @classmethod
    def after(cls, total: Mapping[str, Any]) -> SinkTotals:
        """The totals with this total and no batch of their own. A missing figure is 0."""
        return cls(_NOTHING, {"batches": 0, **_NOTHING, **total})


def _state(account: Mapping[str, Any]) -> dict[str, Any]:
    return {name: account[name] for name in _STATES}


class SinkHistory:
    """The batches of one sink of one query, and the totals after each.

    Args:
        most: How many batches are kept one by one; older ones are only in the totals.
        before: The total of all batches up to and including ``through``, which are not added again.

    Attributes:
        through: The last batch that is only in the totals; -1 if there is none.
    """

    def __init__(self, most: int, before: SinkTotals | None = None, through: int = -1) -> None:
        self._most = most
        self._before, self.through = before or SinkTotals.none(), through
        # In the order of batches.
        self._accounts: list[Account] = []
        self._totals: list[SinkTotals] = []

    def add(self, account: Account) -> None:
        """Count the account of a batch, by the rule of the module."""
        if account.batch <= self.through:
            return
        at = bisect_left(self._accounts, account.batch, key=_batch)
        if at < len(self._accounts) and self._accounts[at].batch == account.batch:
            self._accounts[at] = account.joined(self._accounts[at])
        else:
            self._accounts.insert(at, account)
            self._totals.insert(at, self._before)
        for place in range(at, len(self._accounts)):
            before = self._totals[place - 1] if place else self._before
            self._totals[place] = before.then(_NOTHING | self._accounts[place].figures)
        if len(self._accounts) > self._most:
            self.through, self._before = self._accounts.pop(0).batch, self._totals.pop(0)

    @property
    def newest(self) -> Account | None:
        """The account of the newest batch; None if all are only in the totals."""
        return self._accounts[-1] if self._accounts else None

    def at(self, batch: int) -> SinkTotals | None:
        """The totals after a batch; None if the batch is only in a total."""
        if 0 <= batch <= self.through:
            return None
        at = bisect_right(self._accounts, batch, key=_batch)
        if not at:
            return self._before.idle()
        totals = self._totals[at - 1]
        return totals if self._accounts[at - 1].batch == batch else totals.idle()


def _batch(account: Account) -> int:
    return account.batch


class BatchHistory:
    """What the sinks of all queries have written, in the user's driver process. Any thread may call it.

    Args:
        most_batches: As of ``SinkHistory``.
        most_queries: How many queries are remembered: those with the newest accounts.
    """

    def __init__(self, most_batches: int = 1000, most_queries: int = 1000) -> None:
        self._most_batches, self._most_queries = most_batches, most_queries
        self._lock = threading.Lock()
        self._queries: dict[str, dict[str, tuple[SinkHistory, _Unsent]]] = {}

    def add(self, account: Account) -> None:
        """Count an account. Logs when a sink begins to drop rows or keep dead letters, and when it sends all again."""
        with self._lock:
            sinks = self._queries.pop(account.query, {})
            self._queries[account.query] = sinks
            if account.sink not in sinks:
                sinks[account.sink] = SinkHistory(self._most_batches), _Unsent()
            history, unsent = sinks[account.sink]
            history.add(account)
            unsent.note(account)
            while len(self._queries) > self._most_queries:
                self._queries.pop(next(iter(self._queries)))

    def totals(self, query: str, batches: Sequence[int]) -> dict[int, dict[str, SinkTotals]]:
        """The totals of each sink of a query after each batch. Leaves out a sink that has a batch only in a total."""
        with self._lock:
            sinks = {name: history for name, (history, _) in self._queries.get(query, {}).items()}
            return {batch: dict(_known(sinks, batch)) for batch in batches}


def _known(sinks: Mapping[str, SinkHistory], batch: int) -> Iterator[tuple[str, SinkTotals]]:
    for name, history in sinks.items():
        if (totals := history.at(batch)) is not None:
            yield name, totals


class _Unsent:
    """Logs a line when a sink begins to drop rows or keep them as dead letters, and one with the sum when that ends."""

    def __init__(self) -> None:
        self._since = 0
        self._figures: Mapping[str, Any] | None = None  # since then; None while all is sent

    def note(self, account: Account) -> None:
        """Take in a committed batch."""
        of, batch = account.figures, account.batch
        sink = f"sink {account.sink} of query {account.name or account.query}"
        if of["dropped"] or of["deadLettered"]:
            if self._figures is None:
                self._since = batch
                _log.warning("%s: rows are not being sent since batch %d: %s", sink, batch, _unsent(of))
            self._figures = of if self._figures is None else added(SINK, (self._figures, of))
        elif self._figures is not None:
            before, self._figures = self._figures, None
            _log.warning(
                "%s: rows are sent again since batch %d; from batch %d on %d of %d were not: %s",
                sink,
                batch,
                self._since,
                before["rows"] - before["sent"],
                before["rows"],
                _unsent(before),
            )


def _unsent(of: Mapping[str, Any]) -> str:
    kinds = (("dropped", "droppedByReason"), ("kept as dead letters", "deadLetteredByReason"))
    return ", ".join(
        f"{count} {what} ({reason})"
        for what, name in kinds
        for reason, count in sorted(of[name].items())
        if count
    )
