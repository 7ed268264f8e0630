"""The data of a tracker: what it keeps of each counter, its sums, and its findings about the messages of one call."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import msgspec
import xxhash

from zmq_datasource.counters import counted, state
from zmq_datasource.sequences.gaps import Gap, Key

__all__ = ["Ahead", "Counter", "Sample", "SequenceFindings", "Totals"]


@dataclass
class Totals:
    """What was tracked since the log began."""

    lost: int = state(
        "messagesLost",
        "messages",
        "The number of numbered messages that are missing now. A message that comes late or by a replay is not missing "
        "any more. Of one of several partitions it may be negative: that one has healed gaps that another partition "
        "had noticed.",
        numbered=True,
    )
    late: int = counted(
        "messagesLate",
        "messages",
        "The number of messages that came after a message with a higher sequence, and were kept.",
        "log",
        numbered=True,
    )
    healed: int = counted(
        "messagesHealed",
        "messages",
        "The number of messages that filled a gap, by themselves or by a replay.",
        "log",
        numbered=True,
    )
    duplicates: int = counted(
        "messagesDuplicate",
        "messages",
        "The number of messages whose sequence had come before.",
        "log",
        numbered=True,
    )
    overlapping: int = counted(
        "messagesOverlapping",
        "messages",
        "The number of messages that were left out because a replay had brought them a moment before.",
        "log",
        numbered=True,
    )
    restarts: int = counted(
        "publisherRestarts", "times", "How often a publisher has started again.", "log", numbered=True
    )
    forgotten: int = counted(
        "publishersForgotten",
        "publishers",
        "The number of counters that were forgotten because there were more than `maxPublishers`.",
        "log",
        numbered=True,
    )

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


class Sample(NamedTuple):
    """The number of a received message, and a digest of its value.

    A replay is compared with it: a publisher that has restarted has another message under this number, or none.
    """

    number: int
    digest: str

    @classmethod
    def of(cls, number: int, value: bytes) -> Sample:
        return cls(number, xxhash.xxh3_64_hexdigest(value))


class Counter(msgspec.Struct, array_like=True):
    """The state of one counter, besides the number that it expects.

    Attributes:
        floor: The first position for which the tracker knows whether it was received.
        since: The serial from which on rows in the table of gaps belong to the present epoch.
        epoch: The number of restarts so far.
        turn: The position of a number, less the number. It grows when the numbers wrap.
        ended: Whether the publisher has announced that it sends no more.
        topic: The topic of the latest message; for replays that do not repeat topics.
        sample: The latest message of the present epoch, where replays are compared with it.
        moves: How often another partition of the log has taken over the counter.
        division: How the feed was divided among receivers when the latest message arrived.
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
    """A replay is ahead of the live flow, which will bring the same messages once more.

    Attributes:
        expected: The number after the replayed ones.
        begin: The position of the first replayed message.
        connection: The live connection at that moment. Only this one brings the messages again.
        received: The last position that the live flow has brought since; None before.
    """

    expected: int
    begin: int
    connection: int
    received: int | None = None


@dataclass
class SequenceFindings:
    """What the tracker found in the messages of one call.

    Attributes:
        duplicates: The places, among these messages, of those whose number was received before.
        overlapping: The places of those that a replay had brought shortly before.
        gaps: New gaps.
        restarts: Counters whose publisher has restarted.
        abandoned: Older gaps that cannot be filled any more, because the publisher has restarted or the table of gaps
            is full.
    """

    duplicates: list[int] = field(default_factory=list)
    overlapping: list[int] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    restarts: list[Key] = field(default_factory=list)
    abandoned: list[Gap] = field(default_factory=list)
