"""A slow and simple model of the rules of ``zmq_datasource.sequences``: it keeps every received number in a set."""

from __future__ import annotations

from dataclasses import dataclass, field

from zmq_datasource.options import Numbering


@dataclass
class Epoch:
    """An epoch of a counter: its messages from ``floor`` on, as positions that never wrap."""

    floor: int
    seen: set[int] = field(default_factory=set)
    came_late: set[int] = field(default_factory=set)
    end: int = 0

    @property
    def missing(self) -> set[int]:
        return set(range(self.floor, self.end)) - self.seen


@dataclass
class Model:
    """One counter."""

    numbering: Numbering
    epochs: list[Epoch] = field(default_factory=list)
    late: int = 0
    duplicates: int = 0

    @property
    def lost(self) -> int:
        return sum(len(epoch.missing) for epoch in self.epochs)

    @property
    def restarts(self) -> int:
        return max(len(self.epochs) - 1, 0)

    @property
    def healed(self) -> int:
        return sum(len(epoch.came_late) for epoch in self.epochs)

    def see(self, number: int) -> str:
        """What this number is: ``first``, ``next``, ``gap``, ``late``, ``restart`` or ``duplicate``."""
        if not self.epochs:
            floor = min(number, self.numbering.start) if self.numbering.whole else number
            self.epochs.append(Epoch(floor, seen={number}, end=number + 1))
            return "first"
        epoch = self.epochs[-1]
        position = self._position(number, epoch.end)
        if position == epoch.end:
            epoch.seen.add(position)
            epoch.end += 1
            return "next"
        if self.numbering.restarts and number == self.numbering.start:
            return self._restart(number)
        if position > epoch.end:
            epoch.seen.add(position)
            epoch.end = position + 1
            return "gap"
        if position in epoch.missing:
            epoch.seen.add(position)
            epoch.came_late.add(position)
            self.late += 1
            return "late"
        if self.numbering.restarts and position < epoch.end - self.numbering.window:
            return self._restart(number)
        if position < epoch.floor:
            self.late += 1
            return "late"
        self.duplicates += 1
        return "duplicate"

    def _restart(self, number: int) -> str:
        floor = min(number, self.numbering.start)
        self.epochs.append(Epoch(floor, seen={number}, end=number + 1))
        return "restart"

    def _position(self, number: int, expected: int) -> int:
        """Of all positions that have this number, the one nearest to the expected; ahead if two are."""
        if self.numbering.end is None:
            return number
        turn = self.numbering.end + 1
        nearest = number + (expected - number) // turn * turn
        return min((nearest - turn, nearest, nearest + turn), key=lambda p: (abs(p - expected), p < expected))
