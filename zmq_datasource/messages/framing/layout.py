"""Messages whose fields are whole frames, or bytes at a fixed place of one."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from zmq_datasource.messages.framing.fields import Announced, Fields, Malformed, RawMessage, UnfitError

__all__ = ["BinarySequence", "JsonSequence", "Layout", "SequenceField"]

_LARGEST = 2**63 - 1  # what a BIGINT holds


class SequenceField(Protocol):
    """Where a message's number is."""

    @property
    def frame(self) -> int:
        """Which frame it is in."""

    def read(self, frame: bytes) -> int:
        """The number in one such frame; UnfitError if there is none."""

    def read_all(self, frames: Sequence[bytes]) -> Sequence[int]:
        """The numbers of many; UnfitError if any of them has none."""


@dataclass(frozen=True)
class BinarySequence:
    """A whole number in bytes.

    Attributes:
        offset: Bytes in front of it in its frame; None if it is the whole frame.
        width: 4 or 8 bytes.
        low, high: The numbers that a counter can have.
    """

    frame: int
    offset: int | None = None
    width: int = 8
    endian: Literal["big", "little"] = "big"
    signed: bool = False
    low: int = -(2**63)
    high: int = _LARGEST

    def read(self, frame: bytes) -> int:
        if self.offset is None:
            if len(frame) != self.width:
                raise UnfitError(f"the sequence has {len(frame)} bytes, {self.width} expected")
            number = int.from_bytes(frame, self.endian, signed=self.signed)
        else:
            end = self.offset + self.width
            if len(frame) < end:
                raise UnfitError(f"the frame with the sequence has {len(frame)} bytes, {end} needed")
            number = int.from_bytes(frame[self.offset : end], self.endian, signed=self.signed)
        return _within(number, self.low, self.high)

    def write_all(self, numbers: Sequence[int]) -> list[bytes]:
        """The whole frames that these numbers were read from."""
        return [number.to_bytes(self.width, self.endian, signed=self.signed) for number in numbers]

    def read_all(self, frames: Sequence[bytes]) -> Sequence[int]:
        if self.offset is not None:
            end = self.offset + self.width
            frames = [frame[self.offset : end] for frame in frames]
        if set(map(len, frames)) != {self.width}:
            raise UnfitError("some are too short or too long")
        order = ">" if self.endian == "big" else "<"
        kind = {(4, False): "I", (4, True): "i", (8, False): "Q", (8, True): "q"}[self.width, self.signed]
        numbers = struct.unpack(f"{order}{len(frames)}{kind}", b"".join(frames))
        _within(min(numbers), self.low, self.high)
        _within(max(numbers), self.low, self.high)
        return numbers


# A header is small; a large text would keep the receiving thread from the socket.
_MOST_HEADER_BYTES = 256 << 10


class JsonSequence:
    """A whole number at a path of a JSON text that is the frame.

    Args:
        path: Names from the top; what is beside them is read over, not built.
        low, high: The numbers that a counter can have.
    """

    def __init__(self, frame: int, path: Sequence[str], low: int = -(2**63), high: int = _LARGEST) -> None:
        self.frame = frame
        self._low, self._high = low, high
        kind: Any = int
        for name in reversed(path):
            kind = msgspec.defstruct("Header", [("found", kind)], rename={"found": name})
        self._depth = len(path)
        self._decoder = msgspec.json.Decoder(kind)

    def read(self, frame: bytes) -> int:
        if len(frame) > _MOST_HEADER_BYTES:
            raise UnfitError(f"the header has {len(frame)} bytes, {_MOST_HEADER_BYTES} at most")
        try:
            found = self._decoder.decode(frame)
        # Deeply nested text is an attack on the stack, not a header.
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
            raise UnfitError(f"the header does not hold the sequence: {e}") from e
        for _ in range(self._depth):
            found = found.found
        return _within(found, self._low, self._high)

    def read_all(self, frames: Sequence[bytes]) -> Sequence[int]:
        return [self.read(frame) for frame in frames]


def _within(number: int, low: int, high: int) -> int:
    if not low <= number <= high:
        raise UnfitError(f"the sequence {number} is outside {low} to {high}")
    return number


@dataclass(frozen=True)
class Layout:
    """Which frame is what; negative numbers count from the end.

    Attributes:
        frames: How many frames a message has; with ``more``, at least.
        controls: Topics of messages without content.
        ends: Whether a message without its last frame, the value, announces that the publisher
            has ended: its sequence is how many messages there were.
    """

    frames: int
    more: bool = False
    topic: int | None = None
    publisher: int | None = None
    sequence: SequenceField | None = None
    value: int = -1
    value_offset: int = 0
    controls: frozenset[bytes] = frozenset()
    ends: bool = False

    def decode(self, messages: Sequence[RawMessage]) -> Fields:
        """Read the fields; never raises for what the bytes are."""
        try:
            return self._decode_alike(messages)
        except (UnfitError, ValueError):
            return self._decode_each(messages)

    def _decode_alike(self, messages: Sequence[RawMessage]) -> Fields:
        """All at once; UnfitError or ValueError if one of them is not like the others."""
        columns: list[Sequence[bytes]]
        kinds = set(map(type, messages))
        if kinds == {list}:
            columns = list(zip(*messages, strict=True))
        elif kinds == {bytes}:
            columns = [messages]  # type: ignore[list-item]
        else:
            raise UnfitError("some have one frame, others more")
        self._check_count(len(columns))
        topics = None if self.topic is None else columns[self.topic]
        if topics is not None and self.controls and not self.controls.isdisjoint(topics):
            raise UnfitError("some have no content")
        values = columns[self.value]
        if self.value_offset:
            if min(map(len, values)) < self.value_offset:
                raise UnfitError("some have no value")
            values = [frame[self.value_offset :] for frame in values]
        return Fields(
            values=values,
            topics=topics,
            publishers=None if self.publisher is None else columns[self.publisher],
            sequences=None if self.sequence is None else self.sequence.read_all(columns[self.sequence.frame]),
        )

    def _decode_each(self, messages: Sequence[RawMessage]) -> Fields:
        rows: list[int] = []
        topics: list[bytes | None] = []
        publishers: list[bytes] = []
        sequences: list[int] = []
        values: list[bytes] = []
        fields = Fields(values)
        for row, message in enumerate(messages):
            frames = message if isinstance(message, list) else [message]
            try:
                if self._is_control(frames):
                    fields.skipped += 1
                    continue
                if self.ends and len(frames) == self.frames - 1:
                    fields.announced.append(self._announced(row, frames))
                    continue
                self._check_count(len(frames))
                value = frames[self.value]
                if len(value) < self.value_offset:
                    raise UnfitError(
                        f"the frame with the value has {len(value)} bytes, {self.value_offset} needed"
                    )
                # First, because it may be unfit: the lists must stay equally long.
                if self.sequence is not None:
                    sequences.append(self.sequence.read(frames[self.sequence.frame]))
            except UnfitError as e:
                fields.malformed.append(Malformed(row, str(e)))
                continue
            rows.append(row)
            values.append(value[self.value_offset :])
            if self.topic is not None:
                topics.append(frames[self.topic])
            if self.publisher is not None:
                publishers.append(frames[self.publisher])
        fields.rows = rows
        fields.topics = None if self.topic is None else topics
        fields.publishers = None if self.publisher is None else publishers
        fields.sequences = None if self.sequence is None else sequences
        return fields

    @property
    def whole(self) -> bool:
        """Whether each frame is a field, so that ``frames_of`` gives all of them back."""
        sequence = self.sequence
        if self.more or self.value_offset or not isinstance(sequence, BinarySequence):
            return False
        named = {self.topic, self.publisher, sequence.frame, self.value} - {None}
        return sequence.offset is None and named == set(range(self.frames))

    def frames_of(
        self,
        topics: Sequence[bytes | None],
        publishers: Sequence[bytes | None],
        sequences: Sequence[int],
        values: Sequence[bytes],
    ) -> list[list[bytes]]:
        """The frames of messages, from their fields; of a ``whole`` layout. A topic of None is no frame."""
        assert isinstance(self.sequence, BinarySequence), "a layout that is whole"
        places = {
            self.topic: topics,
            self.publisher: publishers,
            self.sequence.frame: self.sequence.write_all(sequences),
            self.value: values,
        }
        columns = [places[at] for at in range(self.frames)]
        messages = map(list, zip(*columns, strict=True))
        if None in topics:
            return [[frame for frame in frames if frame is not None] for frames in messages]
        return list(messages)

    def _check_count(self, count: int) -> None:
        if count == self.frames or (self.more and count > self.frames):
            return
        expected = f"{self.frames} or more" if self.more else str(self.frames)
        raise UnfitError(f"it has {count} frame{'s' * (count != 1)}, {expected} expected")

    def _is_control(self, frames: list[bytes]) -> bool:
        return bool(self.controls) and self.topic == 0 and frames[0] in self.controls

    def _announced(self, row: int, frames: list[bytes]) -> Announced:
        assert self.sequence is not None
        total = self.sequence.read(frames[self.sequence.frame])
        return Announced(
            row,
            None if self.topic is None else frames[self.topic],
            None if self.publisher is None else frames[self.publisher],
            total - 1,
            end=True,
        )
