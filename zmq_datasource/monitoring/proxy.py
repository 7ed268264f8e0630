"""A proxy's figures for Prometheus, from its status."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zmq_datasource.monitoring.catalogue import PROXY, SUBSCRIBER
from zmq_datasource.monitoring.prometheus import Shown, serve_metrics

__all__ = ["ProxyMetrics"]


class ProxyMetrics:
    """Serves the newest status of a proxy.

    Args:
        port: Where, at ``/metrics``; 0 takes a free one.

    Attributes:
        close: Ends it.

    Raises:
        OptionError: The port cannot be listened on, or ``prometheus_client`` is not installed.
    """

    def __init__(self, port: int) -> None:
        self._status: Mapping[str, Any] = {}
        self.close: Callable[[], None] = serve_metrics(port, self._read)

    def observe(self, status: Mapping[str, Any]) -> None:
        """Show this status from now on."""
        self._status = status

    def _read(self) -> Iterator[Shown]:
        status = self._status
        if status:
            yield Shown(PROXY, (), [((), status)])
            accounts = [((account["name"],), account) for account in status["durable"]]
            yield Shown(SUBSCRIBER, ("name",), accounts)
