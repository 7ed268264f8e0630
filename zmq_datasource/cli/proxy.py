"""``zmq-datasource proxy``."""

from __future__ import annotations

import json
import logging
import time
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
    """Stand between publishers and subscribers, keep the messages in a log, and serve them again.

    A message is published as topic, id (8 bytes, big-endian), value, once it is in the log. Any Spark job can
    read the log. On Ctrl-C or SIGTERM the proxy takes the messages that are on the way, and ends.

    \b
    Examples:
      zmq-datasource proxy --bind "tcp://*:5557" --publish "tcp://*:5556" --wal-location /data/wal
      zmq-datasource proxy --bind "tcp://*:5557" --publish "tcp://*:5556" --durable "tcp://*:5558" \\
          --replay "tcp://*:5559" --wal-location /data/wal --wal-retention 7d --monitor
      zmq-datasource proxy --connect tcp://feed:5556 --topics orders. --durable "tcp://*:5558" \\
          --wal-location /data/wal -o subscriberExpiry=30d
    """
    from contextlib import ExitStack  # noqa: PLC0415

    from zmq_datasource.monitoring.prometheus import PrometheusOutlet  # noqa: PLC0415
    from zmq_datasource.monitoring.proxy import shown  # noqa: PLC0415 - imports Arrow

    given = all_options(ProxyOptions, named, others)
    name = next((given[side] for side in ("bind", "connect", "pull", "router") if side in given), "proxy")
    with ExitStack() as stack:
        observers: list[Callable[[dict[str, Any]], None]] = []
        if prometheus is not None:
            newest: dict[str, Any] = {}
            outlet = PrometheusOutlet(lambda: shown(newest))
            stack.callback(outlet.close)
            outlet.serve(prometheus)
            observers.append(newest.update)
        if monitor:
            _monitor(name, given, observers)
        else:
            _run(name, given, observers)


def _run(name: str, given: dict[str, str], observers: list[Callable[[dict[str, Any]], None]]) -> None:
    from zmq_datasource.monitoring.view import StatusLines, proxy_record  # noqa: PLC0415
    from zmq_datasource.proxy.process import run_until_stopped  # noqa: PLC0415

    lines = StatusLines(logging.getLogger(__name__))

    def observe(status: dict[str, Any]) -> None:
        for each in observers:
            each(status)
        lines.show(lambda: proxy_record(name, status), status["nextId"])

    run_until_stopped(given, observe)


def _monitor(name: str, given: dict[str, str], observers: list[Callable[[dict[str, Any]], None]]) -> None:
    from rich.console import Console  # noqa: PLC0415

    from zmq_datasource.monitoring.view import Record, proxy_record, watch  # noqa: PLC0415
    from zmq_datasource.proxy.handle import Proxy  # noqa: PLC0415

    with Proxy(**given) as running:

        def status() -> dict[str, Any]:
            found = dict(running.status())
            for observe in observers:
                observe(found)
            return found

        def read() -> list[Record]:
            return [proxy_record(name, found)] if (found := status()) else []

        if Console().is_terminal:
            watch(read, 1.0, goes_on=lambda: running.running)
            return
        try:
            while running.running:
                click.echo(json.dumps(status()))
                time.sleep(1.0)
        except KeyboardInterrupt:
            return
