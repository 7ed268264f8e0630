"""Passes the metrics of every query of a session to a callback and to Prometheus."""

from __future__ import annotations

import copy
import json
import threading
import traceback
from collections.abc import Callable
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from zmq_datasource.errors import MetricsError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.monitoring.files import within
from zmq_datasource.monitoring.prometheus import PrometheusOutlet
from zmq_datasource.spark.progress import complete, fill_in_sinks, fill_in_sources, has_run
from zmq_datasource.spark.query_events import QueryEvents

__all__ = ["ZmqMetricsListener"]

# Short, because one thread of Spark calls all listeners.
_PATIENCE_SECONDS = 2.0


class ZmqMetricsListener(StreamingQueryListener):
    """Passes on each progress event of each query, with the metrics of its ZeroMQ sources and sinks.

    ```python
    spark.streams.addListener(ZmqMetricsListener(prometheusPort=9400))
    ```

    A failure here is logged and counted (``failures``, ``zmq_metrics_outlet_failures_total``), and does not affect the
    query.

    Args:
        callback: Called with each event in the form of ``metrics(query).last``, in a thread of Spark.
        location: The sinks' ``metricsLocation``; as in ``metrics``.
        spark: The session of the queries; by default the active one. For queries of other sessions there are no events
            while they are idle.
        prometheusPort: Serve the metrics on this port of the driver; 0 takes a free one (``port``). Needs the extra
            ``prometheus``.
        prometheusAddress: The address to listen on.
        prometheusGateway: Push the metrics to this Pushgateway, ``host:port`` or a URL.
        prometheusInterval: Seconds between two pushes.
        prometheusJob: The group of the Pushgateway that a push replaces: use another one for each application.

    Raises:
        OptionError: The Prometheus client is not installed.
    """

    def __init__(
        self,
        callback: Callable[[dict[str, Any]], object] | None = None,
        *,
        location: str | None = None,
        spark: SparkSession | None = None,
        prometheusPort: int | None = None,
        prometheusAddress: str = "0.0.0.0",
        prometheusGateway: str | None = None,
        prometheusInterval: float = 10.0,
        prometheusJob: str = "zmq_datasource",
    ) -> None:
        self._callback = callback
        self._location = location
        # Taken here, because no session is active in the threads that call listeners.
        self._spark = spark or SparkSession.getActiveSession()
        self._faults = LimitedLog(__name__, "failures")
        self._events = QueryEvents()
        self._outlet: PrometheusOutlet | None = None
        self._port, self._address = prometheusPort, prometheusAddress
        self._failures = 0
        self._hanging: threading.Event | None = None  # set when the last read of ``location`` has ended
        self._sinks: dict[str, dict[str, Any]] = {}  # by query: the sinks' last figures that could be read
        if prometheusPort is not None or prometheusGateway is not None:
            self._outlet = PrometheusOutlet(self._events.shown)
            self._serve()
            if prometheusGateway is not None:
                self._outlet.push(prometheusGateway, prometheusInterval, prometheusJob)

    def _serve(self) -> None:
        if self._outlet is not None and self._port is not None:
            self._outlet.serve_if_possible(self._port, self._address)

    @property
    def port(self) -> int | None:
        """The port on which metrics are served for Prometheus; None if they are not."""
        return None if self._outlet is None else self._outlet.port

    @property
    def failures(self) -> int:
        """How many times an outlet has failed."""
        return self._failures if self._outlet is None else self._outlet.failures

    def close(self) -> None:
        """Stop serving, and push a last time. Call it after ``spark.streams.removeListener``."""
        if self._outlet is not None:
            self._outlet.close()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing, because there is no progress yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        self._pass_on(json.loads(event.progress.json))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """An idle query has no progress, but its connections come and go; Spark has asked its sources again."""
        query = None if self._spark is None else self._spark.streams.get(str(event.id))
        last = None if query is None else query.lastProgress
        if last is not None:
            progress = json.loads(last.json)
            if not has_run(progress):  # a batch has its own event
                self._pass_on(progress)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        self._sinks.pop(str(event.id), None)
        self._events.ended(str(event.id))

    def _pass_on(self, progress: dict[str, Any]) -> None:
        query, known = progress["id"], True
        try:
            self._fill_in(progress)
            self._sinks[query] = progress["sink"]
        except MetricsError as e:
            known = False
            self._failed("metricsLocation", str(e))
        # Prometheus would take a counter that falls and rises again for a restart.
        sink = progress["sink"] if known else self._sinks.get(query, progress["sink"])
        self._events.observe(progress | {"sink": sink})
        self._serve()
        if self._callback is not None:
            try:
                self._callback(complete(copy.deepcopy(progress)))
            # Spark's listener bus would swallow the error of a user's callback.
            except Exception as e:
                self._failed(
                    "callback", f"the callback of ZmqMetricsListener: {e!r}\n{traceback.format_exc()}"
                )

    def _fill_in(self, progress: dict[str, Any]) -> None:
        fill_in_sources([progress])
        if self._location is None:
            fill_in_sinks([progress], None)
            return
        if self._hanging is not None and not self._hanging.is_set():
            raise MetricsError(f"reading {self._location}: the file system still has not answered")
        answered = self._hanging = threading.Event()

        def read(_: threading.Event) -> dict[str, Any]:
            try:
                found = copy.deepcopy(progress)
                fill_in_sinks([found], self._location)
                return found
            finally:
                answered.set()

        progress |= within(_PATIENCE_SECONDS, "reading the accounts", read)

    def _failed(self, outlet: str, why: str) -> None:
        if self._outlet is not None:
            self._outlet.failed(outlet, why)
        else:
            self._failures += 1
            self._faults.warn("%s", why)
