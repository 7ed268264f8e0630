"""The facts of a chunk, in the metadata of its last batch: its place, its times, and the log's writers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

import msgspec
import xxhash

_FACTS = b"chunk"
# In the metadata of the last batch of a group of an open chunk: the first id of the group.
GROUP_FIRST = b"group.first"


class Times(NamedTuple):
    """The earliest and the latest time at which a message was received, in microseconds since the epoch."""

    earliest: int
    latest: int

    def union(self, other: Times) -> Times:
        """The earliest and latest time of both."""
        return Times(min(self.earliest, other.earliest), max(self.latest, other.latest))


class PastTimes(NamedTuple):
    """The latest times of blocks of chunks. A block of 2**k chunks begins at a number that 2**k divides.

    Attributes:
        chunks: How many chunks are counted, which is the number of the next chunk.
        latest: For each k, the latest time in the last whole block of 2**k chunks, in microseconds since the epoch.
    """

    chunks: int = 0
    latest: tuple[int, ...] = ()

    def and_then(self, latest: int) -> PastTimes:
        """Count one more chunk.

        Args:
            latest: The latest time in this chunk.
        """
        chunks, levels = self.chunks + 1, list(self.latest)
        for level in range(chunks.bit_length()):
            if chunks % (1 << level):
                break
            before = levels[level : level + 1]
            levels[level : level + 1] = [latest]
            latest = max([latest, *before])
        return PastTimes(chunks, tuple(levels))


class Incarnations(NamedTuple):
    """The writers of a log, in order: for each its first id, and its incarnation, which is a random name.

    Ids of a log are given out once. But if an older copy of a log is restored and filled further, ids are given out
    again, to other messages. Then the incarnations differ.
    """

    writers: tuple[tuple[int, str], ...] = ()

    def of(self, message_id: int) -> str | None:
        """The incarnation that has written a message; None if it is forgotten."""
        found = None
        for first, name in self.writers:
            if first > message_id:
                break
            found = name
        return found

    def first_of(self, message_id: int) -> int:
        """The first id of the writer that has written a message."""
        return max((first for first, _ in self.writers if first <= message_id), default=0)

    def and_then(self, first: int, name: str, earliest: int) -> Incarnations:
        """Add the writer that begins at id ``first``; forget those with messages below ``earliest`` only."""
        writers = [writer for writer in self.writers if writer[0] < first]
        while len(writers) > 1 and writers[1][0] <= earliest:
            del writers[0]
        return Incarnations((*writers, (first, name)))


# For a log without chunks.
NO_INCARNATIONS = Incarnations()


class ChunkFacts(msgspec.Struct, frozen=True):
    """The facts of a chunk. In an open chunk each group has them, for the rows up to its end.

    Attributes:
        first: The id of the first row.
        end: The id after the last row.
        times: The times at which the rows were received.
        past: The times of the chunks before.
        incarnations: The writers up to that of this chunk.
    """

    first: int
    end: int
    times: Times
    past: PastTimes
    incarnations: Incarnations

    @property
    def incarnation(self) -> str:
        """The incarnation of this chunk's writer."""
        return self.incarnations.writers[-1][1] if self.incarnations.writers else ""

    def to_metadata(self) -> dict[bytes, bytes]:
        """The metadata entry: a checksum (XXH3, 64 bits, hex), and JSON."""
        text = msgspec.json.encode(self)
        return {_FACTS: xxhash.xxh3_64_hexdigest(text).encode() + b" " + text}

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes]) -> Self:
        """Read the facts of a group or of a whole chunk.

        Raises:
            ValueError: They are missing or damaged.
        """
        checksum, _, text = metadata.get(_FACTS, b"").partition(b" ")
        if checksum != xxhash.xxh3_64_hexdigest(text).encode():
            raise ValueError("its facts are missing or were changed after it was written")
        return msgspec.json.decode(text, type=cls)  # its error is a ValueError

    @classmethod
    def of_whole(cls, metadata: Mapping[bytes, bytes]) -> Self:
        """Read the facts of a whole chunk.

        Raises:
            ValueError: They are missing or damaged, or those of a group: then the end of the chunk is missing.
        """
        if GROUP_FIRST in metadata:
            raise ValueError("its end is missing; the file was changed after it was written")
        return cls.from_metadata(metadata)

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
