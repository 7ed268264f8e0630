"""The result of decoding: the fields of messages that fit, and the reasons why the others do not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pyarrow as pa

from zmq_datasource.messages.columns import integers_of


class UnfitError(Exception):
    """A message does not fit its framing. The text says why, without quoting the message."""


class Malformed(NamedTuple):
    """A message that does not fit: its place among the decoded messages, and the reason."""

    row: int
    reason: str


class Announced(NamedTuple):
    """A message without content that announces its publisher's latest number.

    Attributes:
        row: Its place among the decoded messages.
        last: The number of the last message that was sent before it.
        end: Whether the publisher sends no more.
    """

    row: int
    topic: bytes | None
    publisher: bytes | None
    last: int
    end: bool = False


@dataclass
class Fields:
    """The fields of decoded messages, in columns with an entry for each message that fits.

    Attributes:
        values: Binary, like topics and publishers.
        topics, publishers, sequences: None where the framing has no such field. The topic of a message without one is
            null. Sequences have 64 bits.
        rows: The places of these messages among all decoded messages (64 bits); None if all fit.
        plain_frames: A message with this many frames has the topic and the value as its frames, or the value alone, as
            with plain framing; 0 if that is never so.
        malformed, announced: The messages that do not fit, and the announcements.
        skipped: The number of other messages without content (heartbeats).
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
        """The place, among all decoded messages, of the message at this position."""
        return position if self.rows is None else int(self.rows[position].as_py())

    def of(self, everything: pa.Array) -> pa.Array:
        """Take the rows of these messages from a column that has all decoded messages."""
        return everything if self.rows is None else everything.take(self.rows)

    def without(self, positions: Collection[int]) -> Fields:
        """Copy the fields without the messages at these positions."""
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
