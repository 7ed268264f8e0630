"""What a tracker remembers, as plain data that survives the process.

A tracker restored from it goes on exactly as the one that was saved. A replay that runs ahead of the live flow is not
part of it: what was replayed is, and a new connection brings nothing twice.
"""

from __future__ import annotations

from dataclasses import fields

import msgspec

from zmq_datasource.options import Numbering
from zmq_datasource.sequences.gaps import Gap, Key
from zmq_datasource.sequences.records import Counter, Totals
from zmq_datasource.sequences.tracker import SequenceTracker

__all__ = ["SavedTracker", "restore", "restore_renamed", "save", "totals_of", "tracker_of"]


class SavedTracker(msgspec.Struct, frozen=True, rename="camel"):
    """What ``save`` makes; JSON has names in base64.

    Attributes:
        numbering: How the messages are counted that this is about.
        division: How the feed was divided among receivers.
        names, expected, counters: Of each counter, that not heard for longest first.
        gaps: Oldest first.
        next_gap: The serial of the next one.
    """

    numbering: Numbering
    division: str
    totals: dict[str, int]
    names: list[bytes | tuple[bytes, ...]]
    expected: list[int]
    counters: list[Counter]
    gaps: list[Gap]
    next_gap: int


def save(tracker: SequenceTracker) -> SavedTracker:
    """Everything, for an encoder to read at once: the tracker's own objects are in it, and no loop of Python's."""
    names = list(tracker.expected)
    return SavedTracker(
        numbering=tracker.numbering,
        division=tracker.division,
        totals=tracker.totals.to_json(),
        names=names,
        expected=tracker.next_numbers(),
        counters=list(map(tracker.counters.__getitem__, names)),
        gaps=list(tracker.gaps),
        next_gap=tracker.gaps.next_serial,
    )


def restore(tracker: SequenceTracker, saved: SavedTracker) -> None:
    """Fill a new tracker with what was saved, whose objects become its own."""
    tracker.expected = dict(zip(saved.names, saved.expected, strict=True))
    tracker.counters = dict(zip(saved.names, saved.counters, strict=True))
    tracker.totals = totals_of(saved)
    _restore_gaps(tracker, saved.gaps, saved.next_gap)


def tracker_of(saved: SavedTracker) -> SequenceTracker:
    """A tracker of what was saved, for who only reads it."""
    tracker = SequenceTracker(saved.numbering, max_counters=2**62, max_gaps=2**62)
    restore(tracker, saved)
    tracker.division = saved.division
    return tracker


def totals_of(saved: SavedTracker) -> Totals:
    """What was tracked in all; another release may count more."""
    known = {field.name for field in fields(Totals)}
    return Totals(**{name: value for name, value in saved.totals.items() if name in known})


def restore_renamed(tracker: SequenceTracker, saved: SavedTracker) -> bool:
    """Fill a new tracker with what another one has counted by endpoint and topic, or the other way round.

    vLLM's messages are counted in the one way with a replay and in the other without.

    Returns:
        Whether it was possible: each endpoint has one topic, and it is known.
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


def _restore_gaps(tracker: SequenceTracker, gaps: list[Gap], next_serial: int) -> None:
    since = {key: counter.since for key, counter in tracker.counters.items()}
    tracker.gaps.restore(gaps, next_serial, since)
