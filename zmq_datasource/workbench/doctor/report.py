"""The report: facts and findings as rows, for programs as JSON and for people as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zmq_datasource.options.types import ByteSize
from zmq_datasource.workbench.doctor.facts import Feed, Place
from zmq_datasource.workbench.doctor.findings import Severity, exit_code, findings_of

_COLUMNS = 100


class Row(NamedTuple):
    """A fact or a finding about an endpoint, a directory or a bucket."""

    about: str
    id: str
    severity: Severity
    what: str
    cause: str = ""  # empty for a fact
    fix: str = ""


def report(examined: Sequence[Feed | Place]) -> list[Row]:
    """All facts, and then all findings, the worst first."""
    facts, found = [], []
    for one in examined:
        about = one.endpoint if isinstance(one, Feed) else one.location
        if isinstance(one, Feed):
            facts += [Row(about, name, Severity.FACT, what) for name, what in _facts(one)]
        found += [Row(about, f.id, f.severity, f.what, f.cause, f.fix) for f in findings_of(one)]
    return facts + sorted(found, key=lambda row: -exit_code(row.severity))


def _facts(feed: Feed) -> Iterator[tuple[str, str]]:
    greeting, handshake, traffic, numbers, stall = (
        feed.greeting,
        feed.handshake,
        feed.traffic,
        feed.numbers,
        feed.stall,
    )
    if greeting.state == "greeted":
        kind = greeting.socket_type or "a socket of a type that it has not named"
        yield "peer", f"{kind}, ZMTP {greeting.version}, security {greeting.mechanism}"
    elif greeting.reason:
        yield "peer", greeting.reason
    yield "handshake", handshake.state + (f"; lost {handshake.lost:,} ×" if handshake.lost else "")
    if traffic is not None:
        yield "messages", f"{traffic.messages:,} in {traffic.seconds:.1f} s: {traffic.rate:,.0f}/s"
        yield "sizes", f"{ByteSize(traffic.size_mean)} on average, {ByteSize(traffic.size_max)} at most"
        yield "topics", ", ".join(f"'{topic}' {count:,}" for topic, count in traffic.topics) or "none"
    if numbers is not None:
        yield (
            "numbers",
            f"framing {feed.framing}: {numbers.lost:,} lost, {numbers.repeated:,} repeated, {numbers.late:,} late",
        )
    if feed.counting is not None:
        yield "counting", feed.counting.place
    if stall is not None:
        lost = "" if stall.lost is None else f", {stall.lost:,} numbers are missing"
        yield "stall", f"{stall.seconds:g} s: {stall.received:,} messages came of about {stall.due:,}{lost}"


def as_text(rows: Sequence[Row]) -> str:
    """The rows for people: the facts about each endpoint or place, then the findings."""
    lines = []
    for about in dict.fromkeys(row.about for row in rows):
        facts = [row for row in rows if row.about == about and row.severity is Severity.FACT]
        lines += [about, *(_indented(row.id, row.what) for row in facts), ""]
    found = [row for row in rows if row.severity is not Severity.FACT]
    for row in found:
        lines.append(textwrap.fill(f"{row.severity.upper()} {row.id}: {row.what}", _COLUMNS))
        parts = (("about", row.about), ("cause", row.cause), ("what to do", row.fix))
        lines += [*(_indented(*part) for part in parts), ""]
    count = sum(row.severity is not Severity.NOTE for row in found)
    lines.append(
        f"{count} finding{'s' * (count != 1)} to act on."
        if count
        else "No problem found in what was checked."
    )
    return "\n".join(lines)


def _indented(name: str, text: str) -> str:
    return textwrap.fill(text, _COLUMNS, initial_indent=f"  {name:<15}  ", subsequent_indent=" " * 19)
