"""Decode messages with fields that are whole frames, or bytes at a fixed place; a sequence may be in JSON, too."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.messages.columns import (
    all_true,
    binary_of,
    integers_of,
    join_frames,
    number,
    numbers_from,
    numbers_to,
)
from zmq_datasource.messages.framing.fields import Announced, Fields, Malformed, UnfitError
from zmq_datasource.messages.raw import RawMessages

__all__ = ["BinarySequence", "JsonSequence", "Layout", "SequenceField"]

_LARGEST = 2**63 - 1  # what a BIGINT holds
_FAR = 2**31 - 1  # beyond the end of any frame


class SequenceField(Protocol):
    """Where a message's sequence is."""

    @property
    def frame(self) -> int:
        """The place of the frame that has it."""

    def read(self, frame: bytes) -> int:
        """Read the number from a frame.

        Raises:
            UnfitError: The frame has no number, or one that no counter can have.
        """

    def fitting(self, frames: pa.Array) -> pa.Array:
        """A mask of the frames whose size allows for a number."""

    def read_all(self, frames: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Read the numbers of frames that are ``fitting``.

        Returns them, and a mask of those that a counter can have.
        """


@dataclass(frozen=True)
class BinarySequence:
    """A sequence that is a binary integer.

    Attributes:
        offset: The number of bytes in front of it in its frame; None if it is the whole frame.
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
            value = int.from_bytes(frame, self.endian, signed=self.signed)
        else:
            end = self.offset + self.width
            if len(frame) < end:
                raise UnfitError(f"the frame with the sequence has {len(frame)} bytes, {end} needed")
            value = int.from_bytes(frame[self.offset : end], self.endian, signed=self.signed)
        return _within(value, self.low, self.high)

    def fitting(self, frames: pa.Array) -> pa.Array:
        sizes = pc.binary_length(frames)
        if self.offset is None:
            return pc.equal(sizes, number(self.width, pa.int32()))
        return pc.greater_equal(sizes, number(self.offset + self.width, pa.int32()))

    def read_all(self, frames: pa.Array) -> tuple[pa.Array, pa.Array]:
        if self.offset is not None:
            frames = pc.binary_slice(frames, self.offset, self.offset + self.width)
        numbers = numbers_from(frames, self.width, self.endian, self.signed)
        low = self.low
        if not self.signed and self.low < 0:  # an unsigned number beyond a column's range is negative in it
            low = 0
        return numbers, pc.and_(
            pc.greater_equal(numbers, number(low)), pc.less_equal(numbers, number(self.high))
        )


# A header is small. Parsing a large text would keep the receiving thread from the socket.
_MOST_HEADER_BYTES = 256 << 10


class JsonSequence:
    """A sequence that is an integer in a frame of JSON.

    Args:
        path: The names that lead to it, from the top. No Python object is made for other parts of the text.
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
        # A deeply nested text is an attack on the stack: RecursionError.
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
            raise UnfitError(f"the header does not hold the sequence: {e}") from e
        for _ in range(self._depth):
            found = found.found
        return _within(found, self._low, self._high)

    def fitting(self, frames: pa.Array) -> pa.Array:
        return pc.less_equal(pc.binary_length(frames), number(_MOST_HEADER_BYTES, pa.int32()))

    def read_all(self, frames: pa.Array) -> tuple[pa.Array, pa.Array]:
        numbers = array("q", bytes(8 * len(frames)))
        fits = array("b", bytes(len(frames)))
        for row, frame in enumerate(frames.to_pylist()):
            with suppress(UnfitError):
                numbers[row] = self.read(frame)
                fits[row] = 1
        return integers_of(numbers), pa.Array.from_buffers(
            pa.int8(), len(frames), [None, pa.py_buffer(fits)]
        ).cast(pa.bool_())


def _within(value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise UnfitError(f"the sequence {value} is outside {low} to {high}")
    return value


class _Fitting:
    """The messages that fit, as far as they have been checked.

    Attributes:
        rows: Their places; None if all fit.
    """

    def __init__(self, raw: RawMessages) -> None:
        self._all = self._raw = raw
        self.rows: pa.Array | None = None
        self._frames: dict[int, pa.Array] = {}

    def keep(self, mask: pa.Array) -> None:
        """Keep the messages that the mask selects."""
        if all_true(mask):
            return
        rows = pa.arange(0, len(self._all)) if self.rows is None else self.rows
        self.rows = rows.filter(mask)
        self._raw = self._raw.filter(mask)
        self._frames.clear()

    def frame(self, place: int) -> pa.Array:
        """A column of the frames at this place."""
        if place not in self._frames:
            self._frames[place] = self._raw.frame(place)
        return self._frames[place]

    def others(self) -> Iterator[int]:
        """The places of the messages that were not kept, in order: also of those without content."""
        if self.rows is not None:
            everywhere = pa.arange(0, len(self._all))
            yield from everywhere.filter(pc.invert(pc.is_in(everywhere, value_set=self.rows))).to_pylist()


@dataclass(frozen=True)
class Layout:
    """The places of a message's fields among its frames. Negative places count from the end.

    Attributes:
        frames: The number of frames that a message has; with ``more``, the least number.
        controls: The topics of messages without content.
        ends: Whether a message without the last frame, the value, announces that its publisher has ended. The sequence
            of such a message is the number of messages that the publisher has sent.
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

    def decode(self, raw: RawMessages) -> Fields:
        """Find the fields. Raises nothing for any bytes."""
        fitting = _Fitting(raw)
        counts = raw.counts()
        expected = number(self.frames, pa.int32())
        fitting.keep(pc.greater_equal(counts, expected) if self.more else pc.equal(counts, expected))
        topics = None if self.topic is None else fitting.frame(self.topic)
        if topics is not None and self.controls:
            fitting.keep(pc.invert(pc.is_in(topics, value_set=binary_of(sorted(self.controls)))))
        if self.value_offset:
            fitting.keep(
                pc.greater_equal(
                    pc.binary_length(fitting.frame(self.value)), number(self.value_offset, pa.int32())
                )
            )
        sequences = None
        if self.sequence is not None:
            fitting.keep(self.sequence.fitting(fitting.frame(self.sequence.frame)))
            sequences, fits = self.sequence.read_all(fitting.frame(self.sequence.frame))
            if not all_true(fits):
                sequences = sequences.filter(fits)
            fitting.keep(fits)
        values = fitting.frame(self.value)
        if self.value_offset:
            values = pc.binary_slice(values, self.value_offset, _FAR)  # without an end Arrow 26 fails
        fields = Fields(
            values,
            None if self.topic is None else fitting.frame(self.topic),
            None if self.publisher is None else fitting.frame(self.publisher),
            sequences,
            fitting.rows,
            self._plain_frames,
        )
        for row in fitting.others():
            self._note_other(fields, row, raw.message(row))
        return fields

    @property
    def _plain_frames(self) -> int:
        """See ``Fields.plain_frames``."""
        if self.value_offset or self.value not in (-1, (0 if self.topic is None else 1)):
            return 0
        return {None: 1, 0: 2}.get(self.topic, 0)

    def _note_other(self, fields: Fields, row: int, frames: list[bytes]) -> None:
        """Note a message that has no row: as a control message, as an announcement, or with the reason."""
        if self._is_control(frames):
            fields.skipped += 1
            return
        try:
            if self.ends and len(frames) == self.frames - 1:
                fields.announced.append(self._announced(row, frames))
                return
            self._check_count(len(frames))
            size = len(frames[self.value])
            if size < self.value_offset:
                raise UnfitError(f"the frame with the value has {size} bytes, {self.value_offset} needed")
            assert self.sequence is not None, "nothing else can be wrong"
            self.sequence.read(frames[self.sequence.frame])
        except UnfitError as e:
            fields.malformed.append(Malformed(row, str(e)))
        else:
            raise AssertionError(f"message {row} was left out, and fits")

    @property
    def whole(self) -> bool:
        """Whether each frame is a field, so that ``messages_of`` restores all frames."""
        sequence = self.sequence
        if self.more or self.value_offset or not isinstance(sequence, BinarySequence):
            return False
        named = {self.topic, self.publisher, sequence.frame, self.value} - {None}
        return sequence.offset is None and named == set(range(self.frames))

    def messages_of(
        self, topics: pa.Array, publishers: pa.Array, sequences: pa.Array, values: pa.Array
    ) -> RawMessages:
        """Restore messages from their fields, with a ``whole`` layout.

        If the topic is null, the message has no such frame.
        """
        assert isinstance(self.sequence, BinarySequence), "a layout that is whole"
        places = {
            self.topic: topics,
            self.publisher: publishers,
            self.sequence.frame: numbers_to(sequences, self.sequence.width, self.sequence.endian),
            self.value: values,
        }
        columns = [places[at] for at in range(self.frames)]
        if topics.null_count:
            return RawMessages.of_lists(join_frames(columns))
        return RawMessages(columns[0], columns[-1], join_frames(columns[1:-1]))

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
