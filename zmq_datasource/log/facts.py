"""The facts of a chunk, in the metadata of its last batch: its place and its times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

import msgspec
import xxhash

_FACTS = b"chunk"


class Times(NamedTuple):
    """The earliest and the latest time at which a message was received, in microseconds since the epoch."""

    earliest: int
    latest: int

    def union(self, other: Times) -> Times:
        """The earliest and latest time of both."""
        return Times(min(self.earliest, other.earliest), max(self.latest, other.latest))


class ChunkFacts(msgspec.Struct, frozen=True):
    """The facts of a chunk.

    Attributes:
        first: The id of the first row.
        end: The id after the last row.
        times: The times at which the rows were received.
        past: The latest time of all rows of the log up to ``end``, also of deleted ones. It never falls from chunk to
            chunk, so a time is found by a binary search.
    """

    first: int
    end: int
    times: Times
    past: int

    def to_metadata(self) -> dict[bytes, bytes]:
        """The metadata entry: a checksum (XXH3, 64 bits, hex), and JSON."""
        text = msgspec.json.encode(self)
        return {_FACTS: xxhash.xxh3_64_hexdigest(text).encode() + b" " + text}

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes]) -> Self:
        """Read the facts of a chunk.

        Raises:
            ValueError: They are missing or damaged.
        """
        checksum, _, text = metadata.get(_FACTS, b"").partition(b" ")
        if checksum != xxhash.xxh3_64_hexdigest(text).encode():
            raise ValueError("its facts are missing or were changed after it was written")
        return msgspec.json.decode(text, type=cls)  # its error is a ValueError

    def check_place(self, first: int) -> None:
        """Refuse a chunk that was written for another place.

        Raises:
            ValueError: The chunk was written for another place.
        """
        if self.first != first:
            raise ValueError(
                f"it has the place of id {first}, and was written as the ids {self.first} to {self.end - 1}; the file "
                "was renamed or copied"
            )
