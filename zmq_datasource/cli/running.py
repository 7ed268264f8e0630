"""Commands that stream: ``receive``, ``proxy`` and ``demo``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zmq_datasource.cli.types import (
    Form,
    all_options,
    figures_options,
    number,
    option_of,
    other_options,
    prometheus_address,
    setting,
)
from zmq_datasource.options import ProxyOptions, ReceiveOptions

if TYPE_CHECKING:
    from zmq_datasource.monitoring.http import HttpAddress


ready_file_option = click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file that exists while this program has the log and its sockets are open. /ready of --prometheus and "
    "systemd (Type=notify) say the same.",
)


@click.command(short_help="Receive into a log, without Spark.")
@option_of(ReceiveOptions, "bind", "connect", "socket_type", "topics", "framing", "durable")
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
@option_of(ReceiveOptions, "wal_max_bytes")
@other_options("-o onLoss=fail")
@figures_options
@prometheus_address
@ready_file_option
def receive(
    others: tuple[str, ...],
    figures: Form,
    figures_every: float,
    prometheus: HttpAddress | None,
    ready_file: Path | None,
    **named: str | None,
) -> None:
    """Receive into a log, without Spark, until Ctrl-C or SIGTERM.

    Queries read the log by its walLocation, without an endpoint, at any time. Messages that all queries
    have read are deleted once they are older than --wal-retention. Before the first query nothing is deleted.

    \b
    Examples:
      zmq-datasource receive --connect tcp://feed:5556 --wal-location /data/wal/feed \\
          --wal-retention 1d --framing vllm -o replayEndpoint=tcp://feed:5557
      zmq-datasource receive --socket-type ROUTER --bind "tcp://*:5558" --wal-location /data/wal/orders \\
          --durable "tcp://*:5559"
    """
    from zmq_datasource.monitoring.view import Figures  # noqa: PLC0415 - imports rich
    from zmq_datasource.receive import receive_until_stopped  # noqa: PLC0415 - imports Arrow

    given = all_options(ReceiveOptions, named, others)
    if named["bind"] is None and named["connect"] is None:
        raise click.UsageError("name an endpoint with --bind or --connect")
    if named["wal_location"] is None and named["wal_store"] is None:
        raise click.UsageError("name the log with --wal-location or --wal-store")
    receive_until_stopped(given, prometheus, Figures(figures, figures_every), ready_file)


@click.command(short_help="Keep messages for subscribers that are away.")
@option_of(ProxyOptions, "bind", "connect", "pull", "publish", "durable")
@option_of(ProxyOptions, "wal_location", help="The directory of the log, which any Spark job may read.")
@option_of(ProxyOptions, "wal_retention", "wal_max_bytes", "topics")
@other_options("-o subscriberExpiry=30d")
@figures_options
@prometheus_address
@ready_file_option
def proxy(
    others: tuple[str, ...],
    figures: Form,
    figures_every: float,
    prometheus: HttpAddress | None,
    ready_file: Path | None,
    **named: object,
) -> None:
    """Stand between publishers and subscribers, keep the messages in a log, and serve them again.

    This is a receiver (see receive) with one side more: a message is published as it comes, while it is on its way
    into the log. Any Spark job can read the log. On Ctrl-C or SIGTERM the proxy takes the messages that are on the
    way, and ends.

    \b
    Examples:
      zmq-datasource proxy --bind "tcp://*:5557" --publish "tcp://*:5556" --wal-location /data/wal
      zmq-datasource proxy --bind "tcp://*:5557" --publish "tcp://*:5556" --durable "tcp://*:5558" \\
          --wal-location /data/wal --wal-retention 7d --figures json
      zmq-datasource proxy --connect tcp://feed:5556 --topics orders. --durable "tcp://*:5558" \\
          --wal-location /data/wal -o subscriberExpiry=30d
    """
    from zmq_datasource.monitoring.view import Figures  # noqa: PLC0415 - imports rich
    from zmq_datasource.receive import receive_until_stopped  # noqa: PLC0415 - imports Arrow

    given = all_options(ProxyOptions, named, others)
    receive_until_stopped(given, prometheus, Figures(figures, figures_every), ready_file, ProxyOptions)


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
