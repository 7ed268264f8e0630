"""``zmq-datasource log``: what a log holds, its readers and its messages."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from zmq_datasource.cli.types import DIRECTORY, Read
from zmq_datasource.host.log_lines import printable

if TYPE_CHECKING:
    from zmq_datasource.log import LogStorage
    from zmq_datasource.monitoring.tables import Row
    from zmq_datasource.workbench.log import LogSummary, Message, ReaderSummary

_MOST_CHARACTERS = 500  # of a name


class _LogCommands(click.Group):
    """Shows the log at a location: ``log LOCATION`` is ``log show LOCATION``."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            args = ["show", *args]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = ["show", *args]
        return super().parse_args(ctx, args)


def _location(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("location", type=DIRECTORY, metavar="LOCATION")(command)


def _read_ids(text: str) -> tuple[int | None, int | None]:
    first, separator, end = text.partition(":")
    if not separator or not all(part == "" or part.isdecimal() for part in (first, end)):
        raise ValueError(
            "write FIRST:END, as in 100:200 for the ids 100 to 199; each of them can be left out"
        )
    return (int(first) if first else None, int(end) if end else None)


@click.group(cls=_LogCommands, short_help="Show a log, its readers and its messages.")
def log() -> None:
    """Show what a log holds: its ids and its readers.

    LOCATION is a walLocation or a walStore. The log may be written and read meanwhile.

    \b
    Examples:
      zmq-datasource log /data/wal/orders
      zmq-datasource log s3://bucket/orders --json
      zmq-datasource log verify /data/wal/orders
      zmq-datasource log cat /data/wal/orders --last 10
      zmq-datasource log readers drop /data/wal/orders billing
    """


@log.command(short_help="Show the ids and the readers; the default.")
@_location
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(location: str, as_json: bool) -> None:
    """Show the ids and the readers of a log."""
    from zmq_datasource.monitoring.tables import print_table, stack  # noqa: PLC0415
    from zmq_datasource.workbench.log import readers, summary  # noqa: PLC0415

    storage = _storage(location)
    found, known = summary(storage), readers(storage)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "log": storage.log_id(),
                    "location": storage.root,
                    **found._asdict(),
                    "readers": [reader._asdict() for reader in known],
                }
            )
        )
        return
    click.echo(f"log {storage.log_id()} in {storage.root}\n")
    tables = [[_row("first", found)], [_row("reader", each) for each in known]]
    print_table(stack(tables))


def _row(kind: str, summary: LogSummary | ReaderSummary) -> Row:
    """The fields of the JSON object as a line of a table; the first one is the name."""
    from zmq_datasource.monitoring.tables import Cell, Row  # noqa: PLC0415

    (_, name), *fields = summary._asdict().items()
    return Row(
        kind, _text("", name), {field.replace("_", " "): Cell(_text(field, value)) for field, value in fields}
    )


def _text(field: str, value: Any) -> str:
    if value is None:
        return "–"
    if field in ("oldest", "newest", "seen"):
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return printable(f"{value:.1f}" if isinstance(value, float) else str(value), _MOST_CHARACTERS)


@log.command(short_help="Read every checksum, and name the files that are damaged.")
@_location
def verify(location: str) -> None:
    """Read every checksum of a log, and name each damaged file with its ids.

    Exits with 1 if a file is damaged or missing. The log may be written and read meanwhile.
    """
    from zmq_datasource.log import verify_log  # noqa: PLC0415

    damaged = 0
    for damage in verify_log(_storage(location)):
        damaged += 1
        click.echo(f"{damage.file}: {damage.what}")
    click.echo(f"{damaged or 'no'} damage{'s' if damaged > 1 else ''} found")
    if damaged:
        raise click.exceptions.Exit(1)


@log.command(short_help="Print messages.")
@_location
@click.option(
    "--ids", type=Read("FIRST:END", _read_ids), metavar="FIRST:END", help="Only these ids, END not included."
)
@click.option("--last", type=click.IntRange(1), metavar="N", help="Only the newest N.")
@click.option(
    "--hex", "as_hex", is_flag=True, help="Values in hexadecimal; otherwise as text, other bytes escaped."
)
def cat(
    location: str,
    ids: tuple[int | None, int | None] | None,
    last: int | None,
    as_hex: bool,
) -> None:
    """Print messages of a log: id, time, topic and value, separated by tabs, a line each.

    The value of a message that does not fit its framing is \\N.
    """
    from zmq_datasource.workbench.log import Gone, messages  # noqa: PLC0415

    start, end = ids or (None, None)
    for message in messages(_storage(location), start=start, end=end, last=last):
        if isinstance(message, Gone):
            ids_gone = f"ids {message.first} to {message.end - 1}"
            click.echo(f"{ids_gone} were deleted, and are not shown", err=True)
        else:
            click.echo(_line(message, as_hex))


def _line(message: Message, as_hex: bool) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(message.timestamp))
    fraction = f"{message.timestamp % 1:.6f}"[1:]
    topic = "" if message.topic is None else printable(message.topic, sys.maxsize)
    return f"{message.id}\t{stamp}{fraction}Z\t{topic}\t{_shown(message.value, as_hex)}"


def _shown(value: bytes | None, as_hex: bool) -> str:
    if value is None:
        return "\\N"
    return value.hex() if as_hex else printable(value, sys.maxsize)


@log.group(short_help="Change what the log keeps for a reader.")
def readers() -> None:
    """Change what the log keeps for a reader that does not run."""


@readers.command(short_help="Drop a reader and its position.")
@_location
@click.argument("name")
def drop(location: str, name: str) -> None:
    """Drop the position of the reader NAME: the log keeps nothing for it any more.

    If the query starts again and misses messages, failOnDataLoss decides.
    """
    from zmq_datasource.workbench.log import drop_reader  # noqa: PLC0415

    drop_reader(_storage(location), name)
    click.echo(f"dropped reader {name}")


def _storage(location: str) -> LogStorage:
    """The log at a ``walLocation`` or a ``walStore``."""
    from zmq_datasource.options import BatchReadOptions  # noqa: PLC0415 - imports Arrow
    from zmq_datasource.options.parser import parse  # noqa: PLC0415
    from zmq_datasource.source.location import log_storage  # noqa: PLC0415

    in_bucket = "://" in location and not location.startswith("file:")
    return log_storage(parse(BatchReadOptions, {"walStore" if in_bucket else "walLocation": location}))
