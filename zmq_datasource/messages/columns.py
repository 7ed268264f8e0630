"""Messages as columns of Arrow, made and taken apart without a Python object for each.

Nothing here, nor elsewhere on a message's way, has Arrow look at a Python object, not even at a number: for that it
imports pandas where there is one, which takes 0.2 s and 40 MB in each process. So numbers and texts become Arrow's
scalars by ``number`` and ``text``.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.messages.schemas import FRAMES

__all__ = [
    "all_true",
    "as_binary",
    "binary_of",
    "data_bytes",
    "integers_of",
    "join_frames",
    "number",
    "numbers_from",
    "numbers_to",
    "only_rows",
    "text",
]


def integers_of(numbers: Sequence[int]) -> pa.Array:
    """Python's numbers as a column of 64 bits."""
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(array("q", numbers))])


@lru_cache(256)  # most are the same each time, and each takes several calls of Arrow
def number(value: int, kind: pa.DataType = pa.int64()) -> pa.Scalar:  # noqa: B008 - Arrow's types never change
    """One of Python's numbers for Arrow to compute with."""
    return integers_of([value]).cast(kind)[0]


def text(value: str) -> pa.Scalar:
    """One of Python's texts."""
    return binary_of([value.encode()]).cast(pa.string())[0]


def binary_of(contents: Sequence[bytes | None]) -> pa.Array:
    """Python's bytes as a column; None is null."""
    present = [content for content in contents if content is not None]
    valid = None
    if len(present) < len(contents):
        bits = bytearray((len(contents) + 7) // 8)
        for row, content in enumerate(contents):
            bits[row >> 3] |= (content is not None) << (row & 7)
        valid = pa.py_buffer(bits)
    ends = array("i", accumulate((0 if content is None else len(content) for content in contents), initial=0))
    return pa.Array.from_buffers(
        pa.binary(), len(contents), [valid, pa.py_buffer(ends), pa.py_buffer(b"".join(present))]
    )


def as_binary(column: pa.Array) -> pa.Array:
    """Text as its bytes, with offsets of as many bits; binary as it is."""
    if pa.types.is_string(column.type):
        return pc.cast(column, pa.binary())
    if pa.types.is_large_string(column.type):
        return pc.cast(column, pa.large_binary())
    return column


def data_bytes(column: pa.Array) -> int:
    """How many bytes the binary values of a column have together."""
    offsets = memoryview(column.buffers()[1])[4 * column.offset :].cast("i")
    return offsets[len(column)] - offsets[0] if len(column) else 0


def join_frames(columns: Sequence[pa.Array]) -> pa.ListArray:
    """Lists of frames from the columns of them, in this order; a null is no frame."""
    rows, width = len(columns[0]), len(columns)
    places = array("q", bytes(8 * rows * width))
    for at in range(width):
        places[at::width] = array("q", range(at * rows, (at + 1) * rows))
    frames = pa.concat_arrays(columns).take(
        pa.Array.from_buffers(pa.int64(), rows * width, [None, pa.py_buffer(places)])
    )
    ends = pa.arange(0, rows * width + 1, width).cast(pa.int32())
    if frames.null_count:
        before = pc.cumulative_sum(frames.is_valid().cast(pa.int32()))
        before = pa.concat_arrays([integers_of([0]).cast(pa.int32()), before])
        ends, frames = before.take(ends), frames.drop_null()
    return pa.Array.from_buffers(FRAMES, rows, [None, ends.buffers()[1]], children=[frames])


def only_rows(lists: pa.ListArray, rows: Collection[int] | pa.Array) -> pa.ListArray:
    """The same with a null for each row but these: by their places, or by a mask."""
    if not isinstance(rows, pa.Array):
        rows = pc.is_in(pa.arange(0, len(lists)), value_set=integers_of(sorted(rows)))
    return lists.take(pc.if_else(rows, pa.arange(0, len(lists)), pa.nulls(1, pa.int64())[0]))


def all_true(mask: pa.Array) -> bool:
    """Whether a mask without nulls holds for each row."""
    return bool(mask.true_count == len(mask))


_CODES = {(4, False): ("I", pa.uint32()), (4, True): ("i", pa.int32())}


def numbers_from(frames: pa.Array, width: int, endian: str, signed: bool) -> pa.Array:
    """Whole numbers of so many bytes (4 or 8) each as a column of 64 bits; one from 2**63 on becomes negative."""
    code, kind = _CODES.get((width, signed), ("q", pa.int64()))
    begin = int.from_bytes(
        memoryview(frames.buffers()[1])[4 * frames.offset : 4 * frames.offset + 4], sys.byteorder
    )
    numbers = array(code)
    numbers.frombytes(memoryview(frames.buffers()[2])[begin : begin + width * len(frames)])
    if endian != sys.byteorder:
        numbers.byteswap()
    return pa.Array.from_buffers(kind, len(frames), [None, pa.py_buffer(numbers)]).cast(pa.int64())


def numbers_to(numbers: pa.Array, width: int, endian: str) -> pa.Array:
    """The frames that these numbers were read from."""
    narrow = pc.cast(numbers, {4: pa.uint32(), 8: pa.int64()}[width], safe=False)
    swapped = array("I" if width == 4 else "q")
    swapped.frombytes(
        memoryview(narrow.buffers()[1])[width * narrow.offset : width * (narrow.offset + len(narrow))]
    )
    if endian != sys.byteorder:
        swapped.byteswap()
    ends = pa.arange(0, width * len(numbers) + 1, width).cast(pa.int32())
    return pa.Array.from_buffers(pa.binary(), len(numbers), [None, ends.buffers()[1], pa.py_buffer(swapped)])
