"""Measure which messages a stalled or slow receiver gets, and which high-water mark of the sender explains a stall.

A sender's pipe takes a message while fewer than ``sndhwm`` are written and not known to be read. The sender learns in
steps of ``lwm = (sndhwm + 1) // 2`` how many messages have left the pipe, counted from the beginning of the connection.
The reader had taken ``before`` messages when it stopped, and ``beyond`` have left the sender's pipe since: into the
kernel's buffers on both sides, and into our own queue. So at the first refusal::

    before + held = sndhwm + lwm * floor((before + beyond) / lwm)

``held`` and ``before`` are counted. ``beyond`` is known within some messages if the kernel's queues can be read, and
otherwise assumed. A high-water mark explains what was seen if the equation holds for one of the possible ``beyond``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from zmq_datasource.options import ReadOptions
from zmq_datasource.sequences import Gap
from zmq_datasource.workbench.doctor.facts import DEFAULT_HWM, Consumed, HwmRange, Outcome, Stalled
from zmq_datasource.workbench.doctor.probe import Probe, receive_all
from zmq_datasource.workbench.experiment import wait_until

__all__ = ["STALL_RCVHWM", "beyond", "consume", "explain", "fits", "held_before", "outcome_of", "stall"]

# A small queue of our own, so that the sender's shows.
STALL_RCVHWM = 10
_SETTLE_SECONDS = 0.4
_TURN_SECONDS = 0.02
# After a stall the rate is measured in windows: the time for 10 messages at the earlier rate, within these seconds.
_LEAST_AFTER, _MOST_AFTER, _AFTER_MESSAGES = 0.3, 3.0, 10
_MOST_DRAIN, _MOST_MESSAGES = 15.0, 1_000_000
# After the held messages, a rate of at most this many times the earlier one is the feed's own rate again.
_AS_BEFORE = 1.3
# A higher rate is the feed's own, too, if it varies by no more than _STEADY from one window to the next: up to _NEAR
# times the earlier rate at once, and beyond that after _LONG_STEADY windows, because the earlier rate was unusual then.
_NEAR, _STEADY, _LONG_STEADY = 2.0, 0.2, 3
# A queue with no more than this has only new messages.
_EMPTY_SHARE, _EMPTY_BYTES = 0.2, 16384
# Fewer messages than these say nothing.
_LEAST_MESSAGES = 20
# Rates vary. The outcome is ``fewer`` only if this share is missing of the stall's messages, and this share of those
# that were sent while the held ones were taken.
_LACKING, _LACKING_AFTER = 0.3, 0.05
# Numbers that are missing in a row for less than this time were dropped in a burst, not because the queue was full.
_FULL_SECONDS = 0.05
# libzmq sends and reads in batches of 8 kB, on both sides, which no kernel's queue shows.
_BATCHES_BYTES = 2 * 8192
# The size to which Linux lets a send buffer grow by itself (the third figure of net.ipv4.tcp_wmem). If the peer's
# machine cannot be read, its send buffer is assumed to hold at most this.
_ASSUMED_BYTES = 4 << 20
_LEAST_SLACK = 2


def stall(
    options: ReadOptions,
    given: Mapping[str, str],
    watched: Probe,
    rate: float,
    seconds: float,
    wait: float,
    expected: int | None,
) -> Stalled | None:
    """Open a connection, take nothing on it for ``seconds``, and then take all. None if nothing came before the stall.

    Args:
        options, given: As of ``Probe``, with the RCVHWM of the stall.
        watched: An earlier probe of this endpoint, for the framing and the sizes.
        rate: Messages that are sent in a second, including the missing ones.
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
        marks = explain(held, before, options.rcvhwm, watched.tally.wire_bytes, ours, theirs, expected)
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
        beyond=beyond(options.rcvhwm, watched.tally.wire_bytes, ours, theirs)[1],
        marks=marks,
    )


def _take_all(probe: Probe, rate: float, kernel_bytes: int) -> tuple[float, float]:
    """Take the messages that were held, and some new ones after them.

    All held messages have come when the kernel's queues, which had ``kernel_bytes``, are empty, and messages come at
    about the feed's own rate or at a steady rate. (A store on the way sends its backlog slowly.)

    Returns:
        The seconds that this took, and the rate at its end.
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
        lost: How many messages of that time are missing; None if they have no numbers.
        rate: Messages a second before the stall.
        live: Messages that were sent after the stall, until all was taken.
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
        before: The place of the first message after the stall began: how many had come before.
        rate: Messages a second of one counter.
    """
    largest = max((gap.size for gap in gaps), default=0)
    if largest < max(3, rate * _FULL_SECONDS):
        return None
    # Each counter has a gap of its own, of about the same length. The queue was full at the first of them.
    return min(gap.noticed for gap in gaps if gap.size >= largest / 2) - before


def consume(probe: Probe, each: float, seconds: float) -> Consumed:
    """Imitate a receiver that takes ``each`` seconds for a message. After ``seconds``, take the rest, to see losses."""
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


# High-water marks.


def step(hwm: int) -> int:
    """libzmq's low-water mark: when so many more messages have left its queue, the sender learns it."""
    return (hwm + 1) // 2


def fits(hwm: int, held: int, before: int, low: int, high: int) -> bool:
    """Whether a high-water mark explains ``held``, if ``low`` to ``high`` messages are beyond the sender's pipe."""
    lwm = step(hwm)
    # The kernel is read, and the last message comes, at slightly different moments: some messages more or fewer.
    slack = max(_LEAST_SLACK, hwm // 50)
    heard = before + held - hwm  # the sender knew that so many had left, in whole steps
    least, most = math.ceil((heard - slack) / lwm), (heard + slack) // lwm
    return max(0, least, (before + low) // lwm) <= min(most, (before + high) // lwm)


def beyond(rcvhwm: int, wire_bytes: float, ours: int | None, theirs: int | None) -> tuple[int, int]:
    """How many messages are beyond the sender's pipe at the end of a stall, at least and at most."""
    low = rcvhwm + int(((ours or 0) + (theirs or 0)) / wire_bytes)
    high = low + int((_BATCHES_BYTES + (_ASSUMED_BYTES if theirs is None else 0)) / wire_bytes)
    return max(0, low - _LEAST_SLACK), high + _LEAST_SLACK


def explain(
    held: int,
    before: int,
    rcvhwm: int,
    wire_bytes: float,
    ours: int | None,
    theirs: int | None,
    expected: int | None,
) -> HwmRange | None:
    """The high-water marks that explain a stall; None if none does.

    Args:
        held: Messages that came after the stall and before the first missing one.
        before: Messages taken on this connection before the stall.
        rcvhwm: Of our socket.
        wire_bytes: Of one message, its frames' headers included.
        ours, theirs: Bytes in the kernel's queues at the end of the stall; None if unknown.
        expected: The high-water mark that the user meant.
    """
    low, high = beyond(rcvhwm, wire_bytes, ours, theirs)
    # Of a high-water mark at least half is free when a reader that keeps up stops: larger ones would have held more.
    possible = [hwm for hwm in range(1, 2 * held + 2) if fits(hwm, held, before, low, high)]
    if not possible:
        return None
    return HwmRange(
        low=possible[0],
        high=possible[-1],
        measured=theirs is not None,
        expected_fits=None if expected is None else expected in possible,
        default_fits=DEFAULT_HWM in possible,
    )
