"""Functions for values: from MessagePack or CBOR to columns, back to MessagePack, and compressed values.

They are like Spark's ``from_json`` and ``to_json``, for formats that many ZeroMQ programs send::

    from zmq_datasource.functions import from_msgpack

    feed.select(from_msgpack("value", "city STRING, celsius DOUBLE").alias("weather")).select("weather.*")
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import types as t
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_type

from zmq_datasource.errors import OptionError, RowError

__all__ = ["compress", "decompress", "from_cbor", "from_msgpack", "to_msgpack"]

_Fit = Callable[[Any], Any]
# cbor2 returns an array inside a tag as a tuple.
_ARRAY = (list, tuple)
_Mode = Literal["permissive", "failfast"]
_Codec = Literal["zstd", "lz4", "gzip"]
# Arrow's limit for a column of one batch.
_MOST_BYTES = 2**31 - 1
_INTEGERS: dict[type[t.DataType], int] = {t.ByteType: 8, t.ShortType: 16, t.IntegerType: 32, t.LongType: 64}


class _UnfitError(ValueError):
    """A value does not fit the schema."""


class _NoValueError(Exception):
    """The formats have no value for a type of the schema."""


class _Format(NamedTuple):
    """A binary format that has maps, arrays and scalars.

    Attributes:
        name: For errors, as in "for which MessagePack has no value".
        function: The name of the public function that reads the format, for errors.
        decode: From bytes to Python objects.
        errors: Raised by ``decode`` for bytes that are none of the format.
    """

    name: str
    function: str
    decode: Callable[[bytes], Any]
    errors: tuple[type[Exception], ...]


def from_msgpack(
    column: Column | str,
    schema: t.DataType | str,
    mode: _Mode = "permissive",
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
    errors = (msgspec.DecodeError, UnicodeDecodeError)
    return _read(_Format("MessagePack", "from_msgpack", msgspec.msgpack.decode, errors), column, schema, mode)


def from_cbor(column: Column | str, schema: t.DataType | str, mode: _Mode = "permissive") -> Column:
    """Read CBOR (RFC 8949) as a column of a schema; needs ``pip install "zmq_datasource[cbor]"``.

    As ``from_msgpack``. A date and time (tags 0 and 1) becomes a TIMESTAMP, a bignum an integer. Of a tag that cbor2
    does not know, the content is read: a typed array (RFC 8746) becomes BINARY.

    Args:
        column: BINARY, as the column ``value`` of a source.
        schema: The schema of the result, as in Spark.
        mode: As in ``from_msgpack``.

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
    return _read(_Format("CBOR", "from_cbor", _decode_cbor, (cbor2.CBORDecodeError,)), column, schema, mode)


def _decode_cbor(value: bytes) -> Any:
    import cbor2  # noqa: PLC0415 - an extra

    content = io.BytesIO(value)
    decoded = cbor2.CBORDecoder(content, tag_hook=lambda tag, _immutable: tag.value).decode()
    if content.tell() != len(value):
        raise _UnfitError(f"{len(value) - content.tell()} bytes follow the CBOR item")
    return decoded


def _read(form: _Format, column: Column | str, schema: t.DataType | str, mode: _Mode) -> Column:
    _check_mode(form.function, mode)
    kind = t.DataType.fromDDL(schema) if isinstance(schema, str) else schema
    try:
        fit = _fit_of(kind, "schema", mode == "permissive")
    except _NoValueError as e:
        raise OptionError(
            f"{form.function}: {e}, for which {form.name} has no value; read it as a number or text, and cast it"
        ) from None
    arrow = to_arrow_type(kind, timezone="UTC")
    unreadable: tuple[type[Exception], ...] = (*form.errors, _UnfitError, RecursionError)

    def read(value: bytes | None) -> Any:
        if value is None:
            return None
        try:
            return fit(form.decode(value))
        except unreadable as e:
            if mode == "failfast":
                raise RowError(
                    f"{form.function}: {e}, in a value of {len(value)} bytes that begins with {value[:32]!r}; correct "
                    "the schema, or use mode='permissive' to read such values as null"
                ) from None
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


def decompress(
    column: Column | str, codec: _Codec, max_bytes: int = 16 << 20, mode: _Mode = "permissive"
) -> Column:
    """Decompress values (BINARY).

    The values may come from any program: frames of zstd with or without their size, frames of lz4 (not its raw blocks),
    and gzip. A zstd frame that needs a dictionary, or more than 128 MiB for decompression, cannot be read.

    Args:
        column: BINARY, as the column ``value`` of a source.
        codec: ``zstd``, ``lz4`` or ``gzip``.
        max_bytes: A value that would be larger is not decompressed further, because a few bytes can stand for
            gigabytes. A task needs memory for the values of one batch
            (``spark.sql.execution.arrow.maxRecordsPerBatch`` rows).
        mode: With ``permissive``, a value that cannot be decompressed, or is larger, is null. With ``failfast``, the
            query fails and shows the value's beginning.

    Raises:
        OptionError: The codec or the mode is unknown, or ``max_bytes`` is not between 1 and 2**31 - 2.
    """
    _check_codec("decompress", codec)
    _check_mode("decompress", mode)
    if not 0 < max_bytes < _MOST_BYTES:
        raise OptionError(f"decompress(max_bytes={max_bytes}): it must be from 1 to {_MOST_BYTES - 1}")

    def read(value: bytes | None) -> bytes | None:
        if value is None:
            return None
        try:
            return _decompressed(value, codec, max_bytes)
        except (OSError, _UnfitError) as e:
            if mode == "failfast":
                raise RowError(
                    f"decompress: {e}, in a value of {len(value)} bytes that begins with {value[:32]!r}; correct the "
                    "codec or max_bytes, or use mode='permissive' to read such values as null"
                ) from None
            return None

    def convert(values: pa.Array) -> pa.Array:
        whole, size = [], 0
        for value in values.to_pylist():
            whole.append(read(value))
            size += len(whole[-1] or b"")
            if size > _MOST_BYTES:
                raise RowError(
                    f"decompress: the values of a batch of {len(values)} rows have more than 2 GiB; set "
                    f"spark.sql.execution.arrow.maxRecordsPerBatch below {len(values)}"
                )
        return pa.array(whole, pa.binary())

    return _applied(convert, t.BinaryType(), column)


def _decompressed(value: bytes, codec: _Codec, max_bytes: int) -> bytes:
    # Arrow reads no bytes as no frames.
    if not value:
        raise _UnfitError("no bytes")
    with pa.CompressedInputStream(pa.BufferReader(value), codec) as stream:
        content: bytes = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _UnfitError(f"more than {max_bytes} bytes (max_bytes)")
    return content


def compress(column: Column | str, codec: _Codec) -> Column:
    """Compress values (STRING or BINARY) for ``decompress``, or for other programs: each as one frame.

    Args:
        column: The values. A null stays null.
        codec: ``zstd``, ``lz4`` or ``gzip``.

    Raises:
        OptionError: The codec is unknown.
    """
    _check_codec("compress", codec)

    def convert(values: pa.Array) -> pa.Array:
        rows = values.cast(pa.binary()).to_pylist()
        return pa.array(
            [None if row is None else pa.compress(row, codec, asbytes=True) for row in rows], pa.binary()
        )

    return _applied(convert, t.BinaryType(), column)


def _check_codec(function: str, codec: str) -> None:
    if codec not in ("zstd", "lz4", "gzip"):
        raise OptionError(f"{function}(codec={codec!r}): it must be 'zstd', 'lz4' or 'gzip'")


def _check_mode(function: str, mode: str) -> None:
    if mode not in ("permissive", "failfast"):
        raise OptionError(f"{function}(mode={mode!r}): it must be 'permissive' or 'failfast'")


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
        return lambda value: [element(one) for one in _instance(value, _ARRAY, where)]
    if isinstance(kind, t.MapType):
        key = _fit_of(kind.keyType, f"{where} key", lenient, nullable=False)
        item = _fit_of(kind.valueType, f"{where}{{}}", lenient, kind.valueContainsNull)
        return lambda value: [(key(k), item(v)) for k, v in _instance(value, Mapping, where).items()]
    if type(kind) in _INTEGERS:
        half = 1 << (_INTEGERS[type(kind)] - 1)
        return _integer(-half, half - 1, where)
    if isinstance(kind, t.DecimalType) and not kind.scale:
        least, most = 1 - 10**kind.precision, 10**kind.precision - 1
        whole = _integer(least, most, where)
        return lambda value: Decimal(whole(value))
    if isinstance(kind, t.FloatType | t.DoubleType):
        return _float(where)
    simple = {t.BooleanType: bool, t.StringType: str, t.BinaryType: bytes, t.TimestampType: datetime}
    python = simple.get(type(kind))
    if python is None:
        raise _NoValueError(f"{where} is {kind.simpleString()}")
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


def _float(where: str) -> _Fit:
    def fit(value: Any) -> float:
        try:
            return float(_instance(value, (int, float), where))
        except OverflowError:  # a bignum of CBOR
            raise _UnfitError(f"{where} is an integer that a floating-point number cannot hold") from None

    return fit


def _struct(kind: t.StructType, where: str, lenient: bool) -> _Fit:
    fields = [
        (field.name, _fit_of(field.dataType, f"{where}.{field.name}", lenient, field.nullable))
        for field in kind.fields
    ]

    def fit(value: Any) -> dict[str, Any]:
        if isinstance(value, Mapping):
            return {name: of(value.get(name)) for name, of in fields}
        given = _instance(value, _ARRAY, where)
        return {name: of(given[at]) if at < len(given) else None for at, (name, of) in enumerate(fields)}

    return fit
