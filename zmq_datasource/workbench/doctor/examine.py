"""Take the facts about an endpoint: receive, ask for its greeting, and make the stall if it is asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from msgspec.structs import replace

from zmq_datasource.errors import EndpointError, OptionError
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.options.socket import Endpoints
from zmq_datasource.options.types import Topics
from zmq_datasource.transport.spec import SocketSpec, check_socket_options
from zmq_datasource.workbench.doctor.facts import Feed, Greeting, Stall, Traffic
from zmq_datasource.workbench.doctor.greeting import ask_for_greeting
from zmq_datasource.workbench.doctor.probe import Probe

# Seconds to wait for a greeting, at most, and to look for other topics.
_GREETING_SECONDS, _PEEK_SECONDS = 2.0, 3.0
# The stall has a small queue of its own, so that the sender's fills.
_STALL_RCVHWM = 10
# Seconds to receive before a stall; to take what was held, at most; and to receive after that.
_BEFORE_SECONDS, _DRAIN_SECONDS, _AFTER_SECONDS = 0.5, 15.0, 1.0
# Rates vary. Fewer messages than were due came only if this share of the stall's messages is missing, and so many.
_LACKING, _LEAST_MESSAGES = 0.3, 20


def examine(given: Mapping[str, str], duration: float, wait: float, stall: float = 0.0) -> list[Feed]:
    """Examine the endpoints of a source, one after the other.

    Args:
        given: The source's options as text.
        duration: Seconds to watch.
        wait: Seconds to wait for a peer to connect.
        stall: Seconds to take nothing; 0 is no stall.

    Raises:
        OptionError: The options cannot be honoured.
    """
    options = parse(ReadOptions, given)
    if not options.has_endpoints:
        raise OptionError("neither connect nor bind is set; name the feed, as in --connect tcp://feed:5556")
    check_socket_options(SocketSpec.of_source(options))
    return [_examine(each, duration, wait, stall) for each in _of_one_endpoint(options)]


def _of_one_endpoint(options: ReadOptions) -> Iterator[ReadOptions]:
    for endpoint in options.connect:
        yield replace(options, connect=Endpoints((endpoint,)), bind=Endpoints())
    for endpoint in options.bind:
        yield replace(options, connect=Endpoints(), bind=Endpoints((endpoint,)))


def _examine(options: ReadOptions, duration: float, wait: float, stall: float) -> Feed:
    facts: dict[str, Any] = {
        "endpoint": options.endpoints,
        "socket_type": str(options.socket_type),
        "mechanism": next(
            (word for word in ("CURVE", "PLAIN") if any(it.startswith(word.lower()) for it in options.zmq)),
            "NULL",
        ),
        "framing": options.framing,
    }
    try:
        with Probe(options) as probe:
            probe.receive(wait, until=lambda: probe.is_up)
            if probe.is_up:
                probe.receive(duration)
            facts |= probe.facts()
    except EndpointError as e:
        return Feed(**facts, not_opened=str(e))
    traffic = facts["traffic"]
    if probe.is_up and traffic is None and options.socket_type == "SUB" and "" not in options.topics:
        facts["elsewhere"] = _other_topics(options, min(_PEEK_SECONDS, duration))
    if stall and traffic is not None:
        losses = facts["numbers"].lost / traffic.seconds if facts["numbers"] else 0.0
        facts["stall"] = _stall(options, traffic, losses, stall, wait)
    return Feed(**facts, greeting=_greeting(options, wait))


def _greeting(options: ReadOptions, wait: float) -> Greeting:
    """The peer's greeting. A peer that connects to us, or that is behind a SOCKS proxy, cannot be asked."""
    if options.bind or "socks_proxy" in options.zmq:
        return Greeting(state="not_asked")
    return ask_for_greeting(options.connect[0], min(wait, _GREETING_SECONDS))


def _other_topics(options: ReadOptions, seconds: float) -> str:
    """The topics that come without the filter; empty if no message comes."""
    with Probe(replace(options, topics=Topics(("",)))) as probe:
        probe.receive(seconds)
        other = probe.traffic()
    return "" if other is None else ", ".join(topic for topic, _ in other.topics) or "(one frame)"


def _stall(options: ReadOptions, usual: Traffic, losses: float, seconds: float, wait: float) -> Stall:
    """Take nothing for ``seconds`` on a new connection, and then take everything.

    Args:
        usual: The messages that came without a stall.
        losses: Messages that are missing in a second without a stall.
        wait: Seconds to wait for the first message of the connection.
    """
    with Probe(replace(options, rcvhwm=_STALL_RCVHWM)) as probe:
        probe.receive(wait, until=lambda: probe.messages > 0)
        probe.receive(_BEFORE_SECONDS)
        before, lost_before = probe.messages, probe.lost
        began = time.monotonic()
        time.sleep(seconds)
        probe.receive(_DRAIN_SECONDS, until=lambda: not probe.has_waiting)
        probe.receive(_AFTER_SECONDS)
        elapsed, received, lost = time.monotonic() - began, probe.messages - before, probe.lost
    if lost is not None:
        lost -= lost_before or 0
    due = round((usual.rate + losses) * elapsed)
    drops = None if lost is None else lost > 2 * losses * elapsed
    lacks = due - received >= max(_LACKING * usual.rate * seconds, _LEAST_MESSAGES)
    outcome = _outcome(options.socket_type, drops, lacks)
    return Stall(outcome=outcome, seconds=seconds, due=due, received=received, lost=lost)


def _outcome(socket_type: str, drops: bool | None, lacks: bool) -> Literal["drops", "waits", "neither"]:
    """What a stall has shown of the sender.

    Args:
        drops: Whether more numbers are missing than without a stall; None without numbers.
        lacks: Whether fewer messages came than were due.
    """
    can_drop = socket_type != "PULL"  # a PUSH drops nothing
    if can_drop and (drops or (drops is None and lacks)):
        return "drops"
    return "waits" if lacks else "neither"
