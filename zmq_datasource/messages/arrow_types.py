"""Convert columns of unknown origin to the types of a schema.

Arrow's casts rely on valid data. So a column is validated before a cast, and a nested type is taken apart and put
together again. A column converts to another type only if none of its values loses anything:

* numbers to another width, integers to floating-point numbers or decimals, and times to another unit;
* text, bytes and lists from another of Arrow's layouts, and dictionaries of flat values to these values;
* a column that has only nulls to any type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["MemoryBudget", "UnfitValueError", "column_as", "short", "width_of"]

_t: Any = pa.types

# For rows that take no bytes in a value: nulls without a buffer, and repeated values of a dictionary.
_BUDGET_BYTES = 256 << 20
_VIEW_BYTES = 16
_MOST_DIGITS = 76


class UnfitValueError(ValueError):
    """A value is not a table with the schema. The text says why, without quoting the value."""


class MemoryBudget:
    """The memory that the rows of one value may still take beyond the bytes of the value."""

    def __init__(self) -> None:
        self._left = _BUDGET_BYTES

    def spend(self, size: int) -> None:
        """Count memory, in bytes, before it is allocated.

        Raises:
            UnfitValueError: It is more than what is left.
        """
        self._left -= size
        if self._left < 0:
            raise UnfitValueError(f"its rows take {_BUDGET_BYTES >> 20} MiB more than its bytes")


def short(what: object) -> str:
    """Cut a text of unknown origin to 200 characters, in one line."""
    return " ".join(str(what)[:200].split())


def column_as(column: pa.Array, wanted: pa.Field, budget: MemoryBudget) -> pa.Array:
    """Convert a column of a value to the type of a field.

    Raises:
        UnfitValueError: The column is damaged, has nulls that the field forbids, or would lose something.
    """
    where = f"column {wanted.name!r}"
    try:
        column.validate()
        _count_views(column, budget)
        column.validate(full=True)
    except UnfitValueError:
        raise
    except Exception as e:  # Arrow raises errors of many types
        raise UnfitValueError(f"{where} is damaged: {short(e)}") from None
    try:
        found = _as(column, wanted.type, where, budget)
    except UnfitValueError:
        raise
    except Exception as e:
        raise UnfitValueError(
            f"{where} is {short(column.type)}, and does not fit {wanted.type}: {short(e)}"
        ) from None
    _check_nulls(found, wanted.nullable, where)
    return found


def _count_views(column: pa.Array, budget: MemoryBudget) -> None:
    """Count the bytes that views show beyond the bytes of their buffers: many views can show the same megabyte."""
    kind = column.type
    if _t.is_string_view(kind) or _t.is_binary_view(kind):
        buffers = column.buffers()
        parts = pa.Array.from_buffers(
            pa.int32(), 4 * (column.offset + len(column)), [None, buffers[1]]
        )  # each view begins with its length
        lengths = parts.take(pa.arange(4 * column.offset, len(parts), 4)).cast(pa.int64())
        shown = pc.sum(pc.if_else(column.is_valid(), lengths, pa.scalar(0, pa.int64()))).as_py() or 0
        budget.spend(max(0, shown - sum(buffer.size for buffer in buffers[1:])))
    elif _is_list(kind):
        _count_views(column.values, budget)
    elif _t.is_map(kind):
        _count_views(column.keys, budget)
        _count_views(column.items, budget)
    elif _t.is_struct(kind):
        for place in range(kind.num_fields):
            _count_views(column.field(place), budget)
    elif _t.is_dictionary(kind):
        _count_views(column.dictionary, budget)


def _as(column: pa.Array, wanted: pa.DataType, where: str, budget: MemoryBudget) -> pa.Array:
    given = column.type
    if isinstance(given, pa.BaseExtensionType):
        raise UnfitValueError(f"{where} is {short(given)}, and the schema says {wanted}")
    if not len(column):
        # Arrow does not validate the offsets of an empty array, and crashes when it follows wrong ones.
        column = pa.nulls(0, given)
    if _t.is_null(given):
        budget.spend(len(column) * width_of(wanted))
        return pa.nulls(len(column), wanted)
    if _t.is_dictionary(given) and not _t.is_nested(given.value_type):
        values = _as(column.dictionary, wanted, where, budget)
        budget.spend(_taken(values, column.indices))
        return values.take(column.indices)
    if _is_list(given) and _t.is_list(wanted):
        return _list(column, wanted, where, budget)
    if _t.is_struct(given) and _t.is_struct(wanted):
        return _struct(column, wanted, where, budget)
    if _t.is_map(given) and _t.is_map(wanted):
        return _map(column, wanted, where, budget)
    if not _t.is_nested(given):
        if given == wanted:
            return column
        for is_given, is_wanted, convert in _CONVERSIONS:
            if is_given(given) and is_wanted(wanted):
                _spend_beyond(column, width_of(wanted), budget)
                return convert(column, wanted)
    raise UnfitValueError(f"{where} is {short(given)}, and the schema says {wanted}")


def _is_list(kind: pa.DataType) -> bool:
    return bool(_t.is_list(kind) or _t.is_large_list(kind) or _t.is_fixed_size_list(kind))


def _list(column: pa.Array, wanted: pa.DataType, where: str, budget: MemoryBudget) -> pa.Array:
    _spend_beyond(column, 32, budget)  # the steps below take so much for each row
    # A null can have elements, too: flatten leaves them out.
    values = _as(column.flatten(), wanted.value_type, f"{where}[]", budget)
    lengths = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64())
    ends = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths)]).cast(pa.int32())
    return pa.ListArray.from_arrays(ends, values, type=wanted, mask=column.is_null())


def _struct(column: pa.Array, wanted: pa.DataType, where: str, budget: MemoryBudget) -> pa.Array:
    names = [field.name for field in wanted]
    if [field.name for field in column.type] != names or len(set(names)) < len(names):
        raise UnfitValueError(f"{where} is {short(column.type)}, and the schema says {wanted}")
    # flatten makes the children null where the struct is.
    children = [
        _as(child, field.type, f"{where}.{field.name}", budget)
        for child, field in zip(column.flatten(), wanted, strict=True)
    ]
    return pa.StructArray.from_arrays(children, fields=list(wanted), mask=column.is_null())


def _map(column: pa.Array, wanted: pa.DataType, where: str, budget: MemoryBudget) -> pa.Array:
    """Convert a map as a list of its entries."""
    kind = column.type
    given = [pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)]
    lists = pa.Array.from_buffers(
        pa.list_(pa.struct(given)),
        len(column),
        column.buffers()[:2],
        column.null_count,
        column.offset,
        [pa.StructArray.from_arrays([column.keys, column.items], fields=given)],
    )
    fields = [pa.field("key", wanted.key_type, nullable=False), wanted.item_field.with_name("value")]
    made = _list(lists, pa.list_(pa.struct(fields)), where, budget)
    keys, items = made.values.flatten()
    if keys.null_count:  # reading null_count computes it; otherwise pyarrow 21 to 24 crash below
        raise UnfitValueError(f"{where} has a null among its keys")
    entries = pa.StructArray.from_arrays([keys, items], fields=[wanted.key_field, wanted.item_field])
    return pa.Array.from_buffers(wanted, len(made), made.buffers()[:2], made.null_count, 0, [entries])


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


def width_of(kind: pa.DataType) -> int:
    """Estimate how many bytes a null of this type takes in a record batch."""
    if _t.is_struct(kind):
        return 1 + sum(width_of(field.type) for field in kind)
    try:
        return 2 + int(kind.bit_width) // 8
    except ValueError:
        return 5  # an offset


def _taken(values: pa.Array, indices: pa.Array) -> int:
    """The number of bytes that the values of a dictionary take in the rows."""
    size = len(indices) * width_of(values.type)
    if _t.is_binary(values.type) or _t.is_string(values.type):
        size += pc.sum(pc.binary_length(values).take(indices).cast(pa.int64())).as_py() or 0
    return size


def _spend_beyond(column: pa.Array, each: int, budget: MemoryBudget) -> None:
    """Count ``each`` bytes a row, less the bytes that the column has."""
    try:
        held = column.nbytes
    except pa.ArrowTypeError:  # of views, before pyarrow 24
        held = column.get_total_buffer_size()
    budget.spend(max(0, len(column) * each - held))


# Conversions of flat types.


def _cast(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    return pc.cast(column, wanted)


def _narrow(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    found = pc.cast(column, wanted)
    if wanted.bit_width < column.type.bit_width:
        back = pc.cast(found, column.type)
        same = pc.or_(pc.equal(back, column), pc.and_(pc.is_nan(back), pc.is_nan(column)))
        if not pc.all(same, min_count=0).as_py():
            raise pa.ArrowInvalid("a number changes in the narrower type")
    return found


def _viewed(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Convert views to text or bytes. A null can have any bytes as its view, which Arrow would follow: replace them."""
    kind, buffers = column.type, column.buffers()
    begin = column.offset * _VIEW_BYTES
    views = pa.Array.from_buffers(
        pa.binary(_VIEW_BYTES), len(column), [None, buffers[1].slice(begin, len(column) * _VIEW_BYTES)]
    )
    empty = pa.scalar(bytes(_VIEW_BYTES), pa.binary(_VIEW_BYTES))
    clean = pc.if_else(column.is_valid(), views, empty)
    rebuilt = pa.Array.from_buffers(kind, len(column), [None, clean.buffers()[1], *buffers[2:]])
    found = pc.cast(rebuilt, wanted)
    return pc.if_else(column.is_valid(), found, pa.scalar(None, wanted)) if column.null_count else found


def _whole_to_decimal(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    return _decimal(pc.cast(column, pa.decimal128(20, 0)), wanted)


def _decimal(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Convert by way of the widest type, because Arrow does not notice every overflow of a narrower one."""
    kind = column.type
    more = max(0, wanted.scale - kind.scale)
    if not 0 <= kind.scale <= kind.precision or kind.precision + more > _MOST_DIGITS:
        raise pa.ArrowInvalid("the scales differ by too much")
    wide = pc.cast(column, pa.decimal256(_MOST_DIGITS, kind.scale))
    return pc.cast(pc.cast(wide, pa.decimal256(_MOST_DIGITS, wanted.scale)), wanted)


_Is = Callable[[pa.DataType], bool]


def _is_text(kind: pa.DataType) -> bool:
    return bool(_t.is_string(kind) or _t.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(_t.is_binary(kind) or _t.is_large_binary(kind) or _t.is_fixed_size_binary(kind))


def _is_instant(kind: pa.DataType) -> bool:
    return bool(_t.is_timestamp(kind) and kind.tz is not None)


def _is_local_time(kind: pa.DataType) -> bool:
    return bool(_t.is_timestamp(kind) and kind.tz is None)


_CONVERSIONS: tuple[tuple[_Is, _Is, Callable[[pa.Array, pa.DataType], pa.Array]], ...] = (
    (_t.is_integer, _t.is_integer, _cast),
    (_t.is_integer, _t.is_floating, _cast),
    (_t.is_integer, _t.is_decimal, _whole_to_decimal),
    (_t.is_floating, _t.is_floating, _narrow),
    (_t.is_decimal, _t.is_decimal, _decimal),
    (_is_text, _is_text, _cast),
    (_t.is_string_view, _is_text, _viewed),
    (_is_bytes, _is_bytes, _cast),
    (_t.is_binary_view, _is_bytes, _viewed),
    (_is_instant, _is_instant, _cast),
    (_is_local_time, _is_local_time, _cast),
    (_t.is_date, _t.is_date, _cast),
    (_t.is_time, _t.is_time, _cast),
    (_t.is_duration, _t.is_duration, _cast),
)
