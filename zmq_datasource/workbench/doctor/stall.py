"""Taking nothing for a while, and a receiver that takes its time: what comes of it, measured."""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq

from zmq_datasource.messages.raw import RawMessage
from zmq_datasource.options import ReadOptions
from zmq_datasource.workbench.doctor.facts import Consumed, Outcome, Stalled
from zmq_datasource.workbench.doctor.hwm import beyond, explain
from zmq_datasource.workbench.doctor.link import ROUND, TURN_MS, Link
from zmq_datasource.workbench.doctor.watcher import Key, SequenceWatcher
from zmq_datasource.workbench.doctor.watching import Watching, size_of
from zmq_datasource.workbench.experiment import wait_until

__all__ = ["STALL_RCVHWM", "consume", "measure_stall", "stall"]

# A small queue of our own, so that the sender's shows.
STALL_RCVHWM = 10
_SETTLE_SECONDS = 0.4
_TURN_SECONDS = 0.02
# After a stall the rate is looked at every so many seconds; so many messages must have been possible in them.
_LEAST_AFTER, _MOST_AFTER, _AFTER_MESSAGES = 0.3, 3.0, 10
_MOST_DRAIN = 15.0
# Up to this many times its rate a feed is as it was before.
_AS_BEFORE = 1.3
# Up to this many times, if it varies by no more than this from one look to the next; and beyond if it does so for long:
# the rate that was seen before was not the usual one.
_NEAR, _STEADY, _LONG_STEADY = 2.0, 0.2, 3
# A queue with no more than this is empty but for what is live.
_EMPTY_SHARE, _EMPTY_BYTES = 0.2, 16384
_MOST_KEPT = 1_000_000
_MOST_KEPT_BYTES = 512 << 20
# Fewer messages than these say nothing.
_LEAST_MESSAGES = 20
# Rates vary: fewer is what lacks this share of the stall's messages, and of those that came while all was taken.
_LACKING, _LACKING_AFTER = 0.3, 0.05
# What is missing in a row for less than this was dropped in a burst, not because the queue was full.
_FULL_SECONDS = 0.05


def stall(
    options: ReadOptions, seconds: float, wait: float, watched: Watching, expected: int | None
) -> Stalled | None:
    """Take nothing on a connection of its own for ``seconds``, then all; None if nothing came at first.

    Args:
        options: With one endpoint, the framing that was found, and the RCVHWM of the stall.
        wait: Seconds to wait for the connection and its first message.
        watched: What came before, for the rate and the sizes.
        expected: The sender's high-water mark that the user meant.
    """
    watcher = SequenceWatcher(options)
    with Link(options) as link:
        if not link.shake_hands(wait) or not link.socket.poll(round(wait * 1000)):
            return None
        before = 0
        settled = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < settled:
            link.socket.poll(TURN_MS)
            taken = link.receive()
            watcher.follow(taken)
            before += len(taken)
        while (taken := link.receive()) and time.monotonic() < settled + _MOST_AFTER:
            watcher.follow(taken)
            before += len(taken)
        began = time.monotonic()
        while (left := began + seconds - time.monotonic()) > 0:
            time.sleep(min(_TURN_SECONDS, left))
            link.socket.getsockopt(zmq.EVENTS)  # a SUB keeps its subscriptions only while it is touched
        ours, theirs = link.kernel_bytes()
        messages, after, rate_after = _drain(link, watched.published_rate, (ours or 0) + (theirs or 0))
        broken = link.disconnects > 0
    last = dict(watcher.last)
    numbered = watcher.follow(messages)
    outcome, promised, lost, held = measure_stall(
        numbered if watcher.tracker is not None and last else None,
        last,
        len(messages),
        watched.published_rate,
        seconds,
        rate_after * after,
    )
    marks = None
    if held is not None and not broken:
        marks = explain(held, before, options.rcvhwm, watched.wire_bytes, ours, theirs, expected)
    return Stalled(
        outcome=outcome,
        seconds=seconds,
        rcvhwm=options.rcvhwm,
        rate=round(watched.published_rate, 1),
        expected=promised,
        received=len(messages),
        lost=lost,
        held=held,
        kernel_bytes=None if ours is None else ours + (theirs or 0),
        measured=theirs is not None,
        beyond=beyond(options.rcvhwm, watched.wire_bytes, ours, theirs)[1],
        marks=marks,
    )


def _drain(link: Link, rate: float, kernel_bytes: int) -> tuple[list[RawMessage], float, float]:
    """What was held, and some that come live after it; how many seconds that took, and the rate at its end.

    It is all there when the kernel's queues, which had ``kernel_bytes``, have emptied, and about the feed's own
    rate comes (a store gives its backlog out slowly), or a rate that does not change any more.
    """
    messages: list[RawMessage] = []
    size = 0
    began = time.monotonic()
    window = min(_MOST_AFTER, max(_LEAST_AFTER, _AFTER_MESSAGES / rate))
    window_end, window_began_with = began + window, 0
    rate_now, rate_before, steady = rate, 0.0, 0
    while (now := time.monotonic()) < began + _MOST_DRAIN:
        taken = link.receive()
        messages += taken
        size += size_of(taken)
        if len(messages) >= _MOST_KEPT or size >= _MOST_KEPT_BYTES:
            break
        if now >= window_end:
            rate_now = (len(messages) - window_began_with) / (now - window_end + window)
            steady = steady + 1 if abs(rate_now - rate_before) <= _STEADY * rate_now else 0
            settled = steady >= (1 if rate_now <= _NEAR * rate else _LONG_STEADY)
            waiting = sum(figure or 0 for figure in link.kernel_bytes())
            emptied = waiting <= max(_EMPTY_SHARE * kernel_bytes, _EMPTY_BYTES)
            if emptied and (settled or rate_now <= _AS_BEFORE * rate):
                break
            window_end, window_began_with, rate_before = now + window, len(messages), rate_now
        if not taken:
            link.socket.poll(TURN_MS)
    return messages, time.monotonic() - began, rate_now


def measure_stall(
    numbered: Sequence[tuple[Key, int]] | None,
    last: dict[Key, int],
    received: int,
    rate: float,
    seconds: float,
    live: float,
) -> tuple[Outcome, int, int | None, int | None]:
    """What a stall tells: outcome, messages promised by the rate, lost, and held before the first missing.

    Args:
        numbered: Counters and numbers in the order in which they came; None if there are none.
        last: The last number of each counter before it.
        received: Messages that came since.
        rate: Messages a second before it.
        live: Messages that were sent after it, until all was taken.
    """
    promised = round(rate * seconds + live)
    lost, held = None, None
    if numbered is not None:
        expected, gaps = {key: number + 1 for key, number in last.items()}, []
        for place, (key, number) in enumerate(numbered):
            missing = number - expected.get(key, number)
            if missing > 0:
                gaps.append((missing, place))
            expected[key] = number + 1
        lost = sum(missing for missing, _ in gaps)
        largest = max((missing for missing, _ in gaps), default=0)
        if largest >= max(3, rate * _FULL_SECONDS / max(1, len(last))):
            # Each counter has a gap of its own, of about the same length: the first of them.
            held = next(place for missing, place in gaps if missing >= largest / 2)
    if rate * seconds < _LEAST_MESSAGES or received + (lost or 0) < _LEAST_MESSAGES:
        return "idle", promised, lost, None
    if lost:
        return "dropped", promised, lost, held
    lacking = _LACKING * rate * seconds + _LACKING_AFTER * live
    if promised - received >= max(lacking, _LEAST_MESSAGES):
        return "fewer", promised, lost, None
    return "all", promised, lost, None


def consume(link: Link, watched: Watching, each: float, seconds: float) -> Consumed:
    """Take ``each`` seconds for a message, for ``seconds``; what is lost meanwhile is seen when all is taken."""
    lost_before, taken = watched.lost, 0
    began = time.monotonic()
    free_since_half = False
    while (now := time.monotonic()) < began + seconds:
        link.update()
        if not link.socket.poll(0):
            free_since_half = free_since_half or now > began + seconds / 2
            link.socket.poll(TURN_MS)
            continue
        taken += watched.take(1)
        wait_until(now + each)
    ours, theirs = link.kernel_bytes()
    elapsed = time.monotonic() - began
    end = time.monotonic() + _MOST_AFTER
    quiet = time.monotonic() + _LEAST_AFTER
    while (now := time.monotonic()) < end:
        more = watched.take()
        if more < ROUND and now > quiet:
            break
        if not more:
            link.socket.poll(TURN_MS)
    return Consumed(
        each=each,
        seconds=round(elapsed, 3),
        messages=taken,
        lost=watched.lost - lost_before,
        behind=taken > 0 and not free_since_half,
        queued=None if ours is None else ours + (theirs or 0),
    )
