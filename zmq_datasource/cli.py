"""The command line, ``zmq-datasource``. What a command needs is imported when it is called."""

from __future__ import annotations

import signal
import warnings

import click

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="zmq_datasource")
def main() -> None:
    """ZeroMQ as a source and sink of Spark Structured Streaming."""


@main.command()
@click.option(
    "--endpoint", metavar="URL", help="Read this feed, instead of a publisher started for the demo."
)
@click.option(
    "--socket-type",
    type=click.Choice(["SUB", "PULL"], case_sensitive=False),
    metavar="SUB|PULL",
    default="SUB",
    show_default=True,
    help="How to read --endpoint. PULL takes the messages: no other reader gets them.",
)
@click.option("--topics", metavar="PREFIX,...", help="Topic prefixes to subscribe to (SUB).  [default: all]")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    metavar="N",
    default=15,
    show_default=True,
    help="How long messages are streamed; starting Spark comes on top.",
)
def demo(endpoint: str | None, socket_type: str, topics: str | None, seconds: float) -> None:
    """See a live feed pass through Spark and out again, every message accounted for.

    Three streaming queries read the feed: an aggregation, a sink to a fast consumer, and a sink
    to a consumer that is too slow on purpose and drops what it cannot take. At the end a table
    shows what was published, received, sent, dropped and why.

    \b
    Examples:
      zmq-datasource demo
      zmq-datasource demo --endpoint tcp://localhost:5556 --topics weather,traffic
      zmq-datasource demo --endpoint ipc:///tmp/jobs --socket-type PULL --seconds 60
    """
    if endpoint is None and (topics is not None or socket_type != "SUB"):
        raise click.UsageError("--topics and --socket-type describe your own feed; name it with --endpoint")

    from rich.console import Console  # noqa: PLC0415 - only this command pays for it

    from zmq_datasource.demo.run import feed_options, run_demo  # noqa: PLC0415 - imports Spark
    from zmq_datasource.errors import ZmqDataSourceError  # noqa: PLC0415

    # Spark warns of the pandas that is installed, which the demo does not use.
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    # A process that is told to end ends its children first, as with Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        feed = None if endpoint is None else feed_options(endpoint, socket_type, topics)
        run_demo(Console(), seconds, feed)
    except ZmqDataSourceError as e:
        raise click.ClickException(str(e)) from e
    except KeyboardInterrupt:
        click.echo("Stopped.", err=True)
        raise click.exceptions.Exit(130) from None


@main.command()
@click.option("--bind", metavar="URL,...", help="Where to receive.")
@click.option("--connect", metavar="URL,...", help="Where to receive from.")
@click.option(
    "--socket-type",
    type=click.Choice(["ROUTER", "PULL", "SUB"], case_sensitive=False),
    default="ROUTER",
    show_default=True,
    help="ROUTER takes acknowledged transactions; PULL and SUB plain messages.",
)
@click.option("--wal-location", metavar="DIR", required=True, help="The log to fill; queries read it.")
@click.option(
    "-o",
    "--option",
    "options",
    metavar="NAME=VALUE",
    multiple=True,
    help="Any other option of the source, as in -o walRetention=1h; may be repeated.",
)
def receive(
    bind: str | None, connect: str | None, socket_type: str, wal_location: str, options: tuple[str, ...]
) -> None:
    """Receive into a log, without Spark, until told to stop (Ctrl-C or SIGTERM).

    Queries read the log with walLocation and no endpoint, while this runs and while it does not. What
    all of them have committed is deleted, once it is older than walRetention.

    \b
    Examples:
      zmq-datasource receive --bind "tcp://*:5558" --wal-location /data/wal/orders
      zmq-datasource receive --socket-type SUB --connect tcp://feed:5556 \\
          --wal-location /data/wal/feed -o framing=vllm -o walRetention=1d
    """
    from zmq_datasource.errors import ZmqDataSourceError  # noqa: PLC0415
    from zmq_datasource.receive import receive_until_stopped  # noqa: PLC0415 - imports Arrow

    given = {"socketType": socket_type, "walLocation": wal_location}
    given |= {name: value for name, value in (("bind", bind), ("connect", connect)) if value is not None}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator:
            raise click.UsageError(f"--option {option!r}: write NAME=VALUE")
        given[name] = value
    if bind is None and connect is None:
        raise click.UsageError("name an endpoint with --bind or --connect")
    try:
        receive_until_stopped(given)
    except ZmqDataSourceError as e:
        raise click.ClickException(str(e)) from e


@main.command()
@click.option(
    "--metrics",
    "location",
    metavar="DIR|URI",
    required=True,
    help="The metricsLocation of sources and sinks.",
)
@click.option(
    "--interval",
    metavar="DURATION",
    default="1s",
    show_default=True,
    help="How often to look, as in 500ms or 5s.",
)
@click.option(
    "--since",
    metavar="DURATION",
    default="10m",
    show_default=True,
    help="Leave out what has said nothing for this long.",
)
@click.option("--once", is_flag=True, help="Show the tables once and end, as for a script.")
def top(location: str, interval: str, since: str, once: bool) -> None:
    """Watch sources and sinks: rates, drops, backlog, pauses, high-water marks in use.

    They must write to a metricsLocation; any machine that sees it can look. Ctrl-C ends it.

    \b
    Examples:
      zmq-datasource top --metrics /data/metrics
      zmq-datasource top --metrics s3://bucket/metrics --interval 5s
      zmq-datasource top --metrics /data/metrics --since 1d --once
    """
    from zmq_datasource.errors import ZmqDataSourceError  # noqa: PLC0415
    from zmq_datasource.monitoring.top import watch  # noqa: PLC0415
    from zmq_datasource.option_types import Duration, Location  # noqa: PLC0415

    try:
        seconds = {name: Duration.read(text) for name, text in (("interval", interval), ("since", since))}
    except ValueError as e:
        raise click.UsageError(str(e)) from e
    try:
        watch(Location(location), seconds["interval"], seconds["since"], once=once)
    except ZmqDataSourceError as e:
        raise click.ClickException(str(e)) from e


if __name__ == "__main__":
    main()
