"""``zmq-datasource demo``."""

from __future__ import annotations

import warnings

import click

from zmq_datasource.cli.types import number, option_of, setting
from zmq_datasource.options import ReadOptions, StreamReadOptions
from zmq_datasource.options.parser import parse

__all__ = ["demo"]


@click.command(short_help="See a live feed pass through Spark and out again.")
@click.option(
    "--endpoint", metavar="URL", help="Read this feed, instead of a publisher started for the demo."
)
@option_of(
    ReadOptions,
    "socket_type",
    choices=("SUB", "PULL"),
    default="SUB",
    help="How to read --endpoint. PULL takes the messages: no other reader gets them.",
)
@option_of(ReadOptions, "topics")
@setting("--seconds", number(1, 86_400), "15", "How long messages are streamed; starting Spark comes on top.")
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

    from rich.console import Console  # noqa: PLC0415

    try:
        import zmq_datasource.spark  # noqa: F401, PLC0415 - says what to install where there is no Spark
        from zmq_datasource.demo import run_demo  # noqa: PLC0415
    except ImportError as e:
        if e.name != "pyspark":
            raise
        raise click.ClickException(str(e)) from None

    # Spark warns of the pandas that is installed, which the demo does not use.
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    feed = None
    if endpoint is not None:
        feed = {"connect": endpoint, "socketType": socket_type}
        if topics is not None:
            feed["topics"] = topics
        parse(StreamReadOptions, feed)  # refuses a wrong one before Spark starts
    run_demo(Console(), seconds, feed)
