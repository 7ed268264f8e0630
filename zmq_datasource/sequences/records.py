"""What a tracker remembers of each counter, what it has counted, and what it says of a call's messages. Pure data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import msgspec
import xxhash

from zmq_datasource.sequences.gaps import Gap, Key

__all__ = ["Ahead", "Counter", "Sample", "SequenceFindings", "Totals"]


@dataclass
class Totals:
    """What was tracked since the log began.

    Attributes:
        lost: Missing messages: gaps as far as they were not filled. What is forgotten stays in it.
        late: Messages that came after a higher number by themselves, and were kept.
        healed: Messages that filled a gap, by themselves or by a replay.
        duplicates: Messages whose number was seen.
        overlapping: Messages that a replay had brought a moment before; left out.
        restarts: Publishers that started anew.
        forgotten: Counters that were forgotten because there were too many, though not at their end.
    """

    lost: int = 0
    late: int = 0
    healed: int = 0
    duplicates: int = 0
    overlapping: int = 0
    restarts: int = 0
    forgotten: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


class Sample(NamedTuple):
    """A message that was received: its number, and a digest of its value.

    A publisher that has restarted has another message under that number, or none.
    """

    number: int
    digest: str

    @classmethod
    def of(cls, number: int, value: bytes) -> Sample:
        """The sample of this message."""
        return cls(number, xxhash.xxh3_64_hexdigest(value))


class Counter(msgspec.Struct, array_like=True):
    """What is known of one counter beside the number it expects.

    Attributes:
        floor: The first position of which it is known whether it came.
        since: The serial of the first row that the table of gaps can have of its present epoch.
        epoch: How often it has started anew.
        turn: What to add to a number for its position.
        ended: Whether its publisher has said that no more comes.
        topic: The topic last heard, where a replay may not say it.
        sample: The latest message of its present epoch, where a replay is recognised by it.
        moves: How often another partition of the log has taken it over.
        division: How the feed was divided among receivers when it was last heard.
    """

    floor: int
    since: int
    epoch: int = 0
    turn: int = 0
    ended: bool = False
    topic: bytes | None = None
    sample: Sample | None = None
    moves: int = 0
    division: str = ""


@dataclass(slots=True)
class Ahead:
    """A replay was ahead of the live flow, which will bring the same messages once more.

    Attributes:
        expected: The number that follows the replayed ones.
        begin: The position of the first replayed one.
        heard: The last position that the live flow has brought; None before.
        connection: The live connection of that moment. Another one brings nothing again.
    """

    expected: int
    begin: int
    connection: int
    heard: int | None = None


@dataclass
class SequenceFindings:
    """About the messages of one call, by their place in it.

    Attributes:
        duplicates: Seen before.
        overlapping: Seen in a replay a moment ago; not the publisher's doing.
        gaps: What is missing, newly.
        restarts: Counters that started anew.
        abandoned: Gaps that were known and cannot be filled any more, because the counter started
            anew or the table of gaps is full.
    """

    duplicates: list[int] = field(default_factory=list)
    overlapping: list[int] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    restarts: list[Key] = field(default_factory=list)
    abandoned: list[Gap] = field(default_factory=list)
