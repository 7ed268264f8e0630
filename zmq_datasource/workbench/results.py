"""Show the runs of experiments as a table on the screen, as CSV, and as a plot.

The table and the plot show all runs of an experiment together: the median, and the smallest and the largest value. The
CSV has a line for each run.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from zmq_datasource.errors import OptionError, WorkbenchError
from zmq_datasource.monitoring.tables import Cell, Row, count, stack
from zmq_datasource.workbench.experiment import Experiment, ExperimentResult

_FORMATS = (".png", ".svg", ".pdf")
_MOST_SHOWN = 200  # characters of a path in an error


def row(run: ExperimentResult) -> dict[str, Any]:
    """A run as one flat row: the settings of its experiment, then its figures in seconds, bytes and messages."""
    figures = {**run.experiment._asdict(), **run._asdict(), "drop_rate": run.drop_rate}
    del figures["experiment"]
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in figures.items()}


def table(runs: Iterable[ExperimentResult]) -> Table:
    """A line for each experiment: the median of its runs, and the range if they differ."""
    return stack([[_line(experiment, group) for experiment, group in _repeated(runs).items()]])


def _repeated(runs: Iterable[ExperimentResult]) -> dict[Experiment, list[ExperimentResult]]:
    """The runs of each experiment. Experiments are in the order of their first runs."""
    groups: dict[Experiment, list[ExperimentResult]] = {}
    for run in runs:
        groups.setdefault(run.experiment, []).append(run)
    return groups


def _line(experiment: Experiment, runs: Sequence[ExperimentResult]) -> Row:
    def spread(figure: Callable[[ExperimentResult], float], unit: str, show: Callable[[float], str]) -> Cell:
        values = [figure(run) for run in runs]
        least, most = show(min(values)), show(max(values))
        text = show(median(values)) + (f" ({least}..{most})" if least != most else "")
        return Cell(f"{text} {unit}".rstrip())

    marks = f"{experiment.sndhwm:,}"
    if experiment.rcvhwm != experiment.sndhwm:
        marks += f"/{experiment.rcvhwm:,}"
    cells = {
        "sent": spread(lambda run: run.sent, "", count),
        "dropped": spread(lambda run: run.dropped, "", count),
        "lost": spread(lambda run: run.lost, "", count),
        "received": spread(lambda run: run.received, "", count),
        "not received": spread(lambda run: run.drop_rate * 100, "%", "{:.1f}".format),
        "blocked": spread(lambda run: run.blocked, "s", "{:.2f}".format),
        "p50": spread(lambda run: run.p50 * 1000, "ms", "{:,.1f}".format),
        "p99": spread(lambda run: run.p99 * 1000, "ms", "{:,.1f}".format),
        "memory": spread(
            lambda run: (run.sender_bytes + run.consumer_bytes) / (1 << 20), "MiB", "{:.1f}".format
        ),
    }
    return Row("sockets, full queue, hwm", f"{experiment.pattern} {experiment.mode} {marks}", cells)


def write_csv(runs: Sequence[ExperimentResult], path: Path) -> None:
    """Write all runs as CSV, one line for each.

    Raises:
        WorkbenchError: The file cannot be written.
    """
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row(runs[0])))
            writer.writeheader()
            writer.writerows(map(row, runs))
    except OSError as e:
        raise WorkbenchError(f"writing {path}: {e.strerror or e}; name another file with --csv") from e


def check_outputs(csv_file: Path | None, plot_file: Path | None) -> None:
    """Check, before the experiments run, that ``write_csv`` and ``plot`` can write these files.

    Raises:
        OptionError: A plot needs matplotlib, which is not installed; a file cannot be written; or the plot's file name
            has another ending than the allowed ones.
    """
    if plot_file is not None and find_spec("matplotlib") is None:
        raise OptionError("drawing a plot needs matplotlib; pip install 'zmq_datasource[plot]'")
    for option, path in (("--csv", csv_file), ("--plot", plot_file)):
        if path is None:
            continue
        try:
            is_new = not path.exists()
            path.open("ab").close()
            if is_new:
                path.unlink()
        except OSError as e:
            shown = str(path)[:_MOST_SHOWN]
            raise OptionError(f"writing {shown}: {e.strerror}; name another file with {option}") from e
    if plot_file is not None and plot_file.suffix not in _FORMATS:
        raise OptionError(
            f"writing {str(plot_file)[:_MOST_SHOWN]}: name a file that ends in {', '.join(_FORMATS)} with --plot"
        )


def plot(runs: Sequence[ExperimentResult], path: Path) -> None:
    """Draw two figures over the send high-water mark: the share of messages not received, and the age of the others.

    Raises:
        WorkbenchError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415

    figure = Figure(figsize=(8, 6), dpi=110, layout="constrained")
    shares, ages = figure.subplots(2, 1, sharex=True)
    for name, group in _curves(runs).items():
        marks = [experiment.sndhwm for experiment in group]
        color = None  # the curve's first line takes the next color, and its other lines take the same
        figures: Sequence[tuple[Any, str, Callable[[ExperimentResult], float]]] = (
            (shares, "-", lambda run: run.drop_rate * 100),
            (ages, "-", lambda run: run.p50 * 1000),
            (ages, "--", lambda run: run.p99 * 1000),
        )
        for axes, style, value in figures:
            values = [[value(run) for run in repeated] for repeated in group.values()]
            label = name if style == "-" else None
            (line,) = axes.plot(marks, list(map(median, values)), style, color=color, marker=".", label=label)
            color = line.get_color()
            axes.fill_between(
                marks, list(map(min, values)), list(map(max, values)), color=color, alpha=0.2, linewidth=0
            )
    repeats = max(map(len, _repeated(runs).values()))
    spread = f"\nlines: median of {repeats} runs, bands: smallest to largest" if repeats > 1 else ""
    figure.suptitle(f"{_load(runs[0].experiment)}{spread}", x=0.01, ha="left", fontsize=11)
    shares.set_ylabel("not received, %")
    shares.set_ylim(bottom=-2)
    ages.set_ylabel("age when received, ms\n(p50; dashed: p99)")
    ages.set_xlabel("send high-water mark, messages")
    ages.set_yscale("log")
    ages.yaxis.set_major_locator(
        LogLocator(subs=(1, 2, 5))
    )  # else an axis within one decade has no plain number
    ages.yaxis.set_major_formatter("{x:,g}")
    ages.yaxis.set_minor_formatter(NullFormatter())
    for axes in (shares, ages):
        axes.set_xscale("log")
        axes.set_xticks(sorted({run.experiment.sndhwm for run in runs}))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    shares.legend(frameon=False, fontsize=9)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:
        raise WorkbenchError(f"writing {path}: {e}; name a file that ends in .png, .svg or .pdf") from e


def _load(experiment: Experiment) -> str:
    """What is the same in all runs of a plot, in words."""
    rate = f"at {experiment.rate:,g}/s" if experiment.rate else "at once"
    stall = f", after a stall of {experiment.stall:g} s" if experiment.stall else ""
    return (
        f"{experiment.messages:,} messages of {experiment.size:,} bytes {rate}; the consumer takes one in "
        f"{experiment.consume * 1e6:,.0f} µs{stall}"
    )


def _curves(runs: Iterable[ExperimentResult]) -> dict[str, dict[Experiment, list[ExperimentResult]]]:
    """Group experiments into curves. The experiments of one curve differ only in their high-water marks.

    Returns:
        By the label of the curve: the runs of each experiment, in the order of the send high-water mark.
    """
    curves: dict[str, dict[Experiment, list[ExperimentResult]]] = {}
    for experiment, repeated in sorted(_repeated(runs).items(), key=lambda item: item[0].sndhwm):
        same = experiment.rcvhwm == experiment.sndhwm
        receiver = "rcvhwm = sndhwm" if same else f"rcvhwm {experiment.rcvhwm}"
        linger = "" if experiment.linger < 0 else f", linger {experiment.linger} ms"
        curves.setdefault(f"{experiment.pattern} {experiment.mode}, {receiver}{linger}", {})[experiment] = (
            repeated
        )
    return curves
