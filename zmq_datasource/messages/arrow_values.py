"""Values that are tables: write record batches to messages, and read messages as rows.

A value is an Arrow IPC stream: the schema, record batches, and the end. So each message can be read alone, by any
program that knows Arrow.

The rules of reading:

* A column is found by its name, and cast to the type of the schema (``cast(safe=True)``).
* Any bytes become rows or an ``UnfitValueError``. Arrow's casts rely on valid data: a wrong offset, length or scale can
  end the process. So a column is examined and validated in full before the cast, and the memory of its rows is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from zmq_datasource.messages.columns import LOG_SCHEMA, integers_of

_t: Any = pa.types

# A schema may have these columns beside those of the values: facts about the message, and a value that does not fit.
MESSAGE_COLUMNS = {
    f"_{column.name}": column for column in LOG_SCHEMA if column.name not in ("value", "frames")
}
CORRUPT_RECORD = "_corrupt_record"
_NEVER_NULL = ("_id", "_timestamp")

# The columns by name; None for a value that does not fit.
_Columns: TypeAlias = dict[str, pa.Array] | None

# Rows of small messages are joined into batches of this size for Spark.
_BATCH_ROWS, _BATCH_BYTES = 10_000, 32 << 20
# A record batch without buffers can claim any number of rows.
_MOST_ROWS = 1 << 24
_END = b"\xff\xff\xff\xff\0\0\0\0"
# Beyond so many digits Arrow does not notice an overflow.
_MOST_DIGITS = 38
# The rows of one value may take this much memory, and _ELEMENT_BYTES more for each byte of the value, because an
# integer of 8 bits may become a decimal of 16 bytes.
_BUDGET_BYTES = 256 << 20
_ELEMENT_BYTES = 16
# The bytes that Python needs for a record batch of any size.
_BATCH_COST = 2048


class UnfitValueError(ValueError):
    """A value is not a table with the schema. The text says why, without quoting the value."""


class _Budget:
    """The memory that the rows of one value may take.

    Nulls without buffers, repeated values of a dictionary, and views of one text can claim any number of bytes.
    """

    def __init__(self, value_bytes: int) -> None:
        self._left = _BUDGET_BYTES + _ELEMENT_BYTES * value_bytes

    def spend(self, size: int) -> None:
        """Count memory, in bytes, before it is allocated.

        Raises:
            UnfitValueError: It is more than what is left.
        """
        self._left -= size
        if self._left < 0:
            raise UnfitValueError(
                f"its rows take {_BUDGET_BYTES >> 20} MiB more than {_ELEMENT_BYTES} times its bytes"
            )


def _fields_of(kind: pa.DataType) -> int:
    """How many columns a null of this type takes: also of a struct in it."""
    return 1 + sum(_fields_of(kind.field(place).type) for place in range(kind.num_fields))


def values_of(batch: pa.RecordBatch, max_bytes: int) -> pa.Array:
    """Write the rows of a batch, in order, to the values of messages.

    Args:
        max_bytes: The most bytes of columns in one message. A larger row is a message of its own.

    Returns:
        A binary column with offsets of 64 bits.
    """
    sink = pa.BufferOutputStream()
    ends = [0]
    rest = [batch] if batch.num_rows else []
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
        self, batch: pa.RecordBatch, unfit: Callable[[int, UnfitValueError], None]
    ) -> Iterator[pa.RecordBatch]:
        """Read messages of a log as rows, in order.

        Args:
            unfit: Called for each value that does not fit, with its id, and the reason.
        """
        gathered: list[pa.RecordBatch] = []
        rows = size = 0
        values = batch.column("value")
        for at in range(batch.num_rows):
            value = values[at].as_buffer()
            value_bytes = 0 if value is None else value.size
            budget = _Budget(value_bytes)
            try:
                if value is None:
                    raise UnfitValueError("there is none: the message does not fit its framing (onMalformed)")
                found = self._read(value, budget)
                made = [self._with_message(*each, batch, at, budget) for each in found]
            except UnfitValueError as e:
                unfit(batch.column("id")[at].as_py(), e)
                made = (
                    [self._with_message(None, 1, batch, at, _Budget(value_bytes))] if self.permissive else []
                )
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

    def _read(self, value: pa.Buffer, budget: _Budget) -> list[tuple[_Columns, int]]:
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
            raise UnfitValueError(f"it is not an Arrow IPC stream: {_short(e)}") from None
        if left:
            raise UnfitValueError(f"{left} bytes follow the Arrow IPC stream")
        if value.slice(max(0, value.size - len(_END))).to_pybytes() != _END:
            raise UnfitValueError("the end of the Arrow IPC stream is missing")
        return found

    def _columns(self, batch: pa.RecordBatch, budget: _Budget) -> _Columns:
        if not 0 <= batch.num_rows <= _MOST_ROWS:
            raise UnfitValueError(
                f"it has a record batch of {batch.num_rows} rows; the most are {_MOST_ROWS}"
            )
        columns = {}
        for wanted in self._given:
            places = batch.schema.get_all_field_indices(wanted.name)
            if len(places) != 1:
                raise UnfitValueError(f"it has {len(places)} columns {wanted.name!r}")
            columns[wanted.name] = _column_as(batch.column(places[0]), wanted, budget)
        return columns

    def _with_message(
        self, columns: _Columns, length: int, batch: pa.RecordBatch, at: int, budget: _Budget
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
                budget.spend(length * _ELEMENT_BYTES * _fields_of(column.type))
                arrays.append(pa.nulls(length, column.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _repeated(value: pa.Scalar, length: int, budget: _Budget) -> pa.Array:
    """Repeat a value in each row. A single row takes nothing beyond the message, which has the value."""
    if length > 1:
        text = value.as_buffer().size if _t.is_string(value.type) and value.is_valid else 0
        budget.spend(length * (_ELEMENT_BYTES + text))
    return pa.repeat(value, length)


def _together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


# Columns of unknown origin.


def _short(what: object) -> str:
    """Cut a text of unknown origin to 200 characters, in one line."""
    return " ".join(str(what)[:200].split())


def _column_as(column: pa.Array, wanted: pa.Field, budget: _Budget) -> pa.Array:
    """Cast a column of a value to the type of a field.

    Raises:
        UnfitValueError: The column is damaged, cannot be cast, or has nulls that the field forbids.
    """
    where = f"column {wanted.name!r}"
    try:
        found = _cast(column, wanted.type, budget)
    except UnfitValueError:
        raise
    except Exception as e:  # Arrow raises errors of many types
        raise UnfitValueError(
            f"{where} is {_short(column.type)}, and does not fit {_short(wanted.type)}: {_short(e)}"
        ) from None
    _check_nulls(found, wanted.nullable, where)
    return found


def _cast(column: pa.Array, wanted: pa.DataType, budget: _Budget) -> pa.Array:
    column.validate()
    if _t.is_dictionary(column.type):
        column.validate(full=not _is_view(column.type.value_type))
        values = _cast(column.dictionary, wanted, budget)
        budget.spend(len(column) * _ELEMENT_BYTES)
        if _t.is_binary(wanted) or _t.is_string(wanted):
            budget.spend(pc.sum(pc.binary_length(values).take(column.indices).cast(pa.int64())).as_py() or 0)
        return values.take(column.indices)
    _examine(column, wanted, budget)  # in full only then: many views can show the same megabyte
    column.validate(full=True)
    found = column.cast(wanted, safe=True)
    # Arrow does not validate the offsets of an empty list, and crashes when it follows wrong ones: a copy has none.
    return found.take(pa.arange(0, len(found))) if _t.is_nested(wanted) else found


def _examine(column: pa.Array, wanted: pa.DataType, budget: _Budget) -> None:
    """Count the memory that a column will take, and refuse what makes a cast of Arrow crash or give other values."""
    given = column.type
    budget.spend(len(column) * _ELEMENT_BYTES)
    if _t.is_null(given):
        budget.spend(len(column) * _ELEMENT_BYTES * _fields_of(wanted))
    elif _is_list(given) and _t.is_list(wanted):
        _examine(column.values, wanted.value_type, budget)
    elif _t.is_map(given) and _t.is_map(wanted):
        _examine(column.keys, wanted.key_type, budget)
        _examine(column.items, wanted.item_type, budget)
    elif _t.is_struct(given) and _t.is_struct(wanted):
        if [field.name for field in given] != [field.name for field in wanted]:
            raise pa.ArrowTypeError("the fields of the struct differ")
        for place in range(given.num_fields):
            _examine(column.field(place), wanted.field(place).type, budget)
    elif _t.is_nested(given) or _t.is_nested(wanted) or isinstance(given, pa.BaseExtensionType):
        raise pa.ArrowTypeError("the types are too different")
    elif _is_view(given):
        _examine_views(column, budget)
    elif _t.is_decimal(given):
        more = max(0, wanted.scale - given.scale) if _t.is_decimal(wanted) else 0
        if not 0 <= given.scale <= given.precision or (more and given.precision + more > _MOST_DIGITS):
            raise pa.ArrowInvalid("the scales differ by too much")


def _examine_views(column: pa.Array, budget: _Budget) -> None:
    _, views, *data = column.buffers()
    # Each view of 16 bytes begins with the length of its text. A cast follows those of nulls, too.
    count, begin = len(column), column.offset
    lengths = pa.Array.from_buffers(pa.int32(), 4 * (begin + count), [None, views])
    lengths = lengths.take(pa.arange(4 * begin, 4 * (begin + count), 4)).cast(pa.int64())
    if (pc.min(lengths).as_py() or 0) < 0:
        raise pa.ArrowInvalid("a view has a negative length")
    budget.spend(pc.sum(lengths).as_py() or 0)
    pa.Array.from_buffers(column.type, count, [None, views, *data], 0, begin).validate(full=True)


def _is_list(kind: pa.DataType) -> bool:
    return bool(_t.is_list(kind) or _t.is_large_list(kind) or _t.is_fixed_size_list(kind))


def _is_view(kind: pa.DataType) -> bool:
    return bool(_t.is_string_view(kind) or _t.is_binary_view(kind))


def _check_nulls(column: pa.Array, nullable: bool, where: str) -> None:
    """Check that a column has no null where its type forbids it, at any depth. Spark relies on that.

    Raises:
        UnfitValueError: The column has such a null.
    """
    if column.null_count and not nullable:
        raise UnfitValueError(f"{where} has nulls, and the schema says NOT NULL")
    kind = column.type
    if _t.is_list(kind):
        _check_nulls(column.flatten(), kind.value_field.nullable, f"{where}[]")
    elif _t.is_map(kind):
        _check_nulls(column.keys, False, f"{where} key")
        _check_nulls(column.items, kind.item_field.nullable, f"{where}{{}}")
    elif _t.is_struct(kind):
        present = column.drop_null() if column.null_count else column
        for child, field in zip(present.flatten(), kind, strict=True):
            _check_nulls(child, field.nullable, f"{where}.{field.name}")
