"""``zmq-datasource hwm``."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zmq_datasource.cli.types import DURATION, LINGER, Read, number, setting, size

if TYPE_CHECKING:
    from zmq_datasource.workbench.experiment import Mode, Pattern

__all__ = ["hwm"]


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
@setting("--messages", click.IntRange(1, 10_000_000), 5000, "Sent in each run.")
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
@click.option("--csv", "csv_file", type=_FILE, help="Write the figures of each run there.")
@click.option("--plot", "plot_file", type=_FILE, help="Draw them there (.png).")
def hwm(
    pattern: tuple[Pattern, ...],
    full: tuple[Mode, ...],
    sndhwm: tuple[int, ...],
    rcvhwm: tuple[int, ...] | None,
    linger: tuple[int, ...],
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
      zmq-datasource hwm --rate 20000 --size 100 --consume 60us --stall 1s --sndhwm 100,1000,10000
    """
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    from zmq_datasource.monitoring.tables import print_fitted  # noqa: PLC0415
    from zmq_datasource.workbench.experiment import HEADER_BYTES, Experiment, run  # noqa: PLC0415
    from zmq_datasource.workbench.results import check_outputs, plot, table, write_csv  # noqa: PLC0415

    if same["size"] < HEADER_BYTES:
        raise click.UsageError(
            f"--size {same['size']}: a message has {HEADER_BYTES} bytes or more, its number and time"
        )
    if "silent" in full and "PUB/SUB" not in pattern:
        raise click.UsageError("--full silent is for --pattern PUB/SUB; a PUSH drops nothing in silence")
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
    print_fitted(lambda width: table(runs, width))
    if csv_file is not None:
        write_csv(runs, csv_file)
    if plot_file is not None:
        plot(runs, plot_file)
