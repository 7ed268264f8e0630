"""Finds numbers that count up in messages: a field of JSON text, or a frame of 4 or 8 bytes. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

# So many messages are searched; fewer than _LEAST show nothing.
SAMPLE, _LEAST = 500, 5
# The share of the steps from one number to the next that must be equal.
_SURELY = 0.9
# The longest step between the numbers that one of several PULLs gets.
_MOST_STEP = 16
# A number in JSON text is a time if it is within a day of now in one of these units.
_CLOCKS, _CLOCK_SECONDS = (1, 10**3, 10**6, 10**9), 86_400
_MOST_PATHS, _MOST_DEPTH, _MOST_JSON_BYTES = 20, 4, 64 << 10


class Counting(NamedTuple):
    """Numbers that count up.

    Attributes:
        at: The place of the number, as in ``sequenceAt``.
        by_topic: Whether each first frame has a counter of its own.
        step: By how much the numbers go up. More than one if other PULLs get the numbers between.
    """

    at: str
    by_topic: bool = False
    step: int = 1

    @property
    def place(self) -> str:
        """Where the numbers are, in words."""
        return f"at {self.at}, {'for each topic' if self.by_topic else 'over the whole feed'}"

    @property
    def options(self) -> str:
        """The options with which the source reads and counts these numbers."""
        by = ", topicFrame=0, sequenceBy=endpoint,topic" if self.by_topic else ""
        return f"framing=custom, sequenceAt={self.at}{by}"


def find_counting(messages: Sequence[Sequence[bytes]], filtered: bool, shared: bool) -> Counting | None:
    """Find the numbers that count up most regularly; None if there are none.

    Args:
        messages: Some messages, each as its frames, in their order.
        filtered: Whether only some topics come. Then a counter for each topic is looked for first.
        shared: Whether other consumers may get the messages between, as those of a PUSH.
    """
    if len(messages) < _LEAST or len({len(message) for message in messages}) > 1:
        return None
    topics = [message[0] for message in messages]
    best, found = 0.0, None
    for at, numbers in _candidates(messages):
        for by_topic in (filtered, not filtered):
            if by_topic and at.startswith("0:"):  # the number is in the first frame, so this is no topic
                continue
            share, step = _steps(numbers, topics if by_topic else None, _MOST_STEP if shared else 1)
            if share > best:
                best, found = share, Counting(at, by_topic, step)
    return found if best >= _SURELY else None


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


def _steps(numbers: Sequence[int], topics: Sequence[bytes] | None, most: int) -> tuple[float, int]:
    """The share of steps that have the most frequent length from 1 to ``most``, and this length."""
    last: dict[bytes, int] = {}
    steps: Counter[int] = Counter()
    for number, topic in zip(numbers, topics or [b""] * len(numbers), strict=True):
        if topic in last:
            steps[number - last[topic]] += 1
        last[topic] = number
    found = max(range(1, most + 1), key=lambda step: steps[step])
    return (steps[found] / steps.total(), found) if steps.total() >= _LEAST - 1 else (0.0, 1)


def _numbers_in(content: bytes) -> dict[str, int]:
    """The whole numbers in JSON text, by their paths."""
    if not content.lstrip().startswith(b"{") or len(content) > _MOST_JSON_BYTES:
        return {}
    try:
        return dict(_walk(msgspec.json.decode(content), ()))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    if isinstance(value, dict) and len(path) < _MOST_DEPTH:
        for name, inner in value.items():
            if name and "." not in name:
                yield from _walk(inner, (*path, name))
    elif isinstance(value, int) and not isinstance(value, bool) and path:
        yield ".".join(path), value


def _is_time(value: int) -> bool:
    return any(abs(value / unit - time.time()) < _CLOCK_SECONDS for unit in _CLOCKS)
