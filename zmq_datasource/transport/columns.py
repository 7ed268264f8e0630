"""Rows as messages: one column for each frame of a message, or for several frames, in the order of the frames.

Each core reads the columns' buffers (``described``), with offsets of 32 bits. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from zmq_datasource.messages.columns import FRAMES


@dataclass(frozen=True)
class FrameColumn:
    """One frame in each row: binary or text.

    A null gives the row no frame, or with ``empty`` a frame without bytes.
    """

    values: pa.Array
    empty: bool = False

    def described(self) -> tuple[Any, ...]:
        """The column as the cores take it."""
        values = _narrow(self.values)
        valid, offsets, data = values.buffers()
        return 0, data, offsets, valid, None, self.empty, values.offset, 0


@dataclass(frozen=True)
class SameColumn:
    """The same frame in each row."""

    content: bytes

    def described(self) -> tuple[Any, ...]:
        return 1, self.content, None, None, None, False, 0, 0


@dataclass(frozen=True)
class NumberColumn:
    """A frame of 8 bytes, big-endian: a number that goes up by one from row to row.

    Attributes:
        first: The number in row 0.
    """

    first: int

    def described(self) -> tuple[Any, ...]:
        return 2, None, None, None, None, False, self.first, 0


@dataclass(frozen=True)
class FramesColumn:
    """Several frames in each row, as a list of binary. Neither a list nor a frame may be null."""

    messages: pa.Array

    def described(self) -> tuple[Any, ...]:
        messages = self._narrow()
        frames = messages.values
        valid, lists = messages.buffers()[:2]
        _, offsets, data = frames.buffers()
        return 3, data, offsets, valid, lists, False, messages.offset, frames.offset

    def _narrow(self) -> pa.Array:
        kind = self.messages.type
        if not pa.types.is_list(kind):
            raise TypeError(f"lists with offsets of 32 bits are needed, and not {kind}")
        if pa.types.is_binary(kind.value_type):
            return self.messages
        _check_kind(kind.value_type)
        return self.messages.cast(FRAMES)


Column: TypeAlias = FrameColumn | SameColumn | NumberColumn | FramesColumn


def _narrow(values: pa.Array) -> pa.Array:
    """The values as binary with offsets of 32 bits. Raises ArrowInvalid if they have more than 2 GiB."""
    _check_kind(values.type)
    return values if pa.types.is_binary(values.type) else values.cast(pa.binary())


def _check_kind(kind: pa.DataType) -> None:
    is_binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    if not (is_binary or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise TypeError(f"frames are binary, and not {kind}")
