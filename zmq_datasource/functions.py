"""Functions for values, like Spark's ``from_json``: MessagePack and CBOR as columns, and compressed values.

::

    from zmq_datasource.functions import from_msgpack

    feed.select(from_msgpack("value", "city STRING, celsius DOUBLE").alias("weather")).select("weather.*")
"""

from __future__ import annotations

import io
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

__all__ = ["decompress", "from_cbor", "from_msgpack"]

_Fit = Callable[[Any], Any]
_Mode = Literal["permissive", "failfast"]
_Codec = Literal["zstd", "lz4", "gzip", "zlib"]
# Arrow's limit for a column of one batch.
_MOST_BYTES = 2**31 - 1
_BITS: dict[type[t.DataType], int] = {t.ByteType: 8, t.ShortType: 16, t.IntegerType: 32, t.LongType: 64}
# Beside the decoder's own error: what does not fit the schema raises the first two.
_UNREADABLE = (ValueError, OverflowError, RecursionError, OSError)


def from_msgpack(column: Column | str, schema: t.DataType | str, mode: _Mode = "permissive") -> Column:
    """Read MessagePack as a column of a schema.

    A map becomes a struct by the names of its fields. Fields that the schema does not have are left out, and fields
    that the map does not have are null. An array becomes an ARRAY, or a struct by the order of its fields. A timestamp
    (extension -1) becomes a TIMESTAMP. An integer may become a DOUBLE. Binary that is UTF-8 may be a name or become a
    STRING. An unsigned integer of 64 bits, which many programs use for hashes, needs DECIMAL(20, 0).

    Args:
        column: BINARY, as the column ``value`` of a source.
        schema: The schema of the result, as in Spark (``"city STRING, celsius DOUBLE"``, ``"ARRAY<INT>"``).
        mode: With ``permissive``, a value that is no MessagePack, or has a string that is not UTF-8, is null, and so
            is a field or an element that does not fit the schema, as in ``from_json``. With ``failfast``, the query
            fails and shows the value's beginning.

    Raises:
        OptionError: MessagePack has no value for a type of the schema, or the mode is unknown.
    """
    return _read("from_msgpack", msgspec.msgpack.decode, msgspec.DecodeError, column, schema, mode)


def from_cbor(column: Column | str, schema: t.DataType | str, mode: _Mode = "permissive") -> Column:
    """Read CBOR (RFC 8949) as a column of a schema; needs ``pip install "zmq_datasource[cbor]"``.

    As ``from_msgpack``. A date and time (tags 0 and 1) becomes a TIMESTAMP, a bignum an integer. Of a tag that cbor2
    does not know, the content is read: a typed array (RFC 8746) becomes BINARY.

    Raises:
        OptionError: CBOR has no value for a type of the schema, or the mode is unknown.
        ImportError: cbor2 is not installed.
    """
    try:
        import cbor2  # noqa: PLC0415 - an extra
    except ImportError as e:
        raise ImportError(
            'from_cbor needs cbor2, also where Spark\'s workers run: pip install "zmq_datasource[cbor]"',
            name="cbor2",
        ) from e
    return _read("from_cbor", _decode_cbor, cbor2.CBORDecodeError, column, schema, mode)


def _decode_cbor(value: bytes) -> Any:
    import cbor2  # noqa: PLC0415 - an extra

    content = io.BytesIO(value)
    decoded = cbor2.CBORDecoder(content, tag_hook=lambda tag, _immutable: tag.value).decode()
    if content.tell() != len(value):
        raise ValueError(f"{len(value) - content.tell()} bytes follow the CBOR item")
    return decoded


def decompress(
    column: Column | str, codec: _Codec, max_bytes: int = 16 << 20, mode: _Mode = "permissive"
) -> Column:
    """Decompress values (BINARY).

    The values may come from any program: frames of zstd with or without their size, frames of lz4 (not its raw blocks),
    gzip and zlib. A zstd frame that needs a dictionary, or more than 128 MiB for decompression, cannot be read.

    Args:
        column: BINARY, as the column ``value`` of a source.
        codec: ``zstd``, ``lz4``, ``gzip`` or ``zlib``. The last two read each other's values too.
        max_bytes: A value that would be larger is not decompressed further, because a few bytes can stand for
            gigabytes. A task needs memory for the values of one batch
            (``spark.sql.execution.arrow.maxRecordsPerBatch`` rows).
        mode: With ``permissive``, a value that cannot be decompressed, or is larger, is null. With ``failfast``, the
            query fails and shows the value's beginning.

    Raises:
        OptionError: The codec or the mode is unknown, or ``max_bytes`` is not between 1 and 2**31 - 2.
    """
    if codec not in ("zstd", "lz4", "gzip", "zlib"):
        raise OptionError(f"decompress(codec={codec!r}): it must be 'zstd', 'lz4', 'gzip' or 'zlib'")
    if not 0 < max_bytes < _MOST_BYTES:
        raise OptionError(f"decompress(max_bytes={max_bytes}): it must be from 1 to {_MOST_BYTES - 1}")
    arrows = "gzip" if codec == "zlib" else codec  # Arrow's reads the headers of both

    def read(value: bytes) -> bytes:
        if not value:  # Arrow reads no bytes as no frames
            raise ValueError("no bytes")
        with pa.CompressedInputStream(pa.BufferReader(value), arrows) as stream:
            content: bytes = stream.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ValueError(f"more than {max_bytes} bytes (max_bytes)")
        return content

    return _applied("decompress", read, OSError, column, t.BinaryType(), mode)


def _read(
    function: str,
    decode: Callable[[bytes], Any],
    error: type[Exception],
    column: Column | str,
    schema: t.DataType | str,
    mode: _Mode,
) -> Column:
    kind = t.DataType.fromDDL(schema) if isinstance(schema, str) else schema
    fit = _fit_of(kind, "schema", mode == "permissive")
    return _applied(function, lambda value: fit(decode(value)), error, column, kind, mode)


def _applied(
    function: str,
    read: Callable[[bytes], Any],
    error: type[Exception],
    column: Column | str,
    kind: t.DataType,
    mode: _Mode,
) -> Column:
    """Apply ``read`` to each value. Where it cannot be read, the result is null, or the query fails."""
    if mode not in ("permissive", "failfast"):
        raise OptionError(f"{function}(mode={mode!r}): it must be 'permissive' or 'failfast'")
    arrow = to_arrow_type(kind, timezone="UTC")

    def read_one(value: bytes | None) -> Any:
        try:
            return None if value is None else read(value)
        except (error, *_UNREADABLE) as e:
            if mode == "permissive" or value is None:
                return None
            raise RowError(
                f"{function}: {e}, in a value of {len(value)} bytes that begins with {value[:32]!r}; correct the "
                "other arguments, or use mode='permissive' to read such values as null"
            ) from None

    def convert(values: pa.Array) -> pa.Array:
        found, size = [], 0
        for value in values.to_pylist():
            found.append(read_one(value))
            size += len(found[-1]) if isinstance(found[-1], bytes) else 0
            if size > _MOST_BYTES:
                raise RowError(
                    f"{function}: the values of a batch of {len(values)} rows have more than 2 GiB; set "
                    f"spark.sql.execution.arrow.maxRecordsPerBatch below {len(values)}"
                )
        return pa.array(found, arrow)

    # Spark needs annotations that are types. In this module they are text.
    convert.__annotations__ = {"values": pa.Array, "return": pa.Array}
    made: Any = arrow_udf(convert, kind)  # type: ignore[call-overload]
    applied: Column = made(column)
    return applied


def _fit_of(kind: t.DataType, where: str, lenient: bool, nullable: bool = True) -> _Fit:
    """A function that makes a decoded value one of this type.

    If the value does not fit, it returns None if ``lenient`` and nullable, or raises ``ValueError`` or
    ``OverflowError``.
    """
    python, convert = _conversion(kind, where, lenient)

    def fit(value: Any) -> Any:
        if value is None and nullable:
            return None
        try:
            # A bool is an int in Python, and must not pass for one.
            if not isinstance(value, python) or (isinstance(value, bool) and bool not in python):
                raise ValueError(f"{where} is {type(value).__name__}")
            return convert(value)
        except (ValueError, OverflowError):
            if lenient and nullable:
                return None
            raise

    return fit


def _conversion(kind: t.DataType, where: str, lenient: bool) -> tuple[tuple[type, ...], _Fit]:
    """The Python types that the decoders return for this type, and what makes a value of one of them."""
    if isinstance(kind, t.StructType):
        return (dict, list, tuple), _struct(kind, where, lenient)
    if isinstance(kind, t.ArrayType):
        element = _fit_of(kind.elementType, f"{where}[]", lenient, kind.containsNull)
        # cbor2 returns an array inside a tag as a tuple.
        return (list, tuple), lambda value: [element(one) for one in value]
    if isinstance(kind, t.MapType):
        key = _fit_of(kind.keyType, f"{where} key", lenient, nullable=False)
        item = _fit_of(kind.valueType, f"{where}{{}}", lenient, kind.valueContainsNull)
        return (dict,), lambda value: [(key(k), item(v)) for k, v in value.items()]
    if bits := _BITS.get(type(kind)):
        return (int,), _within(-(1 << bits - 1), (1 << bits - 1) - 1, where)
    if isinstance(kind, t.DecimalType) and not kind.scale:
        whole = _within(1 - 10**kind.precision, 10**kind.precision - 1, where)
        return (int,), lambda value: Decimal(whole(value))
    if isinstance(kind, t.FloatType | t.DoubleType):
        return (int, float), float  # OverflowError: a bignum of CBOR
    if isinstance(kind, t.StringType):
        return (str, bytes), lambda value: value.decode() if isinstance(value, bytes) else value
    simple: dict[type[t.DataType], type] = {
        t.BooleanType: bool,
        t.BinaryType: bytes,
        t.TimestampType: datetime,
    }
    if type(kind) not in simple:
        raise OptionError(
            f"{where} is {kind.simpleString()}, for which MessagePack and CBOR have no value; read it as a number or "
            "text, and cast it"
        )
    return (simple[type(kind)],), lambda value: value


def _struct(kind: t.StructType, where: str, lenient: bool) -> _Fit:
    fields = [
        (
            field.name,
            field.name.encode(),
            _fit_of(field.dataType, f"{where}.{field.name}", lenient, field.nullable),
        )
        for field in kind.fields
    ]

    def convert(value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return {name: fit(value.get(name, value.get(binary))) for name, binary, fit in fields}
        return {name: fit(value[at] if at < len(value) else None) for at, (name, _, fit) in enumerate(fields)}

    return convert


def _within(least: int, most: int, where: str) -> _Fit:
    def convert(value: int) -> int:
        if not least <= value <= most:
            raise ValueError(f"{where} is {value}, which is not from {least} to {most}")
        return value

    return convert
