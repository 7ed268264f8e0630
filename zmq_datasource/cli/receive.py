"""``zmq-datasource receive``."""

from __future__ import annotations

import click

from zmq_datasource.cli.types import DIRECTORY, named_options

__all__ = ["receive"]


@click.command()
@click.option("--bind", metavar="URL,...", help="Where to receive.")
@click.option("--connect", metavar="URL,...", help="Where to receive from.")
@click.option(
    "--socket-type",
    type=click.Choice(["ROUTER", "PULL", "SUB"], case_sensitive=False),
    default="ROUTER",
    show_default=True,
    help="ROUTER takes acknowledged transactions; PULL and SUB plain messages.",
)
@click.option(
    "--wal-location",
    type=DIRECTORY,
    metavar="DIR",
    required=True,
    help="The log to fill; queries read it.",
)
@click.option(
    "--wal-retention",
    metavar="DURATION",
    help="How long messages stay after they were received and all queries have read them; 0s if not set.",
)
@click.option(
    "-o",
    "--option",
    "options",
    metavar="NAME=VALUE|@FILE",
    multiple=True,
    help="Any other option of the source, as in -o walMaxBytes=10g; may be repeated.",
)
def receive(
    bind: str | None,
    connect: str | None,
    socket_type: str,
    wal_location: str,
    wal_retention: str | None,
    options: tuple[str, ...],
) -> None:
    """Receive into a log, without Spark, until told to stop (Ctrl-C or SIGTERM).

    Queries read the log with walLocation and no endpoint, while this runs and while it does not. What
    all of them have read is deleted, once it is older than --wal-retention; before a first query has come,
    nothing is.

    \b
    Examples:
      zmq-datasource receive --bind "tcp://*:5558" --wal-location /data/wal/orders
      zmq-datasource receive --socket-type SUB --connect tcp://feed:5556 \\
          --wal-location /data/wal/feed --wal-retention 1d -o framing=vllm
    """
    from zmq_datasource.errors import ZmqDataSourceError  # noqa: PLC0415
    from zmq_datasource.receive import receive_until_stopped  # noqa: PLC0415 - imports Arrow

    given = {"socketType": socket_type, "walLocation": wal_location}
    named = (("bind", bind), ("connect", connect), ("walRetention", wal_retention))
    given |= {name: value for name, value in named if value is not None}
    given |= named_options(options)
    if bind is None and connect is None:
        raise click.UsageError("name an endpoint with --bind or --connect")
    try:
        receive_until_stopped(given)
    except ZmqDataSourceError as e:
        raise click.ClickException(str(e)) from e
