"""What a log keeps of its receiver's knowledge, for who reads it without receiving: counters, totals and gaps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from zmq_datasource.counters import SourceCounters
from zmq_datasource.host.printable import printable
from zmq_datasource.log import LogStorage, read_saved_state, sections_of
from zmq_datasource.messages.rows import name_of
from zmq_datasource.sequences import Key, SequenceTracker, Totals, state

__all__ = ["describe_key", "read_counters", "read_gaps", "sequences_of", "states_beside", "tracker_of"]

_log = logging.getLogger(__name__)

# Characters of a name that a publisher chose.
_MOST_SHOWN = 200


def describe_key(by: Sequence[str], key: Key) -> str:
    """Name a counter of messages in words."""
    return " ".join(f"{name} '{printable(text, _MOST_SHOWN)}'" for name, text in _names(by, key).items())


def sequences_of(sections: Mapping[str, msgspec.Raw]) -> state.SavedTracker | None:
    """What a state tells of publishers' numbers; None if the messages have none."""
    kept = sections.get("sequences")
    return None if kept is None else msgspec.json.decode(kept, type=state.SavedTracker)


def tracker_of(saved: bytes) -> SequenceTracker | None:
    """The same of the state of a log partition, to be read."""
    sequences = sequences_of(sections_of(saved))
    return None if sequences is None else state.tracker_of(sequences)


def states_beside(storage: LogStorage) -> list[bytes]:
    """What the other partitions of a log keep; other processes may write them at the same time.

    Args:
        storage: Of the partition that is left out.

    Raises:
        LogError: One cannot be read.
    """
    others = [storage.of(partition) for partition in storage.partitions() if partition != storage.partition]
    return [read_saved_state(other) for other in others]


def read_gaps(saved: bytes, beside: Iterable[bytes] = ()) -> list[dict[str, Any]]:
    """The gap table that a log partition keeps: a dictionary a gap, oldest first.

    ``first``, ``last`` and ``messages`` are sequences and their number, ``noticed`` and ``healed``
    microseconds since the epoch; ``publisher``, ``topic`` and ``endpoint`` are None where the
    messages are not counted by them.

    Args:
        saved: The state of the partition.
        beside: Of the other partitions; an open gap is in the table of the partition that may still heal it.
    """
    tracker = tracker_of(saved)
    if tracker is None:
        return []
    for other in filter(None, map(tracker_of, beside)):
        tracker.learn_newer_counters(other)
    return [
        {
            **_names(tracker.numbering.by, gap.key),
            "epoch": gap.epoch,
            "first": tracker.number(gap.first),
            "last": tracker.number(gap.last),
            "messages": min(gap.size, 2**63 - 1),
            "noticed": gap.noticed,
            "healed": gap.healed,
        }
        for gap in tracker.gaps
    ]


def read_counters(saved: bytes) -> tuple[SourceCounters, Totals | None]:
    """What a log's writer had counted; and tracked, if its messages have numbers."""
    sections, counters = sections_of(saved), SourceCounters()
    if sections:
        counters.restore(msgspec.json.decode(sections["counters"]))
    sequences = sequences_of(sections)
    return counters, None if sequences is None else state.totals_of(sequences)


def _names(by: Sequence[str], key: Key) -> dict[str, str]:
    parts = (key,) if isinstance(key, bytes) else key
    return {name: name_of(part) for name, part in zip(by, parts, strict=True)}
