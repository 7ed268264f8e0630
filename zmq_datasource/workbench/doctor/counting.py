"""Finds numbers that count up by one in messages: a field of JSON text, or a frame of 4 or 8 bytes. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

# So many messages are searched; fewer than _LEAST show nothing.
SAMPLE, _LEAST = 500, 5
# The share of the steps from one number to the next that must be one.
_SURELY = 0.9
# Fields of a JSON object that are looked at.
_MOST_PATHS = 20
# A number in JSON text is a time if it is within a day of now in one of these units.
_CLOCKS, _CLOCK_SECONDS = (1, 10**3, 10**6, 10**9), 86_400


class Counting(NamedTuple):
    """Numbers that count up.

    Attributes:
        at: The place of the number, as in ``sequenceAt``.
        by_topic: Whether each first frame has a counter of its own.
    """

    at: str
    by_topic: bool = False

    @property
    def place(self) -> str:
        """Where the numbers are, in words."""
        return f"at {self.at}, {'for each topic' if self.by_topic else 'over the whole feed'}"

    @property
    def options(self) -> str:
        """The options with which the source reads and counts these numbers."""
        by = ", topicFrame=0, sequenceBy=endpoint,topic" if self.by_topic else ""
        return f"framing=custom, sequenceAt={self.at}{by}"


def find_counting(messages: Sequence[Sequence[bytes]]) -> Counting | None:
    """Find numbers that count up, over the whole feed or for each topic; None if there are none.

    Args:
        messages: Some messages, each as its frames, in their order.
    """
    if len({len(message) for message in messages}) != 1:
        return None
    topics = [message[0] for message in messages]
    for at, numbers in _candidates(messages):
        if _counts_up(numbers, [b""] * len(numbers)):
            return Counting(at)
        if not at.startswith("0:") and _counts_up(numbers, topics):
            return Counting(at, by_topic=True)
    return None


def _candidates(messages: Sequence[Sequence[bytes]]) -> Iterator[tuple[str, list[int]]]:
    """The places that have a number in every message, and these numbers."""
    for frame in range(len(messages[0])):
        contents = [message[frame] for message in messages]
        width = len(contents[0])
        if width in (4, 8) and all(len(content) == width for content in contents):
            yield f"{frame}:0:u{8 * width}be", [int.from_bytes(content, "big") for content in contents]
            yield f"{frame}:0:u{8 * width}le", [int.from_bytes(content, "little") for content in contents]
        elif first := _numbers_in(contents[0]):
            texts = [_numbers_in(content) for content in contents]
            for path in list(first)[:_MOST_PATHS]:
                if all(path in text for text in texts) and not _is_time(first[path]):
                    yield f"{frame}:$.{path}", [text[path] for text in texts]


def _counts_up(numbers: Sequence[int], topics: Sequence[bytes]) -> bool:
    last: dict[bytes, int] = {}
    steps = []
    for number, topic in zip(numbers, topics, strict=True):
        if topic in last:
            steps.append(number - last[topic])
        last[topic] = number
    return len(steps) >= _LEAST - 1 and steps.count(1) >= _SURELY * len(steps)


def _numbers_in(content: bytes) -> dict[str, int]:
    """The whole numbers in a JSON object and in the objects in it, by their paths."""
    if not content.lstrip().startswith(b"{"):
        return {}
    try:
        return dict(_walk(msgspec.json.decode(content), ""))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}


def _walk(value: dict[str, Any], path: str) -> Iterator[tuple[str, int]]:
    for name, inner in value.items():
        if not name or "." in name:
            continue
        if isinstance(inner, dict):
            yield from _walk(inner, f"{path}{name}.")
        elif isinstance(inner, int) and not isinstance(inner, bool):
            yield f"{path}{name}", inner


def _is_time(value: int) -> bool:
    return any(abs(value / unit - time.time()) < _CLOCK_SECONDS for unit in _CLOCKS)
