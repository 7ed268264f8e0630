"""A slow and simple model of the rules of ``zmq_datasource.sequences``: it keeps every received number in a set."""

from __future__ import annotations

from dataclasses import dataclass, field

from zmq_datasource.options import Numbering


@dataclass
class Epoch:
    """An epoch of a counter: its messages from ``floor`` on, by number."""

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
        if number == epoch.end:
            epoch.seen.add(number)
            epoch.end += 1
            return "next"
        if self.numbering.restarts and number == self.numbering.start:
            return self._restart(number)
        if number > epoch.end:
            epoch.seen.add(number)
            epoch.end = number + 1
            return "gap"
        if number in epoch.missing:
            epoch.seen.add(number)
            epoch.came_late.add(number)
            self.late += 1
            return "late"
        if self.numbering.restarts and number < epoch.end - self.numbering.window:
            return self._restart(number)
        if number < epoch.floor:
            self.late += 1
            return "late"
        self.duplicates += 1
        return "duplicate"

    def _restart(self, number: int) -> str:
        floor = min(number, self.numbering.start)
        self.epochs.append(Epoch(floor, seen={number}, end=number + 1))
        return "restart"
