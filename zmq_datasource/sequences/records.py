"""The data of a tracker: the state of each counter, the gaps, the sums, and the findings about one call's messages."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from zmq_datasource.counters import counted, state

# Names a counter: the bytes that its messages are counted by (a topic, for example), or a tuple if there are several.
Key: TypeAlias = bytes | tuple[bytes, ...]


class Gap(msgspec.Struct, array_like=True, eq=False):
    """The numbers ``first`` to ``last`` of one epoch of a counter, all missing.

    Attributes:
        noticed: When the gap was found, in microseconds since the epoch.
        lost: Whether the loss is told (``onLoss``). False while a replay may bring the messages.
        past: Whether its epoch is over, or its counter forgotten, so that no message fills it any more.
    """

    key: Key
    epoch: int
    first: int
    last: int
    noticed: int
    lost: bool = False
    past: bool = False

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def _first(gap: Gap) -> int:
    return gap.first


class GapTable:
    """The table of gaps: the numbers that are missing. Bounded.

    It has the gaps of all counters, oldest first, and the gaps in each counter's present epoch, in order.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[int, Gap] = {}  # by identity
        self._present: dict[Key, list[Gap]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Gap]:
        return iter(self._rows.values())

    def missing(self, key: Key) -> list[Gap]:
        """List the gaps in a counter's present epoch, in order."""
        return list(self._present.get(key, ()))

    def find(self, key: Key, number: int) -> Gap | None:
        """Find the gap of the present epoch that has this number; None if there is none."""
        gaps = self._present.get(key)
        if not gaps:
            return None
        at = bisect_right(gaps, number, key=_first) - 1
        return gaps[at] if at >= 0 and number <= gaps[at].last else None

    def add(self, gap: Gap) -> None:
        """Add a gap."""
        self._rows[id(gap)] = gap
        if not gap.past:
            insort(self._present.setdefault(gap.key, []), gap, key=_first)

    def fill(self, gap: Gap, number: int) -> Gap | None:
        """Take the number of a message that arrived out of a gap of a present epoch.

        Returns:
            What is left behind the number, if this is a gap of its own now.
        """
        rest = None
        if gap.first < number < gap.last:
            rest = replace(gap, first=number + 1)
            self.add(rest)
            gap.last = number - 1
        elif number == gap.first < gap.last:
            gap.first += 1
        else:
            gap.last -= 1
        if not gap.size:
            self._present[gap.key].remove(gap)
            del self._rows[id(gap)]
        return rest

    def end_epoch(self, key: Key) -> list[Gap]:
        """Keep a counter's gaps as they are from now on, because a new epoch begins or the counter is forgotten."""
        gaps = self._present.pop(key, [])
        for gap in gaps:
            gap.past = True
        return gaps

    def shrink(self) -> list[Gap]:
        """Forget the oldest gaps beyond the limit. Returns those of them that are in a present epoch."""
        forgotten = []
        while len(self._rows) > self._limit:
            gap = next(iter(self._rows.values()))
            if not gap.past:
                self._present[gap.key].remove(gap)
                forgotten.append(gap)
            del self._rows[id(gap)]
        return forgotten


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


class Counter(msgspec.Struct, array_like=True):
    """The state of one counter, besides the number that it expects.

    Attributes:
        floor: The first number for which the tracker knows whether it was received.
        epoch: The number of restarts so far.
        ended: Whether the publisher has announced that it sends no more.
        topic: The topic of the latest message; for replays that do not repeat topics.
    """

    floor: int
    epoch: int = 0
    ended: bool = False
    topic: bytes | None = None


@dataclass
class SequenceFindings:
    """What the tracker found in the messages of one call.

    Attributes:
        duplicates: The places, among these messages, of those whose number was received before.
        lost: The gaps that are told as losses now: new ones, or, where a replay could have filled them, those that
            it does not fill any more.
        restarts: Counters whose publisher has restarted.
    """

    duplicates: list[int] = field(default_factory=list)
    lost: list[Gap] = field(default_factory=list)
    restarts: list[Key] = field(default_factory=list)
