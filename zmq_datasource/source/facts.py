"""Facts about a receiver: its figures for monitoring, and the counters, totals and gaps that its log stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from zmq_datasource.counters import SourceCounters
from zmq_datasource.log import sections_of
from zmq_datasource.messages.rows import name_of
from zmq_datasource.sequences import Key, Totals, state


class SourceFacts(NamedTuple):
    """The figures of a source for monitoring, whether this process receives or another one.

    Attributes:
        counters: The counters of this process.
        receiver: The counters of the process that receives: this one or another; None until the log has them.
        received: The number of messages received in all. Monitoring takes the rate from its growth.
        receives: Whether this process receives.
        totals: The totals of the sequence tracker, such as lost messages; None if messages are not numbered.
        publishers: The number of known publishers; None if this process does not know it.
        gaps: The number of gaps in the table; None if this process does not know it.
    """

    counters: SourceCounters
    receiver: SourceCounters | None
    received: int
    receives: bool
    totals: Totals | None = None
    publishers: int | None = None
    gaps: int | None = None


def saved_sequences(sections: Mapping[str, msgspec.Raw]) -> state.SavedTracker | None:
    """Decode the tracker's part of a saved state; None if messages are not numbered."""
    saved = sections.get("sequences")
    return None if saved is None else msgspec.json.decode(saved, type=state.SavedTracker)


def read_gaps(saved: bytes) -> list[dict[str, Any]]:
    """Read the gap table of a log: a dictionary for each gap, oldest first.

    ``first`` and ``last`` are sequence numbers. ``messages`` is how many messages are missing. ``noticed`` is in
    microseconds since the epoch. Of ``publisher``, ``topic`` and ``endpoint``, a gap has only those by which messages
    are counted.

    Args:
        saved: The saved state of the log.
    """
    sequences = saved_sequences(sections_of(saved))
    if sequences is None:
        return []
    numbering = sequences.numbering
    return [
        {
            **names_of(numbering.by, gap.key),
            "epoch": gap.epoch,
            "first": gap.first,
            "last": gap.last,
            "messages": min(gap.size, 2**63 - 1),  # what a column of 64 bits can hold
            "noticed": gap.noticed,
        }
        for gap in sequences.gaps
    ]


def read_counters(saved: bytes) -> tuple[SourceCounters, Totals | None]:
    """Read the counters in a saved state, and the totals of its tracker (None if messages are not numbered)."""
    sections, counters = sections_of(saved), SourceCounters()
    if sections:
        counters.restore(msgspec.json.decode(sections["counters"]))
    sequences = saved_sequences(sections)
    return counters, None if sequences is None else sequences.totals


def names_of(by: Sequence[str], key: Key) -> dict[str, str]:
    """The names of a publisher's counter. ``by`` says what ``key`` consists of."""
    parts = (key,) if isinstance(key, bytes) else key
    return {name: name_of(part) for name, part in zip(by, parts, strict=True)}
