"""``zmq-datasource receive``."""

from __future__ import annotations

import click

from zmq_datasource.cli.types import (
    Read,
    all_options,
    named_options,
    option_of,
    other_options,
    prometheus_port,
    set_by_user,
)
from zmq_datasource.options import ReceiveOptions
from zmq_datasource.options.parser import describe
from zmq_datasource.options.read_kinds import OF_A_QUERY

__all__ = ["receive"]


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
