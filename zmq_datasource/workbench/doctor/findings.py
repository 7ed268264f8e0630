"""The doctor's findings, as one table: the condition on the facts, the finding, its probable cause, and what to do.

A text has places for facts, as in ``{f.greeting.reason}``. ``make docs`` makes the tables of docs/workbench.md from
this table; such a place shows there as ``…``. What cannot be known from outside is said, and how to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from zmq_datasource.workbench.doctor.facts import Feed, Place


class Severity(StrEnum):
    """How serious a row of the report is.

    ``unreachable``: the endpoint could not be examined. ``warning``: messages are lost, or will be, or the feed or the
    place is not as it should be. ``note``: worth knowing, but no fault. ``fact``: what was seen, and no finding.
    """

    UNREACHABLE = "unreachable"
    WARNING = "warning"
    NOTE = "note"
    FACT = "fact"


_NOTE, _UNREACHABLE = Severity.NOTE, Severity.UNREACHABLE
# Of the command, for its worst finding. Click takes 2, for wrong arguments.
_EXIT_CODES = {Severity.UNREACHABLE: 3, Severity.WARNING: 1}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A row of the table.

    Attributes:
        id: The name for scripts, which does not change.
        when: The condition on the facts: a ``Feed``, or a ``Place``.
        what: The finding.
        cause: The probable cause.
        fix: What to do, or how to find out more.
    """

    id: str
    severity: Severity = Severity.WARNING
    when: Callable[[Any], object]
    what: str
    cause: str
    fix: str


# If the connection cannot be made, the first reason is the only finding.
_CONNECTION = (
    Finding(
        id="host_unknown",
        severity=_UNREACHABLE,
        when=lambda f: f.greeting.state == "unresolved",
        what="The host name does not resolve.",
        cause="The name is misspelt, or only another network or container knows it. libzmq itself retries for ever and "
        "reports nothing.",
        fix="Correct the host name, or use its address.",
    ),
    Finding(
        id="cannot_open",
        severity=_UNREACHABLE,
        when=lambda f: f.not_opened,
        what="The endpoint cannot be bound or connected: {f.not_opened}",
        cause="Another process uses it, or it is not an address of this machine.",
        fix="Use another port or path, or stop the process that uses it.",
    ),
    Finding(
        id="refused",
        severity=_UNREACHABLE,
        when=lambda f: not f.is_up and f.greeting.state == "refused",
        what="No program listens at this endpoint.",
        cause="The sender is not running. Or it listens on another port or interface (127.0.0.1 instead of *). Or it "
        "connects instead of binding, for example to a proxy.",
        fix="Start the sender first, or check its bind address. If it connects, give its endpoint to --bind.",
    ),
    Finding(
        id="no_answer",
        severity=_UNREACHABLE,
        when=lambda f: not f.is_up and f.greeting.state == "no_answer",
        what="The host does not answer: {f.greeting.reason}.",
        cause="A firewall drops the packets, the address is wrong, or the machine is down.",
        fix="Try the port with nc -vz from this machine. Open the port in the firewall.",
    ),
    Finding(
        id="silent_peer",
        severity=_UNREACHABLE,
        when=lambda f: not f.is_up and f.greeting.state == "silent",
        what="The connection is accepted, and then the peer sends no greeting.",
        cause="The process is stopped or hangs, and the kernel accepts the connection for it. Or a machine on the way "
        "accepts it and forwards nothing. Or the service is not ZeroMQ.",
        fix="Check on the peer's machine with ss -ltnp whether the process behind the port runs.",
    ),
    Finding(
        id="not_zeromq",
        severity=_UNREACHABLE,
        when=lambda f: not f.is_up and f.greeting.state == "not_zeromq",
        what="A service that is not ZeroMQ answers at this endpoint.",
        cause="The port belongs to another service.",
        fix="Find out the publisher's port.",
    ),
    Finding(
        id="nobody_came",
        severity=_UNREACHABLE,
        when=lambda f: f.greeting.state == "not_asked" and f.handshake.state == "none",
        what="There was no connection for the whole --wait.",
        cause="The sender is not running, it connects to another address, or a firewall or SOCKS proxy is in between.",
        fix="Start the sender, and let it connect to an address of this machine. Or set a longer --wait.",
    ),
    Finding(
        id="security_mismatch",
        severity=_UNREACHABLE,
        when=lambda f: not f.is_up and f.has_other_security,
        what="The peer uses security {f.greeting.mechanism}, and our side uses {f.mechanism}.",
        cause="One side has no keys, or its keys were set after bind or connect. libzmq ignores them then.",
        fix="Set here what the source sets: -o zmq.curve_serverkey, zmq.curve_publickey and zmq.curve_secretkey for "
        "CURVE, zmq.plain_username and zmq.plain_password for PLAIN. If the peer runs without security (NULL), remove "
        "the options here, or set the peer's before its bind.",
    ),
    Finding(
        id="wrong_socket_type",
        severity=_UNREACHABLE,
        when=lambda f: f.is_mismatched,
        what="The peer is of type {f.greeting.socket_type}. A {f.socket_type} cannot receive from it.",
        cause="The socket types of the two sides do not match. libzmq ends the connection without a message.",
        fix="Receive from a PUB or XPUB with --socket-type SUB, and from a PUSH with --socket-type PULL. Of a proxy, "
        "name the side for subscribers (its XPUB). Receive the transactions of a DEALER with socketType=ROUTER and "
        "bind. The other types are no feeds: find the sender's endpoint.",
    ),
    Finding(
        id="credentials_refused",
        severity=_UNREACHABLE,
        when=lambda f: not f.is_up and f.mechanism != "NULL",
        what="The peer ends the handshake, although both sides use {f.mechanism}.",
        cause="CURVE: the server key is wrong, our two keys are not a pair, or the peer does not let our key in (ZAP). "
        "PLAIN: the username or the password is wrong, or the peer has no authenticator (ZAP).",
        fix="Compare zmq.curve_serverkey with the server's public key, and zmq.plain_username and zmq.plain_password "
        "with those of the peer. Ask its operator to let our key in.",
    ),
    Finding(
        id="hung_up",
        severity=_UNREACHABLE,
        when=lambda f: not f.is_up,
        what="The peer greets, and then ends the handshake or does not finish it.",
        cause="The peer lets only some peers in (ZAP), or it restarted at that moment. The doctor cannot tell from "
        "outside which of the two it is.",
        fix="Try again. Read the peer's own log, or its monitor.",
    ),
)

_MESSAGES = (
    Finding(
        id="connection_lost",
        when=lambda f: f.handshake.lost,
        what="The connection was lost {f.handshake.lost:,} times while the doctor watched, of these "
        "{f.handshake.faults:,} times because of what the peer had sent.",
        cause="The sender stops or restarts, or the network fails. If what the peer had sent is the reason, a frame is "
        "larger than zmq.maxmsgsize. Each time the messages that were queued for us are lost, and the sender gets no "
        "error.",
        fix="Read the sender's log of that time. Set zmq.maxmsgsize well above the largest frame.",
    ),
    Finding(
        id="feed_stopped",
        when=lambda f: f.traffic is not None and f.traffic.has_stopped and not f.handshake.lost,
        what="Messages came, with pauses of {f.traffic.longest_pause:.2f} s at most, and then none for the last "
        "{f.traffic.silence:.1f} s, although the connection is still there.",
        cause="The publisher's process is stopped or hangs, or has nothing to send. Or something on the way (a "
        "firewall, NAT or load balancer) drops the packets of this connection. The doctor cannot tell from outside "
        "which of these it is.",
        fix="Run the doctor again at once. If messages come, something on the way had dropped the connection. If it "
        "reports silent_peer, the publisher's process stands still. If it connects and nothing comes, the publisher "
        "sends nothing.",
    ),
    Finding(
        id="topics_do_not_match",
        when=lambda f: f.elsewhere,
        what="No message has the topics that are subscribed to. Without the filter these come: {f.elsewhere}.",
        cause="A topic is a prefix of the first frame, compared byte by byte. So upper and lower case, blanks and a "
        "letter in front make a difference.",
        fix="Correct --topics (option topics), or leave it out and filter in Spark.",
    ),
    Finding(
        id="nothing_came",
        when=lambda f: f.traffic is None and not (f.elsewhere or f.handshake.lost),
        what="The doctor is connected, and no message came.",
        cause="The sender sends nothing at the moment. Or the peer is a proxy (XPUB), and no publisher sends to it. Or "
        "other consumers of a PUSH get all messages. The doctor cannot tell from outside which of these it is.",
        fix="Set a longer --duration. Behind a proxy, examine the publisher itself. Stop the other consumers of a PUSH "
        "for a moment.",
    ),
)

_NUMBERS = (
    Finding(
        id="malformed",
        when=lambda f: f.malformed,
        what="{f.malformed:,} of {f.traffic.messages:,} messages do not fit framing={f.framing}.",
        cause="The publisher uses another framing, or several kinds of messages share the feed.",
        fix="Name the publisher's framing (docs/sequences.md).",
    ),
    Finding(
        id="numbers_found",
        severity=_NOTE,
        when=lambda f: f.counting is not None,
        what="The messages have numbers that count up, and the source does not read them: {f.counting.place}.",
        cause="The publisher numbers its messages. The source counts what is missing if its options name their place.",
        fix="Set {f.counting.options}. If the publisher's framing has a name in docs/sequences.md, set that one. For a "
        "table that has the messages already, see docs/recipes.md, Numbers in JSON.",
    ),
    Finding(
        id="no_numbers",
        severity=_NOTE,
        when=lambda f: f.traffic is not None and not (f.numbers or f.counting or f.malformed),
        what="The messages have no numbers that the doctor can follow, so a loss cannot be seen.",
        cause="A PUB drops messages for a subscriber that is full or late, and reports nothing. A PUSH shares its "
        "messages out among all its PULLs. Without numbers the receiver cannot notice either of these.",
        fix="Let the publisher number its messages (the sink does so with framing=sequenced), and name the framing at "
        "the receiver.",
    ),
    Finding(
        id="another_pull",
        when=lambda f: f.has_gaps and f.socket_type == "PULL",
        what="{f.numbers.lost:,} numbers are missing, and a PUSH drops nothing.",
        cause="A PUSH shares its messages out among all its PULLs, in turn: another PULL took them. Or the sender gave "
        "messages up: NOBLOCK sends that were refused, or a connection that ended.",
        fix="Stop the other consumer (ss -tnp on the sender's machine lists the connections), or bring the messages of "
        "all consumers together. If each consumer needs all messages, the sender must be a PUB.",
    ),
    Finding(
        id="numbers_missing",
        when=lambda f: f.has_gaps and f.socket_type == "SUB",
        what="{f.numbers.lost:,} numbers are missing, although the doctor takes every message at once.",
        cause="A PUB drops messages at its SNDHWM and reports nothing: its bursts are larger than the high-water mark. "
        "Or a proxy drops them. Or sequenceBy names another counter than the publisher has.",
        fix="Raise the publisher's SNDHWM before its bind. Behind a proxy, examine the publisher itself: what is "
        "missing only behind the proxy, the proxy drops.",
    ),
    Finding(
        id="numbers_repeat",
        when=lambda f: f.is_mixed or (f.numbers and f.numbers.repeated),
        what="Of {f.traffic.messages:,} messages, {f.numbers.repeated:,} have a number that came before, and "
        "{f.numbers.late:,} a lower one than the message before.",
        cause="Several publishers or topics have counters of their own, and sequenceBy counts them as one. Or the "
        "sender repeats messages after a failure, or they come by two paths. Neither equal numbers nor equal content "
        "show which of these it is.",
        fix="Name what has a counter with sequenceBy, and give each publisher a name or an endpoint of its own. Do not "
        "set deduplicate because of this finding: it would delete every message whose number came before, also that "
        "of another publisher.",
    ),
)

_STALL = (
    Finding(
        id="stall_drops",
        when=lambda f: f.stall is not None and f.stall.outcome == "drops",
        what="Messages are dropped while the receiver pauses.",
        cause="A PUB drops messages for a subscriber whose queue is full, and its send still succeeds. Without "
        "numbers, a publisher that waits (XPUB_NODROP) looks the same from outside.",
        fix="Use a larger SNDHWM at the publisher (docs/tuning.md), or a sender that waits. Let the publisher number "
        "its messages, so that the receiver counts what is missing.",
    ),
    Finding(
        id="stall_waits",
        severity=_NOTE,
        when=lambda f: f.stall is not None and f.stall.outcome == "waits",
        what="The sender waits while the receiver pauses.",
        cause="A PUSH never drops, nor does a PUB with XPUB_NODROP: at a full queue send() blocks, or with NOBLOCK "
        "refuses. One slow subscriber then holds back all. The doctor cannot see what the sender's program does with a "
        "refused message.",
        fix="Change nothing, if the sender may wait that long.",
    ),
    Finding(
        id="stall_neither",
        severity=_NOTE,
        when=lambda f: f.stall is not None and f.stall.outcome == "neither",
        what="The stall shows neither drops nor waiting.",
        cause="The queues and buffers on the way held all messages of the stall, the sender waited and caught up "
        "afterwards, or too few messages came.",
        fix="Set a longer --stall.",
    ),
)

_PLACE = (
    Finding(
        id="place_unusable",
        when=lambda f: f.failed,
        what="No log can be written there: {f.failed}",
        cause="The directory belongs to another user, its file system is full or read-only, cannot force files to the "
        "disk or has no hard links (an object store mounted as files, a share, FAT), or the path is wrong. Or the "
        "bucket does not exist, or refuses the credentials.",
        fix="Use a directory on a disk that the receiver's user can write, or walStore for an object store. Try a "
        "bucket with the receiver's credentials.",
    ),
    Finding(
        id="name_given_twice",
        when=lambda f: f.replaced,
        what="A second object or file takes a name that must be free.",
        cause="A bucket's service ignores the condition (If-None-Match), or a file system does not check the name of a "
        "hard link. Two receivers would give the same ids to different messages.",
        fix="Do not use this place for a log. Use a service with conditional puts, or a directory on a disk.",
    ),
)

# By the heading of its part in docs/workbench.md.
TABLE = {
    "The connection cannot be made": _CONNECTION,
    "No messages, or lost connections": _MESSAGES,
    "Numbers and losses": _NUMBERS,
    "Which side drops and which waits (`--stall`)": _STALL,
    "The place of the log (`--wal-location`, `--wal-store`)": _PLACE,
}


def findings_of(facts: Feed | Place) -> list[Finding]:
    """The findings about a feed or a place, in the order of the table, with the facts in their sentences."""
    if isinstance(facts, Place):
        return _holding(_PLACE, facts)
    return _holding(_CONNECTION, facts)[:1] or _holding((*_MESSAGES, *_NUMBERS, *_STALL), facts)


def _holding(findings: Iterable[Finding], facts: Feed | Place) -> list[Finding]:
    return [
        replace(each, what=each.what.format(f=facts), fix=each.fix.format(f=facts))
        for each in findings
        if each.when(facts)
    ]


def exit_code(severity: Severity) -> int:
    """0 if nothing is wrong, 1 if something is, 3 if an endpoint could not be examined."""
    return _EXIT_CODES.get(severity, 0)
