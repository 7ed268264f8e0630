"""The columns of a message, declared once for Arrow, for the log and for Spark, and functions on Arrow columns.

A receiver appends *messages* to the log (``MESSAGE_SCHEMA``). *Rows* that are read from the log have ``id``
before these columns (``LOG_SCHEMA``). Spark reads the same rows, but ``frames`` only if the user asks for them
(``row_schema``).

``topic`` is text. A topic that is not UTF-8 is text in hex (``rows.name_of``), and ``frames`` keeps the original. In
the log, ``frames`` is null where the other columns give the frames back exactly, so an ordinary message is stored once.

The functions make Arrow columns and take them apart without a Python object for each message. No code on a message's
way may give Arrow a Python object, not even a number: Arrow would then import pandas, if it is installed, which takes
0.2 s and 40 MB in each process. ``number`` and ``text`` make Arrow scalars without that.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc

# A message must fit an Arrow array with 32-bit offsets and a JVM byte array, with room to spare.
MAX_MESSAGE_BYTES = 1 << 30

# The key in a schema's metadata for the framing that restores the frames; plain, if it is missing.
FRAMING = b"framing"

# The type of a column with all frames of each message.
FRAMES = pa.list_(pa.field("element", pa.binary()))

MESSAGE_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("value", pa.binary()),
        ("publisher", pa.string()),
        ("sequence", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("frames", FRAMES),
    ]
)
LOG_SCHEMA = pa.schema([("id", pa.int64()), *MESSAGE_SCHEMA])

_SPARK_TYPES = {
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP",
    FRAMES: "ARRAY<BINARY>",
}


def row_schema(include_frames: bool) -> pa.Schema:
    """The schema of the rows that Spark reads, for Arrow."""
    return LOG_SCHEMA if include_frames else LOG_SCHEMA.remove(LOG_SCHEMA.get_field_index("frames"))


def spark_ddl(include_frames: bool) -> str:
    """The schema of the rows that Spark reads, as DDL."""
    return ", ".join(f"{f.name} {_SPARK_TYPES[f.type]}" for f in row_schema(include_frames))


def integers_of(numbers: Sequence[int]) -> pa.Array:
    """Make a column of 64 bits from Python integers."""
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(array("q", numbers))])


@lru_cache(256)  # few different numbers are used, and each takes several calls of Arrow
def number(value: int, kind: pa.DataType = pa.int64()) -> pa.Scalar:  # noqa: B008 - Arrow's types never change
    """Make an Arrow scalar from a Python integer."""
    return integers_of([value]).cast(kind)[0]


def text(value: str) -> pa.Scalar:
    """Make an Arrow scalar from a Python string."""
    return binary_of([value.encode()]).cast(pa.string())[0]


def binary_of(contents: Sequence[bytes | None]) -> pa.Array:
    """Make a binary column from Python bytes; None becomes null."""
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
    """Convert a text column to binary with offsets of the same width. A binary column stays as it is."""
    if pa.types.is_string(column.type):
        return pc.cast(column, pa.binary())
    if pa.types.is_large_string(column.type):
        return pc.cast(column, pa.large_binary())
    return column


def data_bytes(column: pa.Array) -> int:
    """The number of bytes of all values in a binary column."""
    offsets = memoryview(column.buffers()[1])[4 * column.offset :].cast("i")
    return offsets[len(column)] - offsets[0] if len(column) else 0


def join_frames(columns: Sequence[pa.Array]) -> pa.ListArray:
    """Make the list of frames of each message from columns of frames. A null adds no frame."""
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
    """Replace all lists except those of ``rows`` by null. The rows are given by place or as a mask."""
    if not isinstance(rows, pa.Array):
        rows = pc.is_in(pa.arange(0, len(lists)), value_set=integers_of(sorted(rows)))
    return lists.take(pc.if_else(rows, pa.arange(0, len(lists)), pa.nulls(1, pa.int64())[0]))


def all_true(mask: pa.Array) -> bool:
    """Whether a mask without nulls selects every row."""
    return bool(mask.true_count == len(mask))


_CODES = {(4, False): ("I", pa.uint32()), (4, True): ("i", pa.int32())}


def numbers_from(frames: pa.Array, width: int, endian: str, signed: bool) -> pa.Array:
    """Decode binary integers of ``width`` bytes (4 or 8) into a column of 64 bits.

    Numbers from 2**63 on become negative.
    """
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
    """Encode integers as frames of ``width`` bytes: the reverse of ``numbers_from``."""
    narrow = pc.cast(numbers, {4: pa.uint32(), 8: pa.int64()}[width], safe=False)
    swapped = array("I" if width == 4 else "q")
    swapped.frombytes(
        memoryview(narrow.buffers()[1])[width * narrow.offset : width * (narrow.offset + len(narrow))]
    )
    if endian != sys.byteorder:
        swapped.byteswap()
    ends = pa.arange(0, width * len(numbers) + 1, width).cast(pa.int32())
    return pa.Array.from_buffers(pa.binary(), len(numbers), [None, ends.buffers()[1], pa.py_buffer(swapped)])
