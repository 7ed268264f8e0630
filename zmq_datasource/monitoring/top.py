"""``zmq-datasource top``: the newest reports of a location, on a terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live

from zmq_datasource.monitoring.store import MetricsStore
from zmq_datasource.monitoring.view import View
from zmq_datasource.option_types import Location

__all__ = ["watch"]

_WIDTH = 160


def watch(location: Location, interval: float, since: float, *, once: bool = False) -> None:
    """Show what is at ``location`` until Ctrl-C.

    Raises:
        MetricsError: There is nothing, or it cannot be read.
    """
    store, console = MetricsStore(location), Console()
    if not console.is_terminal:  # into a file or pipe, a line is as wide as it must be
        console = Console(width=_WIDTH)
    view = View(since, console.width)
    if once:
        console.print(view.render(store.newest()))
        return
    try:
        with Live(view.render(store.newest()), console=console, auto_refresh=False, screen=False) as live:
            while True:
                time.sleep(interval)
                live.update(view.render(store.newest()), refresh=True)
    except KeyboardInterrupt:
        return
