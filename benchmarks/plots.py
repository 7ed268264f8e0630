"""``python -m benchmarks.plots``: the plots of docs/performance.md, from ``results.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.growth import PUBLISHERS, TOPICS
from benchmarks.latency import MEDIAN, TAIL
from benchmarks.source import BACKLOG, DURABLE, RAW, TUTORIAL

_HERE = Path(__file__).parent
_IMAGES = _HERE.parent / "docs" / "images"
_Results = Mapping[tuple[str, str, str], Mapping[str, Any]]  # by section, case and method
_BYTES = {"100 B": 100, "1 kB": 1_000, "100 kB": 100_000, "1 MB": 1_000_000}


def main() -> None:
    """Draw every plot whose section was measured."""
    measured = json.loads((_HERE / "results.json").read_text(encoding="utf-8"))["measurements"]
    results = {(m["section"], m["case"], m["method"]): m for m in measured}
    mpl.use("svg")
    mpl.rcParams.update(
        {"svg.hashsalt": "zmq_datasource", "font.size": 11, "axes.grid": True, "grid.alpha": 0.3}
    )
    _IMAGES.mkdir(exist_ok=True)
    plots: Mapping[str, tuple[str, Callable[[Any, _Results], None]]] = {
        "throughput-by-size": ("source", _sizes),
        "cpu-by-process": ("source", _cpu),
        "latency-by-rate": ("latency", _latency),
        "rate-by-backlog": ("backlog", _backlog),
        "cost-by-counters": ("growth", _growth),
    }
    for name, (section, draw) in plots.items():
        if not any(of == section for of, _, _ in results):
            print(f"{name}: not measured; run python -m benchmarks --only {section}")
            continue
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        draw(axes, results)
        figure.savefig(_IMAGES / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
        print(_IMAGES / f"{name}.svg")


def _of(results: _Results, section: str, method: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(case, m) for (of, case, how), m in results.items() if (of, how) == (section, method)]


def _line(
    axes: Any, places: Sequence[float], measured: Sequence[Mapping[str, Any]], label: str, scale: float = 1
) -> None:
    """Medians, and a bar from least to most."""
    medians = [m["median"] * scale for m in measured]
    bars = [
        [(m["median"] - m["min"]) * scale for m in measured],
        [(m["max"] - m["median"]) * scale for m in measured],
    ]
    axes.errorbar(places, medians, yerr=bars, label=label, marker="o", capsize=3)


def _sizes(axes: Any, results: _Results) -> None:
    for method in (RAW, BACKLOG, DURABLE, TUTORIAL):
        found = _of(results, "source", method)
        _line(axes, [_BYTES[case] for case, _ in found], [m for _, m in found], method)
    axes.set(xscale="log", yscale="log", xlabel="bytes a message", ylabel="messages a second")
    axes.set_title("Throughput by size of message, two cores")
    axes.legend()


def _cpu(axes: Any, results: _Results) -> None:
    found = [(method, results["source", "100 B", method]["cpu"]) for method in (DURABLE, TUTORIAL, BACKLOG)]
    processes = list(dict.fromkeys(process for _, cpu in found for process in cpu))
    left = [0.0] * len(found)
    for process in processes:
        widths = [_median(cpu.get(process, [0.0])) for _, cpu in found]
        axes.barh([method for method, _ in found], widths, left=left, label=process)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set(xlabel="microseconds of CPU a message of 100 B")
    axes.set_title("Where a message's time goes")
    axes.invert_yaxis()
    axes.legend(loc="lower right")


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _latency(axes: Any, results: _Results) -> None:
    for method, label in ((MEDIAN, "median"), (TAIL, "99 of 100 are faster")):
        found = _of(results, "latency", method)
        rates = [int(case.split()[0].replace(",", "")) for case, _ in found]
        _line(axes, rates, [m for _, m in found], label)
    axes.set(xscale="log", xlabel="messages a second", ylabel="milliseconds", ylim=(0, None))
    axes.set_title("From the sender to the user's function (foreachBatch)")
    axes.legend()


def _backlog(axes: Any, results: _Results) -> None:
    found = _of(results, "backlog", "zmq")
    _line(
        axes, [float(case.split()[0]) for case, _ in found], [m for _, m in found], "log read by Spark", 1e-6
    )
    axes.set(xlabel="million messages in the log", ylabel="million messages a second", ylim=(0, None))
    axes.set_title("Reading a backlog of messages of 100 B")


def _growth(axes: Any, results: _Results) -> None:
    for kind, counts in (("topics", TOPICS), ("publishers", PUBLISHERS)):
        found = [results["growth", f"{count:,} {kind}", "cost of a message"] for count in counts]
        _line(axes, counts, found, f"{kind}, each with numbers of its own")
    axes.set(xscale="log", xlabel="topics or publishers", ylabel="microseconds a message", ylim=(0, None))
    axes.set_title("What receiving and judging a message costs")
    axes.legend()


if __name__ == "__main__":
    main()
