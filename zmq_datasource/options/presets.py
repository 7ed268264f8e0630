"""What each framing says: where the fields of a message are among its frames, and how its publishers count.

A preset is one value of ``PRESETS``. ``messages.framing`` reads messages by its layout, and ``sequences`` tracks them
by its numbering. Its golden bytes are in tests/data/framings.json.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, NamedTuple

_LARGEST = 2**63 - 1  # the column is a BIGINT


@dataclass(frozen=True)
class SequenceAt:
    """Where the sequence of a message is: an integer in bytes of a frame, or a number in its JSON text.

    Attributes:
        frame: The number of the frame; a negative one counts from the end.
        offset: The number of bytes before the integer.
        kind: The integer, as ``u32le``: unsigned or signed, its bits, and its byte order.
        path: The names that lead to the number in the JSON text, from the top; empty for an integer in bytes.
    """

    words: ClassVar[str] = "a place"

    frame: int
    offset: int = 0
    kind: str = "u64be"
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.path:
            return f"{self.frame}:$.{'.'.join(self.path)}"
        return f"{self.frame}:{self.offset}:{self.kind}"

    @property
    def width(self) -> int:
        """The number of bytes of the integer."""
        return int(self.kind[1:3]) // 8

    @property
    def endian(self) -> Literal["big", "little"]:
        return "little" if self.kind.endswith("le") else "big"

    @property
    def signed(self) -> bool:
        return self.kind.startswith("i")

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest sequence that can be read."""
        if self.path:
            return -(2**63), _LARGEST
        bits = 8 * self.width
        return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if self.signed else (0, min(2**bits - 1, _LARGEST))

    @classmethod
    def read(cls, text: str) -> SequenceAt:
        integer = re.fullmatch(r"(-?[0-9]{1,9}):([0-9]{1,9}):([ui](?:32|64)[lb]e)", text)
        if integer:
            return cls(int(integer[1]), int(integer[2]), integer[3])
        number = re.fullmatch(r"(-?[0-9]{1,9}):\$((?:\.[^.]+)+)", text)
        if number:
            return cls(int(number[1]), path=tuple(number[2][1:].split(".")))
        raise ValueError(
            "it is frame:byte:integer, as in 1:3:u32le (frame 1 from byte 3; u or i, 32 or 64, le or be), or "
            "frame:$.path, as in 1:$.header.frame (a number in the JSON text of frame 1)"
        )


@dataclass(frozen=True)
class Layout:
    """The places of a message's fields among its frames. Negative places count from the end.

    Attributes:
        frames: The least number of frames that a message has. If the layout is ``exact``, a message has no more.
        topic, publisher, sequence: None if there is no such field.
        exact: Whether each frame is one whole field, so that the fields give back all frames.
        ends: Whether a message without the last frame, the value, announces that its publisher has ended. The sequence
            of such a message is the number of messages that the publisher has sent.
    """

    frames: int
    topic: int | None = None
    publisher: int | None = None
    sequence: SequenceAt | None = None
    value: int = -1
    exact: bool = True
    ends: bool = False


class Numbering(NamedTuple):
    """How publishers number their messages, for ``sequences``, which tracks them.

    Attributes:
        by: What has a counter of its own: some of ``publisher``, ``topic`` and ``endpoint``.
        start: The first sequence of a counter.
        restarts: Whether a publisher that starts again keeps its name and counts from ``start``. If not, a lower
            sequence never means a restart.
        window: A sequence that is at most this far behind is late or a duplicate, and not a restart.
        whole: Whether messages before the first received one are missing, too: publishers are short-lived, or the user
            has said where counters begin.
        replayed: Whether missing messages are asked for. Each number is taken once then, whether a replay brings it or
            the live flow.
    """

    by: tuple[str, ...]
    start: int = 0
    restarts: bool = True
    window: int = 1000
    whole: bool = False
    replayed: bool = False

    def is_like(self, other: Numbering) -> bool:
        """Whether counters have the same meaning. The rules for restarts may differ."""
        return (self.by, self.start) == (other.by, other.start)


class Preset(NamedTuple):
    """A framing.

    Attributes:
        layout: Where the fields are; None for plain framing.
        numbering: How the publishers count; None if they do not.
        unnumbered: Why messages have no numbers, for errors.
    """

    layout: Layout | None
    numbering: Numbering | None = None
    unnumbered: str = ""


PRESETS: Final = {
    "plain": Preset(None, unnumbered="plain framing has no sequences"),
    # This package's sink. A message without the value announces that the publisher has ended.
    "sequenced": Preset(
        Layout(4, topic=0, publisher=1, sequence=SequenceAt(2), value=3, ends=True),
        Numbering(("publisher",), restarts=False, whole=True),
    ),
    # topic, sequence, payload: vllm/distributed/kv_events.py
    "vllm": Preset(
        Layout(3, topic=0, sequence=SequenceAt(1), value=2),
        Numbering(("endpoint", "topic")),
    ),
    # topic, body, the topic's counter: Bitcoin Core's doc/zmq.md
    "bitcoin": Preset(
        Layout(3, topic=0, sequence=SequenceAt(2, kind="u32le"), value=1),
        Numbering(("endpoint", "topic")),
    ),
}
