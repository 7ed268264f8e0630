"""What decoding gives: the fields of the messages that fit, and what is to be said of the others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pyarrow as pa

from zmq_datasource.messages.columns import integers_of

__all__ = ["Announced", "Fields", "Malformed", "UnfitError"]


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
        values: Binary, as are topics and publishers.
        topics, publishers, sequences: None where the framing has none. A topic may be null in a message that has none.
            Sequences have 64 bits.
        rows: The places of these messages among those decoded (64 bits); None if it is all of them.
        plain_frames: Messages of so many frames are their topic and value, or their value alone, as with plain framing;
            0 if none are.
        malformed, announced: The other messages.
        skipped: How many more had no content (heartbeats).
    """

    values: pa.Array
    topics: pa.Array | None = None
    publishers: pa.Array | None = None
    sequences: pa.Array | None = None
    rows: pa.Array | None = None
    plain_frames: int = 0
    malformed: list[Malformed] = field(default_factory=list)
    announced: list[Announced] = field(default_factory=list)
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.values)

    def row(self, position: int) -> int:
        """Where the message at this position is among those decoded."""
        return position if self.rows is None else int(self.rows[position].as_py())

    def of(self, everything: pa.Array) -> pa.Array:
        """From a column of all messages that were decoded: that of these."""
        return everything if self.rows is None else everything.take(self.rows)

    def without(self, positions: Collection[int]) -> Fields:
        """The same without the messages at these positions."""
        left_out = set(positions)
        kept = integers_of([position for position in range(len(self)) if position not in left_out])
        return replace(
            self,
            values=self.values.take(kept),
            topics=_taken(self.topics, kept),
            publishers=_taken(self.publishers, kept),
            sequences=_taken(self.sequences, kept),
            rows=kept if self.rows is None else self.rows.take(kept),
        )


def _taken(column: pa.Array | None, places: pa.Array) -> pa.Array | None:
    return None if column is None else column.take(places)
