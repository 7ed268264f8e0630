"""Commands that stream or watch: ``receive``, ``proxy``, ``demo`` and ``top``."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import click

from zmq_datasource.cli.types import (
    AGE,
    DURATION,
    Read,
    all_options,
    named_options,
    number,
    option_of,
    other_options,
    prometheus_port,
    set_by_user,
    setting,
)
from zmq_datasource.options import ProxyOptions, ReceiveOptions
from zmq_datasource.options.parser import describe
from zmq_datasource.options.read import OF_A_QUERY

__all__ = ["demo", "proxy", "receive", "top"]


_FIRST = ("bind", "connect", "socket_type", "wal_location", "wal_store", "wal_retention")
_REST = [
    option.field
    for option in describe(ReceiveOptions)
    if option.field not in _FIRST and option.roles.isdisjoint(OF_A_QUERY)
]


def _read_share(text: str) -> tuple[int, int]:
    number, separator, count = text.partition("/")
    if not (separator and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError("write K/N, as in 0/4: number 0 of the receivers 0 to 3")
    return int(number), int(count)


@click.command(short_help="Receive into a log, without Spark.")
@option_of(ReceiveOptions, "bind", "connect")
@option_of(ReceiveOptions, "socket_type", default="ROUTER")
@option_of(ReceiveOptions, "wal_location", help="The directory of the log to fill; queries read it.")
@option_of(
    ReceiveOptions,
    "wal_store",
    help="The bucket of the log, in place of a directory, as in s3://bucket/orders.",
)
@option_of(
    ReceiveOptions,
    "wal_retention",
    help="How long messages stay after they were received and all queries have read them.",
)
@click.option(
    "--partition",
    type=Read("K/N", _read_share),
    metavar="K/N",
    help="Receive as number K, from 0 on, of N receivers that share the feed, each into a log partition of its own.",
)
@option_of(ReceiveOptions, *_REST)
@other_options("-o zmq.rcvbuf=1m", ReceiveOptions)
@prometheus_port
def receive(
    others: tuple[str, ...],
    partition: tuple[int, int] | None,
    prometheus: int | None,
    **named: str | None,
) -> None:
    """Receive into a log, without Spark, until Ctrl-C or SIGTERM.

    Queries read the log by its walLocation, without an endpoint, at any time. Messages that all queries
    have read are deleted once they are older than --wal-retention. Before the first query nothing is deleted.

    \b
    Examples:
      zmq-datasource receive --bind "tcp://*:5558" --wal-location /data/wal/orders
      zmq-datasource receive --socket-type SUB --connect tcp://feed:5556 \\
          --wal-location /data/wal/feed --wal-retention 1d --framing vllm
      zmq-datasource receive --socket-type PULL --connect tcp://feed:5557 \\
          --wal-location /shared/wal/feed --partition 0/4
    """
    from zmq_datasource.receive import receive_until_stopped  # noqa: PLC0415 - imports Arrow

    given = all_options(ReceiveOptions, named, others)
    if named["bind"] is None and named["connect"] is None:
        raise click.UsageError("name an endpoint with --bind or --connect")
    chosen = set_by_user("socket_type") or "sockettype" in map(str.lower, named_options(others))
    if named["bind"] is None and not chosen:
        raise click.UsageError(
            "--connect needs --socket-type: SUB for the messages of a PUB, or PULL for those of a PUSH"
        )
    if named["wal_location"] is None and named["wal_store"] is None:
        raise click.UsageError("name the log with --wal-location or --wal-store")
    number = None
    if partition is not None:
        if "receivers" in map(str.lower, given):
            raise click.UsageError("--partition K/N says how many receivers there are; remove --receivers")
        number, count = partition
        given["receivers"] = str(count)
    receive_until_stopped(given, number, prometheus)


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

    from zmq_datasource.monitoring.prometheus import PrometheusOutlet, shown_of_proxy  # noqa: PLC0415

    given = all_options(ProxyOptions, named, others)
    name = next((given[side] for side in ("bind", "connect", "pull", "router") if side in given), "proxy")
    with ExitStack() as stack:
        observers: list[Callable[[dict[str, Any]], None]] = []
        if prometheus is not None:
            newest: dict[str, Any] = {}
            outlet = PrometheusOutlet(lambda: shown_of_proxy(newest))
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


@click.command(short_help="See a live feed pass through Spark and out again.")
@setting("--seconds", number(1, 86_400), "15", "How long messages are streamed; starting Spark comes on top.")
def demo(seconds: float) -> None:
    """See a live feed pass through Spark and out again, every message accounted for.

    Three streaming queries read the feed: an aggregation, a sink to a fast consumer, and a sink
    to a consumer that is too slow on purpose and drops what it cannot take. At the end a table
    shows what was published, received, sent, dropped and why.
    """
    from rich.console import Console  # noqa: PLC0415

    try:
        import zmq_datasource.spark  # noqa: F401, PLC0415 - says what to install where there is no Spark
        from zmq_datasource.demo import run_demo  # noqa: PLC0415
    except ImportError as e:
        if e.name != "pyspark":
            raise
        raise click.ClickException(str(e)) from None

    # Spark warns about the installed pandas, but the demo does not use pandas.
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    run_demo(Console(), seconds)


@click.command(short_help="Watch the figures of sources, sinks and proxies.")
@click.argument("locations", nargs=-1, required=True, metavar="LOCATION...")
@setting("--interval", DURATION, "1s", "How often to look, as in 500ms or 5s.")
@setting(
    "--since", AGE, "1m", "Leave out what has sent no figures for this long, such as a query that has ended."
)
@click.option("--once", is_flag=True, help="Show the tables once and end, as for a script.")
def top(locations: tuple[str, ...], interval: float, since: float, once: bool) -> None:
    """Watch rates, drops, backlog, pauses and high-water marks in use.

    A LOCATION is the metricsLocation of sources and sinks, or the URL of a program that serves its figures for
    Prometheus: "zmq-datasource receive" and "zmq-datasource proxy" with --prometheus, and a Spark application with
    ZmqMetricsListener. Ctrl-C ends it. Into a file or pipe it shows the tables once.

    \b
    Examples:
      zmq-datasource top /data/metrics
      zmq-datasource top http://localhost:9400/metrics
      zmq-datasource top s3://bucket/metrics http://proxy:9400/metrics --interval 5s
      zmq-datasource top /data/metrics --since 1d --once
    """
    from zmq_datasource.monitoring.top import show  # noqa: PLC0415

    show(locations, interval, since, once=once)
