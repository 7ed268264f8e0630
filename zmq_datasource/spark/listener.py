"""The same metrics for every query of a session, as they come: to a callback, and to Prometheus."""

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
from zmq_datasource.monitoring.patience import within
from zmq_datasource.monitoring.prometheus import PrometheusOutlet
from zmq_datasource.spark.progress import complete, fill_in_sinks, fill_in_sources, has_run

__all__ = ["ZmqMetricsListener"]

# Spark's own thread calls listeners one after another.
_PATIENCE_SECONDS = 2.0


class ZmqMetricsListener(StreamingQueryListener):
    """Hands on each progress event of each query with the metrics of its ZeroMQ sources and sinks.

    ```python
    spark.streams.addListener(ZmqMetricsListener(prometheusPort=9400))
    ```

    Whatever fails here is logged and counted (``failures``, ``zmq_metrics_outlet_failures_total``), and
    no query notices.

    Args:
        callback: Called with each event as ``metrics(query).last`` would be then, in a thread of Spark's.
        location: The sinks' ``metricsLocation``; as in ``metrics``.
        spark: The session of the queries, which is asked about idle ones; by default the active one. Queries of
            other sessions are heard while they have data.
        prometheusPort: Serve the metrics on this port of the driver; 0 takes a free one (``port``). Needs
            the extra ``prometheus``.
        prometheusAddress: Where to listen.
        prometheusGateway: Push them to this Pushgateway, ``host:port`` or a URL.
        prometheusInterval: Seconds between two pushes.
        prometheusJob: The group that a push replaces there: name one for each application.

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
        # Here, because Spark calls listeners in threads in which no session is active.
        self._spark = spark or SparkSession.getActiveSession()
        self._faults = LimitedLog(__name__, "failures")
        self._outlet: PrometheusOutlet | None = None
        self._failures = 0
        self._hanging: threading.Event | None = None  # set once the last reading has ended
        self._sinks: dict[str, dict[str, Any]] = {}  # of each query's last event of which they were known
        if prometheusPort is not None or prometheusGateway is not None:
            self._outlet = PrometheusOutlet(
                prometheusPort, prometheusAddress, prometheusGateway, prometheusInterval, prometheusJob
            )

    @property
    def port(self) -> int | None:
        """Where Prometheus is served now; None if it is not."""
        return None if self._outlet is None else self._outlet.port

    @property
    def failures(self) -> int:
        """How often an outlet has failed."""
        return self._failures if self._outlet is None else self._outlet.failures

    def close(self) -> None:
        """Stop serving; push a last time. After ``spark.streams.removeListener``."""
        if self._outlet is not None:
            self._outlet.close()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing: there is no progress yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        self._hand_on(json.loads(event.progress.json))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """An idle query has no progress, but its connections come and go; Spark has asked its sources anew."""
        query = None if self._spark is None else self._spark.streams.get(str(event.id))
        last = None if query is None else query.lastProgress
        if last is not None:
            progress = json.loads(last.json)
            if not has_run(progress):  # a batch meanwhile has an event of its own
                self._hand_on(progress)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        self._sinks.pop(str(event.id), None)
        if self._outlet is not None:
            self._outlet.ended(str(event.id))

    def _hand_on(self, progress: dict[str, Any]) -> None:
        query, known = progress["id"], True
        try:
            self._fill_in(progress)
            self._sinks[query] = progress["sink"]
        except MetricsError as e:
            known = False
            self._failed("metricsLocation", str(e))
        if self._outlet is not None:
            # A counter that fell and rose again would count as news.
            self._outlet.observe(
                progress if known else progress | {"sink": self._sinks.get(query, progress["sink"])}
            )
        if self._callback is not None:
            try:
                self._callback(complete(copy.deepcopy(progress)))
            # It is the user's; what it raises would only be swallowed by Spark's listener bus.
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
