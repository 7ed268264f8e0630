"""Which framing messages seem to have. Pure.

A framing of the package is believed if nearly all messages fit it and, where it numbers them, the numbers
of each counter go up in small steps, many of them by one. Where none does, a number that the publisher
puts at a fixed place is looked for in the same way (``framing=custom``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zmq_datasource.errors import OptionError
from zmq_datasource.messages.raw import RawMessage
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.workbench.doctor.watcher import Key, SequenceWatcher

__all__ = ["SAMPLE", "Guess", "guess"]

# So many messages are looked at; fewer than _LEAST say nothing.
SAMPLE = 2000
_LEAST = 5
_FITTING = 0.9
# Of the steps from one number to the next: this share goes up by no more than _SMALL, that one by exactly one.
_UPWARDS, _SMALL, _BY_ONE = 0.9, 100_000, 0.2
# A place that nobody has named must be more convincing: nearly every step is one.
_SURELY = 0.9
# And small: of a number of 4 bytes with 4 of something else after it, 8 bytes would count as well.
_LARGEST = 2**48
_PRESETS = ("sequenced", "dafka", "clone", "vllm", "bitcoin", "jupyter")


class Guess(NamedTuple):
    """``framing``, and what else to set."""

    framing: str
    options: dict[str, str]


def guess(messages: Sequence[RawMessage]) -> Guess:
    """The framing of a feed, from some of its messages in their order; ``plain`` if none is recognised."""
    sample = messages[:SAMPLE]
    if len(sample) < _LEAST:
        return Guess("plain", {})
    for name in _PRESETS:
        if name == "clone" and not all(map(_has_uuid, sample)):
            continue
        if _believable(sample, {"framing": name}, _UPWARDS, _BY_ONE):
            return Guess(name, {})
    for options in _places(sample):
        if _believable(sample, {"framing": "custom", **options}, _SURELY, _SURELY, _LARGEST):
            return Guess("custom", options)
    return Guess("plain", {})


def _has_uuid(message: RawMessage) -> bool:
    """Whether the third frame can be that of a kvmsg; else five frames with a number are all that it takes."""
    return isinstance(message, list) and len(message) > 2 and len(message[2]) in (0, 16)


def _believable(
    sample: Sequence[RawMessage],
    options: dict[str, str],
    upwards: float,
    by_one: float,
    largest: int = 2**63,
) -> bool:
    # An endpoint is required and says nothing here.
    try:
        watcher = SequenceWatcher(parse(ReadOptions, {"connect": "tcp://feed:1", **options}))
    except OptionError:  # no topic to count by, for one
        return False
    numbered = watcher.follow(sample)
    if len(sample) - watcher.malformed < _FITTING * len(sample):
        return False
    if watcher.tracker is None:
        return True
    last: dict[Key, int] = {}
    steps = []
    for key, number in numbered:
        if key in last:
            steps.append(number - last[key])
        last[key] = number
    if len(steps) < _LEAST - 1 or max(last.values()) > largest:
        return False
    small = sum(0 < step <= _SMALL for step in steps)
    return small >= upwards * len(steps) and steps.count(1) >= by_one * len(steps)


def _places(sample: Sequence[RawMessage]) -> Iterator[dict[str, str]]:
    """Where a number could be: at the beginning of a frame, in 8 or 4 bytes of either order."""
    frames = [message if isinstance(message, list) else [message] for message in sample]
    counts = {len(message) for message in frames}
    if len(counts) > 1:
        return
    (count,) = counts
    for frame in range(count):
        least = min(len(message[frame]) for message in frames)
        for width in (8, 4):
            if least < width:
                continue
            for endian in ("big", "little"):
                options = {
                    "sequenceFrame": str(frame),
                    "sequenceWidth": str(width),
                    "sequenceEndian": endian,
                }
                yield options
                if count > 1 and frame > 0:
                    yield {**options, "topicFrame": "0", "sequenceBy": "endpoint,topic"}
