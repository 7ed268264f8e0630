"""Values that are tables: write record batches to messages, and read messages as rows.

A value is an Arrow IPC stream: the schema, record batches, and the end. So each message can be read alone, by any
program that knows Arrow.

The rules of reading:

* A column is found by its name. Its type must be that of the schema, or convert to it without loss (``arrow_types``).
* Any bytes become rows or an ``UnfitValueError``. What Arrow reads is validated in full before it is used, and the
  memory that rows take beyond the bytes of the value is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa
import pyarrow.ipc

from zmq_datasource.messages.arrow_types import MemoryBudget, UnfitValueError, column_as, short, width_of
from zmq_datasource.messages.columns import LOG_SCHEMA, integers_of

__all__ = ["CORRUPT_RECORD", "MESSAGE_COLUMNS", "ArrowValues", "values_of"]

# A schema may have these columns beside those of the values: facts about the message, and a value that does not fit.
MESSAGE_COLUMNS = {
    f"_{column.name}": column for column in LOG_SCHEMA if column.name not in ("value", "frames")
}
CORRUPT_RECORD = "_corrupt_record"
_NEVER_NULL = ("_partition", "_id", "_timestamp")

# The columns by name; None for a value that does not fit.
_Columns: TypeAlias = dict[str, pa.Array] | None

# Rows of small messages are joined into batches of this size for Spark.
_BATCH_ROWS, _BATCH_BYTES = 10_000, 32 << 20
# A record batch without buffers can claim any number of rows.
_MOST_ROWS = 1 << 24
# The bytes that Python needs for a record batch of any size.
_BATCH_COST = 2048
_END = b"\xff\xff\xff\xff\0\0\0\0"


def values_of(batch: pa.RecordBatch, max_rows: int, max_bytes: int) -> pa.Array:
    """Write the rows of a batch, in order, to the values of messages.

    Args:
        max_rows: The most rows of one message.
        max_bytes: The most bytes of columns in one message. A larger row is a message of its own.

    Returns:
        A binary column with offsets of 64 bits.
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
    """Reads messages of a log as rows with a schema.

    Args:
        schema: The schema of the rows. Beside columns of the values it may have ``MESSAGE_COLUMNS`` and
            ``CORRUPT_RECORD``.
        permissive: Whether a value that does not fit becomes a row of nulls with the value as ``CORRUPT_RECORD``.

    Raises:
        ValueError: There is no column; or one with such a name has another type or case; or a NOT NULL one may be null.
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
                    f"column {column.name!r} has type {column.type}; this column of messages has type {wanted}"
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
        """Read messages of a log as rows, in order.

        Args:
            unfit: Called for each value that does not fit, with its partition, its id, and the reason.
        """
        gathered: list[pa.RecordBatch] = []
        rows = size = 0
        values = batch.column("value")
        for at in range(batch.num_rows):
            budget = MemoryBudget()
            try:
                found = self._read(values[at].as_buffer(), budget)
                made = [self._with_message(*each, batch, at, budget) for each in found]
            except UnfitValueError as e:
                unfit(batch.column("partition")[at].as_py(), batch.column("id")[at].as_py(), e)
                made = [self._with_message(None, 1, batch, at, MemoryBudget())] if self.permissive else []
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

    def _read(self, value: pa.Buffer, budget: MemoryBudget) -> list[tuple[_Columns, int]]:
        """Read the columns of each record batch in a value, and their length."""
        source = pa.BufferReader(value)
        found: list[tuple[_Columns, int]] = []
        rows = 0
        try:
            with pa.ipc.open_stream(source) as reader:
                for batch in reader:
                    budget.spend(_BATCH_COST)
                    columns = self._columns(batch, budget)
                    rows += batch.num_rows
                    if rows > _MOST_ROWS:
                        raise UnfitValueError(f"it has more than {_MOST_ROWS} rows")
                    if batch.num_rows:
                        found.append((columns, batch.num_rows))
            left = value.size - source.tell()
        except UnfitValueError:
            raise
        # Arrow's errors, MemoryError for an impossible size, and anything that an extension type registered in this
        # process raises.
        except Exception as e:
            raise UnfitValueError(f"it is not an Arrow IPC stream: {short(e)}") from None
        if left:
            raise UnfitValueError(f"{left} bytes follow the Arrow IPC stream")
        if value.slice(max(0, value.size - len(_END))).to_pybytes() != _END:
            raise UnfitValueError("the end of the Arrow IPC stream is missing")
        return found

    def _columns(self, batch: pa.RecordBatch, budget: MemoryBudget) -> _Columns:
        if not 0 <= batch.num_rows <= _MOST_ROWS:
            raise UnfitValueError(
                f"it has a record batch of {batch.num_rows} rows; the most are {_MOST_ROWS}"
            )
        columns = {}
        for wanted in self._given:
            places = batch.schema.get_all_field_indices(wanted.name)
            if len(places) != 1:
                raise UnfitValueError(f"it has {len(places)} columns {wanted.name!r}")
            columns[wanted.name] = column_as(batch.column(places[0]), wanted, budget)
        return columns

    def _with_message(
        self, columns: _Columns, length: int, batch: pa.RecordBatch, at: int, budget: MemoryBudget
    ) -> pa.RecordBatch:
        arrays = []
        for column in self.schema:
            if column.name in MESSAGE_COLUMNS:
                arrays.append(_repeated(batch.column(column.name[1:])[at], length, budget))
            elif columns is not None and column.name in columns:
                arrays.append(columns[column.name])
            elif columns is None and column.name == CORRUPT_RECORD:
                arrays.append(_repeated(batch.column("value")[at], length, budget))
            else:
                budget.spend(length * width_of(column.type))
                arrays.append(pa.nulls(length, column.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _repeated(value: pa.Scalar, length: int, budget: MemoryBudget) -> pa.Array:
    """Repeat a value in each row. A single row takes nothing beyond the message, which has the value."""
    if length > 1:
        text = value.as_buffer().size if pa.types.is_string(value.type) and value.is_valid else 0
        budget.spend(length * (width_of(value.type) + text))
    return pa.repeat(value, length)


def _together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
