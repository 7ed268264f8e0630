"""Values that are tables: record batches to messages, and messages to rows.

A value is an Arrow IPC stream: the schema, record batches, and the end. So each message can be read alone, by anything
that knows Arrow.

The rules of reading:

* A column is found by its name. Its type must be the schema's, or one that becomes it without a loss: see
  ``arrow_types``.
* Whatever the bytes are, they become rows or an ``UnfitValueError``: what Arrow reads is checked in full before it is
  used, and memory that no bytes stand for is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa
import pyarrow.ipc

from zmq_datasource.messages.arrow_types import Room, UnfitValueError, column_as, short, width_of
from zmq_datasource.messages.columns import integers_of
from zmq_datasource.messages.schemas import LOG_SCHEMA

__all__ = ["CORRUPT_RECORD", "MESSAGE_COLUMNS", "ArrowValues", "values_of"]

# What a schema may have beside the columns of the values: what is known of the message, and the value that did not fit.
MESSAGE_COLUMNS = {
    f"_{column.name}": column for column in LOG_SCHEMA if column.name not in ("value", "frames")
}
CORRUPT_RECORD = "_corrupt_record"
_NEVER_NULL = ("_partition", "_id", "_timestamp")

# By name; None for a value that does not fit.
_Columns: TypeAlias = dict[str, pa.Array] | None

# Rows of small messages are given to Spark together.
_BATCH_ROWS, _BATCH_BYTES = 10_000, 32 << 20
# Without any buffer a record batch can claim any number of rows.
_MOST_ROWS = 1 << 24
# What a record batch costs in Python, however few its bytes.
_BATCH_COST = 2048
_END = b"\xff\xff\xff\xff\0\0\0\0"


def values_of(batch: pa.RecordBatch, max_rows: int, max_bytes: int) -> pa.Array:
    """The values of messages that hold the rows of a batch, in their order.

    Args:
        max_rows: Of one message.
        max_bytes: Of the columns in one message; a row is never divided.

    Returns:
        Binary, with offsets of 64 bits.
    """
    sink = pa.BufferOutputStream()
    ends = [0]
    rest = [batch.slice(begin, max_rows) for begin in range(0, batch.num_rows, max_rows)][::-1]
    while rest:
        rows = rest.pop()
        if rows.nbytes > max_bytes and rows.num_rows > 1:
            half = rows.num_rows // 2
            rest += [rows.slice(half), rows.slice(0, half)]
            continue
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(rows)
        ends.append(sink.tell())
    return pa.Array.from_buffers(
        pa.large_binary(), len(ends) - 1, [None, integers_of(ends).buffers()[1], sink.getvalue()]
    )


@dataclass(frozen=True)
class ArrowValues:
    """Reads messages of a log as rows of a schema.

    Args:
        schema: Of the rows; beside columns of the values it may have those of ``MESSAGE_COLUMNS``, and
            ``CORRUPT_RECORD``.
        permissive: Whether a value that does not fit becomes a row of nulls, with its bytes as ``CORRUPT_RECORD``.

    Raises:
        ValueError: A column with one of those names has another type, or must not be null and would be.
    """

    schema: pa.Schema
    permissive: bool
    _given: tuple[pa.Field, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.schema.names:
            raise ValueError("it has no columns")
        special = {name: column.type for name, column in MESSAGE_COLUMNS.items()}
        special[CORRUPT_RECORD] = pa.binary()
        given = []
        for column in self.schema:
            wanted = special.get(column.name)
            if wanted is None:
                if column.name.lower() in special:
                    raise ValueError(f"column {column.name!r}: write {column.name.lower()!r}")
                given.append(column)
            elif column.type != wanted:
                raise ValueError(
                    f"column {column.name!r} has type {column.type}, and what it is of a message has type {wanted}"
                )
            elif not column.nullable and column.name not in _NEVER_NULL:
                raise ValueError(f"column {column.name!r} can be null; leave out NOT NULL")
        required = [column.name for column in given if not column.nullable]
        if self.permissive and required:
            raise ValueError(
                f"column {required[0]!r} is NOT NULL, and in a value that does not fit it is null; leave out NOT NULL, "
                "or set mode to DROPMALFORMED or FAILFAST"
            )
        object.__setattr__(self, "_given", tuple(given))

    def rows(
        self, batch: pa.RecordBatch, unfit: Callable[[int, int, UnfitValueError], None]
    ) -> Iterator[pa.RecordBatch]:
        """The rows of messages, in order.

        Args:
            batch: Messages of a log.
            unfit: Told of each value that does not fit: its partition, its id, and why.
        """
        gathered: list[pa.RecordBatch] = []
        rows = size = 0
        values = batch.column("value")
        for at in range(batch.num_rows):
            room = Room()
            try:
                found = self._read(values[at].as_buffer(), room)
                made = [self._with_message(*each, batch, at, room) for each in found]
            except UnfitValueError as e:
                unfit(batch.column("partition")[at].as_py(), batch.column("id")[at].as_py(), e)
                made = [self._with_message(None, 1, batch, at, Room())] if self.permissive else []
            for each in made:
                if not each.num_rows:
                    continue
                if gathered and (rows >= _BATCH_ROWS or size + each.nbytes > _BATCH_BYTES):
                    yield _together(gathered)
                    gathered, rows, size = [], 0, 0
                gathered.append(each)
                rows += each.num_rows
                size += each.nbytes
        if gathered:
            yield _together(gathered)

    def _read(self, value: pa.Buffer, room: Room) -> list[tuple[_Columns, int]]:
        """The columns of each of its record batches, and their lengths."""
        source = pa.BufferReader(value)
        found: list[tuple[_Columns, int]] = []
        rows = 0
        try:
            with pa.ipc.open_stream(source) as reader:
                for batch in reader:
                    room.take(_BATCH_COST)
                    columns = self._columns(batch, room)
                    rows += batch.num_rows
                    if rows > _MOST_ROWS:
                        raise UnfitValueError(f"it has more than {_MOST_ROWS} rows")
                    if batch.num_rows:
                        found.append((columns, batch.num_rows))
            left = value.size - source.tell()
        except UnfitValueError:
            raise
        # Arrow's own errors, a size that no memory has, and whatever an extension type that somebody has registered in
        # this process thinks of its description.
        except Exception as e:
            raise UnfitValueError(f"it is no Arrow IPC stream: {short(e)}") from None
        if left:
            raise UnfitValueError(f"{left} bytes follow the Arrow IPC stream")
        if value.slice(max(0, value.size - len(_END))).to_pybytes() != _END:
            raise UnfitValueError("the end of the Arrow IPC stream is missing")
        return found

    def _columns(self, batch: pa.RecordBatch, room: Room) -> _Columns:
        if not 0 <= batch.num_rows <= _MOST_ROWS:
            raise UnfitValueError(f"a record batch of {batch.num_rows} rows; {_MOST_ROWS} are the most")
        columns = {}
        for wanted in self._given:
            places = batch.schema.get_all_field_indices(wanted.name)
            if len(places) != 1:
                raise UnfitValueError(f"it has {len(places)} columns {wanted.name!r}")
            columns[wanted.name] = column_as(batch.column(places[0]), wanted, room)
        return columns

    def _with_message(
        self, columns: _Columns, length: int, batch: pa.RecordBatch, at: int, room: Room
    ) -> pa.RecordBatch:
        arrays = []
        for column in self.schema:
            if column.name in MESSAGE_COLUMNS:
                arrays.append(_repeated(batch.column(column.name[1:])[at], length, room))
            elif columns is not None and column.name in columns:
                arrays.append(columns[column.name])
            elif columns is None and column.name == CORRUPT_RECORD:
                arrays.append(_repeated(batch.column("value")[at], length, room))
            else:
                room.take(length * width_of(column.type))
                arrays.append(pa.nulls(length, column.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _repeated(value: pa.Scalar, length: int, room: Room) -> pa.Array:
    """The same value in each row; that of one row was received, and has its room."""
    if length > 1:
        text = value.as_buffer().size if pa.types.is_string(value.type) and value.is_valid else 0
        room.take(length * (width_of(value.type) + text))
    return pa.repeat(value, length)


def _together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
