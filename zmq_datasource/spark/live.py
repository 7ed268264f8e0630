"""A query's metrics as a table that keeps itself up to date, in a notebook or a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zmq_datasource.spark.progress import metrics

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from rich.table import Table

__all__ = ["live_view", "records"]


def live_view(
    query: StreamingQuery, seconds: float | None = None, interval: float = 1.0, location: str | None = None
) -> None:
    """Show rates, drops, backlog and high-water marks of a query until it ends.

    Args:
        seconds: End after this long; None goes on until the query ends or Ctrl-C (in a notebook: interrupt).
        interval: Seconds between two looks.
        location: As in ``metrics``.

    Raises:
        MetricsError: ``location`` cannot be read.
    """
    # Every worker of Spark imports this package, and shows no tables.
    from zmq_datasource.monitoring.view import LiveView  # noqa: PLC0415

    deadline = None if seconds is None else time.monotonic() + seconds
    with _screen() as (show, width):
        view = LiveView(width=width)
        try:
            while True:
                last = metrics(query, location).last
                show(view.render(records(last)))
                left = interval if deadline is None else min(interval, deadline - time.monotonic())
                if left <= 0 or not query.isActive:
                    return
                time.sleep(left)
        except KeyboardInterrupt:
            return


def records(event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of an event that are ours, as ``store`` has them."""
    common = {"timestamp": event["timestamp"], "query": event["id"], "name": event["name"]}
    for source in event["sources"]:
        shown = source["metrics"]
        if shown.get("source") is not None:
            yield common | {"kind": "source", "source": shown["source"], "sourceMetrics": shown}
    for name, totals in event["sink"]["metrics"]["bySink"].items():
        named = {"kind": "sink", "sink": name, "batch": event["batchId"]}
        yield common | named | {"sinkMetrics": totals, "sinkTotal": totals["total"]}


@contextmanager
def _screen() -> Iterator[tuple[Callable[[Table], None], int | None]]:
    """Something that shows one thing after another in the same place, and its width in columns."""
    from rich.console import Console  # noqa: PLC0415 - see live_view
    from rich.live import Live  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    if _in_notebook():
        from IPython.display import display  # noqa: PLC0415 - only where it is

        handle = display(Table(), display_id=True)  # type: ignore[no-untyped-call]
        yield handle.update, None
        return
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        yield lambda content: live.update(content, refresh=True), console.width


def _in_notebook() -> bool:
    try:
        from IPython.core.getipython import get_ipython  # noqa: PLC0415 - may not be there
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
