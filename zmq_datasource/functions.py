"""Functions for values: from MessagePack to columns and back.

They are like Spark's ``from_json`` and ``to_json``, for a format that many ZeroMQ programs send::

    from zmq_datasource.functions import from_msgpack

    feed.select(from_msgpack("value", "city STRING, celsius DOUBLE").alias("weather")).select("weather.*")
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

import msgspec
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import types as t
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_type

from zmq_datasource.errors import OptionError, RowError

__all__ = ["from_msgpack", "to_msgpack"]

_Fit = Callable[[Any], Any]
_INTEGERS: dict[type[t.DataType], int] = {t.ByteType: 8, t.ShortType: 16, t.IntegerType: 32, t.LongType: 64}


class _UnfitError(ValueError):
    """A value does not fit the schema."""


def from_msgpack(
    column: Column | str,
    schema: t.DataType | str,
    mode: Literal["permissive", "failfast"] = "permissive",
) -> Column:
    """Read MessagePack as a column of a schema.

    A map becomes a struct by the names of its fields. Fields that the schema does not have are left out, and fields
    that the map does not have are null. An array becomes an ARRAY, or a struct by the order of its fields. A timestamp
    (extension -1) becomes a TIMESTAMP. An integer may become a DOUBLE. An unsigned integer of 64 bits, which many
    programs use for hashes, needs DECIMAL(20, 0).

    Args:
        column: BINARY, as the column ``value`` of a source.
        schema: The schema of the result, as in Spark (``"city STRING, celsius DOUBLE"``, ``"ARRAY<INT>"``).
        mode: With ``permissive``, a value that is no MessagePack is null, and so is a field or an element that does not
            fit the schema, as in ``from_json``. With ``failfast``, the query fails and shows the value's beginning.

    Raises:
        OptionError: MessagePack has no value for a type of the schema, or the mode is unknown.
    """
    if mode not in ("permissive", "failfast"):
        raise OptionError(f"from_msgpack(mode={mode!r}): it must be 'permissive' or 'failfast'")
    kind = t.DataType.fromDDL(schema) if isinstance(schema, str) else schema
    fit = _fit_of(kind, "schema", mode == "permissive")
    arrow = to_arrow_type(kind, timezone="UTC")

    def read(value: bytes | None) -> Any:
        if value is None:
            return None
        try:
            return fit(msgspec.msgpack.decode(value))
        except (msgspec.DecodeError, _UnfitError, RecursionError, UnicodeDecodeError) as e:
            if mode == "failfast":
                raise RowError(
                    f"from_msgpack: {e}, in a value of {len(value)} bytes that begins with {value[:32]!r}; correct the "
                    "schema, or use mode='permissive' to read such values as null"
                ) from e
            return None

    def convert(values: pa.Array) -> pa.Array:
        return pa.array([read(value) for value in values.to_pylist()], arrow)

    return _applied(convert, kind, column)


def to_msgpack(column: Column | str) -> Column:
    """Write a column as MessagePack (BINARY), for ``from_msgpack``. A struct becomes a map.

    A null becomes nil, which ``from_msgpack`` reads as null. DECIMAL, DATE and TIMESTAMP_NTZ become text, because
    MessagePack has no type for them.
    """

    def convert(values: pa.Array) -> pa.Array:
        rows = values.to_pylist(maps_as_pydicts="strict")
        return pa.array([msgspec.msgpack.encode(row) for row in rows], pa.binary())

    return _applied(convert, t.BinaryType(), column)


def _applied(convert: Callable[[pa.Array], pa.Array], kind: t.DataType, column: Column | str) -> Column:
    # Spark needs annotations that are types. In this module they are text.
    convert.__annotations__ = {"values": pa.Array, "return": pa.Array}
    made: Any = arrow_udf(convert, kind)  # type: ignore[call-overload]
    applied: Column = made(column)
    return applied


def _fit_of(kind: t.DataType, where: str, lenient: bool, nullable: bool = True) -> _Fit:
    """A function that converts a decoded value to this type.

    For a value that does not fit it raises ``_UnfitError``, or with ``lenient`` returns None if the type may be null.
    """
    fit = _fit_not_null(kind, where, lenient)
    if not nullable:
        return fit
    if not lenient:
        return lambda value: None if value is None else fit(value)

    def fit_or_null(value: Any) -> Any:
        try:
            return None if value is None else fit(value)
        except _UnfitError:
            return None

    return fit_or_null


def _fit_not_null(kind: t.DataType, where: str, lenient: bool) -> _Fit:
    if isinstance(kind, t.StructType):
        return _struct(kind, where, lenient)
    if isinstance(kind, t.ArrayType):
        element = _fit_of(kind.elementType, f"{where}[]", lenient, kind.containsNull)
        return lambda value: [element(one) for one in _instance(value, list, where)]
    if isinstance(kind, t.MapType):
        key = _fit_of(kind.keyType, f"{where} key", lenient, nullable=False)
        item = _fit_of(kind.valueType, f"{where}{{}}", lenient, kind.valueContainsNull)
        return lambda value: [(key(k), item(v)) for k, v in _instance(value, dict, where).items()]
    if type(kind) in _INTEGERS:
        half = 1 << (_INTEGERS[type(kind)] - 1)
        return _integer(-half, half - 1, where)
    if isinstance(kind, t.DecimalType) and not kind.scale:
        least, most = 1 - 10**kind.precision, 10**kind.precision - 1
        whole = _integer(least, most, where)
        return lambda value: Decimal(whole(value))
    if isinstance(kind, t.FloatType | t.DoubleType):
        return lambda value: float(_instance(value, (int, float), where))
    simple = {t.BooleanType: bool, t.StringType: str, t.BinaryType: bytes, t.TimestampType: datetime}
    python = simple.get(type(kind))
    if python is None:
        raise OptionError(
            f"from_msgpack: {where} is {kind.simpleString()}, for which MessagePack has no value; read it as a number "
            "or text, and cast it"
        )
    return lambda value: _instance(value, python, where)


def _instance(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    # A bool is an int in Python, and must not pass for one.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _UnfitError(f"{where} is {type(value).__name__}")
    return value


def _integer(least: int, most: int, where: str) -> _Fit:
    def fit(value: Any) -> int:
        number: int = _instance(value, int, where)
        if not least <= number <= most:
            raise _UnfitError(f"{where} is {number}, which is not from {least} to {most}")
        return number

    return fit


def _struct(kind: t.StructType, where: str, lenient: bool) -> _Fit:
    fields = [
        (field.name, _fit_of(field.dataType, f"{where}.{field.name}", lenient, field.nullable))
        for field in kind.fields
    ]

    def fit(value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return {name: of(value.get(name)) for name, of in fields}
        given = _instance(value, list, where)
        return {name: of(given[at]) if at < len(given) else None for at, (name, of) in enumerate(fields)}

    return fit
