"""What the figures should be, in one place, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks import framings, loss, proxy, receiving, sink, source, tables, transactions
from benchmarks.measure import Measurement

__all__ = ["Verdict", "verdicts"]

# Messages a second before the compiled core (commit 84c88e7), by this method on 2 cores, medians of three.
_BEFORE: Mapping[tuple[str, str], float] = {
    ("source", "1 kB"): 170_418,
    ("source", "100 kB"): 1_823,
    ("source", "1 MB"): 110,
    ("sink", "PUSH, 1 kB"): 101_763,
    ("sink", "PUSH, 100 kB"): 1_759,
    ("sink", "PUB, 1 kB"): 130_263,
    ("sink", "PUB, 100 kB"): 2_004,
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


_Target = tuple[str, str, str, bool, Callable[[_Median], float]]


def _share(case: str, method: str, share: float, of: str, case_of: str | None = None) -> _Target:
    where = "" if case_of is None else f" at {case_of}"
    text = f"at least {share:g} of {of}{where}"
    return case, method, text, False, lambda median: share * median(case_of or case, of)


def _most(case: str, method: str, most: float) -> _Target:
    return case, method, f"at most {most:g}", True, lambda _: most


def _least(case: str, method: str, least: float) -> _Target:
    return case, method, f"at least {least:,.0f}", False, lambda _: least


def _times_before(section: str, case: str, method: str, times: float) -> _Target:
    text = f"{times:g} times that of commit 84c88e7"
    return case, method, text, False, lambda _: times * _BEFORE[section, case]


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
        _times_before("source", "1 kB", source.DURABLE, 2),
        _times_before("source", "100 kB", source.DURABLE, 4),
        _times_before("source", "1 MB", source.DURABLE, 4),
    ],
    "framings": [_share("100 B", framed, 0.7, framings.PLAIN) for framed in _FRAMED],
    "receiving": [_most("100 B, plain", receiving.RECEIVING, 0.15)],
    "sink": [
        *(_share(f"{kind}, 100 B", sink.BATCH, 0.8, sink.LOOP) for kind in sink.KINDS),
        *(
            _times_before("sink", f"{kind}, {size}", sink.BATCH, 2)
            for kind in sink.KINDS
            for size in ("1 kB", "100 kB")
        ),
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
    ],
}
