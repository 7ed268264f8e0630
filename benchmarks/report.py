"""Results for machines (``results.json``) and for people (``RESULTS.md``)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.measure import Measurement
from benchmarks.section import Section, verdicts

__all__ = ["page", "read_results", "write_results"]


def write_results(
    directory: Path,
    sections: Sequence[Section],
    machine: Mapping[str, str],
    measured: Sequence[Measurement],
    whole: bool = True,
) -> None:
    """Write both files; a figure that was not measured this time stays as it was, with its date.

    Args:
        sections: All of the page, in its order.
        whole: Whether all cases of the measured sections were measured. If not, their other cases stay too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    before_machine, before = read_results(directory)
    place = f"{machine['date']}, {machine['CPU']}"
    measured = list(_merged(before, [replace(m, place=place) for m in measured], whole))
    # An empty entry says that something was not at hand this time, such as Kafka: keep the entry of the older run.
    machine = {name: value or before_machine.get(name, "") for name, value in machine.items()}
    rows = ",\n".join(f"    {json.dumps(asdict(m), ensure_ascii=False)}" for m in measured)
    head = json.dumps(machine, indent=4, ensure_ascii=False)
    text = f'{{\n  "machine": {head},\n  "measurements": [\n{rows}\n  ]\n}}\n'
    (directory / "results.json").write_text(text, encoding="utf-8")
    (directory / "RESULTS.md").write_text(page(sections, machine, measured), encoding="utf-8")


def read_results(directory: Path) -> tuple[Mapping[str, str], list[Measurement]]:
    """The machine and the measurements in ``results.json``; both are empty if there is no such file."""
    path = directory / "results.json"
    if not path.exists():
        return {}, []
    found = json.loads(path.read_text(encoding="utf-8"))
    measured = []
    for m in found["measurements"]:
        m["values"] = tuple(m["values"])
        m["cpu"] = {process: tuple(values) for process, values in m["cpu"].items()}
        measured.append(Measurement(**m))
    return found["machine"], measured


def _merged(before: Sequence[Measurement], new: Sequence[Measurement], whole: bool) -> Iterator[Measurement]:
    """All measurements, in the order in which their sections and cases were first measured."""
    sections, cases = {m.section for m in new}, {(m.section, m.case) for m in new}
    kept = [m for m in before if (m.section, m.case) not in cases and not (whole and m.section in sections)]
    order = {case: at for at, case in enumerate(dict.fromkeys((m.section, m.case) for m in (*before, *new)))}
    yield from sorted((*kept, *new), key=lambda m: order[m.section, m.case])


def page(sections: Sequence[Section], machine: Mapping[str, str], measured: Sequence[Measurement]) -> str:
    """The text of RESULTS.md."""
    return "\n".join(_lines(sections, machine, measured)) + "\n"


def _lines(
    sections: Sequence[Section], machine: Mapping[str, str], measured: Sequence[Measurement]
) -> Iterator[str]:
    yield "# Benchmark results"
    yield ""
    yield "Written by `python -m benchmarks`. Each figure is a median, with the smallest and the largest value in"
    yield "brackets. In each round the methods take turns. The first round is not counted, and each measurement has a"
    yield "warm-up before its window. At scale 1 a window has 10 s. CPU is user and system time of all threads, in"
    yield "microseconds a message."
    yield ""
    shown = {name: value for name, value in machine.items() if value and name not in ("date", "CPU")}
    yield from _table(("machine", ""), shown.items())
    yield "Do not compare figures from different processors with each other."
    yield ""
    for section in sections:
        mine = [m for m in measured if m.section == section.name]
        if mine:
            yield f"## {section.title}"
            yield ""
            yield section.text
            yield ""
            yield from _when(mine)
            yield from _figures(mine, section.ratios)
            yield from _verdicts(section, mine)
            yield from _cpu(mine)


def _when(measured: Sequence[Measurement]) -> Iterator[str]:
    """When and on which processor the figures were measured; with the cases, if not all were in one run."""
    runs: dict[str, list[str]] = {}
    for m in measured:
        rounds = len(m.values)
        run = f"{m.place}: scale {m.scale:g}, {rounds} round{'' if rounds == 1 else 's'}"
        runs.setdefault(run, []).append(m.case)
    for run, cases in runs.items():
        of = "" if len(runs) == 1 else f" ({'; '.join(dict.fromkeys(cases))})"
        yield f"- Measured on {run}{of}."
    yield ""


def _figures(measured: Sequence[Measurement], ratios: Sequence[tuple[str, str]]) -> Iterator[str]:
    # One table for the cases that have the same unit and the same methods.
    tables: dict[tuple[str, ...], dict[str, Mapping[str, Measurement]]] = {}
    by_case = _by_case(measured)
    for case, row in by_case.items():
        methods = tuple(f"{method} ({m.unit})" if m.unit else method for method, m in row.items())
        tables.setdefault(methods, {})[case] = row
    for methods, rows in tables.items():
        yield from _table(["", *methods], ([case, *map(_shown, row.values())] for case, row in rows.items()))
    shown = [
        (ours, other) for ours, other in ratios if any({ours, other} <= set(row) for row in by_case.values())
    ]
    if shown:
        yield from _table(
            ["ratio", *(f"{ours} / {other}" for ours, other in shown)],
            (
                [case, *(_ratio(row.get(ours), row.get(other)) for ours, other in shown)]
                for case, row in by_case.items()
                if any({ours, other} <= set(row) for ours, other in shown)
            ),
        )


def _by_case(measured: Sequence[Measurement]) -> Mapping[str, Mapping[str, Measurement]]:
    found: dict[str, dict[str, Measurement]] = {}
    for m in measured:
        found.setdefault(m.case, {})[m.method] = m
    return found


def _verdicts(section: Section, measured: Sequence[Measurement]) -> Iterator[str]:
    found = list(verdicts(section, measured))
    if found:
        yield from _table(
            ("figure", "target", "which is", "measured", ""),
            (
                (
                    f"{v.target.case}, {v.target.method}",
                    v.target.text,
                    _number(v.limit),
                    _number(v.measured),
                    "met" if v.met else "**missed**",
                )
                for v in found
            ),
        )


def _cpu(measured: Sequence[Measurement]) -> Iterator[str]:
    with_cpu = [m for m in measured if m.cpu]
    processes = list(dict.fromkeys(process for m in with_cpu for process in m.cpu))
    if processes:
        yield from _table(
            ("CPU a message (µs)", "", *processes, "all"),
            (
                (m.case, m.method, *(_median(m.cpu.get(p)) for p in processes), _number(_sum(m)))
                for m in with_cpu
            ),
        )


def _sum(measurement: Measurement) -> float:
    return sum(map(statistics.median, measurement.cpu.values()))


def _median(values: Sequence[float] | None) -> str:
    return _number(statistics.median(values)) if values else ""


def _ratio(ours: Measurement | None, other: Measurement | None) -> str:
    return f"{ours.median / other.median:.2f}" if ours and other and other.median else ""


def _shown(measurement: Measurement) -> str:
    values = measurement.values
    median = _number(measurement.median)
    return median if len(values) == 1 else f"{median} ({_number(min(values))} to {_number(max(values))})"


def _number(value: float) -> str:
    """Three digits at least."""
    if value == 0:
        return "0"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(header)
    yield _row(["---"] * len(header))
    yield from map(_row, rows)
    yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
