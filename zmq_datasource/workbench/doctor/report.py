"""The report: all findings, as one JSON document for programs, and as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zmq_datasource.options.types import ByteSize
from zmq_datasource.workbench.doctor.examine import Examination
from zmq_datasource.workbench.doctor.facts import Durable, Examined, Expected, Stalled
from zmq_datasource.workbench.doctor.findings import (
    EXIT_CODES,
    Finding,
    Severity,
    connection_findings,
    exit_code,
    log_findings,
    size_findings,
    slow_receiver_findings,
    unreachable_findings,
)
from zmq_datasource.workbench.doctor.findings_numbers import number_findings
from zmq_datasource.workbench.doctor.findings_stall import proxy_findings, stall_findings

__all__ = ["FORMAT", "diagnose", "document", "show"]

FORMAT = 1
_COLOURS = {Severity.UNREACHABLE: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def diagnose(examined: Sequence[Examined], log: Durable | None, expected: Expected) -> list[Finding]:
    """All findings, the worst first."""
    found: list[Finding] = []
    for one in examined:
        findings: list[Finding] = []
        if one.handshake.state != "succeeded":
            unreachable = unreachable_findings(one)
            findings += (replace(finding, severity=Severity.UNREACHABLE) for finding in unreachable)
        else:
            findings += connection_findings(one, expected)
            findings += number_findings(one)
            findings += size_findings(one, expected)
            findings += slow_receiver_findings(one)
        findings += stall_findings(one, expected)
        found += (replace(finding, endpoint=one.endpoint) for finding in findings)
    found += proxy_findings(examined)
    if log is not None:
        found += log_findings(log, expected)
    return sorted(found, key=lambda finding: -EXIT_CODES[finding.severity])


def document(examination: Examination, findings: Sequence[Finding]) -> dict[str, Any]:
    """All figures and findings; what was not measured is null."""
    code = exit_code(findings)
    return {
        "format": FORMAT,
        "healthy": code == 0,
        "exitCode": code,
        "endpoints": [msgspec.to_builtins(one, str_keys=True) for one in examination.endpoints],
        "log": msgspec.to_builtins(examination.log),
        "findings": [msgspec.to_builtins(finding) for finding in findings],
    }


def show(console: Console, examination: Examination, findings: Sequence[Finding]) -> None:
    """Print a table of facts for each endpoint, then the findings."""
    for one in examination.endpoints:
        title = f"{one.socket_type} {one.endpoint}" + (" (upstream)" if one.role == "upstream" else "")
        console.print(Text(title, style="bold"))
        console.print(Padding(_grid(_facts(one)), (0, 0, 1, 2)))
    log = examination.log
    if log is not None:
        console.print(Text(f"log {log.location}", style="bold"))
        words = f"{log.state} after {log.seconds:.1f} s" + (
            f", {log.missing:,} messages behind" if log.missing else ""
        )
        console.print(Padding(Text(words), (0, 0, 1, 2)))
    for finding in findings:
        console.print(_finding(finding, named=len(examination.endpoints) > 1))
    console.print(_verdict(findings))


def _grid(rows: Iterator[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _finding(finding: Finding, named: bool) -> RenderableType:
    colour = _COLOURS[finding.severity]
    head = Text.assemble(
        (f"{finding.severity.upper()} ", f"bold {colour}"),
        (finding.what, "bold"),
        (f"  {finding.id}", "dim"),
    )
    rows = [("evidence", finding.evidence), ("cause", finding.cause), ("fix", finding.fix)]
    if named and finding.endpoint:
        rows.insert(0, ("endpoint", finding.endpoint))
    return Group(head, Padding(_grid(iter(rows)), (0, 0, 1, 2)))


def _verdict(findings: Sequence[Finding]) -> Text:
    code = exit_code(findings)
    warnings = sum(finding.severity != Severity.NOTE for finding in findings)
    if not code:
        return Text("No problem found in what was checked." if findings else "Healthy.", style="bold green")
    return Text(f"{warnings} finding{'s' * (warnings != 1)} to act on.", style="bold")


def _facts(one: Examined) -> Iterator[tuple[str, str]]:
    greeting, handshake = one.greeting, one.handshake
    if greeting.state == "greeted":
        kind = greeting.socket_type or "socket type not known before the handshake"
        yield (
            "peer",
            f"ZMTP {greeting.version}: {greeting.reason}"
            if greeting.reason
            else f"{kind}, ZMTP {greeting.version}, security {greeting.mechanism}",
        )
    elif greeting.state != "not_asked":
        yield "peer", greeting.reason
    words = {"succeeded": "succeeded", "failed": "failed", "hung_up": "the peer hung up", "none": "none"}
    yield (
        "handshake",
        words[handshake.state]
        + (f" ({handshake.event})" if handshake.event else "")
        + (f" after {handshake.seconds * 1000:,.1f} ms" if handshake.state == "succeeded" else "")
        + (", the sender came while the doctor waited" if handshake.waited and handshake.connections else "")
        + (f", disconnected {handshake.disconnects:,} ×" if handshake.disconnects else ""),
    )
    yield from _traffic_facts(one)
    if one.consumed is not None:
        consumed = one.consumed
        yield (
            f"at {consumed.each * 1000:g} ms each",
            f"{consumed.messages / consumed.seconds:,.0f}/s taken, "
            + ("behind to the end" if consumed.behind else "kept up")
            + (f", {consumed.lost:,} lost" if consumed.lost else ""),
        )
    if one.stalled is not None:
        yield "stall", _stall_words(one.stalled)
    if one.buffers is not None:
        mine = one.buffers
        sizes = (
            "sizes not readable"
            if mine.rcvbuf is None or mine.sndbuf is None
            else f"rcvbuf {_size(mine.rcvbuf)}, sndbuf {_size(mine.sndbuf)}"
        )
        yield "our buffers", f"rcvhwm {mine.rcvhwm:,}, {sizes}, {_size(mine.queued or 0)} waiting"
        yield (
            "the peer's",
            "not visible from here (another machine, or ipc)"
            if mine.peer_queued is None
            else f"{_size(mine.peer_queued)} waiting in its send buffer; its options cannot be read from outside",
        )


def _traffic_facts(one: Examined) -> Iterator[tuple[str, str]]:
    traffic, numbers = one.traffic, one.numbers
    if traffic is None:
        if one.handshake.state == "succeeded":
            yield "messages", "none"
        return
    yield (
        "messages",
        f"{traffic.messages:,} in {traffic.seconds:.1f} s: {traffic.rate:,.0f}/s, {traffic.peak:,.0f}/s at the peak",
    )
    frames = ", ".join(f"{count:,} × {frames}" for frames, count in traffic.frames.items())
    if len(traffic.frames) == 1:
        frames = str(next(iter(traffic.frames)))
    yield (
        "sizes",
        f"{_size(traffic.size_median)} median, {_size(traffic.size_p99)} 99th percentile, {_size(traffic.size_max)} "
        f"largest; frames: {frames}",
    )
    if traffic.topics:
        more = f", and {traffic.topics_more:,} more" if traffic.topics_more else ""
        yield "topics", ", ".join(f"'{topic}' {count:,}" for topic, count in traffic.topics) + more
    if numbers is None:
        return
    seems = "seems " if numbers.guessed else ""
    extra = "".join(f", {name}={value}" for name, value in numbers.options.items())
    yield "framing", f"{seems}{numbers.framing}{extra}" + ("" if numbers.judged else "; no numbers to follow")
    if numbers.judged:
        yield (
            "numbers",
            f"{numbers.counters:,} counter{'s' * (numbers.counters != 1)}, {numbers.lost:,} lost in {numbers.gaps:,} "
            f"gaps, {numbers.duplicates:,} duplicates, {numbers.late:,} late, {numbers.restarts:,} restarts",
        )


def _stall_words(stalled: Stalled) -> str:
    words = f"{stalled.seconds:g} s: {stalled.received:,} came of about {stalled.expected:,}"
    if stalled.held is not None:
        words += f", {stalled.held:,} were held"
    marks = stalled.marks
    if marks is not None:
        words += f"; a high-water mark of {marks.low:,} to {marks.high:,} at the sender explains it"
        words += "" if marks.measured else ", if its buffers are at most 4 MiB"
        words += ", and so does the expected one" if marks.expected_fits else ""
    return words


def _size(size: int) -> str:
    return str(ByteSize(size))
