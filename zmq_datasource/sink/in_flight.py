"""Rows that a socket has accepted and that may still be lost with a connection. Pure data.

A PUSH hears nothing back. What it can know is that at some moment all queues of this system were empty:
then the next system on the way had all of it. But that may be a load balancer or a tunnel with a memory of
its own, so ``KEEP`` bytes more than what such a moment leaves open stay here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pyarrow as pa

__all__ = ["KEEP", "InFlight", "Part"]

# The least that is kept of a task that has sent more. Twice as much is in memory, as the Arrow columns that
# Spark has handed over. A TCP connection on Linux holds at most 4 MB at one end and 6 MB at the other unless
# the system is set up otherwise, and through a middlebox there are two.
KEEP = 32 << 20

# What a row costs on its way besides its content: headers on the wire, offsets in Arrow.
_ROW_BYTES = 16


@dataclass
class Part:
    """The rows of one call, in Arrow's columns, and how many of them were sent.

    Attributes:
        values, topics: Binary; topics None if there are none.
        frames: Lists of binary, in place of both.
        first: The number of the first of them in the task.
        sent: How many of them count as sent.
        sent_bytes: Of these.
        given_up: Positions of those that do not.
    """

    values: pa.Array | None
    topics: pa.Array | None
    frames: pa.Array | None
    first: int
    sent: int = 0
    sent_bytes: int = 0
    given_up: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        column = self.values if self.frames is None else self.frames
        return 0 if column is None else len(column)

    def forget(self) -> None:
        """Keep only what is counted."""
        self.values = self.topics = self.frames = None
        self.given_up = set()

    @property
    def size(self) -> int:
        """Roughly what it takes in memory and on the wire."""
        return self.sent_bytes + self.sent * _ROW_BYTES


class InFlight:
    """What would have to be sent again if a connection were lost now.

    Attributes:
        parts: The oldest first.
    """

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self.parts: deque[Part] = deque()
        self._bytes = 0
        self._due = 2 * keep

    def add(self, part: Part) -> None:
        """Note that libzmq has accepted these rows."""
        self.parts.append(part)
        self._bytes += part.size

    @property
    def due(self) -> bool:
        """Whether it is time to look whether the queues are empty, so that some can be forgotten."""
        return self._bytes >= self._due

    def looked(self, empty: bool) -> None:
        """All queues were seen empty, or not: forget all but the last, or look again later."""
        if empty:
            # Counted anew: rows that were given up since make a part smaller.
            self._bytes = sum(part.size for part in self.parts)
            while self.parts and self._bytes - self.parts[0].size >= self._keep:
                self._bytes -= self.parts.popleft().size
        self._due = max(2 * self._keep, self._bytes + self._keep // 4)

    def clear(self) -> None:
        """Forget all rows: they have arrived, or were given up."""
        self.parts.clear()
        self._bytes = 0
        self._due = 2 * self._keep
