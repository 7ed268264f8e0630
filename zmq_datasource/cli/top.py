"""``zmq-datasource top``."""

from __future__ import annotations

import click

from zmq_datasource.cli.types import AGE, DURATION

__all__ = ["top"]


@click.command(short_help="Watch the metrics of sources and sinks.")
@click.option(
    "--metrics",
    "location",
    metavar="DIR|URI",
    required=True,
    help="The metricsLocation of sources and sinks.",
)
@click.option(
    "--interval",
    type=DURATION,
    default="1s",
    show_default=True,
    help="How often to look, as in 500ms or 5s.",
)
@click.option(
    "--since",
    type=AGE,
    default="10m",
    show_default=True,
    help="Leave out sources and sinks without a report for this long.",
)
@click.option("--once", is_flag=True, help="Show the tables once and end, as for a script.")
def top(location: str, interval: float, since: float, once: bool) -> None:
    """Watch sources and sinks: rates, drops, backlog, pauses, high-water marks in use.

    They must write to a metricsLocation; any machine that sees it can look. Ctrl-C ends it. Into a file or
    pipe it shows the tables once.

    \b
    Examples:
      zmq-datasource top --metrics /data/metrics
      zmq-datasource top --metrics s3://bucket/metrics --interval 5s
      zmq-datasource top --metrics /data/metrics --since 1d --once
    """
    from zmq_datasource.monitoring.top import watch  # noqa: PLC0415
    from zmq_datasource.options.types import Location  # noqa: PLC0415

    watch(Location(location), interval, since, once=once)
