"""``zmq-datasource top``."""

from __future__ import annotations

import click

from zmq_datasource.cli.types import AGE, DURATION, setting

__all__ = ["top"]


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
