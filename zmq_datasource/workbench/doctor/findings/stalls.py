"""What a stall showed: who drops, who waits, and which high-water mark is in effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zmq_datasource.workbench.doctor.facts import Examined, Expected, HwmRange, Stalled
from zmq_datasource.workbench.doctor.findings.finding import Case, Conditions
from zmq_datasource.workbench.doctor.hwm import DEFAULT_HWM

__all__ = ["CHAIN", "STALLS", "ChainCase", "StallCase", "chains"]

# So much more than the high-water mark must be held elsewhere, before that is worth a word.
_HIDDEN = 5
# A feed whose peak is so many times its rate may have had a pause just then.
_UNEVEN = 5


class StallCase(Case):
    """An endpoint that was stalled."""

    def __init__(self, one: Examined, stalled: Stalled, expected: Expected) -> None:
        self.endpoint, self.stalled, self.kind = one.endpoint, stalled, one.socket_type
        self.outcome, self.full = stalled.outcome, expected.full
        self.marks: Any = stalled.marks
        self.meant: Any = expected.hwm
        self.waited = self.outcome == "fewer" and (self.kind == "PULL" or stalled.lost is not None)
        self.uneven = one.traffic is not None and one.traffic.peak > _UNEVEN * one.traffic.rate
        self.peer = one.glance.socket_type

    @property
    def evidence(self) -> str:
        stalled = self.stalled
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

    @property
    def how_it_waits(self) -> str:
        how = (
            "A PUSH never drops: at a full queue send() blocks, or with NOBLOCK refuses."
            if self.kind == "PULL"
            else "No number is missing, so the publisher waited: XPUB_NODROP with a send() that blocks. One slow "
            "subscriber then holds back all."
        )
        how += " A store in between that gives out no more than the feed's own rate looks the same from here."
        if self.kind == "PULL" and self.stalled.lost is None:
            how += " Whether its program blocked or dropped what was refused cannot be known without numbers."
        return how

    # The high-water mark.

    @property
    def not_in_effect(self) -> bool:
        marks = self.marks
        return (
            self.meant is not None
            and marks is not None
            and marks.expected_fits is False
            and not marks.low <= self.meant <= marks.high
        )

    @property
    def range(self) -> str:
        return _range(self.marks)

    @property
    def and_so_default(self) -> str:
        default = self.marks.default_fits and self.meant != DEFAULT_HWM
        return ", and so libzmq's default of 1000" if default else ""

    @property
    def of_the_proxy(self) -> str:
        return (
            " The peer is an XPUB, as a proxy's backend is: then it is the proxy's high-water mark that counts here."
            if self.peer == "XPUB"
            else ""
        )

    @property
    def mark(self) -> int:
        return int(self.marks.high if self.meant is None else self.meant)

    @property
    def hidden(self) -> bool:
        held = self.stalled.held
        return self.marks is not None and held is not None and held > _HIDDEN * self.mark

    @property
    def times(self) -> float:
        return (self.stalled.held or 0) / self.mark

    @property
    def most(self) -> int:
        """What the high-water mark and all buffers hold."""
        return int(self.meant) + self.stalled.beyond

    @property
    def somewhere(self) -> int:
        """What was sent during the stall came, and must have been somewhere."""
        return min(self.stalled.received, round(self.stalled.rate * self.stalled.seconds))

    @property
    def overfull(self) -> bool:
        unexplained = self.meant is not None and self.marks is None and self.outcome == "all"
        return unexplained and self.somewhere > 1.2 * self.most


STALLS: Conditions = (
    {
        "stall_says_nothing": lambda c: c.outcome == "idle",
        "drops_where_waiting_was_expected": lambda c: c.outcome == "dropped" and c.full == "wait",
        "drops_counted": lambda c: c.outcome == "dropped",
        "sender_waits-unexpected": lambda c: c.waited and c.full == "drop",
        "sender_waits": lambda c: c.waited,
        "drops_uncounted-uneven": lambda c: c.outcome == "fewer" and c.uneven,
        "drops_uncounted": lambda c: c.outcome == "fewer",
        "no_drops_seen-sub": lambda c: c.outcome == "all" and c.full == "drop" and c.kind == "SUB",
        "no_drops_seen": lambda c: c.outcome == "all" and c.full == "drop",
    },
    {
        "mark_not_in_effect": lambda c: c.not_in_effect,
        "buffers_hide_the_mark": lambda c: c.hidden,
        "held_outside_the_mark-push": lambda c: c.overfull and c.kind == "PULL" and c.full != "drop",
        "held_outside_the_mark": lambda c: c.overfull,
        "mark_cannot_be_told": lambda c: c.meant is not None and c.marks is None,
    },
)


class ChainCase(Case):
    """A feed behind a proxy, and its publisher; a stall of each has shown a range of high-water marks."""

    def __init__(self, feed: Examined, here: Stalled, publisher: Examined, there: Stalled) -> None:
        assert here.marks is not None
        assert there.marks is not None
        self.endpoint, self.publisher, self.here, self.there = feed.endpoint, publisher.endpoint, here, there
        self.range_here, self.range_there = _range(here.marks), _range(there.marks)
        self.alike = here.marks.low <= there.marks.high and there.marks.low <= here.marks.high


def chains(examined: Sequence[Examined]) -> Iterator[ChainCase]:
    """Each feed with each publisher behind it, where a stall of both has shown one."""
    measured = [
        (one, one.stalled) for one in examined if one.stalled is not None and one.stalled.marks is not None
    ]
    for feed, here in measured:
        for publisher, there in measured:
            if feed.role == "feed" and publisher.role == "upstream":
                yield ChainCase(feed, here, publisher, there)


CHAIN: Conditions = (
    {
        "proxy_hides_the_mark": lambda c: not c.alike,
    },
)


def _range(marks: HwmRange) -> str:
    return f"{marks.low:,}" if marks.low == marks.high else f"{marks.low:,} to {marks.high:,}"
