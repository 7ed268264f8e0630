"""Findings about what a stall showed: who drops, who waits, and which mark is in effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zmq_datasource.workbench.doctor.facts import Examined, Expected, Marks, Stalled
from zmq_datasource.workbench.doctor.findings.finding import Finding, Severity
from zmq_datasource.workbench.doctor.marks import DEFAULT_MARK

__all__ = ["of_chain", "of_stall"]

# So much more than the mark must be held elsewhere, before that is worth a word.
_HIDDEN = 5
# A feed whose peak is so many times its rate may have had a pause just then.
_UNEVEN = 5

_Make = Callable[..., Finding]


def of_stall(one: Examined, expected: Expected) -> Iterator[Finding]:
    """What taking nothing for a while told of this endpoint."""
    stalled = one.stalled
    if stalled is None:
        return

    def make(name: str, what: str, cause: str, fix: str, note: bool = False) -> Finding:
        return Finding(
            id=name,
            severity=Severity.NOTE if note else Severity.WARNING,
            endpoint=one.endpoint,
            what=what,
            evidence=_evidence(stalled),
            cause=cause,
            fix=fix,
        )

    numbered = stalled.lost is not None
    match stalled.outcome:
        case "idle":
            yield make(
                "stall_says_nothing",
                "Too few messages came to say what the chain holds.",
                "The feed is slow, or the stall short.",
                "A longer --stall.",
                note=True,
            )
        case "dropped":
            yield _drops(expected, make)
        case "fewer" if one.socket_type == "PULL" or numbered:
            yield _waits(one, expected, make)
        case "fewer":
            uneven = one.traffic is not None and one.traffic.peak > _UNEVEN * one.traffic.rate
            yield make(
                "drops_uncounted",
                "Messages were dropped, or never sent, and nobody counts them."
                + (" Or the feed, which is uneven, had a pause." if uneven else ""),
                "A PUB drops for a subscriber whose queue is full, and neither its send nor this receiver can tell. "
                "With XPUB_NODROP it would wait or refuse instead; which of the two this is cannot be told from "
                "outside without numbers.",
                "Number the messages (framing=sequenced) and name the framing, so that the receiver counts what is "
                "missing; or set XPUB_NODROP at the publisher, so that it knows.",
                note=uneven,
            )
        case "all" if expected.full == "drop":
            yield make(
                "no_drops_seen",
                "Nothing was dropped in the stall, where drops were expected.",
                "The stall was shorter than what the chain holds; or the sender waited and caught up afterwards (a "
                "PUSH never drops); or something before it stores. Which cannot be told from outside.",
                "A longer --stall; look whether the sender's send() blocks meanwhile.",
                note=one.socket_type == "SUB",
            )
    yield from _of_mark(one, stalled, expected, make)


def _drops(expected: Expected, make: _Make) -> Finding:
    waits = expected.full == "wait"
    return make(
        "drops_where_waiting_was_expected" if waits else "drops_counted",
        "A full queue drops; only the numbers tell."
        if not waits
        else "A full queue drops, where the sender should wait.",
        "A PUB drops for a subscriber whose queue is full, and its send succeeds all the same. From outside that looks "
        "like a sender that is refused (NOBLOCK, XPUB_NODROP) and goes on.",
        "Send through PUSH, or set XPUB_NODROP and let send() block; a larger SNDHWM covers a pause of known length "
        "(zmq-datasource plan)."
        if waits
        else "Name the framing, so that the source counts what is missing. To lose nothing in such a pause: a larger "
        "SNDHWM (zmq-datasource plan), or a sender that waits.",
        note=not waits,
    )


def _waits(one: Examined, expected: Expected, make: _Make) -> Finding:
    dropping = expected.full == "drop"
    how = (
        "A PUSH never drops: at a full queue send() blocks, or with NOBLOCK refuses."
        if one.socket_type == "PULL"
        else "No number is missing, so the publisher waited: XPUB_NODROP with a send() that blocks. One slow "
        "subscriber then holds back all."
    )
    how += " A store in between that gives out no more than the feed's own rate looks the same from here."
    if one.socket_type == "PULL" and one.stalled is not None and one.stalled.lost is None:
        how += " Whether its program blocked or dropped what was refused cannot be told without numbers."
    return make(
        "sender_waits",
        "The sender waits for a slow receiver"
        + (", where drops were expected." if dropping else "; its rate follows ours."),
        how,
        "To drop instead: a PUB, or NOBLOCK with the refusals counted after a refresh and a second try (a sink does "
        "that with noblock=true)."
        if dropping
        else "Nothing, if the sender may stand still that long.",
        note=not dropping,
    )


def _of_mark(one: Examined, stalled: Stalled, expected: Expected, make: _Make) -> Iterator[Finding]:
    meant, marks = expected.hwm, stalled.marks
    if meant is None:
        if marks is not None and stalled.held is not None and stalled.held > _HIDDEN * marks.high:
            yield _buffers_hide(marks.high, stalled, make)
        return
    if marks is not None and marks.expected_fits is False and not marks.low <= meant <= marks.high:
        yield _not_in_effect(one, meant, marks, make)
    elif marks is not None and stalled.held is not None and stalled.held > _HIDDEN * meant:
        yield _buffers_hide(meant, stalled, make)
    elif marks is None:
        # What was sent during the stall came, and must have been somewhere.
        somewhere = min(stalled.received, round(stalled.rate * stalled.seconds))
        if stalled.outcome == "all" and somewhere > 1.2 * (meant + stalled.beyond):
            yield _more_than_mark(one, meant, somewhere, stalled, expected, make)
        else:
            yield make(
                "mark_cannot_be_told",
                f"Whether the sender's mark is {meant:,} cannot be told from this stall.",
                "Only where numbers are missing in a row does it show where the queue ended: not with a sender that "
                "waits, without numbers, in a stall that the chain sees through, or if the connection broke.",
                "A longer --stall; number the messages; or try the same sockets out with zmq-datasource hwm.",
                note=True,
            )


def _not_in_effect(one: Examined, meant: int, marks: Marks, make: _Make) -> Finding:
    default = marks.default_fits and meant != DEFAULT_MARK
    proxy = (
        " The peer is an XPUB, as a proxy's backend is: then it is the proxy's mark that counts here."
        if one.glance.socket_type == "XPUB"
        else ""
    )
    return make(
        "mark_not_in_effect",
        f"The sender's mark is not {meant:,}; {_range(marks)} explains what it held"
        + (", and so libzmq's default of 1000." if default else "."),
        "It was set after bind or connect, where libzmq takes it without a word and gives new peers the old one; or on "
        "the wrong socket (RCVHWM at the sender, SNDHWM at the receiver, another socket of the program)."
        + proxy,
        "Set SNDHWM on the sending socket before its bind and connect. To see which: getsockopt(SNDHWM) tells what was "
        "set, not what the connections have; only the order in the program, or this measurement, tells that.",
    )


def _buffers_hide(mark: int, stalled: Stalled, make: _Make) -> Finding:
    return make(
        "buffers_hide_the_mark",
        f"The chain holds {(stalled.held or 0) / mark:,.0f} times the mark: the system's buffers do.",
        f"Beside the marks, up to {stalled.beyond:,} messages are in the kernel's buffers, in libzmq's batches and "
        "in our own queue; no mark bounds them. Messages get as old as that while the receiver is slow.",
        "If the mark is to decide: zmq.sndbuf at the sender, and zmq.rcvbuf at the receiver, to small values, before "
        "bind and connect.",
        note=True,
    )


def _more_than_mark(
    one: Examined, meant: int, somewhere: int, stalled: Stalled, expected: Expected, make: _Make
) -> Finding:
    pull = one.socket_type == "PULL"
    return make(
        "held_outside_the_mark",
        f"About {somewhere:,} messages were held; a mark of {meant:,} with all buffers holds "
        f"{meant + stalled.beyond:,} at most.",
        "Something holds messages that the mark does not govern: a proxy or broker with a store or queues of its "
        "own, a list in the sender's program, a mark of 0 (no limit), or one set late or on another socket; or the "
        "sender waited and caught up afterwards. Which of these cannot be told from outside.",
        "Watch the sender's memory during a stall; look for the order of SNDHWM and bind; stall the publisher itself "
        "(--upstream) if a proxy is in between. What must survive a crash belongs into a log, not into a queue.",
        note=pull and expected.full != "drop",
    )


def _evidence(stalled: Stalled) -> str:
    words = [
        f"took nothing for {stalled.seconds:g} s at about {stalled.rate:,.0f}/s with rcvhwm {stalled.rcvhwm}",
        f"then {stalled.received:,} messages came of about {stalled.expected:,} sent by that rate",
    ]
    if stalled.lost is not None:
        words.append(f"{stalled.lost:,} numbers are missing")
    if stalled.held is not None:
        words.append(f"{stalled.held:,} had been held for us")
    if stalled.kernel_bytes is not None:
        whose = "both sides'" if stalled.measured else "our side's"
        words.append(f"{stalled.kernel_bytes:,} bytes in {whose} kernel buffers")
    if not stalled.measured:
        words.append("the peer's buffers are not visible from here: up to 4 MiB are assumed")
    return "; ".join(words)


def of_chain(examined: Sequence[Examined]) -> Iterator[Finding]:
    """What the two sides of a proxy show side by side."""
    above = [one for one in examined if one.role == "upstream" and _marks(one) is not None]
    for feed in (one for one in examined if one.role == "feed"):
        here = _marks(feed)
        for publisher in above:
            there = _marks(publisher)
            if here is None or there is None or (here.low <= there.high and there.low <= here.high):
                continue
            assert feed.stalled is not None
            assert publisher.stalled is not None
            yield Finding(
                id="proxy_hides_the_mark",
                severity=Severity.WARNING,
                endpoint=feed.endpoint,
                what="A subscriber behind the proxy does not meet the publisher's mark, but the proxy's.",
                evidence=f"at the publisher {publisher.endpoint} a mark of {_range(there)} explains what a stall held "
                f"({publisher.stalled.held or 0:,}), here one of {_range(here)} ({feed.stalled.held or 0:,})",
                cause="The proxy takes what the publisher sends whatever its own subscribers do, so the publisher's "
                "queue never fills, and its mark and its drops say nothing about them.",
                fix="Set SNDHWM of the proxy's backend as it is meant for the subscribers, and XPUB_NODROP if the "
                "publisher is to feel them; count losses by numbers at the receiver.",
            )


def _marks(one: Examined) -> Marks | None:
    return None if one.stalled is None else one.stalled.marks


def _range(marks: Marks) -> str:
    return f"{marks.low:,}" if marks.low == marks.high else f"{marks.low:,} to {marks.high:,}"
