"""Taking nothing for a while, and a receiver that takes its time: what comes of it, measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from zmq_datasource.options import ReadOptions
from zmq_datasource.sequences import Gap
from zmq_datasource.workbench.doctor.facts import Consumed, Outcome, Stalled
from zmq_datasource.workbench.doctor.hwm import beyond, explain
from zmq_datasource.workbench.doctor.probe import Probe, receive_all
from zmq_datasource.workbench.experiment import wait_until

__all__ = ["STALL_RCVHWM", "consume", "held_before", "outcome_of", "stall"]

# A small queue of our own, so that the sender's shows.
STALL_RCVHWM = 10
_SETTLE_SECONDS = 0.4
_TURN_SECONDS = 0.02
# After a stall the rate is measured every so many seconds; so many messages must have been possible in them.
_LEAST_AFTER, _MOST_AFTER, _AFTER_MESSAGES = 0.3, 3.0, 10
_MOST_DRAIN, _MOST_MESSAGES = 15.0, 1_000_000
# Up to this many times its rate a feed is as it was before.
_AS_BEFORE = 1.3
# Up to this many times, if it varies by no more than this from one window to the next; and beyond if it does so for
# long: the rate that was seen before was not the usual one.
_NEAR, _STEADY, _LONG_STEADY = 2.0, 0.2, 3
# A queue with no more than this is empty but for what is live.
_EMPTY_SHARE, _EMPTY_BYTES = 0.2, 16384
# Fewer messages than these say nothing.
_LEAST_MESSAGES = 20
# Rates vary: fewer is what lacks this share of the stall's messages, and of those that came while all was taken.
_LACKING, _LACKING_AFTER = 0.3, 0.05
# What is missing in a row for less than this was dropped in a burst, not because the queue was full.
_FULL_SECONDS = 0.05


def stall(
    options: ReadOptions,
    given: Mapping[str, str],
    watched: Probe,
    rate: float,
    seconds: float,
    wait: float,
    expected: int | None,
) -> Stalled | None:
    """Take nothing on a connection of its own for ``seconds``, then all; None if nothing came at first.

    Args:
        options, given: As of ``Probe``, with the RCVHWM of the stall.
        watched: What came before, for the framing and the sizes.
        rate: Messages that were sent a second, the missing ones included.
        wait: Seconds to wait for the connection and its first message.
        expected: The sender's high-water mark that the user meant.
    """
    with Probe(options, given, watched.framing, by_place=True) as probe:
        receive_all([probe], wait, until=lambda: probe.messages > 0)
        if not probe.messages:
            return None
        receive_all([probe], _SETTLE_SECONDS)
        receive_all([probe], _MOST_AFTER, until=lambda: not probe.waiting)
        probe.flush()
        before = probe.messages
        assert probe.numbered is not None
        counters = len(probe.numbered.newest())
        began = time.monotonic()
        while (left := began + seconds - time.monotonic()) > 0:
            time.sleep(min(_TURN_SECONDS, left))
            probe.keep_alive()
        ours, theirs = probe.kernel_bytes()
        after, rate_after = _take_all(probe, rate, (ours or 0) + (theirs or 0))
        probe.flush()
        broken = probe.disconnects > 0
        received, gaps = (
            probe.messages - before,
            [gap for gap in probe.numbered.gaps if gap.noticed >= before],
        )
    lost = sum(gap.size for gap in gaps) if counters else None
    live = rate_after * after
    outcome = outcome_of(received, lost, rate, seconds, live)
    held = held_before(gaps, before, rate / max(1, counters)) if outcome == "dropped" else None
    marks = None
    if held is not None and not broken:
        marks = explain(held, before, options.rcvhwm, watched.wire_bytes, ours, theirs, expected)
    return Stalled(
        outcome=outcome,
        seconds=seconds,
        rcvhwm=options.rcvhwm,
        rate=round(rate, 1),
        expected=round(rate * seconds + live),
        received=received,
        lost=lost,
        held=held,
        kernel_bytes=None if ours is None else ours + (theirs or 0),
        measured=theirs is not None,
        beyond=beyond(options.rcvhwm, watched.wire_bytes, ours, theirs)[1],
        marks=marks,
    )


def _take_all(probe: Probe, rate: float, kernel_bytes: int) -> tuple[float, float]:
    """Take what was held, and some that come live after it; how many seconds that took, and the rate at its end.

    It is all there when the kernel's queues, which had ``kernel_bytes``, have emptied, and about the feed's own
    rate comes (a store gives its backlog out slowly), or a rate that does not change any more.
    """
    first, began = probe.messages, time.monotonic()
    window = min(_MOST_AFTER, max(_LEAST_AFTER, _AFTER_MESSAGES / rate))
    window_end, window_began_with = began + window, first
    rate_now, rate_before, steady = rate, 0.0, 0
    while (now := time.monotonic()) < began + _MOST_DRAIN and probe.messages - first < _MOST_MESSAGES:
        probe.receive()
        if now < window_end:
            continue
        rate_now = (probe.messages - window_began_with) / (now - window_end + window)
        steady = steady + 1 if abs(rate_now - rate_before) <= _STEADY * rate_now else 0
        settled = steady >= (1 if rate_now <= _NEAR * rate else _LONG_STEADY)
        waiting = sum(figure or 0 for figure in probe.kernel_bytes())
        emptied = waiting <= max(_EMPTY_SHARE * kernel_bytes, _EMPTY_BYTES)
        if emptied and (settled or rate_now <= _AS_BEFORE * rate):
            break
        window_end, window_began_with, rate_before = now + window, probe.messages, rate_now
    return time.monotonic() - began, rate_now


def outcome_of(received: int, lost: int | None, rate: float, seconds: float, live: float) -> Outcome:
    """What a stall tells of its sender.

    Args:
        received: Messages that came since the stall began.
        lost: Of these the missing ones; None if they have no numbers.
        rate: Messages a second before it.
        live: Messages that were sent after it, until all was taken.
    """
    if rate * seconds < _LEAST_MESSAGES or received + (lost or 0) < _LEAST_MESSAGES:
        return "idle"
    if lost:
        return "dropped"
    lacking = _LACKING * rate * seconds + _LACKING_AFTER * live
    return "fewer" if rate * seconds + live - received >= max(lacking, _LEAST_MESSAGES) else "all"


def held_before(gaps: Sequence[Gap], before: int, rate: float) -> int | None:
    """How many messages were held for us before the queue was full; None if no gap is long enough to show it.

    Args:
        gaps: Of the stall, each noticed at the place of a message.
        before: The place of the first message that came after the stall.
        rate: Messages a second of one counter.
    """
    largest = max((gap.size for gap in gaps), default=0)
    if largest < max(3, rate * _FULL_SECONDS):
        return None
    # Each counter has a gap of its own, of about the same length: the first of them.
    return min(gap.noticed for gap in gaps if gap.size >= largest / 2) - before


def consume(probe: Probe, each: float, seconds: float) -> Consumed:
    """Take ``each`` seconds for a message, for ``seconds``; what is lost meanwhile is seen when all is taken."""
    lost_before, taken = probe.lost, 0
    began = time.monotonic()
    free_since_half = False
    while (now := time.monotonic()) < began + seconds:
        free_since_half |= now > began + seconds / 2 and not probe.waiting
        if came := probe.receive(1):
            taken += came
            wait_until(now + each)
    elapsed = time.monotonic() - began
    ours, theirs = probe.kernel_bytes()
    receive_all([probe], _LEAST_AFTER)
    receive_all([probe], _MOST_AFTER, until=lambda: not probe.waiting)
    return Consumed(
        each=each,
        seconds=round(elapsed, 3),
        messages=taken,
        lost=probe.lost - lost_before,
        behind=taken > 0 and not free_since_half,
        queued=None if ours is None else ours + (theirs or 0),
    )
