"""The table of gaps: what is missing, and what was and came late. Bounded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec

__all__ = ["Gap", "GapTable", "Key"]

# Which counter: the bytes of the one thing that messages are counted by, or of each of them.
Key: TypeAlias = bytes | tuple[bytes, ...]


class Gap(msgspec.Struct, array_like=True, eq=False):
    """The positions ``first`` to ``last`` of one counter's epoch, all missing or all healed.

    Attributes:
        serial: Counts the table's rows.
        settled: Whether nobody will ask for them (any more).
        noticed, healed: Microseconds since the epoch; ``healed`` is None while they are missing, and
            else when the last of them came.
    """

    serial: int
    key: Key
    epoch: int
    first: int
    last: int
    noticed: int
    healed: int | None = None
    settled: bool = False

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def _first(gap: Gap) -> int:
    return gap.first


class GapTable:
    """Gaps of all counters, oldest first, and for each counter those of its present epoch by position.

    Args:
        limit: Most rows.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[int, Gap] = {}
        self._present: dict[Key, list[Gap]] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Gap]:
        return iter(self._rows.values())

    def missing(self, key: Key) -> list[Gap]:
        """The open gaps of a counter's present epoch, in order."""
        return [gap for gap in self._present.get(key, ()) if gap.healed is None]

    def find(self, key: Key, position: int) -> Gap | None:
        """The open gap that this position is in."""
        gaps = self._present.get(key)
        if not gaps:
            return None
        at = bisect_right(gaps, position, key=_first) - 1
        gap = gaps[at] if at >= 0 else None
        return gap if gap is not None and gap.healed is None and position <= gap.last else None

    def add(self, key: Key, epoch: int, first: int, last: int, noticed: int) -> Gap:
        """A new gap, behind all others of its counter."""
        gap = self._insert(Gap(self._next_serial, key, epoch, first, last, noticed))
        self._present.setdefault(key, []).append(gap)
        return gap

    def fill(self, gap: Gap, position: int, when: int) -> None:
        """A missing message came: its position moves to a healed row, the neighbour's if there is one."""
        gaps = self._present[gap.key]
        at = bisect_right(gaps, gap.first, key=_first) - 1
        before = gaps[at - 1] if at > 0 else None
        after = gaps[at + 1] if at + 1 < len(gaps) else None
        joins_before = _healed_to(before, position - 1)
        joins_after = _healed_from(after, position + 1)
        rest = (position + 1, gap.last)
        gap.last = position - 1
        pieces: list[Gap] = [gap]
        if joins_before and before is not None:
            before.last, before.healed = position, when
            if joins_after and after is not None:
                before.last = after.last
                gaps.pop(at + 1)
                self._remove(after)
        elif joins_after and after is not None:
            after.first, after.healed = position, when
        else:
            pieces.append(
                self._insert(
                    Gap(self._next_serial, gap.key, gap.epoch, position, position, gap.noticed, when)
                )
            )
        if rest[0] <= rest[1]:
            pieces.append(
                self._insert(
                    Gap(self._next_serial, gap.key, gap.epoch, *rest, gap.noticed, None, gap.settled)
                )
            )
        if not gap.size:
            self._remove(gap)
            pieces.remove(gap)
        gaps[at : at + 1] = pieces

    def settle(self, gaps: Iterable[Gap]) -> None:
        """Mark gaps as final: nobody asks for them any more."""
        for gap in gaps:
            if gap.serial in self._rows:
                gap.settled = True

    def drop_missing(self, key: Key) -> None:
        """Remove the open gaps of a counter's present epoch: another table has them now."""
        for gap in self.missing(key):
            self._remove(gap)
        self.end_epoch(key)

    def end_epoch(self, key: Key) -> None:
        """The counter starts anew, or is forgotten: its gaps stay as they are."""
        self._present.pop(key, None)

    def shrink(self) -> list[Gap]:
        """Forget the oldest rows beyond the limit.

        Returns:
            Those that were still open in their counter's present epoch.
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
        """Take in rows that were kept; those of a counter's present epoch have serials from ``since`` on."""
        self._rows = {gap.serial: gap for gap in sorted(gaps, key=lambda gap: gap.serial)}
        self._next_serial = next_serial
        for gap in sorted(self._rows.values(), key=_first):
            if gap.serial >= since.get(gap.key, next_serial):
                self._present.setdefault(gap.key, []).append(gap)

    @property
    def next_serial(self) -> int:
        return self._next_serial

    def _insert(self, gap: Gap) -> Gap:
        self._rows[gap.serial] = gap
        self._next_serial += 1
        return gap

    def _remove(self, gap: Gap) -> None:
        del self._rows[gap.serial]


def _healed_to(gap: Gap | None, position: int) -> bool:
    return gap is not None and gap.healed is not None and gap.last == position


def _healed_from(gap: Gap | None, position: int) -> bool:
    return gap is not None and gap.healed is not None and gap.first == position
