"""What a section of RESULTS.md says of itself: its text, the ratios that it shows, and its targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.measure import MEGA, Measurement

__all__ = [
    "Figures",
    "Section",
    "Target",
    "Verdict",
    "at_least",
    "at_most",
    "share",
    "verdicts",
    "within_cpu",
]

# The measurements of one section, by case and method.
Figures: TypeAlias = Mapping[tuple[str, str], Measurement]


@dataclass(frozen=True)
class Target:
    """What one figure should be.

    Attributes:
        case: Of the figure.
        method: Of the figure.
        text: The target in words.
        limit: The number that it comes to, from the figures of the section. It raises KeyError when one that it
            needs was not measured.
        upper: Whether the figure should be at most ``limit``; else it should be at least that.
    """

    case: str
    method: str
    text: str
    limit: Callable[[Figures], float]
    upper: bool = False


def at_least(case: str, method: str, limit: float) -> Target:
    """At least this number."""
    return Target(case, method, f"at least {limit:,}", lambda _: limit)


def at_most(case: str, method: str, limit: float) -> Target:
    """At most this number."""
    return Target(case, method, f"at most {limit:,}", lambda _: limit, upper=True)


def share(case: str, method: str, factor: float, of: str) -> Target:
    """At least ``factor`` times what the method ``of`` has in the same case."""
    text = f"at least {factor:g} {'times' if factor > 1 else 'of'} {of}"
    return Target(case, method, text, lambda found: factor * found[case, of].median)


def within_cpu(
    case: str, method: str, factor: float, needed: Sequence[tuple[str, str]], text: str, cores: int
) -> Target:
    """At least ``factor`` times the rate at which ``needed`` alone keep all cores busy.

    Args:
        needed: Methods and processes; their CPU times for one message are added.
        text: What ``needed`` stands for.
    """

    def limit(found: Figures) -> float:
        micros = sum(statistics.median(found[case, of].cpu[process]) for of, process in needed)
        return factor * cores * MEGA / micros

    return Target(case, method, f"at least {factor:g} of what {text} allow on {cores} cores", limit)


@dataclass(frozen=True)
class Section:
    """One section of RESULTS.md.

    Attributes:
        name: As in ``--only`` and ``results.json``.
        title: The heading.
        text: What was measured, and how.
        ratios: Pairs of methods; the median of the first is shown as a part of the median of the second.
        targets: Shown beside their figures.
    """

    name: str
    title: str
    text: str
    ratios: Sequence[tuple[str, str]] = ()
    targets: Sequence[Target] = ()


@dataclass(frozen=True)
class Verdict:
    """A target beside its figure.

    Attributes:
        target: The target.
        limit: The number that it comes to.
        measured: The median.
        met: Whether the figure reaches the target.
    """

    target: Target
    limit: float
    measured: float
    met: bool


def verdicts(section: Section, measurements: Sequence[Measurement]) -> Iterator[Verdict]:
    """The section's targets; without those for which a figure is missing."""
    found = {(m.case, m.method): m for m in measurements}
    for target in section.targets:
        try:
            value, limit = found[target.case, target.method].median, target.limit(found)
        except KeyError:
            continue
        yield Verdict(target, limit, value, value <= limit if target.upper else value >= limit)
