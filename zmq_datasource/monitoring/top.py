"""``zmq-datasource top``: the newest reports of a location, on a terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live

from zmq_datasource.errors import OptionError
from zmq_datasource.monitoring.store import MetricsStore
from zmq_datasource.monitoring.view import LiveView
from zmq_datasource.options.types import Location

__all__ = ["watch"]

_WIDTH = 160


def watch(location: Location, interval: float, since: float, *, once: bool = False) -> None:
    """Show what is at ``location``: once, or on a terminal until Ctrl-C.

    Raises:
        OptionError: ``location`` is empty.
        MetricsError: It cannot be read; once: there is nothing.
    """
    if not location:
        raise OptionError("--metrics is empty; name the metricsLocation of a source or sink")
    store, console = MetricsStore(location), Console()
    if not console.is_terminal:  # a line is as wide as it must be
        console, once = Console(width=_WIDTH), True
    view = LiveView(since, console.width)
    if once:
        console.print(view.render(store.newest(required=True)))
        return
    try:
        with Live(view.render(store.newest()), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(view.render(store.newest()), refresh=True)
    except KeyboardInterrupt:
        return
