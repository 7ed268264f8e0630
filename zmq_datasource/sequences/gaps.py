"""The table of gaps: numbers that are missing, and numbers that were missing and arrived late. Bounded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec

__all__ = ["Gap", "GapTable", "Key"]

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
    """The gaps of all counters, oldest first, and the gaps in each counter's present epoch, by position.

    Args:
        limit: The largest number of rows.
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

    @property
    def next_serial(self) -> int:
        """The serial that the next row will have."""
        return self._next_serial

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
        gap = self._insert(Gap(self._next_serial, key, epoch, first, last, noticed))
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
            healed = Gap(self._next_serial, gap.key, gap.epoch, position, position, gap.noticed, when)
            pieces.append(self._insert(healed))
        if behind[0] <= behind[1]:
            rest = Gap(self._next_serial, gap.key, gap.epoch, *behind, gap.noticed, None, gap.final)
            pieces.append(self._insert(rest))
        if not gap.size:
            self._remove(gap)
        gaps[at : at + 1] = pieces

    def mark_final(self, gaps: Iterable[Gap]) -> None:
        """Mark gaps as final, because no replay will bring their messages any more."""
        for gap in gaps:
            if gap.serial in self._rows:
                gap.final = True

    def drop_missing(self, key: Key) -> None:
        """Remove the open gaps in a counter's present epoch, because the table of another partition has them now."""
        for gap in self.missing(key):
            self._remove(gap)
        self.end_epoch(key)

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
        self._next_serial = next_serial
        for gap in sorted(self._rows.values(), key=_first):
            if gap.serial >= since.get(gap.key, next_serial):
                self._present.setdefault(gap.key, []).append(gap)

    def _insert(self, gap: Gap) -> Gap:
        self._rows[gap.serial] = gap
        self._next_serial += 1
        return gap

    def _remove(self, gap: Gap) -> None:
        del self._rows[gap.serial]
