"""Runs as a table for people, as CSV, and as a plot: what more high-water mark buys, and what it costs."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from zmq_datasource.errors import OptionError, WorkbenchError
from zmq_datasource.workbench.experiment import ExperimentResult

__all__ = ["check_outputs", "plot", "row", "table", "write_csv"]


def row(run: ExperimentResult) -> dict[str, Any]:
    """A run as flat figures: seconds, bytes, messages."""
    experiment = run.experiment
    return {
        **experiment._asdict(),
        "sent": run.sent,
        "dropped": run.dropped,
        "received": run.received,
        "lost": run.lost,
        "drop_rate": round(run.drop_rate, 6),
        "blocked": round(run.blocked, 6),
        "latency_p50": round(run.p50, 6),
        "latency_p99": round(run.p99, 6),
        "sender_bytes": run.sender_bytes,
        "consumer_bytes": run.consumer_bytes,
        "seconds": round(run.seconds, 6),
    }


def table(runs: Iterable[ExperimentResult]) -> Table:
    """A row a run, as it was asked for and what came of it."""
    shown = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    for name in ("sockets", "full queue"):
        shown.add_column(name)
    for name in (
        *("sndhwm", "rcvhwm", "sent", "dropped", "lost", "received", "not received"),
        *("blocked", "p50", "p99", "memory"),
    ):
        shown.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        experiment = run.experiment
        shown.add_row(
            experiment.pattern,
            experiment.mode,
            f"{experiment.sndhwm:,}",
            f"{experiment.rcvhwm:,}",
            f"{run.sent:,}",
            f"{run.dropped:,}",
            f"{run.lost:,}",
            f"{run.received:,}",
            f"{run.drop_rate:.1%}",
            f"{run.blocked:.2f} s",
            _duration(run.p50),
            _duration(run.p99),
            f"{(run.sender_bytes + run.consumer_bytes) / (1 << 20):.1f} MiB",
        )
    return shown


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def write_csv(runs: Sequence[ExperimentResult], path: Path) -> None:
    """Write all runs, a line each.

    Raises:
        WorkbenchError: The file cannot be written.
    """
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = [row(run) for run in runs]
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as e:
        raise WorkbenchError(f"writing {path}: {e.strerror or e}; name another file with --csv") from e


_FORMATS = (".png", ".svg", ".pdf")
_MOST_SHOWN = 200


def check_outputs(csv_file: Path | None, plot_file: Path | None) -> None:
    """See whether ``write_csv`` and ``plot`` could write there, before the runs that they would tell of.

    Raises:
        OptionError: matplotlib is not installed, there is no such directory, or the file is none that can be written.
    """
    if plot_file is not None and find_spec("matplotlib") is None:
        raise OptionError("drawing a plot needs matplotlib; pip install 'zmq_datasource[plot]'")
    for option, path in (("--csv", csv_file), ("--plot", plot_file)):
        if path is None:
            continue
        shown, parent = str(path)[:_MOST_SHOWN], str(path.parent)[:_MOST_SHOWN]
        try:
            if not path.parent.is_dir():
                raise OptionError(
                    f"writing {shown}: there is no directory {parent}; name another file with {option}"
                )
            if path.is_dir():
                raise OptionError(f"writing {shown}: it is a directory; name a file with {option}")
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise OptionError(f"writing {shown}: permission denied; name another file with {option}")
        except OSError as e:  # a name that is too long
            raise OptionError(f"writing {shown}: {e.strerror}; name another file with {option}") from e
    if plot_file is not None and plot_file.suffix not in _FORMATS:
        raise OptionError(
            f"writing {str(plot_file)[:_MOST_SHOWN]}: name a file that ends in {', '.join(_FORMATS)} with --plot"
        )


def plot(runs: Sequence[ExperimentResult], path: Path) -> None:
    """Draw the share that was not received and the latency against the send high-water mark.

    Raises:
        WorkbenchError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(8, 6), dpi=110, layout="constrained")
    drops, latency = figure.subplots(2, 1, sharex=True)
    for name, group in _groups(runs).items():
        hwm = [run.experiment.sndhwm for run in group]
        (line,) = drops.plot(hwm, [run.drop_rate * 100 for run in group], marker="o", label=name)
        latency.plot(hwm, [run.p50 * 1000 for run in group], marker="o", color=line.get_color(), label=name)
        latency.plot(
            hwm, [run.p99 * 1000 for run in group], marker=".", color=line.get_color(), linestyle="--"
        )
    drops.set_title("A larger high-water mark buys fewer drops ...", loc="left", fontsize=11)
    drops.set_ylabel("not received, %")
    drops.set_ylim(bottom=-2)
    latency.set_title("... with older messages (line: median, dashed: p99)", loc="left", fontsize=11)
    latency.set_ylabel("latency, ms")
    latency.set_xlabel("send high-water mark, messages")
    latency.set_yscale("log")
    for axes in (drops, latency):
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    drops.legend(frameon=False, fontsize=9)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:
        raise WorkbenchError(f"writing {path}: {e}; name a file that ends in .png, .svg or .pdf") from e


def _groups(runs: Iterable[ExperimentResult]) -> dict[str, list[ExperimentResult]]:
    """Runs that differ in their high-water marks only, by what they have in common."""
    groups: dict[str, list[ExperimentResult]] = {}
    for run in sorted(runs, key=lambda run: run.experiment.sndhwm):
        experiment = run.experiment
        same = experiment.rcvhwm == experiment.sndhwm
        receiver = "rcvhwm = sndhwm" if same else f"rcvhwm {experiment.rcvhwm}"
        linger = "" if experiment.linger < 0 else f", linger {experiment.linger} ms"
        groups.setdefault(f"{experiment.pattern} {experiment.mode}, {receiver}{linger}", []).append(run)
    return groups
