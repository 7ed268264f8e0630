"""Rows as messages: one column for each frame of a message, or for several frames, in the order of the frames.

The compiled core reads the columns' buffers (``described``); the Python core reads their values (``frames``). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from zmq_datasource.messages.raw import RawMessages

_LARGEST_NUMBER = 2**63 - 1


@dataclass(frozen=True)
class FrameColumn:
    """One frame in each row: binary or text, with offsets of 32 or 64 bits.

    A null gives the row no frame, or with ``empty`` a frame without bytes.
    """

    values: pa.Array
    empty: bool = False

    def described(self) -> tuple[Any, ...]:
        """The column as ``_core.c`` takes it."""
        wide = _is_wide(self.values.type)
        valid, offsets, data = self.values.buffers()
        return 0, data, offsets, valid, None, wide, self.empty, self.values.offset, 0

    def frames(self, rows: int) -> list[list[bytes]]:
        """The frames of each row. Raises the errors of ``core.Outbox``."""
        _is_wide(self.values.type)
        absent = [b""] if self.empty else []
        return [absent if value is None else [_bytes_of(value)] for value in _checked(self.values, rows)]


@dataclass(frozen=True)
class SameColumn:
    """The same frame in each row."""

    content: bytes

    def described(self) -> tuple[Any, ...]:
        return 1, self.content, None, None, None, False, False, 0, 0

    def frames(self, rows: int) -> list[list[bytes]]:
        return [[self.content]] * rows


@dataclass(frozen=True)
class NumberColumn:
    """A frame of 8 bytes, big-endian: a number that goes up by one from row to row.

    Attributes:
        first: The number in row 0.
    """

    first: int

    def described(self) -> tuple[Any, ...]:
        return 2, None, None, None, None, False, False, self.first, 0

    def frames(self, rows: int) -> list[list[bytes]]:
        if not 0 <= self.first <= _LARGEST_NUMBER - rows:
            raise ValueError("a column has numbers below 0 or beyond 63 bits")
        return [[number.to_bytes(8, "big")] for number in range(self.first, self.first + rows)]


@dataclass(frozen=True)
class FramesColumn:
    """Several frames in each row, as a list of binary. Neither a list nor a frame may be null."""

    messages: pa.Array

    def described(self) -> tuple[Any, ...]:
        messages = self.messages
        wide = self._is_wide()
        frames = messages.values
        valid, lists = messages.buffers()[:2]
        _, offsets, data = frames.buffers()
        return 3, data, offsets, valid, lists, wide, False, messages.offset, frames.offset

    def frames(self, rows: int) -> list[list[bytes]]:
        self._is_wide()
        lists = _checked(self.messages, rows)
        if None in lists:
            raise ValueError("a row of a column of lists is null")
        return [[_bytes_of(frame) for frame in frames] for frames in lists]

    def _is_wide(self) -> bool:
        if not pa.types.is_list(self.messages.type):
            raise TypeError(f"lists with offsets of 32 bits are needed, and not {self.messages.type}")
        return _is_wide(self.messages.type.value_type)


Column: TypeAlias = FrameColumn | SameColumn | NumberColumn | FramesColumn


def columns_of(raw: RawMessages) -> list[Column]:
    """The columns that send raw messages as they were received."""
    middle: list[Column] = [] if raw.middle is None else [FramesColumn(raw.middle)]
    return [FrameColumn(raw.first), *middle, FrameColumn(raw.last)]


def _is_wide(values: pa.DataType) -> bool:
    """Whether a type of frames has offsets of 64 bits.

    Raises:
        TypeError: The type is neither binary nor text, or has no offsets.
    """
    if pa.types.is_binary(values) or pa.types.is_string(values):
        return False
    if pa.types.is_large_binary(values) or pa.types.is_large_string(values):
        return True
    raise TypeError(f"frames are binary, and not {values}")


def _checked(column: pa.Array, rows: int) -> Sequence[Any]:
    """The first values of a column, after a check of its offsets."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as e:
        raise ValueError(f"a column is damaged: {e}") from e
    if len(column) < rows:
        raise ValueError(f"a column has {len(column)} of {rows} rows")
    values: list[Any] = column.slice(0, rows).to_pylist()
    return values


def _bytes_of(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
