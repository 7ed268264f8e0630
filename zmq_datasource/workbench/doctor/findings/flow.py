"""Findings about what came."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zmq_datasource.messages.schemas import MAX_MESSAGE_BYTES
from zmq_datasource.options.types import ByteSize
from zmq_datasource.workbench.doctor.facts import Examined, Expected, Numbers, Traffic
from zmq_datasource.workbench.doctor.findings.finding import Finding, Severity

__all__ = ["of_flow"]

# A queue of the receiver that may need more than this is worth a word.
_MUCH_MEMORY = 1 << 30
# libzmq looks for room in a sender's queue about that often.
_MAILBOX_SECONDS = 0.0012

_Make = Callable[..., Finding]


def of_flow(one: Examined, expected: Expected) -> Iterator[Finding]:
    """What the messages show, or that there are none."""
    if one.handshake.state != "succeeded":
        return

    def make(name: str, what: str, evidence: str, cause: str, fix: str, note: bool = False) -> Finding:
        return Finding(
            id=name,
            severity=Severity.NOTE if note else Severity.WARNING,
            endpoint=one.endpoint,
            what=what,
            evidence=evidence,
            cause=cause,
            fix=fix,
        )

    if one.limit_hit is not None:
        yield _frame_too_large(one, expected, make)
    elif one.handshake.disconnects:
        yield make(
            "connection_breaks",
            "The connection breaks.",
            f"{_times(one.handshake.disconnects)} while watching; {one.handshake.connections:,} handshakes",
            "The sender restarts, a frame is over zmq.maxmsgsize (set --max-message-size to have that looked into), a "
            "heartbeat runs out, or the network. What was queued for us is lost each time.",
            "Look at the sender's log at that time; set zmq.heartbeat_ivl on one side to see dead peers sooner.",
        )
    if one.traffic is None:
        if one.limit_hit is None:
            yield _nothing_came(one, make)
        return
    if one.numbers is not None:
        yield from _of_numbers(one, one.traffic, one.numbers, make)
    yield from _of_sizes(one.traffic, expected, make)
    if one.consumed is not None:
        yield from _of_consumed(one, make)


def _frame_too_large(one: Examined, expected: Expected, make: _Make) -> Finding:
    return make(
        "frame_too_large",
        "Frames are larger than the receiver lets in: each costs the connection.",
        f"hung up {_times(one.handshake.disconnects)}; without the limit of "
        f"{expected.max_message_size or 0:,} bytes a frame of {one.limit_hit or 0:,} came",
        "zmq.maxmsgsize bounds a frame. Over it libzmq hangs up and does not dial again by itself; all that was sent "
        "behind the frame is lost, without an error at the sender.",
        f"Set zmq.maxmsgsize to {one.limit_hit or 0:,} or more, or have large payloads sent in parts.",
    )


def _nothing_came(one: Examined, make: _Make) -> Finding:
    if one.elsewhere:
        return make(
            "topics_do_not_match",
            "Nothing has the topics that are subscribed to; other topics flow.",
            f"nothing came with the filter; without it: {', '.join(one.elsewhere)}",
            "A topic is a prefix of the first frame, byte by byte: case, blanks and a letter in front count.",
            "Correct --topics (option topics), or leave it out and filter in Spark.",
        )
    shared = one.socket_type == "PULL"
    return make(
        "nothing_came",
        "Connected, and nothing came.",
        "the handshake succeeded; 0 messages while watching",
        "The sender has nothing to say at the moment"
        + (
            ", or other consumers get it all: a PUSH shares its messages out."
            if shared
            else ", or, behind a proxy (XPUB), nobody publishes to it."
        )
        + " Which cannot be told from outside.",
        "A longer --duration; "
        + (
            "stop the other consumers for a moment."
            if shared
            else "for a proxy, look at the publisher itself."
        ),
    )


def _of_numbers(one: Examined, traffic: Traffic, numbers: Numbers, make: _Make) -> Iterator[Finding]:
    if numbers.malformed and not numbers.guessed:
        yield make(
            "malformed",
            f"Messages do not fit framing={numbers.framing}.",
            f"{numbers.malformed:,} of {traffic.messages:,}; frames: {traffic.frames}",
            "The publisher uses another framing, or several kinds of messages share the feed.",
            "Leave framing out, and the doctor guesses it; see docs/sequences.md.",
        )
    if not numbers.judged:
        if one.socket_type == "SUB":
            yield make(
                "unnumbered",
                "The messages have no numbers that could be followed, so a loss cannot be seen.",
                f"{traffic.messages:,} messages, framing seems {numbers.framing}, frames: {traffic.frames}",
                "A PUB drops for a full or late subscriber and tells nobody; without numbers the receiver cannot tell "
                "either.",
                "Have the publisher number its messages (the sink does with framing=sequenced), and name the framing.",
                note=True,
            )
        return
    if numbers.missed_first and one.handshake.waited and numbers.framing != "custom":
        yield make(
            "slow_joiner",
            "The sender began to send before this subscriber had joined.",
            f"{numbers.missed_first:,} messages were sent before the first that came, though the doctor was waiting "
            "when the sender appeared",
            "Connecting and subscribing take some milliseconds; a PUB drops what it sends meanwhile. No mark helps. "
            "(If it has long been running, for others, this is history and no fault; its numbers do not tell.)",
            "Let the publisher wait for the subscription (XPUB), keep history with a replay socket (replayEndpoint), "
            "or send through PUSH. Sleeping before the first send is a guess.",
        )
    if numbers.lost:
        yield _lost(one, traffic, numbers, make)
    if numbers.duplicates:
        yield make(
            "duplicates",
            "Numbers come twice.",
            f"{numbers.duplicates:,} duplicates in {traffic.messages:,} messages",
            "The sender repeats after a failure, two publishers share a name or a proxy is reached on two ways; or the "
            "framing was guessed wrong.",
            "deduplicate=true leaves them out, if equal numbers are equal messages.",
        )


def _lost(one: Examined, traffic: Traffic, numbers: Numbers, make: _Make) -> Finding:
    evidence = (
        f"{numbers.lost:,} numbers missing in {numbers.gaps:,} gaps, {traffic.messages:,} messages came "
        f"({traffic.rate:,.0f}/s, at the peak {traffic.peak:,.0f}/s)"
    )
    if traffic.saturated:
        return make(
            "doctor_too_slow",
            "Numbers are missing, and the doctor itself was behind all the time.",
            evidence,
            "This feed is faster than the doctor can read; gaps may be of its own making.",
            "Watch fewer topics (--topics), or compare with the gaps that the query itself counts.",
        )
    if one.lost_behind:
        return make(
            "proxy_drops",
            "The proxy drops: what is missing here came to a subscriber of the publisher.",
            f"{one.lost_behind:,} of the missing messages came from upstream; {evidence}",
            "A proxy is two pairs of sockets with four marks. Its own SNDHWM towards us is full, or too small for a "
            "burst, while the publisher's never fills: the proxy goes on taking.",
            "Raise SNDHWM of the proxy's backend (before its bind), and use XPUB_NODROP there, so that it waits and "
            "the publisher's own mark decides.",
        )
    least = max(2, round(traffic.peak * _MAILBOX_SECONDS))
    above = (
        " The same numbers are missing upstream, so the proxy is not who drops."
        if one.lost_behind == 0
        else ""
    )
    return make(
        "messages_lost",
        "Numbers are missing although the doctor takes everything at once.",
        evidence,
        "The publisher dropped them at its own SNDHWM, with nobody told: bursts larger than the mark"
        f" (libzmq looks for room every 1.2 ms, so at this peak below {least:,} it drops by mistake), or its NOBLOCK "
        f"sends were refused. Or a proxy in between did.{above}",
        "Raise the publisher's SNDHWM, before its bind; behind a proxy give the publisher's endpoint to --upstream, "
        "which tells the two apart.",
    )


def _of_sizes(traffic: Traffic, expected: Expected, make: _Make) -> Iterator[Finding]:
    if traffic.size_max > MAX_MESSAGE_BYTES:
        yield make(
            "message_too_large",
            "Messages are larger than a row can be; the source discards and counts them.",
            f"the largest has {traffic.size_max:,} bytes, a row {MAX_MESSAGE_BYTES:,} at most",
            "A row's value is one Arrow binary.",
            "Have them sent in parts, or as a reference to where the payload is.",
        )
    elif expected.max_message_size is not None and 2 * traffic.largest_frame > expected.max_message_size:
        yield make(
            "near_the_limit",
            "Frames come near the receiver's limit.",
            f"the largest has {traffic.largest_frame:,} of {expected.max_message_size:,} bytes",
            "A frame over zmq.maxmsgsize costs the connection, and all that was sent behind it.",
            "Set zmq.maxmsgsize well above the largest that can come.",
            note=True,
        )
    memory = traffic.size_p99 * expected.rcvhwm
    if memory > _MUCH_MEMORY:
        yield make(
            "queue_needs_much_memory",
            "The receive mark allows a queue of very many bytes.",
            f"rcvhwm {expected.rcvhwm:,} × {ByteSize(traffic.size_p99)} (99th percentile) = {ByteSize(memory)} "
            "for each connection",
            "A high-water mark counts messages, not bytes.",
            f"rcvhwm={max(1, _MUCH_MEMORY // traffic.size_p99):,} or less, or smaller messages.",
        )


def _of_consumed(one: Examined, make: _Make) -> Iterator[Finding]:
    consumed, traffic, numbers = one.consumed, one.traffic, one.numbers
    assert consumed is not None
    assert traffic is not None
    lost_already = numbers is not None and numbers.lost > 0
    if not consumed.behind and (not consumed.lost or lost_already):
        return
    can = 1 / consumed.each
    judged = numbers is not None and numbers.judged
    yield make(
        "receiver_too_slow",
        "A receiver that takes so long for a message does not keep up.",
        f"at {consumed.each * 1000:g} ms a message {consumed.messages / consumed.seconds:,.0f}/s were taken, "
        f"{can:,.0f}/s at best, of {traffic.rate:,.0f}/s; it was "
        f"{'behind to the end' if consumed.behind else 'behind at times'}"
        + (f"; {consumed.lost:,} messages were lost meanwhile" if judged else "")
        + (f"; {consumed.queued:,} bytes waited in the kernel" if consumed.queued else ""),
        "The receiver is slower than the feed. Larger marks only delay the first drop, and make messages older.",
        "Make it faster, share the work (PULL; several subscribers with topics of their own), or receive into a log "
        "first, as the source does. zmq-datasource plan says which mark survives a pause.",
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
