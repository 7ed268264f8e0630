"""Examine all endpoints at once: connect, watch, and make the further checks that the user asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from zmq_datasource.errors import EndpointError, LogError, OptionError
from zmq_datasource.log import LogStorage, read_index, read_slices, slices
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.parser import ZmqOptions, parse
from zmq_datasource.options.socket import Endpoint, Endpoints
from zmq_datasource.options.types import Topics
from zmq_datasource.source.location import log_storage
from zmq_datasource.transport.spec import SocketSpec, check_socket_options
from zmq_datasource.workbench.doctor.facts import Durable, Examined, Expected, Greeting, State
from zmq_datasource.workbench.doctor.framing import Numbered
from zmq_datasource.workbench.doctor.greeting import ask_for_greeting
from zmq_datasource.workbench.doctor.probe import Probe, receive_all
from zmq_datasource.workbench.doctor.stall import STALL_RCVHWM, consume, stall

__all__ = ["Examination", "ExaminationRequest", "examine"]

_GREETING_SECONDS = 2.0
_LONGEST_PEEK_SECONDS = 3.0
_TURN_SECONDS = 0.05
_TAIL_ROWS = 200_000

_Newest: TypeAlias = dict[tuple[str, ...], int]


class ExaminationRequest(NamedTuple):
    """What to examine.

    Attributes:
        given: The source's options as text, its endpoints among them.
        upstream: Endpoints of the publishers behind the proxy that ``given`` names.
        duration: Seconds to watch.
        wait: Seconds to wait for a peer to connect, or for a log to hold what was seen.
        stall: Seconds to take nothing; 0 is no stall.
        log: The source's options that say where a receiver of this feed has its log; empty to examine no log.
        expected: What the user expects of the feed.
    """

    given: dict[str, str]
    upstream: str | None = None
    duration: float = 5.0
    wait: float = 5.0
    stall: float = 0.0
    log: Mapping[str, str] = MappingProxyType({})
    expected: Expected = Expected()


class Examination(NamedTuple):
    """The facts about each endpoint, and about the log if it was asked for."""

    endpoints: list[Examined]
    log: Durable | None


@dataclass
class _Case:
    """One endpoint under examination.

    Attributes:
        options: The source's options with this endpoint alone.
        given: The same options as text.
        facts: The facts so far.
        probe: The socket that watches; None if the host name does not resolve.
        rate: Messages a second that were sent while the doctor watched, including the missing ones.
    """

    options: ReadOptions
    given: dict[str, str]
    endpoint: Endpoint
    facts: Examined
    probe: Probe | None = None
    rate: float = 0.0

    def add(self, **facts: object) -> None:
        self.facts = replace(self.facts, **facts)


def examine(request: ExaminationRequest) -> Examination:
    """Examine all endpoints; ends by itself, after about the times that were given.

    Raises:
        OptionError: The options cannot be honoured.
        EndpointError: An endpoint cannot be bound.
        LogError: The log cannot be read.
    """
    cases = list(_cases(request))
    with ExitStack() as stack:
        for case in cases:
            _connect(case, stack)
        probes = [case.probe for case in cases if case.probe is not None]
        receive_all(probes, request.wait, until=lambda: all(probe.connection_decided for probe in probes))
        _ask_for_greetings(cases, probes, request.wait)
        connected = [probe for probe in probes if probe.has_connected]
        if connected:
            receive_all(connected, request.duration)
        for case in cases:
            _record(case, request)
    log = None
    feeds = [case.probe for case in cases if case.probe in connected and case.facts.role == "feed"]
    if request.log and feeds:
        watched = [probe.numbered for probe in feeds if probe.numbered is not None]
        received = sum(probe.messages for probe in feeds)
        log = _compare_with_log(parse(ReadOptions, request.log), watched, received, request.wait)
    for case in cases:
        if case.probe is not None and case.probe.has_connected:
            _probe_again(case, case.probe, request)
    _compare_sides(cases)
    return Examination([case.facts for case in cases], log)


def _cases(request: ExaminationRequest) -> Iterator[_Case]:
    options = parse(ReadOptions, request.given)
    if not options.has_endpoints:
        raise OptionError("neither connect nor bind is set; name the feed, as in --connect tcp://feed:5556")
    check_socket_options(SocketSpec.of_source(options))
    others = {name: value for name, value in request.given.items() if name.lower() not in ("connect", "bind")}
    others = {"framing" if name.lower() == "framing" else name: value for name, value in others.items()}
    upstream: Iterable[Endpoint] = ()
    if request.upstream is not None:
        upstream = parse(ReadOptions, {**others, "connect": request.upstream}).connect
    sides: tuple[tuple[Literal["connect", "bind"], Literal["feed", "upstream"], Iterable[Endpoint]], ...]
    sides = (
        ("connect", "feed", options.connect),
        ("bind", "feed", options.bind),
        ("connect", "upstream", upstream),
    )
    for side, role, endpoints in sides:
        for endpoint in endpoints:
            facts = Examined(
                endpoint=str(endpoint),
                role=role,
                socket_type=str(options.socket_type),
                greeting=Greeting(state="not_asked"),
                mechanism=_mechanism(options),
                filtered=options.socket_type == "SUB" and "" not in options.topics,
            )
            alone = {"connect": Endpoints(), "bind": Endpoints(), side: Endpoints((endpoint,))}
            yield _Case(replace(options, **alone), {**others, side: str(endpoint)}, endpoint, facts)


def _mechanism(options: ReadOptions) -> str:
    if {"curve_serverkey", "curve_server"} & set(options.zmq):
        return "CURVE"
    if "plain_username" in options.zmq:
        return "PLAIN"
    return "NULL"


def _connect(case: _Case, stack: ExitStack) -> None:
    given = case.given
    framing = {"framing": given["framing"]} if "framing" in given else None
    try:
        case.probe = stack.enter_context(Probe(case.options, given, framing))
    except (EndpointError, UnicodeError):
        if case.options.bind:
            raise
        # The host name does not resolve, or is not valid. ``_ask_for_greetings`` reports it.


def _ask_for_greetings(cases: list[_Case], probes: list[Probe], wait: float) -> None:
    """Ask each peer for its greeting, and receive meanwhile."""
    asked = [case for case in cases if case.options.connect]
    seconds = min(_GREETING_SECONDS, max(0.5, wait))
    with ThreadPoolExecutor(max(1, len(asked))) as pool:
        answers = [pool.submit(ask_for_greeting, case.endpoint, seconds) for case in asked]
        if probes:
            receive_all(probes, 2 * seconds, until=lambda: all(answer.done() for answer in answers))
        for case, answer in zip(asked, answers, strict=True):
            case.add(greeting=answer.result())


def _record(case: _Case, request: ExaminationRequest) -> None:
    """Record the figures of the connection while it is up, and imitate a slow receiver if that was asked for."""
    probe, each = case.probe, request.expected.consume
    if probe is None:
        return
    if probe.has_connected:
        probe.finish_sample()
        traffic = probe.traffic()
        case.add(buffers=probe.buffers, traffic=traffic)
        if traffic is not None and probe.numbered is not None:
            case.rate = (probe.messages + probe.lost) / traffic.seconds
            numbers = probe.numbered.figures(probe.framing, guessed="framing" not in case.given)
            case.add(numbers=replace(numbers, suggested=probe.suggested))
            if each and case.facts.role == "feed":
                case.add(consumed=consume(probe, each, request.duration))
    case.add(handshake=probe.handshake)


def _probe_again(case: _Case, watched: Probe, request: ExaminationRequest) -> None:
    """Examine on new connections why the first one broke or brought nothing, and make the stall."""
    options, facts = case.options, case.facts
    seconds = min(_LONGEST_PEEK_SECONDS, request.duration)
    limit = options.zmq.get("maxmsgsize")
    if options.socket_type == "SUB" and facts.handshake.disconnects and limit is not None:
        others = ZmqOptions({name: value for name, value in options.zmq.items() if name != "maxmsgsize"})
        seen = _peek(replace(options, zmq=others), request.wait, seconds, int(limit))
        if seen.tally.largest_frame > int(limit):
            case.add(limit_hit=seen.tally.largest_frame)
    if facts.traffic is None and facts.filtered:
        other = _peek(replace(options, topics=Topics(("",))), request.wait, seconds).traffic()
        if other is not None:
            case.add(elsewhere=[topic for topic, _ in other.topics] or ["(one frame)"])
    if request.stall and facts.traffic is not None:
        small = replace(options, rcvhwm=STALL_RCVHWM)
        hwm = request.expected.hwm
        stalled = stall(small, case.given, watched, case.rate, request.stall, request.wait, hwm)
        case.add(stalled=stalled)


def _peek(options: ReadOptions, wait: float, seconds: float, until_frame: int | None = None) -> Probe:
    """Receive for some seconds, or until a frame is larger than ``until_frame``."""

    def enough() -> bool:
        probe.flush()
        return until_frame is not None and probe.tally.largest_frame > until_frame

    with Probe(options, {}, {"framing": "plain"}) as probe:
        receive_all([probe], wait, until=lambda: probe.has_connected)
        receive_all([probe], seconds, until=enough)
    return probe


def _compare_sides(cases: list[_Case]) -> None:
    """Count the messages that are missing in a feed and came from upstream."""
    seen = [(p.facts.role, p, p.probe.numbered) for p in cases if p.probe is not None]
    above = [numbered for role, _, numbered in seen if role == "upstream" and numbered is not None]
    for role, case, below in seen:
        if (
            role == "feed"
            and below is not None
            and any(side.counters.keys() & below.counters.keys() for side in above)
        ):
            case.add(lost_behind=sum(side.count_of_missing(below) for side in above))


def _compare_with_log(
    options: ReadOptions, watched: Sequence[Numbered], received: int, seconds: float
) -> Durable:
    """Wait until the log holds what was seen on the wire, up to ``seconds``.

    Messages that a receiver has taken from its socket and not yet sealed are only in its memory, and no high-water mark
    limits them. From outside, one thing shows them: a number that was on the wire is not in the log.

    Args:
        options: The options that say where the log is.
        watched: The messages that were seen on the wire, for each endpoint.
        received: How many messages were seen.

    Raises:
        LogError: There is no log, or it cannot be read.
    """
    storage = log_storage(options)
    storage.log_id()
    by = next((numbered.by for numbered in watched if numbered.by), ())
    wire: _Newest = {}
    for numbered in watched:
        if numbered.by == by:
            _keep_newest(wire, numbered.newest())
    newest: _Newest = {}
    began = time.monotonic()
    first_end: int | None = None
    seen: dict[int, int] = {}
    while True:
        end = 0
        for partition in storage.partitions():
            part = storage.of(partition)
            index = read_index(part)
            end += index.end
            with suppress(LogError, FileNotFoundError):  # a chunk was just deleted: the next turn reads again
                start = max(seen.get(partition, 0), index.earliest, index.end - _TAIL_ROWS)
                _keep_newest(newest, _newest(part, start, by))
                seen[partition] = index.end
        first_end = end if first_end is None else first_end
        there = _by_our_endpoint(by, wire, newest)
        known = wire.keys() & there.keys()
        missing = sum(max(0, wire[key] - there[key]) for key in known)
        covered = bool(wire) and len(known) == len(wire) and not missing
        waited = time.monotonic() - began
        if covered or waited >= seconds or not wire:
            break
        time.sleep(_TURN_SECONDS)
    state: State = "behind" if known else "foreign"
    if covered:
        state = "covered"
    elif not end:
        state = "empty"
    elif not (wire and newest):
        state = "unnumbered"
    return Durable(
        location=str(options.wal_store or options.wal_location),
        state=state,
        missing={"behind": missing, "empty": received}.get(state, 0),
        seconds=round(waited, 3),
        grew=end > first_end,
    )


def _keep_newest(numbers: _Newest, more: _Newest) -> None:
    for name, number in more.items():
        numbers[name] = max(number, numbers.get(name, number))


def _by_our_endpoint(by: Sequence[str], wire: Mapping[tuple[str, ...], int], there: _Newest) -> _Newest:
    """The log's numbers under our names. A single endpoint on each side is the same one, even under other names."""
    if "endpoint" not in by:
        return there
    at = by.index("endpoint")
    ours, theirs = {name[at] for name in wire}, {name[at] for name in there}
    if not len(ours) == len(theirs) == 1:
        return there
    return {(*name[:at], *ours, *name[at + 1 :]): number for name, number in there.items()}


def _newest(storage: LogStorage, start: int, by: Sequence[str]) -> _Newest:
    """The last number of each counter in the rows from id ``start`` on."""
    newest = {}
    # The log's rows have the endpoint in the column ``publisher``.
    names = ["publisher" if name == "endpoint" else name for name in by]
    index = read_index(storage)
    for batch in read_slices(storage, slices(index.covering(start, index.end), start, index.end)):
        columns = [batch.column(name).to_pylist() for name in names]
        for number, *key in zip(batch.column("sequence").to_pylist(), *columns, strict=True):
            if number is not None:
                newest[tuple(part or "" for part in key)] = number
    return newest
