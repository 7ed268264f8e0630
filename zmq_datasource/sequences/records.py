"""The data of a tracker: the state of each counter, the gaps, the sums, and the findings about one call's messages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec
import xxhash

from zmq_datasource.counters import counted, state

# Names a counter: the bytes that its messages are counted by (a topic, for example), or a tuple if there are several.
Key: TypeAlias = bytes | tuple[bytes, ...]


class Gap(msgspec.Struct, array_like=True, eq=False):
    """The positions ``first`` to ``last`` of one epoch of a counter: all missing, or all healed.

    Attributes:
        serial: The number of this row; rows are numbered in the order of their creation.
        noticed: When the gap was found, in microseconds since the epoch.
        healed: When the last of the messages arrived, in microseconds since the epoch; None while they are missing.
        final: Whether no replay will bring these messages any more.
    """

    serial: int
    key: Key
    epoch: int
    first: int
    last: int
    noticed: int
    healed: int | None = None
    final: bool = False

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def _first(gap: Gap) -> int:
    return gap.first


class GapTable:
    """The table of gaps: numbers that are missing, and numbers that were missing and arrived late. Bounded.

    It has the gaps of all counters, oldest first, and the gaps in each counter's present epoch, by position.

    Attributes:
        next_serial: The serial that the next row will have.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[int, Gap] = {}
        self._present: dict[Key, list[Gap]] = {}
        self.next_serial = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Gap]:
        return iter(self._rows.values())

    def missing(self, key: Key) -> list[Gap]:
        """List the open gaps in a counter's present epoch, in order."""
        return [gap for gap in self._present.get(key, ()) if gap.healed is None]

    def find(self, key: Key, position: int) -> Gap | None:
        """Find the open gap that has this position; None if there is none."""
        gaps = self._present.get(key)
        if not gaps:
            return None
        at = bisect_right(gaps, position, key=_first) - 1
        gap = gaps[at] if at >= 0 else None
        return gap if gap is not None and gap.healed is None and position <= gap.last else None

    def add(self, key: Key, epoch: int, first: int, last: int, noticed: int) -> Gap:
        """Add a gap. It must be behind all other gaps of its counter."""
        gap = self._insert(Gap(self.next_serial, key, epoch, first, last, noticed))
        self._present.setdefault(key, []).append(gap)
        return gap

    def fill(self, gap: Gap, position: int, when: int) -> None:
        """Move the position of a message that arrived from an open gap to a healed row.

        The position joins the healed row beside it, if there is one. The rest of the gap stays open.
        """
        gaps = self._present[gap.key]
        at = bisect_right(gaps, gap.first, key=_first) - 1
        before = gaps[at - 1] if at > 0 else None
        after = gaps[at + 1] if at + 1 < len(gaps) else None
        if before is not None and (before.healed is None or before.last != position - 1):
            before = None
        if after is not None and (after.healed is None or after.first != position + 1):
            after = None
        behind = (position + 1, gap.last)
        gap.last = position - 1
        pieces: list[Gap] = [gap] if gap.size else []
        if before is not None:
            before.last, before.healed = position, when
            if after is not None:
                before.last = after.last
                gaps.pop(at + 1)
                self._remove(after)
        elif after is not None:
            after.first, after.healed = position, when
        else:
            healed = Gap(self.next_serial, gap.key, gap.epoch, position, position, gap.noticed, when)
            pieces.append(self._insert(healed))
        if behind[0] <= behind[1]:
            rest = Gap(self.next_serial, gap.key, gap.epoch, *behind, gap.noticed, None, gap.final)
            pieces.append(self._insert(rest))
        if not gap.size:
            self._remove(gap)
        gaps[at : at + 1] = pieces

    def mark_final(self, gaps: Iterable[Gap]) -> None:
        """Mark gaps as final, because no replay will bring their messages any more."""
        for gap in gaps:
            if gap.serial in self._rows:
                gap.final = True

    def end_epoch(self, key: Key) -> None:
        """Keep a counter's gaps as they are from now on, because a new epoch begins or the counter is forgotten."""
        self._present.pop(key, None)

    def shrink(self) -> list[Gap]:
        """Forget the oldest rows beyond the limit.

        Returns:
            Those of them that were open, in the present epoch of their counter.
        """
        forgotten = []
        while len(self._rows) > self._limit:
            gap = next(iter(self._rows.values()))
            present = self._present.get(gap.key, [])
            if gap in present:
                present.remove(gap)
                if gap.healed is None:
                    forgotten.append(gap)
            self._remove(gap)
        return forgotten

    def restore(self, gaps: Iterable[Gap], next_serial: int, since: Mapping[Key, int]) -> None:
        """Replace all rows by saved ones.

        Args:
            since: For each counter, the serial from which on its rows belong to the present epoch.
        """
        self._rows = {gap.serial: gap for gap in sorted(gaps, key=lambda gap: gap.serial)}
        self.next_serial = next_serial
        for gap in sorted(self._rows.values(), key=_first):
            if gap.serial >= since.get(gap.key, next_serial):
                self._present.setdefault(gap.key, []).append(gap)

    def _insert(self, gap: Gap) -> Gap:
        self._rows[gap.serial] = gap
        self.next_serial += 1
        return gap

    def _remove(self, gap: Gap) -> None:
        del self._rows[gap.serial]


@dataclass
class Totals:
    """The sums of all counters since the log began."""

    lost: int = state(
        "messagesLost",
        "messages",
        "The number of numbered messages that are missing now. A message that comes late or by a replay is not missing "
        "any more.",
        numbered=True,
    )
    late: int = counted(
        "messagesLate",
        "messages",
        "The number of messages that came after a message with a higher sequence, and were kept.",
        "log",
        numbered=True,
    )
    healed: int = counted(
        "messagesHealed",
        "messages",
        "The number of messages that filled a gap, by themselves or by a replay.",
        "log",
        numbered=True,
    )
    duplicates: int = counted(
        "messagesDuplicate",
        "messages",
        "The number of messages whose sequence had come before.",
        "log",
        numbered=True,
    )
    overlapping: int = counted(
        "messagesOverlapping",
        "messages",
        "The number of messages that were left out because a replay had brought them a moment before.",
        "log",
        numbered=True,
    )
    restarts: int = counted(
        "publisherRestarts", "times", "How often a publisher has started again.", "log", numbered=True
    )
    forgotten: int = counted(
        "publishersForgotten",
        "publishers",
        "The number of counters that were forgotten because there were more than `maxPublishers`. Counters of "
        "publishers that have announced their end are not included.",
        "log",
        numbered=True,
    )

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


class Sample(NamedTuple):
    """The number of a received message, and a digest of its value.

    A replay is compared with it: a publisher that has restarted has another message under this number, or none.
    """

    number: int
    digest: str

    @classmethod
    def of(cls, number: int, value: bytes) -> Sample:
        return cls(number, xxhash.xxh3_64_hexdigest(value))


class Counter(msgspec.Struct, array_like=True):
    """The state of one counter, besides the number that it expects.

    Attributes:
        floor: The first position for which the tracker knows whether it was received.
        since: The serial from which on rows in the table of gaps belong to the present epoch.
        epoch: The number of restarts so far.
        turn: The position of a number, less the number. It grows when the numbers wrap.
        ended: Whether the publisher has announced that it sends no more.
        topic: The topic of the latest message; for replays that do not repeat topics.
        sample: The latest message of the present epoch, where replays are compared with it.
    """

    floor: int
    since: int
    epoch: int = 0
    turn: int = 0
    ended: bool = False
    topic: bytes | None = None
    sample: Sample | None = None


@dataclass(slots=True)
class Ahead:
    """A replay is ahead of the live flow, which will bring the same messages once more.

    Attributes:
        connection: The live connection, which alone brings the messages again.
        position: From where on it may bring them: after the last message that it has brought.
    """

    connection: int
    position: int


@dataclass
class SequenceFindings:
    """What the tracker found in the messages of one call.

    Attributes:
        duplicates: The places, among these messages, of those whose number was received before.
        overlapping: The places of those that a replay had brought shortly before.
        gaps: New gaps.
        restarts: Counters whose publisher has restarted.
        abandoned: Older gaps that cannot be filled any more, because the publisher has restarted or the table of gaps
            is full.
    """

    duplicates: list[int] = field(default_factory=list)
    overlapping: list[int] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    restarts: list[Key] = field(default_factory=list)
    abandoned: list[Gap] = field(default_factory=list)
