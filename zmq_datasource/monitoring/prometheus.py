"""Figures for Prometheus, served over HTTP. Needs the extra ``prometheus``.

The listener on Spark's driver, ``receive`` and ``proxy`` use it; each passes a function that returns the figures to
show. Counters are totals, from which Prometheus makes rates.

The rule: a failure of the outlet is logged and counted in ``zmq_metrics_outlet_failures_total``, and the outlet tries
again. It never affects the data.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from zmq_datasource.counters import Metric
from zmq_datasource.errors import OptionError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.monitoring.http import HttpAddress, HttpServer

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 10.0

_OUTLET = (
    Metric(
        "failures",
        "times",
        "How often an outlet of metrics of this process has failed.",
        "process",
        series="zmq_metrics_outlet_failures",
    ),
)


class Shown(NamedTuple):
    """Figures of several things of one kind.

    Attributes:
        metrics: Their declarations.
        labels: The names of the labels that identify a thing.
        things: For each thing the values of these labels, and its figures by name.
    """

    metrics: tuple[Metric, ...]
    labels: tuple[str, ...]
    things: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]]


class PrometheusOutlet:
    """Shows the figures of a process.

    Args:
        read: Returns the figures to show. Called for each scrape, in any thread.
        clock: In seconds.
        is_ready: Whether ``/ready`` answers with 200, and not 503.

    Raises:
        OptionError: ``prometheus_client`` is not installed.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Shown]],
        clock: Callable[[], float] = time.monotonic,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        try:
            import prometheus_client.core  # noqa: PLC0415 - an extra
        except ImportError as e:
            raise OptionError(
                "metrics for Prometheus need its client; pip install 'zmq_datasource[prometheus]'"
            ) from e
        self._client: Any = prometheus_client
        self._read = read
        self._clock = clock
        self._is_ready = is_ready
        self._lock = threading.Lock()
        self._failures = {"http": 0}
        self._faults = LimitedLog(__name__, "failures of a Prometheus outlet")
        self._server: HttpServer | None = None
        self._next_try = 0.0
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._figures: Any = prometheus_client.make_wsgi_app(self._registry)

    @property
    def port(self) -> int | None:
        """The port at which figures are served now; None if they are not."""
        return None if self._server is None else self._server.server_port

    @property
    def failures(self) -> int:
        """How often an outlet has failed."""
        with self._lock:
            return sum(self._failures.values())

    def failed(self, outlet: str, why: str) -> None:
        """Count and log a failure."""
        with self._lock:
            self._failures[outlet] = self._failures.get(outlet, 0) + 1
        self._faults.warn("%s", why)

    def serve(self, address: HttpAddress) -> None:
        """Serve ``http://<address>/metrics`` and ``/ready`` until ``close``.

        Raises:
            OptionError: The address cannot be listened on.
        """
        try:
            self._server = HttpServer(address, self._answer)
        except OSError as e:
            raise OptionError(
                f"serving metrics on {address.host}:{address.port}: {e.strerror or e}; choose another port"
            ) from e
        _log.info("serving metrics on http://%s:%d/metrics", address.host, self.port)

    def serve_if_possible(self, address: HttpAddress) -> None:
        """Call ``serve``, unless figures are served now. A failure is counted; a call after 10 seconds tries again."""
        if self._server is not None or self._clock() < self._next_try:
            return
        self._next_try = self._clock() + _RETRY_SECONDS
        try:
            self.serve(address)
        except OptionError as e:
            self.failed("http", f"{e}. It is tried again every {_RETRY_SECONDS:.0f} s")

    def close(self) -> None:
        """Stop serving."""
        server, self._server = self._server, None
        self._next_try = float("inf")
        if server is not None:
            server.close()

    def _answer(self, request: dict[str, Any], start: Callable[..., Any]) -> Any:
        """Answer a request, as an application of WSGI."""
        if request["PATH_INFO"] != "/ready":
            return self._figures(request, start)
        is_ready = self._is_ready()
        start("200 OK" if is_ready else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"ready\n" if is_ready else b"not ready\n"]

    # prometheus_client's side.

    def collect(self) -> Iterator[Family]:
        """Yield all figures. Called for each scrape, in any thread."""
        for shown in self._read():
            yield from self._families(shown)
        with self._lock:
            things = [((outlet,), {"failures": count}) for outlet, count in self._failures.items()]
        yield from self._families(Shown(_OUTLET, ("outlet",), things))

    def _families(self, shown: Shown) -> Iterator[Family]:
        core = self._client.core
        for metric in shown.metrics:
            if metric.series is None:
                continue
            kind = core.CounterMetricFamily if metric.counts else core.GaugeMetricFamily
            labels = [*shown.labels, metric.label] if metric.label else shown.labels
            family = kind(metric.series, metric.meaning, labels=labels)
            # Prometheus refuses a page with the same labels twice. Things with the same labels are one thing.
            for values, figures in dict(shown.things).items():
                if metric.name not in figures:
                    continue  # a figure of the receiver, in a query that follows a log
                for more, value in _samples(metric, figures[metric.name]):
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
        yield (), datetime.fromisoformat(value).timestamp()
    elif value is not None:
        yield (), float(value)
