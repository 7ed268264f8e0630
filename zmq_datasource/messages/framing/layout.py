"""Decode messages with fields that are whole frames, or bytes at a fixed place; a sequence may be in JSON, too."""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.messages.columns import (
    all_true,
    integers_of,
    join_frames,
    number,
    numbers_from,
    numbers_to,
)
from zmq_datasource.messages.framing.fields import Announced, Fields, Malformed, UnfitError
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.options import Layout, SequenceAt


class _Sequences(Protocol):
    """Reads the sequences of messages."""

    def read(self, frame: bytes) -> int:
        """Read the number from a frame.

        Raises:
            UnfitError: The frame has no number, or one that a BIGINT does not hold.
        """

    def fitting(self, frames: pa.Array) -> pa.Array:
        """A mask of the frames whose size allows for a number."""

    def read_all(self, frames: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Read the numbers of frames that are ``fitting``.

        Returns them, and a mask of those that ``read`` accepts.
        """


class _Integers:
    """Reads integers in bytes of a frame; if they are ``whole``, the frame has no other bytes."""

    def __init__(self, at: SequenceAt, whole: bool) -> None:
        self._at, self._whole, self._bounds = at, whole, at.range
        self._end = at.offset + at.width

    def read(self, frame: bytes) -> int:
        if self._whole and len(frame) != self._end:
            raise UnfitError(f"the sequence has {len(frame)} bytes, {self._end} expected")
        if len(frame) < self._end:
            raise UnfitError(f"the frame with the sequence has {len(frame)} bytes, {self._end} needed")
        content = frame[self._at.offset : self._end]
        return _within(int.from_bytes(content, self._at.endian, signed=self._at.signed), self._bounds)

    def fitting(self, frames: pa.Array) -> pa.Array:
        compare = pc.equal if self._whole else pc.greater_equal
        return compare(pc.binary_length(frames), number(self._end, pa.int32()))

    def read_all(self, frames: pa.Array) -> tuple[pa.Array, pa.Array]:
        if not self._whole:
            frames = pc.binary_slice(frames, self._at.offset, self._end)
        numbers = numbers_from(frames, self._at.width, self._at.endian, self._at.signed)
        # An unsigned number that a BIGINT does not hold is negative in this column.
        return numbers, pc.greater_equal(numbers, number(self._bounds[0]))


# A header is small. Parsing a large text would keep the receiving thread from the socket.
_MOST_HEADER_BYTES = 256 << 10
_WHOLE_NUMBER = re.compile(r"\s*([+-]?[0-9]{1,19})(?:\.0*)?\s*", re.ASCII)


class _JsonNumbers:
    """Reads numbers in the JSON text of a frame.

    A message that has come must not look lost because of another field of its text. So a text that strict JSON refuses
    is read leniently: with NaN and Infinity, a byte order mark, NULs at its end, bytes that are not UTF-8; and the
    number may be ``12.0`` or ``"12"``.
    """

    def __init__(self, at: SequenceAt) -> None:
        self._path, self._bounds = at.path, at.range
        # No Python object is made for other parts of the text.
        kind: Any = int
        for name in reversed(at.path):
            kind = msgspec.defstruct("Header", [("found", kind)], rename={"found": name})
        self._decoder = msgspec.json.Decoder(kind)

    def read(self, frame: bytes) -> int:
        if len(frame) > _MOST_HEADER_BYTES:
            raise UnfitError(f"the header has {len(frame)} bytes, {_MOST_HEADER_BYTES} at most")
        try:
            found = self._decoder.decode(frame)
        # A deeply nested text is an attack on the stack: RecursionError.
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
            leniently = self._find_leniently(frame)
            if leniently is None:
                raise UnfitError(f"the header does not hold the sequence: {e}") from e
            return _within(leniently, self._bounds)
        for _ in self._path:
            found = found.found
        return _within(found, self._bounds)

    def _find_leniently(self, frame: bytes) -> int | None:
        text = frame.removeprefix(codecs.BOM_UTF8).rstrip(b"\0 \t\r\n").decode("utf-8", "replace")
        try:
            found = json.loads(text, parse_float=str)
            for name in self._path:
                found = found[name]
        except (ValueError, RecursionError, LookupError, TypeError):
            return None
        if isinstance(found, str) and (whole := _WHOLE_NUMBER.fullmatch(found)):
            return int(whole[1])
        return found if isinstance(found, int) and not isinstance(found, bool) else None

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


def _within(value: int, bounds: tuple[int, int]) -> int:
    low, high = bounds
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
        """The places of the messages that were not kept, in order."""
        if self.rows is not None:
            everywhere = pa.arange(0, len(self._all))
            yield from everywhere.filter(pc.invert(pc.is_in(everywhere, value_set=self.rows))).to_pylist()


class LayoutFraming:
    """Decodes messages whose fields are at fixed places, and restores messages from their fields."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sequences: _Sequences | None = None
        if layout.sequence is not None:
            at = layout.sequence
            self._sequences = _JsonNumbers(at) if at.path else _Integers(at, layout.exact)

    def decode(self, raw: RawMessages) -> Fields:
        """Find the fields. Raises nothing for any bytes."""
        layout = self._layout
        fitting = _Fitting(raw)
        compare = pc.equal if layout.exact else pc.greater_equal
        fitting.keep(compare(raw.counts(), number(layout.frames, pa.int32())))
        sequences = None
        if layout.sequence is not None and self._sequences is not None:
            fitting.keep(self._sequences.fitting(fitting.frame(layout.sequence.frame)))
            sequences, fits = self._sequences.read_all(fitting.frame(layout.sequence.frame))
            if not all_true(fits):
                sequences = sequences.filter(fits)
            fitting.keep(fits)
        fields = Fields(
            fitting.frame(layout.value),
            None if layout.topic is None else fitting.frame(layout.topic),
            None if layout.publisher is None else fitting.frame(layout.publisher),
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
        layout = self._layout
        if layout.value not in (-1, (0 if layout.topic is None else 1)):
            return 0
        return {None: 1, 0: 2}.get(layout.topic, 0)

    def _note_other(self, fields: Fields, row: int, frames: list[bytes]) -> None:
        """Note a message that has no row: as an announcement, or with the reason."""
        layout = self._layout
        try:
            if layout.ends and len(frames) == layout.frames - 1:
                fields.announced.append(self._announced(row, frames))
                return
            self._check_count(len(frames))
            self._read_sequence(frames)
        except UnfitError as e:
            fields.malformed.append(Malformed(row, str(e)))
        else:
            raise AssertionError(f"message {row} was left out, and fits")

    def _read_sequence(self, frames: list[bytes]) -> int:
        assert self._layout.sequence is not None
        assert self._sequences is not None
        return self._sequences.read(frames[self._layout.sequence.frame])

    def _check_count(self, count: int) -> None:
        layout = self._layout
        if count == layout.frames or (not layout.exact and count > layout.frames):
            return
        expected = str(layout.frames) if layout.exact else f"{layout.frames} or more"
        raise UnfitError(f"it has {count} frame{'s' * (count != 1)}, {expected} expected")

    def _announced(self, row: int, frames: list[bytes]) -> Announced:
        layout = self._layout
        return Announced(
            row,
            None if layout.topic is None else frames[layout.topic],
            None if layout.publisher is None else frames[layout.publisher],
            self._read_sequence(frames) - 1,
            end=True,
        )


def messages_of(
    layout: Layout, topics: pa.Array, publishers: pa.Array, sequences: pa.Array, values: pa.Array
) -> RawMessages:
    """Restore messages from their fields, with an ``exact`` layout.

    If the topic is null, the message has no such frame.
    """
    at = layout.sequence
    assert at is not None, "an exact layout has a sequence"
    places = {
        layout.topic: topics,
        layout.publisher: publishers,
        at.frame: numbers_to(sequences, at.width, at.endian),
        layout.value: values,
    }
    columns = [places[place] for place in range(layout.frames)]
    if topics.null_count:
        return RawMessages.of_lists(join_frames(columns))
    return RawMessages(columns[0], columns[-1], join_frames(columns[1:-1]))
