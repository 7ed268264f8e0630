"""A tracker's state as plain data, which the log stores with each chunk.

A restored tracker continues exactly as the saved one would have. The saved state does not say that a replay is ahead of
the live flow: after a restart the live flow has a new connection, which does not repeat the replayed messages.
"""

from __future__ import annotations

from dataclasses import asdict, fields

import msgspec

from zmq_datasource.options import Numbering
from zmq_datasource.sequences.records import Counter, Gap, Key, Totals
from zmq_datasource.sequences.tracker import SequenceTracker


class SavedTracker(msgspec.Struct, frozen=True, rename="camel"):
    """The saved state. In JSON, names are base64.

    Attributes:
        numbering: How the messages are counted.
        names, expected, counters: An entry for each counter; the counter that was silent for longest is first.
        gaps: Oldest first.
        next_gap: The serial of the next gap.
    """

    numbering: Numbering
    totals: dict[str, int]
    names: list[bytes | tuple[bytes, ...]]
    expected: list[int]
    counters: list[Counter]
    gaps: list[Gap]
    next_gap: int


def save(tracker: SequenceTracker) -> SavedTracker:
    """Save the tracker's state.

    Needs no Python loop over counters: the result refers to the tracker's own objects. Encode it before the tracker's
    next call.
    """
    names = list(tracker.expected)
    return SavedTracker(
        numbering=tracker.numbering,
        totals=asdict(tracker.totals),
        names=names,
        expected=list(tracker.expected.values()),
        counters=list(map(tracker.counters.__getitem__, names)),
        gaps=list(tracker.gaps),
        next_gap=tracker.gaps.next_serial,
    )


def restore(tracker: SequenceTracker, saved: SavedTracker) -> None:
    """Fill a new tracker with a saved state. The tracker changes the saved objects from then on."""
    tracker.expected = dict(zip(saved.names, saved.expected, strict=True))
    tracker.counters = dict(zip(saved.names, saved.counters, strict=True))
    tracker.totals = totals_of(saved)
    since = {key: counter.since for key, counter in tracker.counters.items()}
    tracker.gaps.restore(saved.gaps, saved.next_gap, since)


def tracker_of(saved: SavedTracker) -> SequenceTracker:
    """Make a tracker without bounds from a saved state, to look things up in it."""
    tracker = SequenceTracker(saved.numbering, max_counters=2**62, max_gaps=2**62)
    restore(tracker, saved)
    return tracker


def totals_of(saved: SavedTracker) -> Totals:
    """The saved sums; without those that only another release counts."""
    known = {field.name for field in fields(Totals)}
    return Totals(**{name: value for name, value in saved.totals.items() if name in known})


def restore_renamed(tracker: SequenceTracker, saved: SavedTracker) -> bool:
    """Fill a tracker that counts by endpoint with the state of one that counted by endpoint and topic, or vice versa.

    With a replay, vLLM's messages are counted by endpoint alone; without one, by endpoint and topic.

    Returns:
        Whether that was possible: each endpoint must have one topic, which must be known.
    """
    kept, ours = saved.numbering, tracker.numbering
    if (kept.start, kept.end) != (ours.start, ours.end) or "endpoint" not in kept.by:
        return False
    names: dict[Key, Key] = {}
    for key, counter in zip(saved.names, saved.counters, strict=True):
        if isinstance(key, tuple) and (kept.by, ours.by) == (("endpoint", "topic"), ("endpoint",)):
            names[key], counter.topic = key
        elif isinstance(key, bytes) and counter.topic is not None and ours.by == ("endpoint", "topic"):
            names[key] = (key, counter.topic)
        else:
            return False
    if len(set(names.values())) < len(names):
        return False
    gaps = [gap for gap in saved.gaps if gap.key in names]
    for gap in gaps:
        gap.key = names[gap.key]
    restore(
        tracker,
        msgspec.structs.replace(saved, names=[names[key] for key in saved.names], gaps=gaps),
    )
    return True
