"""``zmq-datasource proxy``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from zmq_datasource.cli.types import all_options, option_of, other_options, prometheus_port
from zmq_datasource.options import ProxyOptions

__all__ = ["proxy"]


@click.command(short_help="Keep messages for subscribers that are away.")
@option_of(ProxyOptions, "bind", "connect", "pull", "router", "publish", "durable", "replay")
@option_of(ProxyOptions, "wal_location", required=True)
@option_of(
    ProxyOptions, "wal_retention", "wal_max_bytes", "topics", "rcvhwm", "sndhwm", "slow_subscriber", "plain"
)
@other_options("-o subscriberExpiry=30d", ProxyOptions)
@click.option(
    "--monitor",
    is_flag=True,
    help="Show publishers, subscriptions, rates and backlogs, live; into a file or pipe as a line of JSON a second.",
)
@prometheus_port
def proxy(others: tuple[str, ...], monitor: bool, prometheus: int | None, **named: object) -> None:
    """Stand between publishers and subscribers, write down what passes, and give it again.

    Messages are published as topic, id (8 bytes, big-endian), value, once they are in the log. Any Spark job
    can read the log. Ctrl-C or SIGTERM takes what is on its way, and ends.

    \b
    Examples:
      zmq-datasource proxy --bind "tcp://*:5557" --publish "tcp://*:5556" --wal-location /data/wal
      zmq-datasource proxy --bind "tcp://*:5557" --publish "tcp://*:5556" --durable "tcp://*:5558" \\
          --replay "tcp://*:5559" --wal-location /data/wal --wal-retention 7d --monitor
      zmq-datasource proxy --connect tcp://feed:5556 --topics orders. --durable "tcp://*:5558" \\
          --wal-location /data/wal -o subscriberExpiry=30d
    """
    from contextlib import ExitStack  # noqa: PLC0415

    given = all_options(ProxyOptions, named, others)
    with ExitStack() as stack:
        observe: Callable[[dict[str, Any]], None] | None = None
        if prometheus is not None:
            from zmq_datasource.monitoring.proxy import ProxyMetrics  # noqa: PLC0415

            metrics = ProxyMetrics(prometheus)
            stack.callback(metrics.close)
            observe = metrics.observe
        if monitor:
            _watch(given, observe)
        else:
            from zmq_datasource.proxy.process import run_until_stopped  # noqa: PLC0415 - imports Arrow

            run_until_stopped(given, observe)


def _watch(given: dict[str, Any], observe: Callable[[dict[str, Any]], None] | None) -> None:
    import json  # noqa: PLC0415
    import time  # noqa: PLC0415
    from contextlib import ExitStack  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    from zmq_datasource.monitoring.view import ProxyView  # noqa: PLC0415
    from zmq_datasource.proxy.handle import Proxy  # noqa: PLC0415

    console = Console()
    view = ProxyView(console.width)
    try:
        with Proxy(**given) as running, ExitStack() as stack:
            live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
            if live is not None:
                stack.enter_context(live)
            while running.running:
                status = dict(running.status())
                if observe is not None:
                    observe(status)
                if live is None:
                    click.echo(json.dumps(status))
                else:
                    live.update(view.render(status, time.monotonic()))
                time.sleep(1)
    except KeyboardInterrupt:
        pass
