"""A proxy's figures for Prometheus, from its status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zmq_datasource.counters import declared
from zmq_datasource.monitoring.prometheus import Shown
from zmq_datasource.proxy.figures import LiveFigures, PublishedFigures, SubscriberFigures

__all__ = ["PROXY", "SUBSCRIBER", "shown"]

PROXY = declared("zmq_proxy", LiveFigures, PublishedFigures)
SUBSCRIBER = declared("zmq_proxy_durable", SubscriberFigures)


def shown(status: Mapping[str, Any]) -> Iterator[Shown]:
    """The figures of a status; none of an empty one."""
    if status:
        yield Shown(PROXY, (), [((), status)])
        yield Shown(SUBSCRIBER, ("name",), [((account["name"],), account) for account in status["durable"]])
