"""Passes the metrics of every query of a session to a callback and to Prometheus.

The series of a query stay for a while after it has ended, so that its last values are scraped.
"""

from __future__ import annotations

import copy
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from zmq_datasource.counters import Metric
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.monitoring.accounts import TOTAL
from zmq_datasource.monitoring.http import HttpAddress
from zmq_datasource.monitoring.prometheus import PrometheusOutlet, Shown
from zmq_datasource.monitoring.source import SOURCE, own_figures
from zmq_datasource.spark.queries import complete, fill_in_sinks, fill_in_sources, has_batch
from zmq_datasource.spark.registration import active_history

_KEPT_SECONDS = 600.0

_QUERY = (
    Metric("active", "", "Whether the query is running.", "now", series="zmq_query_active"),
    Metric(
        "timestamp",
        "",
        "When the query's newest trigger began.",
        "now",
        "time",
        series="zmq_query_progress_timestamp_seconds",
    ),
)

# The values of the labels of a source, sink or query, and its figures.
_Labelled = tuple[tuple[str, ...], Mapping[str, Any]]


class ZmqMetricsListener(StreamingQueryListener):
    """Passes on each progress event of each query, with the metrics of its ZeroMQ sources and sinks.

    ```python
    spark.streams.addListener(ZmqMetricsListener(prometheusPort=9400))
    ```

    A failure here is logged and counted (``failures``, ``zmq_metrics_outlet_failures_total``), and does not affect the
    query.

    Args:
        callback: Called with each event in the form of ``metrics(query).last``, in a thread of Spark.
        spark: The session of the queries; by default the active one. For queries of other sessions there are no events
            while they are idle.
        prometheusPort: Serve the metrics on this port of the driver; 0 takes a free one (``port``). Needs the extra
            ``prometheus``.
        prometheusAddress: The address to listen on; by default only programs on the driver's machine can ask. 0.0.0.0
            listens on all addresses of the machine.

    Raises:
        OptionError: The Prometheus client is not installed.
    """

    def __init__(
        self,
        callback: Callable[[dict[str, Any]], object] | None = None,
        *,
        spark: SparkSession | None = None,
        prometheusPort: int | None = None,
        prometheusAddress: str = "127.0.0.1",
    ) -> None:
        self._callback = callback
        # Taken here, because no session is active in the threads that call listeners.
        self._spark = spark or SparkSession.getActiveSession()
        self._faults = LimitedLog(__name__, "failures")
        self._events = QueryEvents()
        self._outlet: PrometheusOutlet | None = None
        self._address = None if prometheusPort is None else HttpAddress(prometheusPort, prometheusAddress)
        self._failures = 0
        if self._address is not None:
            self._outlet = PrometheusOutlet(self._events.shown)
            self._serve()

    def _serve(self) -> None:
        if self._outlet is not None and self._address is not None:
            self._outlet.serve_if_possible(self._address)

    @property
    def port(self) -> int | None:
        """The port on which metrics are served for Prometheus; None if they are not."""
        return None if self._outlet is None else self._outlet.port

    @property
    def failures(self) -> int:
        """How many times an outlet has failed."""
        return self._failures if self._outlet is None else self._outlet.failures

    def close(self) -> None:
        """Stop serving. Call it after ``spark.streams.removeListener``."""
        if self._outlet is not None:
            self._outlet.close()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing, because there is no progress yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        self._pass_on(json.loads(event.progress.json))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Pass on the newest progress of an idle query: Spark has asked its sources, and connections come and go."""
        query = None if self._spark is None else self._spark.streams.get(str(event.id))
        last = None if query is None else query.lastProgress
        if last is not None:
            progress = json.loads(last.json)
            if not has_batch(progress):  # a batch has its own event
                self._pass_on(progress)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        self._events.ended(str(event.id))

    def _pass_on(self, progress: dict[str, Any]) -> None:
        fill_in_sources([progress])
        fill_in_sinks([progress], active_history())
        self._events.observe(progress)
        self._serve()
        if self._callback is not None:
            try:
                self._callback(complete(copy.deepcopy(progress)))
            # Spark's listener bus would swallow the error of a user's callback.
            except Exception as e:
                self._failed(
                    "callback", f"the callback of ZmqMetricsListener: {e!r}\n{traceback.format_exc()}"
                )

    def _failed(self, outlet: str, why: str) -> None:
        if self._outlet is not None:
            self._outlet.failed(outlet, why)
        else:
            self._failures += 1
            self._faults.warn("%s", why)


@dataclass
class _Query:
    """A query's newest event, and when it ended."""

    event: Mapping[str, Any]
    ended: float | None = None

    @property
    def labels(self) -> tuple[str, str]:
        return str(self.event["name"] or self.event["id"]), self.event["id"]


class QueryEvents:
    """The newest event of each query. Any thread may call it.

    Args:
        clock: In seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._queries: dict[str, _Query] = {}

    def observe(self, event: Mapping[str, Any]) -> None:
        """Keep a query's newest event for ``shown``, if the query has a ZeroMQ source or sink."""
        if any(map(_is_ours, event["sources"])) or event["sink"].get("metrics"):
            with self._lock:
                self._queries[event["id"]] = _Query(event)
                self._forget()

    def ended(self, query: str) -> None:
        """Note the end of a query. Its figures stay for ``_KEPT_SECONDS``."""
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
    """Whether a source is of this package. Other sources, such as Kafka's, have other metrics."""
    return "source" in (source.get("metrics") or {})


def _of_sources(queries: Iterable[_Query]) -> Iterator[_Labelled]:
    for query in queries:
        for source in query.event["sources"]:
            if _is_ours(source):
                metrics = source["metrics"]
                labels = (*query.labels, metrics["source"], source["latestOffset"]["log"])
                yield labels, own_figures(metrics)


def _of_sinks(queries: Iterable[_Query]) -> Iterator[_Labelled]:
    for query in queries:
        for name, totals in query.event["sink"].get("metrics", {}).get("bySink", {}).items():
            yield (*query.labels, name), totals["total"]
