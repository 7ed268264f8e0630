"""``python -m benchmarks.plots DIRECTORY``: the plots of docs/performance.md, from ``results.json``.

``make site`` draws them into the site. Nothing of the measurements is imported, so that this needs no Spark.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

__all__ = ["drawn"]

_RESULTS = Path(__file__).parent / "results.json"
_Results = Mapping[tuple[str, str, str], Mapping[str, Any]]  # by section, case and method
_BYTES = {"100 B": 100, "1 kB": 1_000, "100 kB": 100_000, "1 MB": 1_000_000}
_TUTORIAL, _DURABLE, _LOG_ALONE = "tutorial source", "zmq", "the log alone"


def drawn() -> Iterator[tuple[str, str]]:
    """Name and SVG text of each plot.

    Raises:
        KeyError: A figure that a plot needs was not measured.
    """
    measured = json.loads(_RESULTS.read_text(encoding="utf-8"))["measurements"]
    results = {(m["section"], m["case"], m["method"]): m for m in measured}
    plots: Mapping[str, Callable[[Any, _Results], None]] = {
        "throughput-by-size": _sizes,
        "cpu-by-process": _cpu,
        "latency-by-rate": _latency,
    }
    style: dict[Any, Any] = {
        "svg.hashsalt": "zmq_datasource",
        "font.size": 11,
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
    mpl.use("svg")
    for name, draw in plots.items():
        with mpl.rc_context(style):
            figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
            draw(axes, results)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
            plt.close(figure)
        yield name, text.getvalue()


def _line(axes: Any, places: Sequence[float], measured: Sequence[Mapping[str, Any]], label: str) -> None:
    """Medians, with a bar from the smallest to the largest value."""
    medians = [median(m["values"]) for m in measured]
    below = [middle - min(m["values"]) for middle, m in zip(medians, measured, strict=True)]
    above = [max(m["values"]) - middle for middle, m in zip(medians, measured, strict=True)]
    axes.errorbar(places, medians, yerr=[below, above], label=label, marker="o", capsize=3)


def _sizes(axes: Any, results: _Results) -> None:
    for method in ("raw pyzmq", _LOG_ALONE, _DURABLE, _TUTORIAL):
        measured = [results["source", case, method] for case in _BYTES]
        _line(axes, list(_BYTES.values()), measured, method)
    axes.set(xscale="log", yscale="log", xlabel="bytes a message", ylabel="messages a second")
    axes.set_title("Throughput by size of message, two cores")
    axes.legend()


def _cpu(axes: Any, results: _Results) -> None:
    found = {
        method: results["source", "100 B", method]["cpu"] for method in (_DURABLE, _TUTORIAL, _LOG_ALONE)
    }
    processes = list(dict.fromkeys(process for cpu in found.values() for process in cpu))
    left = [0.0] * len(found)
    for process in processes:
        widths = [median(cpu.get(process, [0.0])) for cpu in found.values()]
        axes.barh(list(found), widths, left=left, label=process)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set(xlabel="microseconds of CPU a message of 100 B")
    axes.set_title("Where a message's time goes")
    axes.invert_yaxis()
    axes.legend(loc="lower right")


def _latency(axes: Any, results: _Results) -> None:
    cases = {
        case: case.split()[0].replace(",", "")
        for of, case, method in results
        if (of, method) == ("latency", "p50")
    }
    for method, label in (("p50", "median"), ("p99", "99 of 100 are faster")):
        measured = [results["latency", case, method] for case in cases]
        _line(axes, [int(rate) for rate in cases.values()], measured, label)
    axes.set(xscale="log", xlabel="messages a second", ylabel="milliseconds", ylim=(0, None))
    axes.set_title("From the sender to the user's function (foreachBatch)")
    axes.legend()


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, svg in drawn():
        (directory / f"{name}.svg").write_text(svg, encoding="utf-8")
        print(directory / f"{name}.svg")
