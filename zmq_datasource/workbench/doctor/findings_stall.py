"""Findings of a stall: which side drops, which one waits, and which high-water mark is in effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from zmq_datasource.workbench.doctor.facts import DEFAULT_HWM, Examined, Expected, HwmRange, Stalled
from zmq_datasource.workbench.doctor.findings import Finding, Severity

__all__ = ["proxy_findings", "stall_findings"]

_NOTE = Severity.NOTE


def stall_findings(one: Examined, expected: Expected) -> list[Finding]:
    """The findings about the stall of an endpoint, if there was one, each with the stall's figures as evidence."""
    stalled = one.stalled
    if stalled is None:
        return []
    found = [*_drops(one, stalled, expected), *_marks(one, stalled, expected)]
    return [replace(finding, evidence=_evidence(stalled)) for finding in found]


_PUB_DROPS = (
    "A PUB drops messages for a subscriber whose queue is full, and its send still succeeds. From outside this looks "
    "the same as a sender that is refused (NOBLOCK, XPUB_NODROP) and sends the next message."
)
# A feed whose peak is so many times its rate may have paused during the stall.
_UNEVEN = 5


def _drops(one: Examined, stalled: Stalled, expected: Expected) -> Iterator[Finding]:
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


def _evidence(stalled: Stalled) -> str:
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
            "of the program)." + (_OF_A_PROXY if one.greeting.socket_type == "XPUB" else ""),
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


def proxy_findings(examined: Sequence[Examined]) -> Iterator[Finding]:
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
