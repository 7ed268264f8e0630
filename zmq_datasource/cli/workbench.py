"""Commands that examine feeds and high-water marks: ``doctor`` and ``hwm``."""

from __future__ import annotations

import json
import logging
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zmq_datasource.cli.types import (
    DIRECTORY,
    DURATION,
    LINGER,
    Read,
    all_options,
    number,
    option_of,
    other_options,
    setting,
    size,
)
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.parser import describe

if TYPE_CHECKING:
    from zmq_datasource.workbench.experiment import Mode, Pattern


@click.command(short_help="Find out what is wrong with a feed, or a place for a log.")
@option_of(ReadOptions, "connect", "bind")
@option_of(
    ReadOptions,
    "socket_type",
    choices=("SUB", "PULL"),
    default="SUB",
    help="As the receiver's. PULL needs --take-messages.",
)
@option_of(ReadOptions, "topics")
@other_options("-o framing=vllm or -o zmq.curve_serverkey=...")
@click.option(
    "--take-messages",
    is_flag=True,
    help="Agree that a PULL takes its share of the messages away from the real consumers: they are gone.",
)
@click.option("--duration", type=DURATION, default="5s", show_default=True, help="How long to watch.")
@click.option(
    "--wait", type=DURATION, default="5s", show_default=True, help="How long to wait for the sender."
)
@click.option(
    "--stall",
    type=DURATION,
    default="0",
    show_default=True,
    help="Then take nothing for so long, to see whether the sender drops or waits. A sender that waits for its slowest "
    "receiver (PUSH, XPUB_NODROP) feels it.",
)
@click.option(
    "--wal-location", type=DIRECTORY, metavar="DIR", help="Also try whether this directory can hold a log."
)
@click.option(
    "--wal-store", metavar="URI", help="Also try whether this bucket can hold a log, as in s3://bucket/feed."
)
@click.option("--json", "as_json", is_flag=True, help="The rows of the report as a JSON list.")
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    others: tuple[str, ...],
    take_messages: bool,
    duration: float,
    wait: float,
    stall: float,
    wal_location: str | None,
    wal_store: str | None,
    as_json: bool,
    **named: Any,
) -> None:
    """Examine a feed as its receiver sees it, or a place for a log, and say what is wrong, why, and what to do.

    Connects to the endpoints as they are, and reports which endpoints answer, the handshake, what the messages look
    like, what is missing, and with --stall whether the sender drops or waits. The doctor is one more subscriber. A
    stall and --take-messages affect other receivers.

    \b
    Exit codes:
      0  no problem was found; there may be notes
      1  there are warnings
      2  wrong arguments
      3  an endpoint cannot be reached or bound, or its handshake fails

    \b
    Examples:
      zmq-datasource doctor --connect tcp://feed:5556
      zmq-datasource doctor --connect tcp://feed:5556 --topics weather --stall 5s
      zmq-datasource doctor --connect tcp://vllm-0:5557 -o framing=vllm --json
      zmq-datasource doctor --connect tcp://jobs:5557 --socket-type PULL --take-messages
      zmq-datasource doctor --wal-location /shared/wal
      zmq-datasource doctor --wal-store s3://bucket/feed
    """
    feed = named["connect"] is not None or named["bind"] is not None
    if not feed and wal_location is None and wal_store is None:
        raise click.UsageError(
            "name a feed with --connect or --bind, or a place with --wal-location or --wal-store"
        )
    # Not with -o, because -o socketType=PULL would take messages without --take-messages.
    taken = [
        each.name for each in describe(ReadOptions) if each.field in (*named, "wal_location", "wal_store")
    ]
    if named["socket_type"] == "PULL" and not take_messages:
        raise click.UsageError(
            "--socket-type PULL takes messages away from the real consumers; add --take-messages if that is all right"
        )
    if not duration:
        raise click.UsageError("--duration 0 sees nothing; 1s or more")

    from rich.console import Console  # noqa: PLC0415 - only a call pays for it

    from zmq_datasource.errors import OptionError  # noqa: PLC0415
    from zmq_datasource.options.types import Location  # noqa: PLC0415
    from zmq_datasource.workbench import doctor as room  # noqa: PLC0415

    # The report has what the sockets of this package would log.
    logging.getLogger("zmq_datasource").addHandler(logging.NullHandler())
    examined: list[Any] = []
    try:
        with Console(stderr=True).status("Examining ..."):
            given = all_options(ReadOptions, named, others, *taken)
            if feed:
                examined += room.examine(given, duration, wait, stall)
            if wal_location is not None:
                examined.append(room.examine_directory(wal_location))
            if wal_store is not None:
                examined.append(room.examine_bucket(Location(wal_store)))
    except OptionError as e:
        raise click.UsageError(str(e)) from e
    rows = room.report(examined)
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows], indent=2, ensure_ascii=False))
    else:
        click.echo(room.as_text(rows))
    ctx.exit(max((room.exit_code(row.severity) for row in rows), default=0))


def _hwms(text: str) -> tuple[int, ...]:
    try:
        marks = tuple(int(part) for part in text.split(","))
    except ValueError as e:
        raise ValueError("write numbers with commas between them, as in 1,10,100") from e
    if min(marks) < 1:
        raise ValueError("a high-water mark is 1 or more; libzmq's 0 means no limit, and no memory is")
    if max(marks) > _MOST_HWM:
        raise ValueError(f"a high-water mark of libzmq is {_MOST_HWM:,} at most")
    return marks


_MOST_HWM = 2**31 - 1
# Of all runs together, without the starts of their processes.
_MOST_SECONDS = 3600.0
_HWMS = Read("n,...", _hwms)
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(short_help="Try out what high-water marks do.")
@click.option(
    "--pattern",
    type=click.Choice(["PUSH/PULL", "PUB/SUB"], case_sensitive=False),
    multiple=True,
    default=["PUSH/PULL"],
    show_default=True,
    help="Socket types; may be repeated.",
)
@click.option(
    "--full",
    type=click.Choice(["noblock", "block", "silent"], case_sensitive=False),
    multiple=True,
    default=["noblock", "block"],
    show_default=True,
    help="What the sender does at a full queue: drop and count, wait, or drop in silence (a PUB as it is).",
)
@setting(
    "--messages",
    click.IntRange(1, 10_000_000),
    None,
    "Sent in each run.  [default: 5000, or with --stall as many as go on for 1 s after it]",
)
@setting("--size", size(0, 64 << 20), "1000", "Bytes of a message; 16 or more.")
@setting("--rate", number(0, 1e9), "5000", "Messages a second that are sent; 0 is as fast as it goes.")
@setting("--consume", DURATION, "400us", "The consumer's time for each message.")
@setting("--stall", DURATION, "0", "The consumer takes nothing for so long.")
@setting("--sndhwm", _HWMS, "1,10,100,1000", "Send high-water marks to try.")
@setting("--rcvhwm", _HWMS, None, "Receive high-water marks to try with each.  [default: that of the sender]")
@click.option(
    "--linger",
    type=LINGER,
    multiple=True,
    default=["-1"],
    help="How long the sender's socket still tries to send when it is closed; -1 is without a limit. May be "
    "repeated.  [default: -1]",
)
@setting(
    "--buffers",
    size(0, 1 << 30),
    "8k",
    "SNDBUF and RCVBUF; 0 leaves them to the system: its buffers then hold more than any high-water mark.",
)
@setting(
    "--repeat",
    click.IntRange(1, 100),
    3,
    "Runs of each combination; the table shows their median, smallest and largest value.",
)
@click.option("--csv", "csv_file", type=_FILE, help="Write the figures of each run into this file.")
@click.option("--plot", "plot_file", type=_FILE, help="Draw the figures into this file (.png).")
def hwm(
    pattern: tuple[Pattern, ...],
    full: tuple[Mode, ...],
    sndhwm: tuple[int, ...],
    rcvhwm: tuple[int, ...] | None,
    linger: tuple[int, ...],
    messages: int | None,
    repeat: int,
    csv_file: Path | None,
    plot_file: Path | None,
    **same: Any,
) -> None:
    """Try high-water marks out: what is dropped, what waits, and how old messages get.

    A sender and a consumer that may be too slow run in processes of their own, over tcp on this machine,
    --repeat times for each combination, in turn. What was sent is received or accounted for in every run.

    \b
    Examples:
      zmq-datasource hwm
      zmq-datasource hwm --pattern PUB/SUB --full silent --full noblock --plot hwm.png
      zmq-datasource hwm --rate 20000 --size 100 --consume 20us --stall 1s --sndhwm 1000,10000,20000
    """
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    from zmq_datasource.monitoring.tables import print_table  # noqa: PLC0415
    from zmq_datasource.workbench.experiment import HEADER_BYTES, Experiment, messages_of, run  # noqa: PLC0415
    from zmq_datasource.workbench.results import check_outputs, plot, table, write_csv  # noqa: PLC0415

    if same["size"] < HEADER_BYTES:
        raise click.UsageError(
            f"--size {same['size']}: a message has {HEADER_BYTES} bytes or more, its number and time"
        )
    if "silent" in full and "PUB/SUB" not in pattern:
        raise click.UsageError("--full silent is for --pattern PUB/SUB; a PUSH drops nothing in silence")
    same["messages"] = messages_of(messages, same["rate"], same["stall"], max((*sndhwm, *(rcvhwm or ()))))
    experiments = [
        Experiment(sockets, mode, sender, receiver, linger=patience, **same)
        for sockets, mode, patience, sender in product(pattern, full, linger, sndhwm)
        if (sockets, mode) != ("PUSH/PULL", "silent")
        for receiver in rcvhwm or (sender,)
    ]
    # In turn: a disturbance of the machine falls on one run of each experiment, not on all runs of one.
    planned = experiments * repeat
    seconds = sum(
        each.stall + each.messages * max(each.consume, 1 / each.rate if each.rate else 0.0)
        for each in planned
    )
    if seconds > _MOST_SECONDS:
        raise click.UsageError(
            f"these {len(planned):,} runs would take {seconds:,.0f} s, and {_MOST_SECONDS:,.0f} s are the most: lower "
            "--messages, --consume, --repeat or --stall, raise --rate, or try fewer high-water marks"
        )
    check_outputs(csv_file, plot_file)
    with Progress(console=Console(stderr=True)) as bar:
        runs = [run(each) for each in bar.track(planned, description="Trying")]
    print_table(table(runs))
    if csv_file is not None:
        write_csv(runs, csv_file)
    if plot_file is not None:
        plot(runs, plot_file)
