"""Metrics for Prometheus: served over HTTP, or pushed to a Pushgateway. Needs the extra ``prometheus``.

What is shown is the newest event of each query, as ``spark.progress`` fills it in; the totals in it
are Prometheus' counters. A query's series stay for a while after it has ended, so that its last
values are scraped.

The rule: an outlet that fails is logged, tried again and shown in ``zmq_metrics_outlet_failures_total``;
it never reaches the query.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from zmq_datasource.errors import OptionError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.host.locations import without_secrets
from zmq_datasource.monitoring.catalogue import SOURCE, TOTAL
from zmq_datasource.monitoring.metric import Metric
from zmq_datasource.options.types import Location

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

__all__ = ["PrometheusOutlet", "Shown", "serve_metrics"]

_log = logging.getLogger(__name__)

_KEPT_SECONDS = 600.0
_RETRY_SECONDS = 10.0
_PUSH_TIMEOUT_SECONDS = 5.0


class Shown(NamedTuple):
    """Figures of several things of one kind.

    Attributes:
        metrics: Their declarations.
        labels: What tells the things apart.
        things: Of each one the values of the labels, and its figures by name.
    """

    metrics: tuple[Metric, ...]
    labels: tuple[str, ...]
    things: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]]


def serve_metrics(
    port: int, read: Callable[[], Iterable[Shown]], address: str = "0.0.0.0"
) -> Callable[[], None]:
    """Serve the figures of a program at ``http://<address>:<port>/metrics``.

    Args:
        port: 0 takes a free one.
        read: Called for each scrape, in another thread.

    Returns:
        Ends it.

    Raises:
        OptionError: The port cannot be listened on, or ``prometheus_client`` is not installed.
    """
    client = _client()
    registry = client.CollectorRegistry(auto_describe=False)

    class Collector:
        def collect(self) -> Iterator[Family]:
            for shown in read():
                yield from _families(shown.metrics, shown.things, shown.labels)

    registry.register(Collector())
    try:
        server, _ = client.start_http_server(port, address, registry=registry)
    except OSError as e:
        raise OptionError(
            f"prometheus={port}: {address}:{port}: {e.strerror or e}; choose another port"
        ) from e
    _log.info("serving metrics on http://%s:%d/metrics", address, server.server_port)

    def close() -> None:
        server.shutdown()
        server.server_close()

    return close


def _client() -> Any:
    try:
        import prometheus_client  # noqa: PLC0415 - an extra
    except ImportError as e:
        raise OptionError(
            "metrics for Prometheus need its client; pip install 'zmq_datasource[prometheus]'"
        ) from e
    return prometheus_client


@dataclass
class _Query:
    """A query's newest event, and when it ended."""

    event: Mapping[str, Any]
    ended: float | None = None


class PrometheusOutlet:
    """Shows the newest metrics of all queries.

    Args:
        port: Serve ``http://<address>:<port>/metrics``; 0 takes a free one.
        address: Where to listen.
        gateway: Push to this Pushgateway (``host:port`` or a URL).
        interval: Seconds between two pushes.
        job: The group that a push replaces there: one for each application.

    Raises:
        OptionError: ``prometheus_client`` is not installed.
    """

    def __init__(
        self,
        port: int | None = None,
        address: str = "0.0.0.0",
        gateway: str | None = None,
        interval: float = 10.0,
        job: str = "zmq_datasource",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = prometheus_client = _client()
        self._wanted_port, self._address = port, address
        self._gateway, self._job = None if gateway is None else Location(gateway), job
        self._clock = clock
        self._lock = threading.Lock()
        self._queries: dict[str, _Query] = {}
        self._failures = {"http": 0, "pushgateway": 0}
        self._faults = LimitedLog(__name__, "failures of a Prometheus outlet")
        self._next_try = 0.0
        self._server: Any = None
        self._stopping = threading.Event()
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._serve()
        self._pusher: threading.Thread | None = None
        if gateway is not None:
            self._pusher = threading.Thread(
                target=self._push, args=(interval,), name="zmq-prometheus-push", daemon=True
            )
            self._pusher.start()

    @property
    def port(self) -> int | None:
        """Where it is served now; None if it is not."""
        return None if self._server is None else int(self._server.server_port)

    @property
    def failures(self) -> int:
        """How often anything has failed."""
        with self._lock:
            return sum(self._failures.values())

    def observe(self, event: Mapping[str, Any]) -> None:
        """Show a query's newest event, if it has to do with ZeroMQ; tries again what has failed."""
        if any(map(_is_ours, event["sources"])) or event["sink"].get("metrics"):
            with self._lock:
                self._queries[event["id"]] = _Query(event)
                self._forget()
        self._serve()

    def ended(self, query: str) -> None:
        """A query has ended."""
        with self._lock:
            if query in self._queries:
                self._queries[query].ended = self._clock()

    def failed(self, outlet: str, why: str) -> None:
        """Count and tell a failure."""
        with self._lock:
            self._failures[outlet] = self._failures.get(outlet, 0) + 1
        self._faults.warn("%s", why)

    def close(self) -> None:
        """Stop serving; push a last time."""
        self._stopping.set()
        if self._pusher is not None:
            self._pusher.join(2 * _PUSH_TIMEOUT_SECONDS)
        server, self._server = self._server, None
        self._wanted_port = None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _forget(self) -> None:
        now = self._clock()
        self._queries = {
            key: query
            for key, query in self._queries.items()
            if query.ended is None or now - query.ended < _KEPT_SECONDS
        }

    def _serve(self) -> None:
        now = self._clock()
        if self._wanted_port is None or self._server is not None or now < self._next_try:
            return
        self._next_try = now + _RETRY_SECONDS
        try:
            self._server, _ = self._client.start_http_server(
                self._wanted_port, self._address, registry=self._registry
            )
        except OSError as e:
            self.failed(
                "http",
                f"serving metrics on {self._address}:{self._wanted_port}: {e.strerror or e}; it is tried again every "
                f"{_RETRY_SECONDS:.0f} s. Choose another prometheusPort if this one is taken",
            )
            return
        _log.info("serving metrics on http://%s:%d/metrics", self._address, self.port)

    def _push(self, interval: float) -> None:
        ended = False
        assert self._gateway is not None, "the thread is started with one"
        while not ended:
            ended = self._stopping.wait(interval)
            try:
                self._client.push_to_gateway(
                    self._gateway.plain, job=self._job, registry=self._registry, timeout=_PUSH_TIMEOUT_SECONDS
                )
            # urllib raises what it likes.
            except Exception as e:
                self.failed(
                    "pushgateway",
                    f"pushing metrics to {self._gateway}: {without_secrets(e, self._gateway)}; it is tried again",
                )

    # prometheus_client's side.

    def collect(self) -> Iterator[Family]:
        """Called for each scrape and push, in any thread."""
        with self._lock:
            self._forget()
            queries = list(self._queries.values())
            failures = dict(self._failures)
        yield from _families(SOURCE, list(_of_sources(queries)), ("query", "query_id", "source", "log"))
        yield from _families(TOTAL, list(_of_sinks(queries)), ("query", "query_id", "sink"))
        yield self._gauge(
            "zmq_query_active",
            "Whether the query is running.",
            ("query", "query_id"),
            [((_name(q.event), q.event["id"]), float(q.ended is None)) for q in queries],
        )
        yield self._gauge(
            "zmq_query_progress_timestamp_seconds",
            "When the query's newest trigger began.",
            ("query", "query_id"),
            [((_name(q.event), q.event["id"]), _seconds(q.event["timestamp"])) for q in queries],
        )
        family = self._client.core.CounterMetricFamily(
            "zmq_metrics_outlet_failures",
            "How often an outlet of metrics of this listener has failed.",
            labels=["outlet"],
        )
        for outlet, count in failures.items():
            family.add_metric([outlet], count)
        yield family

    def _gauge(
        self, name: str, doc: str, labels: Iterable[str], samples: Iterable[tuple[tuple[str, ...], float]]
    ) -> Family:
        gauge = self._client.core.GaugeMetricFamily(name, doc, labels=list(labels))
        for values, value in samples:
            gauge.add_metric(list(values), value)
        family: Family = gauge
        return family


# A labelled set of metrics: of one source or one sink.
_Labelled = tuple[tuple[str, ...], Mapping[str, Any]]


def _name(event: Mapping[str, Any]) -> str:
    return str(event["name"] or event["id"])


def _is_ours(source: Mapping[str, Any]) -> bool:
    """Whether it is a source of this package; others have metrics of their own, as Kafka's."""
    return "source" in (source.get("metrics") or {})


def _of_sources(queries: Iterable[_Query]) -> Iterator[_Labelled]:
    for query in queries:
        event = query.event
        for source in event["sources"]:
            if _is_ours(source):
                metrics = source["metrics"]
                yield (_name(event), event["id"], metrics["source"], source["latestOffset"]["log"]), metrics


def _of_sinks(queries: Iterable[_Query]) -> Iterator[_Labelled]:
    for query in queries:
        event = query.event
        for name, totals in event["sink"].get("metrics", {}).get("bySink", {}).items():
            yield (_name(event), event["id"], name), totals["total"]


def _families(
    metrics: Iterable[Metric], labelled: Sequence[_Labelled], labels: tuple[str, ...]
) -> Iterator[Family]:
    from prometheus_client import core  # noqa: PLC0415 - an extra

    for metric in metrics:
        if metric.series is None:
            continue
        kind = core.CounterMetricFamily if metric.counts else core.GaugeMetricFamily
        family = kind(
            metric.series,
            metric.series_doc or metric.doc,
            labels=[*labels, metric.label] if metric.label else list(labels),
        )
        # The same labels twice would be no exposition: what has them is the same thing.
        for values, shown in dict(labelled).items():
            if metric.name not in shown:
                continue  # of a query that follows a log, the receiver's
            for more, value in _samples(metric, shown[metric.name]):
                family.add_metric([*values, *more], value * metric.scale)
        yield family


def _samples(metric: Metric, value: Any) -> Iterator[tuple[tuple[str, ...], float]]:
    """A metric's value as numbers, each with the label that a map or a state adds."""
    if isinstance(value, Mapping):
        for key, number in value.items():
            yield (key,), float(number)
    elif metric.keys:
        for key in metric.keys:
            yield (key,), float(value == key)
    elif isinstance(value, str):
        yield (), _seconds(value)
    elif value is not None:
        yield (), float(value)


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
