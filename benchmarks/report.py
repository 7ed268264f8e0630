"""Results for machines (``results.json``) and for people (``RESULTS.md``)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import Measurement
from benchmarks.targets import verdicts
from benchmarks.titles import RATIOS, TITLES

__all__ = ["write_results"]


def write_results(
    directory: Path, machine: Mapping[str, str], measured: Sequence[Measurement], whole: bool = True
) -> None:
    """Write both files; what was not measured this time stays as it was.

    Args:
        whole: Whether all cases of its sections were measured; else the other ones stay, too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    kept, before = _before(directory)
    place = f"{machine['date']}, {machine['CPU']}"
    measured = list(_merged(before, [replace(m, place=place) for m in measured], whole))
    # What was not at hand this time was when it was measured.
    machine = {name: value or kept.get(name, "") for name, value in machine.items()}
    results = {
        "machine": machine,
        "measurements": [
            {
                "section": m.section,
                "case": m.case,
                "method": m.method,
                "unit": m.unit,
                "median": m.median,
                "min": min(m.values),
                "max": max(m.values),
                "values": m.values,
                "cpu": m.cpu,
                "scale": m.scale,
                "place": m.place,
            }
            for m in measured
        ],
    }
    text = json.dumps(results, indent=2, ensure_ascii=False)
    (directory / "results.json").write_text(text + "\n", encoding="utf-8")
    (directory / "RESULTS.md").write_text("\n".join(_lines(machine, measured)) + "\n", encoding="utf-8")


def _merged(before: Sequence[Measurement], new: Sequence[Measurement], whole: bool) -> Iterator[Measurement]:
    """All measurements, in the order in which their sections and cases first came."""
    sections, cases = {m.section for m in new}, {(m.section, m.case) for m in new}
    kept = [m for m in before if (m.section, m.case) not in cases and not (whole and m.section in sections)]
    order = {case: at for at, case in enumerate(dict.fromkeys((m.section, m.case) for m in (*before, *new)))}
    yield from sorted((*kept, *new), key=lambda m: order[m.section, m.case])


def _before(directory: Path) -> tuple[Mapping[str, str], list[Measurement]]:
    """The machine and the measurements of the file that is there."""
    path = directory / "results.json"
    if not path.exists():
        return {}, []
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["machine"], [
        Measurement(
            m["section"],
            m["case"],
            m["method"],
            m["unit"],
            tuple(m["values"]),
            {process: tuple(values) for process, values in m.get("cpu", {}).items()},
            m["scale"],
            m["place"],
        )
        for m in found["measurements"]
        if m["section"] in TITLES
    ]


def _lines(machine: Mapping[str, str], measured: Sequence[Measurement]) -> Iterator[str]:
    yield "# Benchmark results"
    yield ""
    yield "Written by `python -m benchmarks`: medians, with least and most in brackets, of rounds in which the"
    yield "methods take turns; a first round is not counted, and each measurement has a warm-up before its window."
    yield "At scale 1 a window has 10 s. CPU is user and system time of all threads, in microseconds a message."
    yield ""
    shown = {name: value for name, value in machine.items() if value and name not in ("date", "CPU")}
    yield from _table(("machine", ""), shown.items())
    yield "Sections that were measured on different processors are not to be compared with each other."
    yield ""
    for section, (title, explanation) in TITLES.items():
        mine = [m for m in measured if m.section == section]
        if mine:
            yield f"## {title}"
            yield ""
            places = "; ".join(dict.fromkeys(m.place for m in mine))
            yield f"{explanation} Scale {mine[0].scale:g}, rounds {len(mine[0].values)}; {places}."
            yield ""
            yield from _section(mine, RATIOS.get(section, ()))
            yield from _verdicts(section, mine)
            yield from _cpu(mine)


def _section(measured: Sequence[Measurement], ratios: Sequence[tuple[str, str]]) -> Iterator[str]:
    for unit in dict.fromkeys(m.unit for m in measured):
        yield from _values([m for m in measured if m.unit == unit], unit)
    if ratios:
        by_case = _by_case(measured)
        yield from _table(
            ["ratio", *(f"{ours} / {other}" for ours, other in ratios)],
            (
                [case, *(_ratio(row.get(ours), row.get(other)) for ours, other in ratios)]
                for case, row in by_case.items()
            ),
        )


def _by_case(measured: Sequence[Measurement]) -> Mapping[str, Mapping[str, Measurement]]:
    found: dict[str, dict[str, Measurement]] = {}
    for m in measured:
        found.setdefault(m.case, {})[m.method] = m
    return found


def _values(measured: Sequence[Measurement], unit: str) -> Iterator[str]:
    methods = list(dict.fromkeys(m.method for m in measured))
    yield from _table(
        ["", *(f"{method} ({unit})" if unit else method for method in methods)],
        (
            [case, *(_shown(row[method]) if method in row else "" for method in methods)]
            for case, row in _by_case(measured).items()
        ),
    )


def _verdicts(section: str, measured: Sequence[Measurement]) -> Iterator[str]:
    found = list(verdicts(section, measured))
    if found:
        yield from _table(
            ("target", "", "which is", "measured", ""),
            (
                (v.figure, v.target, _number(v.wanted), _number(v.measured), "met" if v.met else "**missed**")
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
    return median if len(values) == 1 else f"{median} ({_number(min(values))}–{_number(max(values))})"


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
