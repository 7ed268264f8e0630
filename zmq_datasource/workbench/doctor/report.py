"""The report: facts and findings as rows, for programs as JSON and for people as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zmq_datasource.options.types import ByteSize
from zmq_datasource.workbench.doctor.facts import Feed, Place, Stall, Traffic
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
        named = _feed_facts(one) if isinstance(one, Feed) else _place_facts(one)
        facts += [Row(about, name, Severity.FACT, what) for name, what in named]
        found += [Row(about, f.id, f.severity, f.what, f.cause, f.fix) for f in findings_of(one)]
    return facts + sorted(found, key=lambda row: -exit_code(row.severity))


def _feed_facts(feed: Feed) -> Iterator[tuple[str, str]]:
    greeting, handshake, numbers = feed.greeting, feed.handshake, feed.numbers
    if greeting.addresses and greeting.addresses[0] not in feed.endpoint:
        yield "name", f"resolves to {', '.join(greeting.addresses)}"
    if greeting.state == "greeted":
        kind = greeting.socket_type or "a socket of a type that it has not named"
        yield "peer", f"{kind}, ZMTP {greeting.version}, security {greeting.mechanism}"
    elif greeting.state != "not_asked":
        yield "peer", greeting.reason
    if feed.is_up and greeting.is_old:
        words = "none in this version of ZMTP; the connection is made"
    else:
        words = {"hung_up": "the peer hung up"}.get(handshake.state, handshake.state)
        words += f" ({handshake.event})" if handshake.event else ""
        words += f" after {handshake.seconds * 1000:,.1f} ms" if feed.is_up else ""
    yield "handshake", words + (f"; lost {handshake.lost:,} ×" if handshake.lost else "")
    if feed.traffic is not None:
        yield from _traffic_facts(feed.traffic)
    elif feed.is_up:
        yield "messages", "none"
    if numbers is not None:
        yield (
            "numbers",
            f"framing {feed.framing}: {numbers.counters:,} counter{'s' * (numbers.counters != 1)}, "
            f"{numbers.lost:,} lost in {numbers.gaps:,} gaps, {numbers.repeated:,} repeated, {numbers.late:,} late, "
            f"{numbers.restarts:,} restarts",
        )
    if feed.counting is not None:
        yield "counting", f"{feed.counting.place}; the numbers go up by {feed.counting.step}"
    if feed.stall is not None:
        yield "stall", _stall_words(feed.stall)


def _traffic_facts(traffic: Traffic) -> Iterator[tuple[str, str]]:
    came = f"{traffic.messages:,} in {traffic.seconds:.1f} s"
    yield "messages", f"{came}: {traffic.rate:,.0f}/s, {traffic.peak:,.0f}/s at the peak"
    sizes = f"{_size(traffic.size_median)} median, {_size(traffic.size_p99)} 99th percentile"
    frames = ", ".join(f"{frames} ({count:,} messages)" for frames, count in traffic.frames)
    yield "sizes", f"{sizes}, {_size(traffic.size_max)} largest; frames: {frames}"
    if traffic.topics:
        more = f", and {traffic.more_topics:,} more" if traffic.more_topics else ""
        yield "topics", ", ".join(f"'{topic}' {count:,}" for topic, count in traffic.topics) + more


def _stall_words(stall: Stall) -> str:
    words = f"{stall.seconds:g} s: {stall.received:,} messages came of about {stall.due:,}"
    words += "" if stall.lost is None else f", {stall.lost:,} numbers are missing"
    return words + (f", the connection was lost {stall.disconnected:,} ×" if stall.disconnected else "")


def _place_facts(place: Place) -> Iterator[tuple[str, str]]:
    if place.file_system:
        yield "file system", place.file_system
    if place.free_bytes is not None:
        yield (
            "room",
            f"{_size(place.free_bytes)} free; a log may take {_size(place.needed_bytes)} (walMaxBytes)",
        )
    if place.sync_seconds is not None:
        yield "fsync", f"1 MiB and its name are on the disk after {place.sync_seconds * 1000:.1f} ms"
        yield "hard links", place.no_links or "of two files that take one name, one gets it"
    if place.put_seconds is not None:
        yield "put", f"1 MiB is there after {place.put_seconds * 1000:.0f} ms; so long a chunk takes"
        yield "conditional put", f"{'replaces' if place.replaced else 'refuses'} an object whose key is taken"


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


def _size(size: int) -> str:
    return str(ByteSize(size))
