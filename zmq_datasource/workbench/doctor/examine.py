"""The examination: connect, watch, and what was asked for beside that, endpoint by endpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import msgspec
import zmq

from zmq_datasource.errors import EndpointError, OptionError
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.options.types import Endpoint, Endpoints, Topics, ZmqOptions
from zmq_datasource.transport.spec import SocketSpec, check_socket_options
from zmq_datasource.workbench.doctor.durable import compare
from zmq_datasource.workbench.doctor.facts import Durable, Examined, Expected, Glance
from zmq_datasource.workbench.doctor.link import Link
from zmq_datasource.workbench.doctor.reach import glance
from zmq_datasource.workbench.doctor.stall import STALL_RCVHWM, consume, stall
from zmq_datasource.workbench.doctor.watching import Watching

__all__ = ["Examination", "Request", "examine"]

_TURN_MS = 20
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
        wal_location: The log of a receiver of the same feed.
    """

    given: dict[str, str]
    upstream: str | None = None
    duration: float = 5.0
    wait: float = 5.0
    stall: float = 0.0
    wal_location: str | None = None
    expected: Expected = Expected()


class Examination(NamedTuple):
    """What was found, endpoint by endpoint, and of the log."""

    endpoints: list[Examined]
    log: Durable | None


class _Patient:
    """One endpoint under examination."""

    def __init__(self, options: ReadOptions, role: str) -> None:
        self.options = options
        self.role = role
        (self.endpoint,) = (*options.connect, *options.bind)
        self.glance = Glance(state="not_asked")
        self.link: Link | None = None
        self.watching: Watching | None = None
        self.facts: dict[str, object] = {}

    @property
    def up(self) -> bool:
        return self.watching is not None

    def examined(self) -> Examined:
        return Examined(
            endpoint=str(self.endpoint),
            role=self.role,  # type: ignore[arg-type]
            socket_type=str(self.options.socket_type),
            glance=self.glance,
            mechanism=_mechanism(self.options),
            filtered=_filtered(self.options),
            **self.facts,  # type: ignore[arg-type]
        )


def examine(request: Request) -> Examination:
    """Examine all endpoints; ends by itself, after about the times that were given.

    Raises:
        OptionError: The options cannot be honoured.
        EndpointError: An endpoint cannot be bound.
        LogError: The log cannot be read.
    """
    patients = list(_patients(request))
    with ExitStack() as stack:
        for patient in patients:
            _call_on(patient, stack)
        deadline = time.monotonic() + request.wait
        for patient in patients:
            _greet(patient, deadline, request)
        _watch([p for p in patients if p.up], request.duration)
        for patient in patients:
            _take_down(patient, request)
        log = None
        if request.wal_location is not None and (feed := _first_of(patients)) is not None:
            for patient in patients:  # what is not taken any more must hold nobody back
                _hang_up(patient)
            assert feed.watching is not None
            log = compare(request.wal_location, feed.watching.follower, feed.watching.messages, request.wait)
    for patient in patients:
        _look_again(patient, request)
    _compare_sides(patients)
    return Examination([patient.examined() for patient in patients], log)


def _patients(request: Request) -> Iterator[_Patient]:
    options = parse(ReadOptions, request.given)
    if not (options.connect or options.bind):
        raise OptionError("neither connect nor bind is set; name the feed, as in --connect tcp://feed:5556")
    check_socket_options(SocketSpec.of_source(options))
    for endpoint in options.connect:
        yield _Patient(_only(options, connect=(endpoint,)), "feed")
    for endpoint in options.bind:
        yield _Patient(_only(options, bind=(endpoint,)), "feed")
    if request.upstream is not None:
        given = {name: value for name, value in request.given.items() if name.lower() != "bind"}
        for endpoint in parse(ReadOptions, {**given, "connect": request.upstream}).connect:
            yield _Patient(_only(options, connect=(endpoint,)), "upstream")


def _only(
    options: ReadOptions, connect: Iterable[Endpoint] = (), bind: Iterable[Endpoint] = ()
) -> ReadOptions:
    return msgspec.structs.replace(options, connect=Endpoints(connect), bind=Endpoints(bind))


def _call_on(patient: _Patient, stack: ExitStack) -> None:
    try:
        patient.link = stack.enter_context(Link(patient.options))
    except (EndpointError, UnicodeError):
        if patient.options.bind:
            raise
        # A host that does not resolve, or is no name at all: the glance says so.


def _greet(patient: _Patient, deadline: float, request: Request) -> None:
    """Wait for the handshake, and ask who is there."""
    shaken = patient.link is not None and patient.link.shake_hands(max(0.0, deadline - time.monotonic()))
    if patient.options.connect:
        patient.glance = glance(patient.endpoint, min(_GLANCE_SECONDS, max(0.5, request.wait)))
    if shaken:
        assert patient.link is not None
        patient.watching = Watching(patient.link, _given_for(patient, request))


def _given_for(patient: _Patient, request: Request) -> dict[str, str]:
    """The options as text, for this endpoint alone."""
    endpoints = ("connect", "bind")
    given = {name: value for name, value in request.given.items() if name.lower() not in endpoints}
    return {**given, "connect" if patient.options.connect else "bind": str(patient.endpoint)}


def _watch(patients: list[_Patient], seconds: float) -> None:
    poller = zmq.Poller()
    pairs = [(p.link, p.watching) for p in patients if p.link is not None and p.watching is not None]
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
            poller.poll(_TURN_MS)
    # What waits now was sent while watching.
    for link, watching in pairs:
        watching.take()
        link.update()
        watching.end()


def _take_down(patient: _Patient, request: Request) -> None:
    """The figures of the connection, while it is there."""
    link, watching = patient.link, patient.watching
    if link is not None and watching is not None:
        patient.facts["buffers"] = link.buffers
        patient.facts["traffic"] = watching.traffic
        if watching.traffic is not None:
            patient.facts["numbers"] = watching.numbers
        if request.expected.consume and watching.traffic is not None and patient.role == "feed":
            patient.facts["consumed"] = consume(link, watching, request.expected.consume, request.duration)
    if link is not None:
        patient.facts["handshake"] = link.handshake


def _hang_up(patient: _Patient) -> None:
    if patient.link is not None:
        patient.link.hang_up()


def _look_again(patient: _Patient, request: Request) -> None:
    """On connections of their own: the stall, and what explains that nothing came or that it broke."""
    link, watching, options = patient.link, patient.watching, patient.options
    if link is None or watching is None:
        return
    seconds = min(_MOST_SECOND_LOOK, request.duration)
    limit = options.zmq.get("maxmsgsize")
    if options.socket_type == "SUB" and link.disconnects and limit is not None:
        lifted = ZmqOptions({name: value for name, value in options.zmq.items() if name != "maxmsgsize"})
        seen = _peek(msgspec.structs.replace(options, zmq=lifted), request.wait, seconds, int(limit))
        if seen is not None and seen.traffic is not None and seen.traffic.largest_frame > int(limit):
            patient.facts["limit_hit"] = seen.traffic.largest_frame
    if watching.traffic is None and _filtered(options):
        everything = msgspec.structs.replace(options, topics=Topics(("",)))
        seen = _peek(everything, request.wait, seconds)
        if seen is not None and seen.traffic is not None:
            patient.facts["elsewhere"] = [topic for topic, _ in seen.traffic.topics] or ["(one frame)"]
    if request.stall and watching.traffic is not None:
        given = {**_given_for(patient, request), **watching.framing_options, "rcvhwm": str(STALL_RCVHWM)}
        try:
            parsed = parse(ReadOptions, given)
        except OptionError:  # a filter leaves some of what the publisher counts over
            parsed = parse(ReadOptions, {**given, "sequenceBy": "none"})
        patient.facts["stalled"] = stall(parsed, request.stall, request.wait, watching, request.expected.hwm)


def _peek(
    options: ReadOptions, wait: float, seconds: float, until_frame: int | None = None
) -> Watching | None:
    with Link(options) as link:
        if not link.shake_hands(wait):
            return None
        seen = Watching(link, {"framing": "plain"})
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not seen.take():
                link.socket.poll(_TURN_MS)
            if until_frame is not None and seen.largest_frame > until_frame:
                break
        seen.end()
        return seen


def _compare_sides(patients: list[_Patient]) -> None:
    """Count what is missing in a feed and came from upstream."""
    above = [p.watching.follower for p in patients if p.role == "upstream" and p.watching is not None]
    for patient in patients:
        if patient.role == "upstream" or patient.watching is None or patient.watching.follower is None:
            continue
        below = patient.watching.follower
        sides = [side for side in above if side is not None and side.judge is not None]
        if below.judge is not None and any(set(side.last) & set(below.last) for side in sides):
            patient.facts["lost_behind"] = sum(side.has_of(below) for side in sides)


def _first_of(patients: list[_Patient]) -> _Patient | None:
    return next((p for p in patients if p.up and p.role == "feed"), None)


def _filtered(options: ReadOptions) -> bool:
    return options.socket_type == "SUB" and "" not in options.topics


def _mechanism(options: ReadOptions) -> str:
    if {"curve_serverkey", "curve_server"} & set(options.zmq):
        return "CURVE"
    if {"plain_username", "plain_server"} & set(options.zmq):
        return "PLAIN"
    return "NULL"
