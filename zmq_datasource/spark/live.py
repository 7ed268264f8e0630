"""A query's metrics as a table that is kept up to date, in a notebook or a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zmq_datasource.spark.progress import metrics

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["live_view", "records"]


def live_view(
    query: StreamingQuery, seconds: float | None = None, interval: float = 1.0, location: str | None = None
) -> None:
    """Show rates, drops, backlog and high-water marks of a query until it ends.

    Args:
        seconds: How long to show them; None until the query ends or Ctrl-C (in a notebook: interrupt).
        interval: Seconds between two updates.
        location: As in ``metrics``.

    Raises:
        MetricsError: ``location`` cannot be read.
    """
    # Every worker of Spark imports this package, and shows no tables.
    from zmq_datasource.monitoring.view import watch  # noqa: PLC0415

    def read() -> Iterator[dict[str, Any]]:
        return records(metrics(query, location).last)

    watch(read, interval, seconds, goes_on=lambda: query.isActive)


def records(event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The records of an event's ZeroMQ sources and sinks, as in the files at ``metricsLocation``."""
    common = {"timestamp": event["timestamp"], "query": event["id"], "name": event["name"]}
    for source in event["sources"]:
        shown = source["metrics"]
        if shown.get("source") is not None:
            yield common | {"kind": "source", "source": shown["source"], "sourceMetrics": shown}
    for name, totals in event["sink"]["metrics"]["bySink"].items():
        named = {"kind": "sink", "sink": name, "batch": event["batchId"]}
        yield common | named | {"sinkMetrics": totals, "sinkTotal": totals["total"]}
