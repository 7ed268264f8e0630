"""What a tracker remembers, as plain data that survives the process: all of it, or what has changed.

``full`` is everything; ``delta`` is what has changed since the last ``full``, and can be taken any
number of times. A tracker restored from both goes on exactly as the one that was saved. A replay
that runs ahead of the live flow is not part of it: what was replayed is, and a new connection
brings nothing twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from zmq_datasource.options import Numbering
from zmq_datasource.sequences.gaps import Gap, Key
from zmq_datasource.sequences.records import Counter, Sample, Totals
from zmq_datasource.sequences.tracker import SequenceTracker

__all__ = ["delta", "full", "is_large", "numbering_of", "restore", "restore_renamed"]

# More changed counters than this, and than a quarter of all, are better saved in full.
_LARGE_DELTA = 4096


def full(tracker: SequenceTracker) -> dict[str, Any]:
    """Everything; what changes from now on is the next ``delta``."""
    tracker.changed.clear()
    tracker.removed.clear()
    tracker.gaps.forget_changes()
    return _data(tracker, tracker.expected, tracker.gaps, (), ())


def delta(tracker: SequenceTracker) -> dict[str, Any]:
    """What has changed since the last ``full``."""
    return _data(
        tracker,
        tracker.changed,
        [tracker.gaps.get(serial) for serial in sorted(tracker.gaps.changed)],
        sorted(tracker.removed),
        tracker.gaps.removed,
    )


def is_large(tracker: SequenceTracker) -> bool:
    """Whether a ``full`` is due."""
    changed = (
        len(tracker.changed) + len(tracker.removed) + len(tracker.gaps.changed) + len(tracker.gaps.removed)
    )
    return changed > _LARGE_DELTA and changed > (len(tracker.expected) + len(tracker.gaps)) // 4


def restore(
    tracker: SequenceTracker, base: Mapping[str, Any] | None, changes: Mapping[str, Any] | None
) -> None:
    """Fill a new tracker with what was saved: a ``full`` or none, and a ``delta`` of it or none."""
    gaps: dict[int, Gap] = {}
    for data in (base, changes):
        if data is None:
            continue
        for parts in data["removed"]:
            key = _key(parts)
            tracker.expected.pop(key, None)
            tracker.counters.pop(key, None)
        for parts, expected, floor, since, epoch, turn, ended, topic in data["counters"]:
            key = _key(parts)
            tracker.expected.pop(key, None)  # to the end: it was heard later
            tracker.expected[key] = expected
            tracker.counters[key] = Counter(
                floor, since, epoch, turn, ended, None if topic is None else _bytes(topic)
            )
        for parts, *sample in data.get("samples", ()):
            tracker.counters[_key(parts)].sample = Sample(*sample)
        division = data.get("division", "")
        for row in data["counters"]:
            tracker.counters[_key(row[0])].division = division
        for parts, *moved in data.get("moves", ()):
            counter = tracker.counters[_key(parts)]
            counter.moves, counter.division = moved
        for serial in data["removedGaps"]:
            gaps.pop(serial, None)
        for serial, parts, *numbers in data["gaps"]:
            gaps[serial] = Gap(serial, _key(parts), *numbers)
        tracker.totals = Totals(**data["totals"])
    if base is not None:
        tracker.gaps.base_serial = base["nextGap"]
    latest = changes or base
    if latest is not None:
        since = {key: counter.since for key, counter in tracker.counters.items()}
        tracker.gaps.restore(gaps.values(), latest["nextGap"], since)
    if changes is not None:
        # They are not in the last full, and belong to the next delta again.
        tracker.changed.update((_key(row[0]), None) for row in changes["counters"])
        tracker.removed.update(map(_key, changes["removed"]))
        tracker.gaps.changed.update(row[0] for row in changes["gaps"])
        tracker.gaps.removed.update(changes["removedGaps"])


def restore_renamed(tracker: SequenceTracker, other: SequenceTracker) -> bool:
    """Fill a new tracker with what another one has counted by endpoint and topic, or the other way round.

    vLLM's messages are counted in the one way with a replay and in the other without.

    Returns:
        Whether it was possible: each endpoint has one topic, and it is known.
    """
    kept, ours = other.numbering, tracker.numbering
    if (kept.start, kept.end) != (ours.start, ours.end) or "endpoint" not in kept.by:
        return False
    names: dict[Key, Key] = {}
    for key, counter in other.counters.items():
        if isinstance(key, tuple) and (kept.by, ours.by) == (("endpoint", "topic"), ("endpoint",)):
            names[key], counter.topic = key
        elif isinstance(key, bytes) and counter.topic is not None and ours.by == ("endpoint", "topic"):
            names[key] = (key, counter.topic)
        else:
            return False
    if len(set(names.values())) < len(names):
        return False
    for key in other.expected:
        tracker.expected[names[key]] = other.next_number(key)
        tracker.counters[names[key]] = other.counters[key]
    since = {key: counter.since for key, counter in tracker.counters.items()}
    gaps = [replace(gap, key=names[gap.key]) for gap in other.gaps if gap.key in names]
    tracker.gaps.restore(gaps, other.gaps.next_serial, since)
    tracker.totals = other.totals
    return True


def numbering_of(data: Mapping[str, Any]) -> Numbering:
    """How the messages were counted that this is about."""
    by, *rest = data["numbering"]
    return Numbering(tuple(by), *rest)


def _data(
    tracker: SequenceTracker,
    keys: Collection[Key],
    gaps: Iterable[Gap],
    removed: Iterable[Key],
    removed_gaps: Iterable[int],
) -> dict[str, Any]:
    samples = [(key, tracker.counters[key].sample) for key in keys]
    return {
        "numbering": list(tracker.numbering),
        "totals": tracker.totals.to_json(),
        "nextGap": tracker.gaps.next_serial,
        "counters": list(_counters(tracker, keys)),
        "samples": [(_parts(key), *sample) for key, sample in samples if sample is not None],
        **_moves(tracker, keys),
        "gaps": [
            (
                gap.serial,
                _parts(gap.key),
                gap.epoch,
                gap.first,
                gap.last,
                gap.noticed,
                gap.healed,
                gap.settled,
            )
            for gap in gaps
        ],
        "removed": [_parts(key) for key in removed],
        "removedGaps": sorted(removed_gaps),
    }


def _moves(tracker: SequenceTracker, keys: Iterable[Key]) -> dict[str, Any]:
    """Where the counters were heard last; of a feed that is not divided, nothing."""
    moves = [
        (_parts(key), counter.moves, counter.division)
        for key in keys
        if (counter := tracker.counters[key]).moves or counter.division != tracker.division
    ]
    return ({"division": tracker.division} if tracker.division else {}) | ({"moves": moves} if moves else {})


def _counters(tracker: SequenceTracker, keys: Iterable[Key]) -> Iterator[tuple[object, ...]]:
    for key in keys:
        counter = tracker.counters[key]
        topic = None if counter.topic is None else _text(counter.topic)
        facts = counter.floor, counter.since, counter.epoch, counter.turn, counter.ended
        yield _parts(key), tracker.next_number(key), *facts, topic


def _parts(key: Key) -> str | list[str]:
    return _text(key) if isinstance(key, bytes) else [_text(part) for part in key]


def _key(parts: str | list[str]) -> Key:
    return _bytes(parts) if isinstance(parts, str) else tuple(map(_bytes, parts))


# Names as they are where they are plain text, else in hex: JSON would make six bytes of a zero.


def _text(name: bytes) -> str:
    if name.isascii() and not name.startswith(b"0x"):
        text = name.decode("ascii")
        if text.isprintable():
            return text
    return f"0x{name.hex()}"


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text[2:]) if text.startswith("0x") else text.encode("ascii")
