"""Findings: what is wrong, the evidence, the probable cause, and what to do. From figures, without input or output.

The findings about the connection, the sizes of messages and the log are here, those about sequence numbers in
``findings_numbers``, and those of a stall in ``findings_stall``. Each condition stands beside the sentences of its
finding. ``make docs`` makes the tables of docs/workbench.md from these modules: a function is a table, and the first
line of its docstring is the heading. A figure in a sentence shows as ``…``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

from zmq_datasource.messages.columns import MAX_MESSAGE_BYTES
from zmq_datasource.options.types import ByteSize
from zmq_datasource.workbench.doctor.facts import Durable, Examined, Expected

__all__ = [
    "EXIT_CODES",
    "Finding",
    "Severity",
    "connection_findings",
    "exit_code",
    "log_findings",
    "size_findings",
    "slow_receiver_findings",
    "unreachable_findings",
]


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
_NOTE = Severity.NOTE


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if nothing is wrong, 1 if something is, 3 if an endpoint could not be examined."""
    return max((EXIT_CODES[finding.severity] for finding in findings), default=0)


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


def unreachable_findings(one: Examined) -> Iterator[Finding]:
    """The connection cannot be made.

    The doctor reports at most one of these, as unreachable.
    """
    greeting, handshake, kind = one.greeting, one.handshake, one.greeting.socket_type
    tried = "connecting: " + {
        "failed": f"libzmq says {handshake.event}",
        "hung_up": "connected, and the peer hung up before the handshake was done",
    }.get(handshake.state, "no handshake within --wait")
    if greeting.state == "unresolved":
        yield Finding(
            id="host_unknown",
            what="The host name does not resolve.",
            evidence=greeting.reason,
            cause="The name is misspelt, or only another network or container knows it. libzmq itself retries for "
            "ever and reports nothing.",
            fix="Correct the host name, or use its address.",
        )
    elif greeting.state == "refused":
        yield Finding(
            id="refused",
            what="No program listens at this endpoint.",
            evidence=f"{greeting.reason}; {tried}",
            cause="The sender is not running. Or it listens on another port or interface (127.0.0.1 instead of *). Or "
            "the sender connects instead of binding, for example to a proxy.",
            fix="Start the sender first, or check its bind address. If the sender connects, give its endpoint to "
            "--bind.",
        )
    elif greeting.state == "no_answer":
        yield Finding(
            id="no_answer",
            what="The host does not answer.",
            evidence=f"{greeting.reason}; {tried}",
            cause="A firewall drops the packets, the address is wrong, or the machine is down.",
            fix="Try the port with nc -vz from this machine. Open the port in the firewall.",
        )
    elif greeting.state == "silent":
        yield Finding(
            id="silent_peer",
            what="The connection is accepted, and then the peer sends nothing.",
            evidence=f"{greeting.reason}; {tried}",
            cause="The process is stopped or hangs, and the kernel accepts the connection for it. Or the service is "
            "not ZeroMQ.",
            fix="Check on the peer's machine with ss -ltnp whether the process behind the port runs.",
        )
    elif greeting.state == "not_zeromq":
        yield Finding(
            id="not_zeromq",
            what="A service that is not ZeroMQ answers at this endpoint.",
            evidence=f"its first bytes are no greeting of ZMTP; {tried}",
            cause="The port belongs to another service.",
            fix="Find out the publisher's port.",
        )
    elif greeting.state == "not_asked" and handshake.state == "none":
        yield Finding(
            id="nobody_came",
            what="No peer has connected.",
            evidence="the doctor listened for the whole --wait",
            cause="The sender is not running, it connects to another address, or a firewall is in between.",
            fix="Start the sender, and let it connect to an address of this machine. Or set a longer --wait.",
        )
    elif greeting.mechanism is not None and greeting.mechanism != one.mechanism:
        yield Finding(
            id="security_mismatch",
            what=f"The peer uses security {greeting.mechanism}, and our side uses {one.mechanism}.",
            evidence=f"its greeting (ZMTP {greeting.version}) names {greeting.mechanism}; {tried}",
            cause="One side has no keys, or its keys were set after bind or connect. libzmq ignores them then.",
            fix={
                "CURVE": "Set -o zmq.curve_serverkey, zmq.curve_publickey and zmq.curve_secretkey, as for the source.",
                "PLAIN": "Set -o zmq.plain_username and zmq.plain_password, as for the source.",
                "NULL": "Remove the security options here, or set the peer's before it binds: it runs without any.",
            }.get(greeting.mechanism, f"Set up {greeting.mechanism} on our side, or take it from the peer."),
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
        said = f"it greets with ZMTP {greeting.version}, {greeting.mechanism}, {kind or 'no socket type'}"
        yield Finding(
            id="hung_up",
            what="The peer ended the handshake.",
            evidence=f"{said if greeting.state == 'greeted' else 'the peer was not asked for its greeting'}; {tried}",
            cause="The peer lets only some peers in (ZAP), or it restarted at that moment. The doctor cannot tell "
            "from outside which of the two it is.",
            fix="Try again. Read the peer's own log, or its monitor.",
        )


def connection_findings(one: Examined, expected: Expected) -> Iterator[Finding]:
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


# A receiver's queue that may need more bytes than this is reported.
_MUCH_MEMORY = 1 << 30


def size_findings(one: Examined, expected: Expected) -> Iterator[Finding]:
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
            fix=f"Set rcvhwm={max(1, _MUCH_MEMORY // traffic.size_p99)} or less, or send smaller messages.",
        )


def slow_receiver_findings(one: Examined) -> Iterator[Finding]:
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


def log_findings(log: Durable, expected: Expected) -> Iterator[Finding]:
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
            fix="Look at the receiver's backlog and receivePauses. A crash loses what is not "
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
            fix="Number the messages and name their framing. Or watch backlogAgeMs (docs/metrics.md).",
        )
