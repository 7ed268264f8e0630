"""Columns that strangers have written, as columns of a type that is wanted.

Arrow's own casts are made for data that is what it says. Here nothing is cast that was not checked before, nested types
are taken apart and put together again, and each type has few others that may become it, without a loss:

* another width of numbers, integers where floating-point numbers or decimals are wanted, another unit of times;
* another of Arrow's ways to keep text, bytes and lists; a dictionary of flat values;
* a column of nothing but nulls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Room", "UnfitValueError", "column_as", "short", "width_of"]

_t: Any = pa.types

# Of what a value may become that no bytes in it stand for: nulls without a buffer, repeated values of a dictionary.
_ROOM_BYTES = 256 << 20
_VIEW_BYTES = 16
_MOST_DIGITS = 76


class UnfitValueError(ValueError):
    """A value is no table of the schema; the text says why, without its bytes."""


class Room:
    """How much memory one value may still take beyond its own."""

    def __init__(self) -> None:
        self._left = _ROOM_BYTES

    def take(self, size: int) -> None:
        """Count memory before it is taken.

        Raises:
            UnfitValueError: It is too much.
        """
        self._left -= size
        if self._left < 0:
            raise UnfitValueError(f"its rows take more than {_ROOM_BYTES >> 20} MiB that are not in it")


def short(what: object) -> str:
    """The beginning of a text that may have been made by a stranger, in one line."""
    return " ".join(str(what)[:200].split())


def column_as(column: pa.Array, wanted: pa.Field, room: Room) -> pa.Array:
    """A column of a value as one of the field's type.

    Raises:
        UnfitValueError: It is damaged, or does not become that without a loss.
    """
    where = f"column {wanted.name!r}"
    try:
        column.validate()
        _count_views(column, room)
        column.validate(full=True)
    except UnfitValueError:
        raise
    except Exception as e:  # Arrow has many
        raise UnfitValueError(f"{where} is damaged: {short(e)}") from None
    try:
        found = _as(column, wanted.type, where, room)
    except UnfitValueError:
        raise
    except Exception as e:
        raise UnfitValueError(
            f"{where} is {short(column.type)}, and does not fit {wanted.type}: {short(e)}"
        ) from None
    _check_nulls(found, wanted.nullable, where)
    return found


def _count_views(column: pa.Array, room: Room) -> None:
    """Views cost 16 bytes each, and all may show the same megabyte."""
    kind = column.type
    if _t.is_string_view(kind) or _t.is_binary_view(kind):
        buffers = column.buffers()
        parts = pa.Array.from_buffers(
            pa.int32(), 4 * (column.offset + len(column)), [None, buffers[1]]
        )  # of each view the first one is its length
        lengths = parts.take(pa.arange(4 * column.offset, len(parts), 4)).cast(pa.int64())
        shown = pc.sum(pc.if_else(column.is_valid(), lengths, pa.scalar(0, pa.int64()))).as_py() or 0
        room.take(max(0, shown - sum(buffer.size for buffer in buffers[1:])))
    elif _is_list(kind):
        _count_views(column.values, room)
    elif _t.is_map(kind):
        _count_views(column.keys, room)
        _count_views(column.items, room)
    elif _t.is_struct(kind):
        for place in range(kind.num_fields):
            _count_views(column.field(place), room)
    elif _t.is_dictionary(kind):
        _count_views(column.dictionary, room)


def _as(column: pa.Array, wanted: pa.DataType, where: str, room: Room) -> pa.Array:
    given = column.type
    if isinstance(given, pa.BaseExtensionType):
        raise UnfitValueError(f"{where} is {short(given)}, and the schema says {wanted}")
    if not len(column):
        # Of no elements Arrow does not check the offsets, and ends the process when it follows them.
        column = pa.nulls(0, given)
    if _t.is_null(given):
        room.take(len(column) * width_of(wanted))
        return pa.nulls(len(column), wanted)
    if _t.is_dictionary(given) and not _t.is_nested(given.value_type):
        values = _as(column.dictionary, wanted, where, room)
        room.take(_taken(values, column.indices))
        return values.take(column.indices)
    if _is_list(given) and _t.is_list(wanted):
        return _list(column, wanted, where, room)
    if _t.is_struct(given) and _t.is_struct(wanted):
        return _struct(column, wanted, where, room)
    if _t.is_map(given) and _t.is_map(wanted):
        return _map(column, wanted, where, room)
    if not _t.is_nested(given):
        if given == wanted:
            return column
        for is_given, is_wanted, convert in _CONVERSIONS:
            if is_given(given) and is_wanted(wanted):
                _take_beyond(column, width_of(wanted), room)
                return convert(column, wanted)
    raise UnfitValueError(f"{where} is {short(given)}, and the schema says {wanted}")


def _is_list(kind: pa.DataType) -> bool:
    return bool(_t.is_list(kind) or _t.is_large_list(kind) or _t.is_fixed_size_list(kind))


def _list(column: pa.Array, wanted: pa.DataType, where: str, room: Room) -> pa.Array:
    _take_beyond(column, 32, room)  # each row takes so much below, for a while
    # What is under a null is nobody's: only the elements of lists that there are.
    values = _as(column.flatten(), wanted.value_type, f"{where}[]", room)
    lengths = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64())
    ends = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths)]).cast(pa.int32())
    return pa.ListArray.from_arrays(ends, values, type=wanted, mask=column.is_null())


def _struct(column: pa.Array, wanted: pa.DataType, where: str, room: Room) -> pa.Array:
    names = [field.name for field in wanted]
    if [field.name for field in column.type] != names or len(set(names)) < len(names):
        raise UnfitValueError(f"{where} is {short(column.type)}, and the schema says {wanted}")
    # Null where the struct is.
    children = [
        _as(child, field.type, f"{where}.{field.name}", room)
        for child, field in zip(column.flatten(), wanted, strict=True)
    ]
    return pa.StructArray.from_arrays(children, fields=list(wanted), mask=column.is_null())


def _map(column: pa.Array, wanted: pa.DataType, where: str, room: Room) -> pa.Array:
    """As a list of its entries."""
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
    made = _list(lists, pa.list_(pa.struct(fields)), where, room)
    keys, items = made.values.flatten()
    if keys.null_count:  # which pyarrow 21 to 24 must have counted: else they end the process
        raise UnfitValueError(f"{where} has a null among its keys")
    entries = pa.StructArray.from_arrays([keys, items], fields=[wanted.key_field, wanted.item_field])
    return pa.Array.from_buffers(wanted, len(made), made.buffers()[:2], made.null_count, 0, [entries])


def _check_nulls(column: pa.Array, nullable: bool, where: str) -> None:
    """Refuse a null where there must be none, at any depth; Spark relies on it.

    Raises:
        UnfitValueError: There is one.
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
    """About how many bytes a null of a type takes in the batch that Spark gets."""
    if _t.is_struct(kind):
        return 1 + sum(width_of(field.type) for field in kind)
    try:
        return 2 + int(kind.bit_width) // 8
    except ValueError:
        return 5  # an offset


def _taken(values: pa.Array, indices: pa.Array) -> int:
    """How many bytes a dictionary's values take in the rows."""
    size = len(indices) * width_of(values.type)
    if _t.is_binary(values.type) or _t.is_string(values.type):
        size += pc.sum(pc.binary_length(values).take(indices).cast(pa.int64())).as_py() or 0
    return size


def _take_beyond(column: pa.Array, each: int, room: Room) -> None:
    """Count so many bytes a row, as far as the column has fewer itself."""
    try:
        held = column.nbytes
    except pa.ArrowTypeError:  # of views, before pyarrow 24
        held = column.get_total_buffer_size()
    room.take(max(0, len(column) * each - held))


# Flat types: what may become what, and how.


def _cast(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    return pc.cast(column, wanted)


def _narrow(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    found = pc.cast(column, wanted)
    if wanted.bit_width < column.type.bit_width:
        back = pc.cast(found, column.type)
        same = pc.or_(pc.equal(back, column), pc.and_(pc.is_nan(back), pc.is_nan(column)))
        if not pc.all(same, min_count=0).as_py():
            raise pa.ArrowInvalid("a number is not one of the narrower type")
    return found


def _viewed(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Text or bytes by views; what is under a null can be any bytes, and Arrow would follow them."""
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
    """By way of the widest type: Arrow does not notice each overflow of a narrower one."""
    kind = column.type
    more = max(0, wanted.scale - kind.scale)
    if not 0 <= kind.scale <= kind.precision or kind.precision + more > _MOST_DIGITS:
        raise pa.ArrowInvalid("its scale is too far from that")
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
