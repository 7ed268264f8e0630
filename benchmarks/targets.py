"""What the figures should be, in one place, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks import framings, loss, proxy, receiving, sink, source, tables, transactions
from benchmarks.measure import Measurement

__all__ = ["Verdict", "verdicts"]


class _Beside(NamedTuple):
    """How often what commit 84c88e7 had is to be reached, and what both had in turn in one run, messages a second."""

    times: float
    before: float
    now: float


# The package as it was before the compiled core, on the same processor, by the same harness: windows of 10 s (source)
# and 6 s (sink), three and two rounds in turn, on 2026-11-23. What it had on another day is not to be compared.
_BESIDE: Mapping[tuple[str, str, str], _Beside] = {
    ("source", "1 kB", source.DURABLE): _Beside(2, 353_579, 443_994),
    ("source", "100 kB", source.DURABLE): _Beside(4, 5_517, 6_041),
    ("source", "1 MB", source.DURABLE): _Beside(4, 585, 638),
    ("sink", "PUSH, 1 kB", sink.BATCH): _Beside(2, 291_300, 490_462),
    ("sink", "PUSH, 100 kB", sink.BATCH): _Beside(2, 6_557, 7_485),
    ("sink", "PUB, 1 kB", sink.BATCH): _Beside(2, 330_493, 625_597),
    ("sink", "PUB, 100 kB", sink.BATCH): _Beside(2, 7_836, 8_878),
}


@dataclass(frozen=True)
class Verdict:
    """A target, beside what was measured.

    Attributes:
        figure: What it is about.
        target: In words.
        wanted: The number that it comes to.
        measured: The median.
        met: Whether it is at least that, or at most.
    """

    figure: str
    target: str
    wanted: float
    measured: float
    met: bool


# Median of a case and method of the section.
_Median = Callable[[str, str], float]


def verdicts(section: str, measurements: Sequence[Measurement]) -> Iterator[Verdict]:
    """The targets of a section of which everything that they need was measured."""
    medians = {(m.case, m.method): m.median for m in measurements}
    for case, method, text, most, wanted in _TARGETS.get(section, ()):
        try:
            value, limit = medians[case, method], wanted(lambda case, method: medians[case, method])
        except KeyError:
            continue
        yield Verdict(f"{case}, {method}", text, limit, value, value <= limit if most else value >= limit)
    for (of, case, method), (times, before, now) in _BESIDE.items():
        if of == section:
            text = f"{times:g} times commit 84c88e7 in turn with it, which had {before:,.0f}"
            yield Verdict(f"{case}, {method}", text, times * before, now, now >= times * before)


_Target = tuple[str, str, str, bool, Callable[[_Median], float]]


def _share(case: str, method: str, share: float, of: str, case_of: str | None = None) -> _Target:
    where = "" if case_of is None else f" at {case_of}"
    text = f"at least {share:g} of {of}{where}"
    return case, method, text, False, lambda median: share * median(case_of or case, of)


def _most(case: str, method: str, most: float) -> _Target:
    return case, method, f"at most {most:g}", True, lambda _: most


def _least(case: str, method: str, least: float) -> _Target:
    return case, method, f"at least {least:,.0f}", False, lambda _: least


def _live() -> _Target:
    text = f"5 times {source.TUTORIAL}, or 0.9 of {source.BACKLOG}, whichever is lower"
    case = "100 B"
    return (
        case,
        source.DURABLE,
        text,
        False,
        lambda median: min(5 * median(case, source.TUTORIAL), 0.9 * median(case, source.BACKLOG)),
    )


_FRAMED = ("numbered", "vllm", "bitcoin", "sequenced")
_TARGETS: Mapping[str, Sequence[_Target]] = {
    "source": [
        _live(),
    ],
    "framings": [_share("100 B", framed, 0.7, framings.PLAIN) for framed in _FRAMED],
    "receiving": [_most("100 B, plain", receiving.RECEIVING, 0.15)],
    "sink": [
        *(_share(f"{kind}, 100 B", sink.BATCH, 0.8, sink.LOOP) for kind in sink.KINDS),
    ],
    "tables": [_least("three numbers", tables.TABLES, 10_000_000)],
    "transactions": [_least("100 B", transactions.ACKNOWLEDGED, 1_500_000)],
    "loss": [_most("100,000 messages/s", loss.OURS, 0)],
    "proxy": [
        _share("100 B, messages/s", proxy.UNSYNCED, 0.8, proxy.FORWARDING),
        _share("10 kB, messages/s", proxy.UNSYNCED, 0.8, proxy.FORWARDING),
        *(
            _most(f"{size}, {quantile} in µs", proxy.UNSYNCED, most)
            for size in ("100 B", "10 kB")
            for quantile, most in (("p50", 500), ("p99", 3000))
        ),
        *(
            _share(f"{size}, catching up, messages/s", proxy.CATCHING_UP, 0.5, proxy.LOOP)
            for size in ("100 B", "10 kB")
        ),
    ],
}
