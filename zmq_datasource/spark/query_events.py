"""What Prometheus shows of queries: the newest event of each, as ``progress`` fills it in.

The series of a query stay for a while after it has ended, so that its last values are scraped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zmq_datasource.counters import Metric
from zmq_datasource.monitoring.accounts import TOTAL
from zmq_datasource.monitoring.prometheus import Shown
from zmq_datasource.monitoring.source import SOURCE

__all__ = ["QueryEvents"]

_KEPT_SECONDS = 600.0

_QUERY = (
    Metric("active", "", "Whether the query is running.", "now", series="zmq_query_active"),
    Metric(
        "timestamp",
        "",
        "When the query's newest trigger began.",
        "now",
        "TIMESTAMP",
        series="zmq_query_progress_timestamp_seconds",
    ),
)

# The values of the labels of a thing, and its figures.
_Labelled = tuple[tuple[str, ...], Mapping[str, Any]]


@dataclass
class _Query:
    """A query's newest event, and when it ended."""

    event: Mapping[str, Any]
    ended: float | None = None

    @property
    def labels(self) -> tuple[str, str]:
        return str(self.event["name"] or self.event["id"]), self.event["id"]


class QueryEvents:
    """The newest events. For several threads.

    Args:
        clock: In seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._queries: dict[str, _Query] = {}

    def observe(self, event: Mapping[str, Any]) -> None:
        """Show a query's newest event, if it has to do with ZeroMQ."""
        if any(map(_is_ours, event["sources"])) or event["sink"].get("metrics"):
            with self._lock:
                self._queries[event["id"]] = _Query(event)
                self._forget()

    def ended(self, query: str) -> None:
        """A query has ended."""
        with self._lock:
            if query in self._queries:
                self._queries[query].ended = self._clock()

    def shown(self) -> Iterator[Shown]:
        """The figures of all sources, sinks and queries."""
        with self._lock:
            self._forget()
            queries = list(self._queries.values())
        yield Shown(SOURCE, ("query", "query_id", "source", "log"), list(_of_sources(queries)))
        yield Shown(TOTAL, ("query", "query_id", "sink"), list(_of_sinks(queries)))
        of_queries = [
            (query.labels, {"active": query.ended is None, "timestamp": query.event["timestamp"]})
            for query in queries
        ]
        yield Shown(_QUERY, ("query", "query_id"), of_queries)

    def _forget(self) -> None:
        now = self._clock()
        self._queries = {
            key: query
            for key, query in self._queries.items()
            if query.ended is None or now - query.ended < _KEPT_SECONDS
        }


def _is_ours(source: Mapping[str, Any]) -> bool:
    """Whether it is a source of this package; others have metrics of their own, as Kafka's."""
    return "source" in (source.get("metrics") or {})


def _of_sources(queries: Iterable[_Query]) -> Iterator[_Labelled]:
    for query in queries:
        for source in query.event["sources"]:
            if _is_ours(source):
                metrics = source["metrics"]
                yield (*query.labels, metrics["source"], source["latestOffset"]["log"]), metrics


def _of_sinks(queries: Iterable[_Query]) -> Iterator[_Labelled]:
    for query in queries:
        for name, totals in query.event["sink"].get("metrics", {}).get("bySink", {}).items():
            yield (*query.labels, name), totals["total"]
