"""What a log keeps of its receiver's knowledge, for who reads it without receiving: counters, totals and gaps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DamagedChunkError, LogFormatError
from zmq_datasource.host.printable import printable
from zmq_datasource.log.carried import Envelope
from zmq_datasource.log.state import read_saved_state
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.framing import name_of
from zmq_datasource.sequences import Key, SequenceTracker, Totals, state

__all__ = ["describe_key", "read_counters", "read_gaps", "states_beside", "tracker_of"]

_log = logging.getLogger(__name__)

# Characters of a name that a publisher chose.
_MOST_SHOWN = 200


def describe_key(by: Sequence[str], key: Key) -> str:
    """Name a counter of messages in words."""
    return " ".join(f"{name} '{printable(text, _MOST_SHOWN)}'" for name, text in _names(by, key).items())


def tracker_of(envelope: Envelope) -> SequenceTracker | None:
    """What a log partition keeps of publishers' numbers; None if its messages have none."""
    base, changes = envelope
    kept = (envelope.latest or {}).get("sequences")
    if kept is None:
        return None
    tracker = SequenceTracker(state.numbering_of(kept), max_counters=2**62, max_gaps=2**62)
    state.restore(tracker, base and base["sequences"], changes and changes["sequences"])
    tracker.division = kept.get("division", "")
    return tracker


def states_beside(storage: LogStorage, sync: bool) -> list[Envelope]:
    """What the other partitions of a log keep; other processes may write them at the same time.

    Args:
        storage: Of the partition that is left out.
        sync: Whether chunks are forced to the disk. If not, a state that a crash of the machine has torn is left out.

    Raises:
        LogError: One cannot be read.
    """
    found = []
    for partition in storage.partitions():
        if partition == storage.partition:
            continue
        try:
            saved = read_saved_state(storage.of(partition))
        except (DamagedChunkError, LogFormatError) as e:
            if sync:
                raise
            _log.error("%s. What that partition has kept of publishers' numbers is not taken over", e)
            continue
        found.append(Envelope.of(saved.full, saved.delta))
    return found


def read_gaps(
    full: bytes | None, delta: bytes | None, beside: Iterable[Envelope] = ()
) -> list[dict[str, Any]]:
    """The gap table that a log partition keeps: a dictionary a gap, oldest first.

    ``first``, ``last`` and ``messages`` are sequences and their number, ``noticed`` and ``healed``
    microseconds since the epoch; ``publisher``, ``topic`` and ``endpoint`` are None where the
    messages are not counted by them.

    Args:
        full, delta: The state of the partition.
        beside: Of the other partitions; an open gap is in the table of the partition that may still heal it.
    """
    tracker = tracker_of(Envelope.of(full, delta))
    if tracker is None:
        return []
    for other in filter(None, map(tracker_of, beside)):
        tracker.look_beside(other)
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


def read_counters(full: bytes | None, delta: bytes | None) -> tuple[SourceCounters, Totals | None]:
    """What a log's writer had counted; and tracked, if its messages have numbers."""
    latest = Envelope.of(full, delta).latest or {}
    counters = SourceCounters()
    counters.restore(latest.get("counters", {}))
    kept = latest.get("sequences")
    if kept is None:
        return counters, None
    known = {field.name for field in fields(Totals)}  # another release may count more
    return counters, Totals(**{name: value for name, value in kept["totals"].items() if name in known})


def _names(by: Sequence[str], key: Key) -> dict[str, str]:
    parts = (key,) if isinstance(key, bytes) else key
    return {name: name_of(part) for name, part in zip(by, parts, strict=True)}
