"""What decoding gives: the fields of the messages that fit, and what is to be said of the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

__all__ = ["Announced", "Fields", "Malformed", "RawMessage", "UnfitError"]

RawMessage: TypeAlias = bytes | list[bytes]


class UnfitError(Exception):
    """A message does not fit its framing; the text says why, without its bytes."""


class Malformed(NamedTuple):
    """A message that does not fit: its place among those decoded, and why."""

    row: int
    reason: str


class Announced(NamedTuple):
    """A message without content that tells how far its publisher has counted.

    ``last`` is the number of the last message sent before it; ``end`` says that no more comes.
    """

    row: int
    topic: bytes | None
    publisher: bytes | None
    last: int
    end: bool = False


@dataclass
class Fields:
    """Columns of equal length, an entry for each message that fits.

    Attributes:
        rows: The places of these messages among those decoded; None if it is all of them.
        topics, publishers, sequences: None where the framing has none. A topic may be None in a
            message that has none.
        malformed, announced: The other messages.
        skipped: How many more had no content (heartbeats).
    """

    values: Sequence[bytes]
    topics: Sequence[bytes | None] | None = None
    publishers: Sequence[bytes] | None = None
    sequences: Sequence[int] | None = None
    rows: Sequence[int] | None = None
    malformed: list[Malformed] = field(default_factory=list)
    announced: list[Announced] = field(default_factory=list)
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.values)

    def row(self, position: int) -> int:
        """Where the message at this position is among those decoded."""
        return position if self.rows is None else self.rows[position]

    def without(self, positions: Collection[int]) -> Fields:
        """The same without the messages at these positions."""
        left_out = set(positions)
        kept = [position for position in range(len(self)) if position not in left_out]
        return Fields(
            values=[self.values[at] for at in kept],
            topics=self.topics and [self.topics[at] for at in kept],
            publishers=self.publishers and [self.publishers[at] for at in kept],
            sequences=self.sequences and [self.sequences[at] for at in kept],
            rows=[self.row(at) for at in kept],
            malformed=self.malformed,
            announced=self.announced,
            skipped=self.skipped,
        )
