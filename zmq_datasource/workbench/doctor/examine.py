"""The examination: connect, watch, and what was asked for beside that, endpoint by endpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import zmq
from msgspec.structs import replace

from zmq_datasource.errors import EndpointError, OptionError
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.options.types import Endpoint, Endpoints, Topics, ZmqOptions
from zmq_datasource.transport.spec import SocketSpec, check_socket_options
from zmq_datasource.workbench.doctor.durable import compare
from zmq_datasource.workbench.doctor.facts import Durable, Examined, Expected, Glance
from zmq_datasource.workbench.doctor.link import TURN_MS, Link
from zmq_datasource.workbench.doctor.reach import glance
from zmq_datasource.workbench.doctor.stall import STALL_RCVHWM, consume, stall
from zmq_datasource.workbench.doctor.watcher import parse_framing
from zmq_datasource.workbench.doctor.watching import Watching

__all__ = ["Examination", "Request", "examine"]

_HOUSEKEEPING_SECONDS = 0.05
_GLANCE_SECONDS = 2.0
_MOST_SECOND_LOOK = 3.0


class Request(NamedTuple):
    """What to examine.

    Attributes:
        given: The source's options as text, its endpoints among them.
        upstream: Endpoints of the publishers behind the proxy that ``given`` names.
        duration: Seconds to watch.
        wait: Seconds for a peer, or for a log, to come.
        stall: Seconds to take nothing; 0 is no stall.
        log: Where the log of a receiver of the same feed is, as the source's options; empty if it is not asked for.
    """

    given: dict[str, str]
    upstream: str | None = None
    duration: float = 5.0
    wait: float = 5.0
    stall: float = 0.0
    log: Mapping[str, str] = MappingProxyType({})
    expected: Expected = Expected()


class Examination(NamedTuple):
    """What was found, endpoint by endpoint, and of the log."""

    endpoints: list[Examined]
    log: Durable | None


@dataclass
class _Examination:
    """One endpoint under examination.

    Attributes:
        options: Of the source, with this endpoint alone; ``given`` is their text.
        link: None where its host does not resolve.
        watching: None where nobody shook hands.
    """

    options: ReadOptions
    given: dict[str, str]
    endpoint: Endpoint
    facts: Examined
    link: Link | None = None
    watching: Watching | None = None

    def add(self, **facts: object) -> None:
        self.facts = replace(self.facts, **facts)


def examine(request: Request) -> Examination:
    """Examine all endpoints; ends by itself, after about the times that were given.

    Raises:
        OptionError: The options cannot be honoured.
        EndpointError: An endpoint cannot be bound.
        LogError: The log cannot be read.
    """
    examinations = list(_examinations(request))
    with ExitStack() as stack:
        for examination in examinations:
            _call_on(examination, stack)
        deadline = time.monotonic() + request.wait
        for examination in examinations:
            _greet(examination, deadline, request)
        _watch(examinations, request.duration)
        for examination in examinations:
            _take_down(examination, request)
        log = None
        feeds = {
            p.facts.endpoint: p.watching
            for p in examinations
            if p.watching is not None and p.facts.role == "feed"
        }
        if request.log and feeds:
            for examination in examinations:  # what is not taken any more must hold nobody back
                if examination.link is not None:
                    examination.link.hang_up()
            watched = {endpoint: feed.watcher for endpoint, feed in feeds.items() if feed.watcher is not None}
            received = sum(feed.messages for feed in feeds.values())
            log = compare(parse(ReadOptions, request.log), watched, received, request.wait)
    for examination in examinations:
        _look_again(examination, request)
    _compare_sides(examinations)
    return Examination([examination.facts for examination in examinations], log)


def _examinations(request: Request) -> Iterator[_Examination]:
    options = parse(ReadOptions, request.given)
    if not (options.connect or options.bind):
        raise OptionError("neither connect nor bind is set; name the feed, as in --connect tcp://feed:5556")
    check_socket_options(SocketSpec.of_source(options))
    others = {name: value for name, value in request.given.items() if name.lower() not in ("connect", "bind")}
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
                glance=Glance(state="not_asked"),
                mechanism=_mechanism(options),
                filtered=options.socket_type == "SUB" and "" not in options.topics,
            )
            alone = replace(
                options, **{"connect": Endpoints(), "bind": Endpoints(), side: Endpoints((endpoint,))}
            )
            yield _Examination(alone, {**others, side: str(endpoint)}, endpoint, facts)


def _call_on(examination: _Examination, stack: ExitStack) -> None:
    try:
        examination.link = stack.enter_context(Link(examination.options))
    except (EndpointError, UnicodeError):
        if examination.options.bind:
            raise
        # A host that does not resolve, or is no name at all: the glance says so.


def _greet(examination: _Examination, deadline: float, request: Request) -> None:
    """Wait for the handshake, and ask who is there."""
    link = examination.link
    shaken = link is not None and link.shake_hands(max(0.0, deadline - time.monotonic()))
    if examination.options.connect:
        examination.add(glance=glance(examination.endpoint, min(_GLANCE_SECONDS, max(0.5, request.wait))))
    if link is not None and shaken:
        examination.watching = Watching(link, examination.given)


def _watch(examinations: list[_Examination], seconds: float) -> None:
    poller = zmq.Poller()
    pairs = [(p.link, p.watching) for p in examinations if p.link is not None and p.watching is not None]
    for link, _ in pairs:
        poller.register(link.socket, zmq.POLLIN)
    end = time.monotonic() + seconds if pairs else 0.0
    due = 0.0
    while (now := time.monotonic()) < end:
        if now >= due:
            for link, _ in pairs:
                link.update()
            due = now + _HOUSEKEEPING_SECONDS
        if not sum(watching.take() for _, watching in pairs):
            poller.poll(TURN_MS)
    # What waits now was sent while watching.
    for link, watching in pairs:
        watching.take()
        link.update()
        watching.end()


def _take_down(examination: _Examination, request: Request) -> None:
    """Record the figures of the connection while it is up."""
    link, watching, each = examination.link, examination.watching, request.expected.consume
    if link is None:
        return
    if watching is not None:
        examination.add(buffers=link.buffers, traffic=watching.traffic)
        if watching.traffic is not None:
            examination.add(numbers=watching.numbers)
            if each and examination.facts.role == "feed":
                examination.add(consumed=consume(link, watching, each, request.duration))
    examination.add(handshake=link.handshake)


def _look_again(examination: _Examination, request: Request) -> None:
    """On connections of their own: the stall, and what explains that nothing came or that it broke."""
    link, watching, options = examination.link, examination.watching, examination.options
    if link is None or watching is None:
        return
    seconds = min(_MOST_SECOND_LOOK, request.duration)
    limit = options.zmq.get("maxmsgsize")
    if options.socket_type == "SUB" and examination.facts.handshake.disconnects and limit is not None:
        lifted = ZmqOptions({name: value for name, value in options.zmq.items() if name != "maxmsgsize"})
        seen = _peek(replace(options, zmq=lifted), request.wait, seconds, int(limit))
        if seen is not None and seen.largest_frame > int(limit):
            examination.add(limit_hit=seen.largest_frame)
    if watching.traffic is None and examination.facts.filtered:
        seen = _peek(replace(options, topics=Topics(("",))), request.wait, seconds)
        if seen is not None and seen.traffic is not None:
            examination.add(elsewhere=[topic for topic, _ in seen.traffic.topics] or ["(one frame)"])
    if request.stall and watching.traffic is not None:
        parsed = parse_framing({**examination.given, **watching.framing_options, "rcvhwm": str(STALL_RCVHWM)})
        examination.add(stalled=stall(parsed, request.stall, request.wait, watching, request.expected.hwm))


def _peek(
    options: ReadOptions, wait: float, seconds: float, until_frame: int | None = None
) -> Watching | None:
    with Link(options) as link:
        if not link.shake_hands(wait):
            return None
        seen = Watching(link, {"framing": "plain"})
        end = time.monotonic() + seconds
        while time.monotonic() < end and (until_frame is None or seen.largest_frame <= until_frame):
            if not seen.take():
                link.socket.poll(TURN_MS)
        seen.end()
        return seen


def _compare_sides(examinations: list[_Examination]) -> None:
    """Count what is missing in a feed and came from upstream."""
    seen = [(p, p.watching.watcher) for p in examinations if p.watching is not None]
    above = [f for p, f in seen if p.facts.role == "upstream" and f is not None and f.tracker is not None]
    for examination, below in seen:
        if examination.facts.role == "upstream" or below is None or below.tracker is None:
            continue
        if any(set(side.last) & set(below.last) for side in above):
            examination.add(lost_behind=sum(side.has_of(below) for side in above))


def _mechanism(options: ReadOptions) -> str:
    if {"curve_serverkey", "curve_server"} & set(options.zmq):
        return "CURVE"
    if {"plain_username", "plain_server"} & set(options.zmq):
        return "PLAIN"
    return "NULL"
