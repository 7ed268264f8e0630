"""A tracker's state as plain data, which the log stores with each chunk.

A restored tracker continues exactly as the saved one would have, with new connections.
"""

from __future__ import annotations

import msgspec

from zmq_datasource.options import Numbering
from zmq_datasource.sequences.records import Counter, Gap, Totals
from zmq_datasource.sequences.tracker import SequenceTracker


class SavedTracker(msgspec.Struct, frozen=True, rename="camel"):
    """The saved state. In JSON, names are base64.

    Attributes:
        numbering: How the messages are counted.
        names, expected, counters: An entry for each counter; the counter that was silent for longest is first.
        gaps: Oldest first.
    """

    numbering: Numbering
    totals: Totals
    names: list[bytes | tuple[bytes, ...]]
    expected: list[int]
    counters: list[Counter]
    gaps: list[Gap]


def save(tracker: SequenceTracker) -> SavedTracker:
    """Save the tracker's state.

    Needs no Python loop over counters: the result refers to the tracker's own objects. Encode it before the tracker's
    next call.
    """
    names = list(tracker.expected)
    return SavedTracker(
        numbering=tracker.numbering,
        totals=tracker.totals,
        names=names,
        expected=list(tracker.expected.values()),
        counters=list(map(tracker.counters.__getitem__, names)),
        gaps=list(tracker.gaps),
    )


def restore(tracker: SequenceTracker, saved: SavedTracker) -> None:
    """Fill a new tracker with a saved state. The tracker changes the saved objects from then on."""
    tracker.expected = dict(zip(saved.names, saved.expected, strict=True))
    tracker.counters = dict(zip(saved.names, saved.counters, strict=True))
    tracker.totals = saved.totals
    for gap in saved.gaps:
        tracker.gaps.add(gap)
