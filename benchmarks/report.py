"""Results for machines (``results.json``) and for people (``RESULTS.md``): work, figure and target, met or missed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.measure import Measurement


@dataclass(frozen=True)
class Target:
    """What one figure should be: at least ``number``.

    Attributes:
        case: Of the figure.
        method: Of the figure.
        times: A method of the same case: at least ``number`` times its figure.
        above: A method of the same case: ``number`` more than its figure.
        upper: At most, instead of at least.
    """

    case: str
    method: str
    number: float
    times: str = ""
    above: str = ""
    upper: bool = False

    def shown(self, found: Mapping[tuple[str, str], Measurement]) -> tuple[str, bool]:
        """The target in words, and whether the figure meets it.

        Raises:
            KeyError: A figure that it needs was not measured.
        """
        text, limit = f"at {'most' if self.upper else 'least'} {self.number:,}", self.number
        if self.times:
            limit *= found[self.case, self.times].median
            text += f" times *{self.times}*: {_number(limit)}"
        if self.above:
            limit += found[self.case, self.above].median
            text += f" more than *{self.above}*: {_number(limit)}"
        figure = found[self.case, self.method].median
        return text, figure <= limit if self.upper else figure >= limit


@dataclass(frozen=True)
class Section:
    """One section of RESULTS.md.

    Attributes:
        name: As in ``--only`` and ``results.json``.
        title: The heading.
        text: What was measured, and how.
        targets: Shown beside their figures.
    """

    name: str
    title: str
    text: str
    targets: Sequence[Target] = ()


def write_results(
    directory: Path, sections: Sequence[Section], machine: Mapping[str, str], measured: Sequence[Measurement]
) -> None:
    """Write both files. A figure that was not measured this time stays as it was, with its date."""
    directory.mkdir(parents=True, exist_ok=True)
    _, before = read_results(directory)
    place = f"{machine['date']}, {machine['CPU']}"
    found = {(m.section, m.case, m.method): m for m in before}
    found |= {(m.section, m.case, m.method): replace(m, place=place) for m in measured}
    rows = ",\n".join(f"    {json.dumps(asdict(m), ensure_ascii=False)}" for m in found.values())
    head = json.dumps(machine, indent=4, ensure_ascii=False)
    text = f'{{\n  "machine": {head},\n  "measurements": [\n{rows}\n  ]\n}}\n'
    (directory / "results.json").write_text(text, encoding="utf-8")
    (directory / "RESULTS.md").write_text(page(sections, machine, list(found.values())), encoding="utf-8")


def read_results(directory: Path) -> tuple[Mapping[str, str], list[Measurement]]:
    """The machine and the measurements in ``results.json``; both are empty if there is no such file."""
    path = directory / "results.json"
    if not path.exists():
        return {}, []
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["machine"], [Measurement(**m) for m in found["measurements"]]


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
    yield from ("| machine | |", "| --- | --- |")
    for name, value in machine.items():
        if name not in ("date", "CPU"):
            yield f"| {name} | {value} |"
    yield ""
    yield "Do not compare figures from different processors with each other."
    for section in sections:
        mine = {(m.case, m.method): m for m in measured if m.section == section.name}
        if mine:
            yield from ("", f"## {section.title}", "", section.text, "")
            yield from _when(list(mine.values()))
            yield from _table(section, mine)


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


def _table(section: Section, found: Mapping[tuple[str, str], Measurement]) -> Iterator[str]:
    targets = {(target.case, target.method): target for target in section.targets}
    yield "| work | | figure | target | | CPU |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for work, m in found.items():
        text, verdict = "", ""
        with suppress(KeyError):  # no target, or its other figure was not measured yet
            text, met = targets[work].shown(found)
            verdict = "met" if met else "**missed**"
        yield f"| {m.case} | {m.method} | {_figure(m)} | {text} | {verdict} | {_cpu(m)} |"


def _figure(m: Measurement) -> str:
    unit = f" {m.unit}" if m.unit else ""
    span = f" ({_number(min(m.values))} to {_number(max(m.values))})" if len(m.values) > 1 else ""
    return f"{_number(m.median)}{unit}{span}"


def _cpu(m: Measurement) -> str:
    used = {process: statistics.median(values) for process, values in m.cpu.items()}
    parts = ", ".join(f"{process} {_number(value)}" for process, value in used.items() if value)
    return f"{parts}; all {_number(sum(used.values()))}" if parts else ""


def _number(value: float) -> str:
    """Three digits at least."""
    if value == 0:
        return "0"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"
