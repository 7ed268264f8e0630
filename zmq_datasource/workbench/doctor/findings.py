"""Turns figures into findings: what is wrong, the evidence, the probable cause, and what to do. No input or output.

Each condition stands beside the sentences of its finding. ``make docs`` makes the tables of docs/workbench.md from this
module: a function is a table, and its docstring's first line is the heading. A figure in a sentence shows as ``…``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from zmq_datasource.messages.schemas import MAX_MESSAGE_BYTES
from zmq_datasource.options.types import ByteSize
from zmq_datasource.workbench.doctor.facts import Durable, Examined, Expected, HwmRange, Numbers, Stalled
from zmq_datasource.workbench.doctor.hwm import DEFAULT_HWM, MAILBOX_SECONDS

__all__ = ["EXIT_CODES", "Finding", "Severity", "diagnose", "exit_code"]


class Severity(StrEnum):
    """How serious a finding is.

    ``unreachable``: the endpoint could not be examined. ``warning``: messages are lost, or will be, or the feed is not
    as the user expects it. ``note``: worth knowing, but no fault.
    """

    UNREACHABLE = "unreachable"
    WARNING = "warning"
    NOTE = "note"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem or fact that the doctor found.

    Attributes:
        id: The name for scripts, which does not change.
        endpoint: The endpoint that was examined; empty for the log.
        what: The finding, in a sentence or two.
        evidence: The figures that show it.
        cause: The probable cause. If it cannot be known from outside, the text says so.
        fix: What to do, or how to find out more.
    """

    id: str
    severity: Severity = Severity.WARNING
    endpoint: str = ""
    what: str
    evidence: str = ""
    cause: str
    fix: str


# The exit code of the command is that of the worst finding. Click takes 2, for wrong arguments.
EXIT_CODES = {Severity.NOTE: 0, Severity.WARNING: 1, Severity.UNREACHABLE: 3}
_UNREACHABLE, _NOTE = Severity.UNREACHABLE, Severity.NOTE


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if nothing is wrong, 1 if something is, 3 if an endpoint could not be examined."""
    return max((EXIT_CODES[finding.severity] for finding in findings), default=0)


def diagnose(examined: Sequence[Examined], log: Durable | None, expected: Expected) -> list[Finding]:
    """All findings, the worst first."""
    found: list[Finding] = []
    for one in examined:
        findings: list[Finding] = []
        if one.handshake.state != "succeeded":
            findings += (replace(finding, severity=_UNREACHABLE) for finding in _unreachable(one))
        else:
            findings += _connection(one, expected)
            findings += _numbers(one)
            findings += _sizes(one, expected)
            findings += _slow_receiver(one)
        if one.stalled is not None:
            shown = [*_stall(one, one.stalled, expected), *_marks(one, one.stalled, expected)]
            findings += (replace(finding, evidence=_of_stall(one.stalled)) for finding in shown)
        found += (replace(finding, endpoint=one.endpoint) for finding in findings)
    found += _proxies(examined)
    if log is not None:
        found += _log(log, expected)
    return sorted(found, key=lambda finding: -EXIT_CODES[finding.severity])


_SENDERS = {"SUB": ("PUB", "XPUB"), "PULL": ("PUSH",)}
_TAKERS = {"PUB": "SUB", "XPUB": "SUB", "PUSH": "PULL"}
_NO_SENDER = {
    "PULL": "the peer receives, as the doctor does. Name the endpoint of the sender, or let one side bind and the "
    "other connect",
    "SUB": "the peer receives, as the doctor does. Name the endpoint of the publisher, or let one side bind and the "
    "other connect",
    "XSUB": "the peer is the side of a proxy to which publishers connect. Name the one for subscribers (its XPUB)",
    "ROUTER": "the peer takes transactions, of DEALER sinks and Producers (docs/protocol.md), or is a proxy's durable "
    "or replay endpoint (docs/proxy.md). A SUB or PULL has no business there",
    "DEALER": "the peer sends transactions. Receive them with socketType=ROUTER and bind",
    "REP": "the peer answers requests, and is not a feed",
    "REQ": "the peer sends requests, and is not a feed",
    "PAIR": "the peer talks to one other PAIR, and is not a feed",
}


def _unreachable(one: Examined) -> Iterator[Finding]:
    """The connection cannot be made.

    The doctor reports at most one of these, as unreachable.
    """
    glance, handshake, kind = one.glance, one.handshake, one.glance.socket_type
    tried = "connecting: " + {
        "failed": f"libzmq says {handshake.event}",
        "hung_up": "connected, and the peer hung up before the handshake was done",
    }.get(handshake.state, "no handshake within --wait")
    if glance.state == "unresolved":
        yield Finding(
            id="host_unknown",
            what="The host name does not resolve.",
            evidence=glance.reason,
            cause="The name is misspelt, or only another network or container knows it. libzmq itself retries for "
            "ever and reports nothing.",
            fix="Correct the host name, or use its address.",
        )
    elif glance.state == "refused":
        yield Finding(
            id="refused",
            what="No program listens at this endpoint.",
            evidence=f"{glance.reason}; {tried}",
            cause="The sender is not running. Or it listens on another port or interface (127.0.0.1 instead of *). Or "
            "the sender connects instead of binding, for example to a proxy.",
            fix="Start the sender first, or check its bind address. If the sender connects, give its endpoint to "
            "--bind.",
        )
    elif glance.state == "no_answer":
        yield Finding(
            id="no_answer",
            what="The host does not answer.",
            evidence=f"{glance.reason}; {tried}",
            cause="A firewall drops the packets, the address is wrong, or the machine is down.",
            fix="Try the port with nc -vz from this machine. Open the port in the firewall.",
        )
    elif glance.state == "silent":
        yield Finding(
            id="silent_peer",
            what="The connection is accepted, and then the peer sends nothing.",
            evidence=f"{glance.reason}; {tried}",
            cause="The process is stopped or hangs, and the kernel accepts the connection for it. Or the service is "
            "not ZeroMQ.",
            fix="Check on the peer's machine with ss -ltnp whether the process behind the port runs.",
        )
    elif glance.state == "not_zeromq":
        yield Finding(
            id="not_zeromq",
            what="A service that is not ZeroMQ answers at this endpoint.",
            evidence=f"its first bytes are no greeting of ZMTP; {tried}",
            cause="The port belongs to another service.",
            fix="Find out the publisher's port.",
        )
    elif glance.state == "not_asked" and handshake.state == "none":
        yield Finding(
            id="nobody_came",
            what="No peer has connected.",
            evidence="the doctor listened for the whole --wait",
            cause="The sender is not running, it connects to another address, or a firewall is in between.",
            fix="Start the sender, and let it connect to an address of this machine. Or set a longer --wait.",
        )
    elif glance.mechanism is not None and glance.mechanism != one.mechanism:
        yield Finding(
            id="security_mismatch",
            what=f"The peer uses security {glance.mechanism}, and our side uses {one.mechanism}.",
            evidence=f"its greeting (ZMTP {glance.version}) names {glance.mechanism}; {tried}",
            cause="One side has no keys, or its keys were set after bind or connect. libzmq ignores them then.",
            fix={
                "CURVE": "Set -o zmq.curve_serverkey, zmq.curve_publickey and zmq.curve_secretkey, as for the source.",
                "PLAIN": "Set -o zmq.plain_username and zmq.plain_password, as for the source.",
                "NULL": "Remove the security options here, or set the peer's before it binds: it runs without any.",
            }.get(glance.mechanism, f"Set up {glance.mechanism} on our side, or take it from the peer."),
        )
    elif kind is not None and kind not in _SENDERS.get(one.socket_type, (kind,)):
        taker, instead = _TAKERS.get(kind), _NO_SENDER.get(kind, "the peer is not a feed")
        yield Finding(
            id="wrong_socket_type",
            what=f"The peer is of type {kind}. A {one.socket_type} cannot receive from it.",
            evidence=f"its READY command names {kind}; {tried}",
            cause="The socket types of the two sides do not match. libzmq ends the connection without a message, and "
            "never connects again.",
            fix=f"Use --socket-type {taker} (socketType={taker})."
            if taker
            else f"Use another endpoint: {instead}.",
        )
    elif (
        handshake.state == "failed" or one.mechanism != "NULL"
    ):  # with security, a peer that hangs up refuses it
        yield Finding(
            id="credentials_refused",
            what="The handshake fails, although both sides use the same security.",
            evidence=f"both use {one.mechanism}; {tried}",
            cause={
                "CURVE": "The server key is wrong, our two keys are not a pair, or the peer's authenticator (ZAP) does "
                "not let our key in.",
                "PLAIN": "The username or the password is wrong, or the peer has no authenticator (ZAP). PLAIN needs "
                "one: without it libzmq refuses every client.",
            }.get(one.mechanism, "The peer's authenticator (ZAP) refuses the connection."),
            fix={
                "CURVE": "Compare zmq.curve_serverkey with the server's public key. Ask the operator of the peer to "
                "let our public key in.",
                "PLAIN": "Compare zmq.plain_username and zmq.plain_password with those that the peer lets in. Ask the "
                "operator of the peer.",
            }.get(one.mechanism, "Read the peer's own log."),
        )
    else:
        said = f"it greets with ZMTP {glance.version}, {glance.mechanism}, {kind or 'no socket type'}"
        yield Finding(
            id="hung_up",
            what="The peer ended the handshake.",
            evidence=f"{said if glance.state == 'greeted' else 'the peer was not asked for its greeting'}; {tried}",
            cause="The peer lets only some peers in (ZAP), or it restarted at that moment. The doctor cannot tell "
            "from outside which of the two it is.",
            fix="Try again. Read the peer's own log, or its monitor.",
        )


def _connection(one: Examined, expected: Expected) -> Iterator[Finding]:
    """No messages, or lost connections."""
    count, limit = one.handshake.disconnects, expected.max_message_size or 0
    times = "once" if count == 1 else f"{count:,} times"
    if one.limit_hit is not None:
        yield Finding(
            id="frame_too_large",
            what="Frames are larger than the receiver allows. Each of them ends the connection.",
            evidence=f"hung up {times}; without the limit of {limit:,} bytes a frame of {one.limit_hit:,} came",
            cause="zmq.maxmsgsize limits a frame. If a frame is larger, libzmq ends the connection and does not "
            "reconnect by itself. All messages that were sent after the frame are lost, and the sender gets no error.",
            fix=f"Set zmq.maxmsgsize to {one.limit_hit:,} or more, or let the sender send large payloads in parts.",
        )
    elif count:
        yield Finding(
            id="connection_breaks",
            what="The connection was lost.",
            evidence=f"{times} while watching; {one.handshake.connections:,} handshakes",
            cause="The sender restarts, a frame is larger than zmq.maxmsgsize (set --max-message-size, and the doctor "
            "examines that), a heartbeat times out, or the network fails. Each time the messages that were queued for "
            "us are lost.",
            fix="Read the sender's log of that time. Set zmq.heartbeat_ivl on one side to detect dead peers sooner.",
        )
    if one.traffic is not None or one.limit_hit is not None:
        return
    if one.elsewhere:
        yield Finding(
            id="topics_do_not_match",
            what="No message has the topics that are subscribed to. Messages with other topics come.",
            evidence=f"nothing came with the filter; without it: {', '.join(one.elsewhere)}",
            cause="A topic is a prefix of the first frame, compared byte by byte. So upper and lower case, blanks and "
            "a letter in front make a difference.",
            fix="Correct --topics (option topics), or leave it out and filter in Spark.",
        )
    else:
        pull = one.socket_type == "PULL"
        yield Finding(
            id="nothing_came",
            what="The doctor is connected, and no message came.",
            evidence="the handshake succeeded; 0 messages while watching",
            cause="The sender sends nothing at the moment. Or other consumers get all messages, because a PUSH "
            "distributes them. The doctor cannot tell from outside which of the two it is."
            if pull
            else "The sender sends nothing at the moment. Or the peer is a proxy (XPUB), and no publisher sends to "
            "it. The doctor cannot tell from outside which of the two it is.",
            fix="Set a longer --duration. Stop the other consumers for a moment."
            if pull
            else "Set a longer --duration. Behind a proxy, examine the publisher itself.",
        )


def _numbers(one: Examined) -> Iterator[Finding]:
    """Sequences and losses."""
    traffic, numbers = one.traffic, one.numbers
    if traffic is None or numbers is None:
        return
    if numbers.malformed and not numbers.guessed:
        yield Finding(
            id="malformed",
            what=f"Messages do not fit framing={numbers.framing}.",
            evidence=f"{numbers.malformed:,} of {traffic.messages:,}; frames: {traffic.frames}",
            cause="The publisher uses another framing, or several kinds of messages share the feed.",
            fix="Leave the framing out, and the doctor guesses it. See docs/sequences.md.",
        )
    if not numbers.judged and one.socket_type == "SUB":
        yield Finding(
            id="unnumbered",
            severity=_NOTE,
            what="The messages have no sequence numbers that the doctor can follow, so a loss cannot be seen.",
            evidence=f"{traffic.messages:,} messages, framing seems {numbers.framing}, frames: {traffic.frames}",
            cause="A PUB drops messages for a subscriber that is full or late, and reports nothing. Without sequence "
            "numbers the receiver cannot notice it either.",
            fix="Let the publisher number its messages (the sink does so with framing=sequenced), and set the framing "
            "at the receiver.",
        )
    if not numbers.judged:
        return
    if "sequencePath" in numbers.options and numbers.guessed:
        yield Finding(
            id="numbers_in_json",
            severity=_NOTE,
            what="The messages have sequence numbers in their JSON text.",
            evidence=f"$.{numbers.options['sequencePath']} goes up by one "
            + (f"for each topic ({numbers.counters:,})" if _by_topic(numbers) else "over the whole feed"),
            cause="The publisher numbers its messages in the payload. The source reads the numbers and counts what is "
            "missing, if you say where they are.",
            fix=f"Set {_as_options(numbers)}. For a table that has the messages already, see docs/recipes.md, Numbers "
            "in JSON.",
        )
    if numbers.missed_first and one.handshake.waited and numbers.framing != "custom":
        yield Finding(
            id="slow_joiner",
            what="The sender began to send before this subscriber had joined.",
            evidence=f"{numbers.missed_first:,} messages were sent before the first that came, though the doctor was "
            "waiting when the sender appeared",
            cause="To connect and subscribe takes some milliseconds. A PUB drops what it sends to this subscriber in "
            "that time. No high-water mark helps. (If the sender has long been sending to other subscribers, nothing "
            "is wrong: these are old messages. The sequence numbers do not tell the two cases apart.)",
            fix="Let the publisher wait for the subscription (XPUB), use a replay socket that keeps old messages "
            "(replayEndpoint), or send through PUSH. To sleep before the first send is only a guess.",
        )
    missing = (
        f"{numbers.lost:,} numbers missing in {numbers.gaps:,} gaps, {traffic.messages:,} messages came "
        f"({traffic.rate:,.0f}/s, at the peak {traffic.peak:,.0f}/s)"
    )
    if numbers.lost and traffic.saturated:
        yield Finding(
            id="doctor_too_slow",
            what="Sequence numbers are missing, and the doctor itself was behind all the time.",
            evidence=missing,
            cause="This feed is faster than the doctor can read. The doctor itself may have caused the gaps.",
            fix="Watch fewer topics (--topics), or compare with the gaps that the query itself counts.",
        )
    elif numbers.lost and one.lost_behind:
        yield Finding(
            id="proxy_drops",
            what="The proxy drops messages: those that are missing here came to a subscriber of the publisher.",
            evidence=f"{one.lost_behind:,} of the missing messages came from upstream; {missing}",
            cause="A proxy is two pairs of sockets with four high-water marks. The queue of its own SNDHWM towards us "
            "is full, or too small for a burst. The publisher's queue never fills, because the proxy continues to "
            "take messages.",
            fix="Raise SNDHWM of the proxy's backend (before its bind), and set XPUB_NODROP there. Then the proxy "
            "waits, and the publisher's own high-water mark decides.",
        )
    elif numbers.lost:
        least = max(2, round(traffic.peak * MAILBOX_SECONDS))
        yield Finding(
            id="messages_lost",
            what="Sequence numbers are missing, although the doctor takes every message at once.",
            evidence=missing,
            cause="The publisher dropped the messages at its own SNDHWM and reported nothing. Either its bursts are "
            "larger than the high-water mark (libzmq looks for room every 1.2 ms, so at this peak a PUB with a "
            f"high-water mark below {least:,} drops by mistake), or its NOBLOCK sends were refused. Or a proxy in "
            "between dropped them."
            + (
                " The same numbers are missing upstream, so it is not the proxy that drops."
                if one.lost_behind == 0
                else ""
            ),
            fix="Raise the publisher's SNDHWM before its bind. Behind a proxy, give the publisher's endpoint to "
            "--upstream: that tells whether the publisher or the proxy drops.",
        )
    repeated = f"{numbers.duplicates:,} duplicates in {traffic.messages:,} messages"
    if numbers.unequal and numbers.suggested:
        change = " and ".join(f"{name}={value}" for name, value in numbers.suggested.items())
        yield Finding(
            id="counter_per_topic",
            what="Each topic has a counter of its own, and the framing counts over all topics. So messages that came "
            "once look like duplicates.",
            evidence=f"{repeated}; {_unequal(numbers)}; counted for each topic, the numbers go up by one",
            cause="The publisher numbers each topic by itself.",
            fix=f"Set {change}. Do not set deduplicate: it would leave out messages that came once.",
        )
    elif numbers.unequal:
        yield Finding(
            id="equal_numbers",
            what="Different messages have the same sequence number, so these are no duplicates.",
            evidence=f"{repeated}; {_unequal(numbers)}",
            cause="Two publishers share a name or an endpoint, the publisher counts something smaller than the "
            "framing does (a topic, an instrument), or the framing is the wrong one.",
            fix="Name what has a counter with sequenceBy, let each publisher have a name or an endpoint of its own, or "
            "set sequenceBy=none. Do not set deduplicate: it would leave out messages that came once.",
        )
    elif numbers.duplicates:
        yield Finding(
            id="duplicates",
            what="Messages come twice.",
            evidence=f"{repeated}; "
            + (
                f"of {numbers.compared:,} that were compared, all are equal"
                if numbers.compared
                else _NOT_COMPARED
            ),
            cause="The sender repeats messages after a failure, or they come by two paths, such as two proxies.",
            fix="Set deduplicate=true to leave them out." if numbers.compared else _COMPARE_FIRST,
        )


_NOT_COMPARED = "they came too late to compare them with the messages that had these numbers first"
_COMPARE_FIRST = "Compare messages with equal numbers. Set deduplicate=true only if they are equal."


def _by_topic(numbers: Numbers) -> bool:
    return "topic" in numbers.options.get("sequenceBy", "")


def _as_options(numbers: Numbers) -> str:
    return ", ".join(f"{name}={value}" for name, value in {"framing": "custom", **numbers.options}.items())


def _unequal(numbers: Numbers) -> str:
    return f"of {numbers.compared:,} numbers that came twice, {numbers.unequal:,} have different topics or values"


# A receiver's queue that may need more bytes than this is reported.
_MUCH_MEMORY = 1 << 30


def _sizes(one: Examined, expected: Expected) -> Iterator[Finding]:
    """Message sizes."""
    traffic, limit = one.traffic, expected.max_message_size
    if traffic is None:
        return
    if traffic.size_max > MAX_MESSAGE_BYTES:
        yield Finding(
            id="message_too_large",
            what="Messages are larger than a row can be. The source discards and counts them.",
            evidence=f"the largest has {traffic.size_max:,} bytes, a row {MAX_MESSAGE_BYTES:,} at most",
            cause="The value of a row is one Arrow binary.",
            fix="Let the sender send them in parts, or send a reference to the place of the payload.",
        )
    elif limit and 2 * traffic.largest_frame > limit:
        yield Finding(
            id="near_the_limit",
            severity=_NOTE,
            what="Frames come near the receiver's limit.",
            evidence=f"the largest has {traffic.largest_frame:,} of {limit:,} bytes",
            cause="A frame over zmq.maxmsgsize ends the connection, and all messages after it are lost.",
            fix="Set zmq.maxmsgsize well above the largest frame that can come.",
        )
    memory = traffic.size_p99 * expected.rcvhwm
    if memory > _MUCH_MEMORY:
        yield Finding(
            id="queue_needs_much_memory",
            what="The receive high-water mark allows a queue of very many bytes.",
            evidence=f"rcvhwm {expected.rcvhwm:,} × {ByteSize(traffic.size_p99)!s} (99th percentile) = "
            f"{ByteSize(memory)!s} for each connection",
            cause="A high-water mark counts messages, not bytes.",
            fix=f"Set rcvhwm={max(1, _MUCH_MEMORY // traffic.size_p99):,} or less, or send smaller messages.",
        )


def _slow_receiver(one: Examined) -> Iterator[Finding]:
    """A receiver that takes its time (`--consume`)."""
    consumed, numbers, traffic = one.consumed, one.numbers, one.traffic
    if consumed is None or traffic is None:
        return
    before = numbers is not None and numbers.lost  # such losses are not the slow receiver's
    if consumed.behind or (consumed.lost and not before):
        yield Finding(
            id="receiver_too_slow",
            what="A receiver that takes this long for a message does not keep up.",
            evidence=f"at {consumed.each * 1000:g} ms a message it took {consumed.messages / consumed.seconds:,.0f} of "
            f"{traffic.rate:,.0f} messages/s (at best it could take {1 / consumed.each:,.0f}/s); it was "
            f"{'behind to the end' if consumed.behind else 'behind at times'}"
            + (f"; {consumed.lost:,} messages were lost meanwhile" if numbers and numbers.judged else "")
            + (f"; {consumed.queued:,} bytes waited in the kernel" if consumed.queued else ""),
            cause="The receiver is slower than the feed. Larger high-water marks only delay the first drop, and make "
            "messages older.",
            fix="Make the receiver faster, share the work (PULL, or several subscribers with topics of their own), or "
            "receive into a log first, as the source does. docs/tuning.md says which high-water mark survives a pause.",
        )


_PUB_DROPS = (
    "A PUB drops messages for a subscriber whose queue is full, and its send still succeeds. From outside this looks "
    "the same as a sender that is refused (NOBLOCK, XPUB_NODROP) and sends the next message."
)
# A feed whose peak is so many times its rate may have paused during the stall.
_UNEVEN = 5


def _stall(one: Examined, stalled: Stalled, expected: Expected) -> Iterator[Finding]:
    """Which side drops and which waits (`--stall`)."""
    pull, outcome = one.socket_type == "PULL", stalled.outcome
    if outcome == "idle":
        yield Finding(
            id="stall_says_nothing",
            severity=_NOTE,
            what="Too few messages came to say what the chain holds.",
            cause="The feed is slow, or the stall was short.",
            fix="Set a longer --stall.",
        )
    elif outcome == "dropped" and expected.full == "wait":
        yield Finding(
            id="drops_where_waiting_was_expected",
            what="The sender drops messages at a full queue, where it should wait.",
            cause=_PUB_DROPS,
            fix="Send through PUSH, or set XPUB_NODROP and let send() block. A larger SNDHWM covers a pause of known "
            "length (docs/tuning.md).",
        )
    elif outcome == "dropped":
        yield Finding(
            id="drops_counted",
            severity=_NOTE,
            what="The sender drops messages at a full queue. Only the sequence numbers show it.",
            cause=_PUB_DROPS,
            fix="Set the framing, so that the source counts what is missing. To lose nothing in such a pause, use a "
            "larger SNDHWM (docs/tuning.md), or a sender that waits.",
        )
    elif outcome == "fewer" and (pull or stalled.lost is not None):
        drop = expected.full == "drop"
        yield Finding(
            id="sender_waits",
            severity=Severity.WARNING if drop else _NOTE,
            what="The sender waits for a slow receiver, where drops were expected."
            if drop
            else "The sender waits for a slow receiver: it sends only as fast as we receive.",
            cause=(
                "A PUSH never drops: at a full queue send() blocks, or with NOBLOCK refuses."
                if pull
                else "No number is missing, so the publisher waited: XPUB_NODROP with a send() that blocks. One slow "
                "subscriber then holds back all."
            )
            + " A store in between that gives out no more than the feed's own rate looks the same from here."
            + (
                " Without numbers it cannot be known whether the sender's program blocked or dropped what was refused."
                if pull and stalled.lost is None
                else ""
            ),
            fix="To drop instead, use a PUB. Or use NOBLOCK, and count the refusals after a refresh and a second try, "
            "as a sink does with noblock=true."
            if drop
            else "Change nothing, if the sender may wait that long.",
        )
    elif outcome == "fewer":
        uneven = one.traffic is not None and one.traffic.peak > _UNEVEN * one.traffic.rate
        yield Finding(
            id="drops_uncounted",
            severity=_NOTE if uneven else Severity.WARNING,
            what="Messages were dropped, or never sent, and neither side counts them."
            + (" Or the feed, whose rate is uneven, had a pause." if uneven else ""),
            cause="A PUB drops messages for a subscriber whose queue is full, and neither its send nor this receiver "
            "notices it. With XPUB_NODROP the PUB would wait or refuse instead. Without sequence numbers the doctor "
            "cannot tell from outside which of the two happened.",
            fix="Number the messages (framing=sequenced) and set the framing at the receiver, so that the receiver "
            "counts what is missing. Or set XPUB_NODROP at the publisher, so that the publisher knows.",
        )
    elif expected.full == "drop":
        yield Finding(
            id="no_drops_seen",
            severity=Severity.WARNING if pull else _NOTE,
            what="Nothing was dropped in the stall, where drops were expected.",
            cause="The stall was shorter than the time for which the chain can hold messages. Or the sender waited "
            "and caught up afterwards (a PUSH never drops). Or something on the way stores messages. The doctor "
            "cannot tell these apart from outside.",
            fix="Set a longer --stall. Check whether the sender's send() blocks in that time.",
        )


def _of_stall(stalled: Stalled) -> str:
    words = [
        f"took nothing for {stalled.seconds:g} s at about {stalled.rate:,.0f}/s with rcvhwm {stalled.rcvhwm}",
        f"then {stalled.received:,} messages came, of about {stalled.expected:,} that were sent at that rate",
    ]
    if stalled.lost is not None:
        words.append(f"{stalled.lost:,} numbers are missing")
    if stalled.held is not None:
        words.append(f"{stalled.held:,} had been held for us")
    if stalled.kernel_bytes is not None:
        sides = "both sides'" if stalled.measured else "our side's"
        words.append(f"{stalled.kernel_bytes:,} bytes in {sides} kernel buffers")
    if not stalled.measured:
        words.append("the peer's buffers are not visible from here: up to 4 MiB are assumed")
    return "; ".join(words)


# Buffers are reported if the chain holds more than so many times the high-water mark.
_HIDDEN = 5


def _marks(one: Examined, stalled: Stalled, expected: Expected) -> Iterator[Finding]:
    """High-water marks (`--stall` and `--expect-hwm`)."""
    marks, meant, held = stalled.marks, expected.hwm, stalled.held or 0
    mark = meant or (marks.high if marks is not None else 0)
    if meant and marks and marks.expected_fits is False and not marks.low <= meant <= marks.high:
        default = marks.default_fits and meant != DEFAULT_HWM
        yield Finding(
            id="mark_not_in_effect",
            what=f"The sender's high-water mark is not {meant:,}. What the sender held fits a mark of {_range(marks)}."
            + (" libzmq's default of 1000 fits, too." if default else ""),
            cause="It was set after bind or connect: libzmq accepts it then without an error, and gives new peers the "
            "old one. Or it was set on the wrong socket (RCVHWM at the sender, SNDHWM at the receiver, another socket "
            "of the program)." + (_OF_A_PROXY if one.glance.socket_type == "XPUB" else ""),
            fix="Set SNDHWM on the sending socket before its bind and connect. getsockopt(SNDHWM) shows what was set, "
            "not what the connections have. Only the order in the program, or this measurement, shows that.",
        )
    elif marks is not None and held > _HIDDEN * mark:
        yield Finding(
            id="buffers_hide_the_mark",
            severity=_NOTE,
            what=f"The chain holds {held / mark:,.0f} times the high-water mark, because of the system's buffers.",
            cause=f"Besides the queues with high-water marks, up to {stalled.beyond:,} messages are in the kernel's "
            "buffers, in libzmq's batches and in our own queue. The sender's high-water mark does not limit them. "
            "While the receiver is slow, messages get older by the time that they spend there.",
            fix="If the high-water mark is to decide, set zmq.sndbuf at the sender and zmq.rcvbuf at the receiver to "
            "small values, before bind and connect.",
        )
    elif meant and marks is None:
        # The messages that were sent during the stall came after it, so something held them meanwhile.
        somewhere = min(stalled.received, round(stalled.rate * stalled.seconds))
        most = meant + stalled.beyond
        if stalled.outcome == "all" and somewhere > 1.2 * most:
            pull = one.socket_type == "PULL" and expected.full != "drop"
            yield Finding(
                id="held_outside_the_mark",
                severity=_NOTE if pull else Severity.WARNING,
                what=f"About {somewhere:,} messages were held. A high-water mark of {meant:,} with all buffers holds "
                f"{most:,} at most.",
                cause="Something holds messages that the high-water mark does not limit: a proxy or broker with a "
                "store or queues of its own, a list in the sender's program, a high-water mark of 0 (no limit), or "
                "one that was set late or on another socket. Or the sender waited and caught up afterwards. The "
                "doctor cannot tell from outside which of these it is.",
                fix="Watch the sender's memory during a stall. Check the order of SNDHWM and bind. If a proxy is in "
                "between, stall the publisher itself (--upstream). Keep what must survive a crash in a log, not in a "
                "queue.",
            )
        else:
            yield Finding(
                id="mark_cannot_be_told",
                severity=_NOTE,
                what=f"This stall does not show whether the sender's high-water mark is {meant:,}.",
                cause="The end of the sender's queue shows only where numbers are missing in a row. It does not show "
                "if the sender waits, if the messages have no sequence numbers, if the chain could hold the whole "
                "stall, or if the connection was lost.",
                fix="Set a longer --stall, number the messages, or try the same sockets with zmq-datasource hwm.",
            )


_OF_A_PROXY = (
    " The peer is an XPUB, as a proxy's backend is: then it is the proxy's high-water mark that counts here."
)


def _range(marks: HwmRange) -> str:
    return f"{marks.low:,}" if marks.low == marks.high else f"{marks.low:,} to {marks.high:,}"


def _proxies(examined: Sequence[Examined]) -> Iterator[Finding]:
    """Chains of proxies (`--upstream` and `--stall`)."""
    stalled = [(one, one.stalled, one.stalled.marks) for one in examined if one.stalled and one.stalled.marks]
    below = [each for each in stalled if each[0].role == "feed"]
    above = [each for each in stalled if each[0].role == "upstream"]
    for feed, here, marks in below:
        for publisher, there, others in above:
            if marks is None or others is None or (marks.low <= others.high and others.low <= marks.high):
                continue
            yield Finding(
                id="proxy_hides_the_mark",
                endpoint=feed.endpoint,
                what="For a subscriber behind the proxy the proxy's high-water mark counts, not the publisher's.",
                evidence=f"at the publisher {publisher.endpoint} a high-water mark of {_range(others)} explains what "
                f"a stall held ({there.held:,}), here one of {_range(marks)} ({here.held:,})",
                cause="The proxy takes what the publisher sends, even if its own subscribers are slow. So the "
                "publisher's queue never fills. Its high-water mark and its drops say nothing about these subscribers.",
                fix="Set SNDHWM of the proxy's backend to what the subscribers need. Set XPUB_NODROP there if slow "
                "subscribers are to slow down the publisher. Count losses by sequence numbers at the receiver.",
            )


def _log(log: Durable, expected: Expected) -> Iterator[Finding]:
    """The log (`--wal-location`, `--wal-store`)."""
    grew = "grew" if log.grew else "did not grow"
    if log.state in ("behind", "empty"):
        more = log.missing > expected.rcvhwm
        yield Finding(
            id="log_behind",
            what="Messages are received and not yet in the log. The socket's high-water mark does not limit how many "
            "these are.",
            evidence=f"{log.missing:,} messages that were on the wire are not in the log {log.seconds:.1f} s later; it "
            + ("holds nothing" if log.state == "empty" else "grew meanwhile" if log.grew else grew)
            + (
                f"; the socket's high-water mark of {expected.rcvhwm:,} would hold back at most that many"
                if more
                else ""
            ),
            cause="They are in the receiver's socket, which RCVHWM limits, or in its memory until they are sealed, "
            "which walFlushInterval and walChunkBytes limit. Or the receiver has stopped receiving (walMaxBytes), or "
            "it is not running. The log alone does not show which of these it is.",
            fix="Look at the receiver's backlog and receivePauses (zmq-datasource top). A crash loses what is not "
            "sealed. To lose less, use a shorter walFlushInterval, faster storage, or transactions (DEALER to "
            "ROUTER), in which the sender keeps a message until it is durable.",
        )
    elif log.state == "foreign":
        yield Finding(
            id="log_of_another_feed",
            what="The log holds messages, but none of these publishers or topics.",
            evidence=f"no counter that was on the wire is in the log, after {log.seconds:.1f} s",
            cause="It is the log of another feed, or its query reads the messages with another framing. Or the "
            "receiver has several endpoints, and names this one differently, for example by another host name.",
            fix="Name the log of this feed, and the framing of its query with -o framing=... Name the endpoint as the "
            "receiver does.",
        )
    elif log.state == "unnumbered":
        yield Finding(
            id="log_not_comparable",
            severity=_NOTE,
            what="There are no sequence numbers to compare, so the doctor cannot say whether the log keeps up.",
            evidence=f"the log {grew} in {log.seconds:.1f} s",
            cause="The messages have no sequence numbers, or the framing of the log reads none.",
            fix="Number the messages and name their framing. Or watch backlogAgeMs with zmq-datasource top.",
        )
