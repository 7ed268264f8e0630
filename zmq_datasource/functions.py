"""Functions for values, like Spark's ``from_json``: MessagePack and CBOR as columns, and compressed values.

::

    from zmq_datasource.functions import from_msgpack

    feed.select(from_msgpack("value", "city STRING, celsius DOUBLE").alias("weather")).select("weather.*")
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import types as t
from pyspark.sql.functions import from_json
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_type

from zmq_datasource.errors import OptionError, RowError

_Mode = Literal["permissive", "failfast"]
_Codec = Literal["zstd", "lz4", "gzip", "zlib"]
# Arrow's limit for a column of one batch.
_MOST_BYTES = 2**31 - 1
# Beside the decoder's own error: what JSON has no value for raises the first three.
_UNREADABLE = (ValueError, TypeError, OverflowError, RecursionError, OSError)


def from_msgpack(column: Column | str, schema: t.DataType | str, mode: _Mode = "permissive") -> Column:
    """Read MessagePack as a column of a schema, as ``from_json`` reads the same value in JSON.

    A map becomes a struct by the names of its fields. Fields that the schema does not have are left out, and fields
    that the map does not have are null. An array becomes an ARRAY, or a struct by the order of its fields. A timestamp
    (extension -1) becomes a TIMESTAMP. Binary that is UTF-8 may be a name or become a STRING. An unsigned integer of 64
    bits, which many programs use for hashes, needs DECIMAL(20, 0).

    Args:
        column: BINARY, as the column ``value`` of a source.
        schema: The schema of the result, as in ``from_json`` (``"city STRING, celsius DOUBLE"``, ``"ARRAY<INT>"``).
        mode: With ``permissive``, a value that is no MessagePack, or has a string that is not UTF-8, is null, and so
            is a field that does not fit the schema. With ``failfast``, the query fails and shows the value's beginning.

    Raises:
        OptionError: The mode is unknown.
    """
    return _read("from_msgpack", msgspec.msgpack.decode, msgspec.DecodeError, column, schema, mode)


def from_cbor(column: Column | str, schema: t.DataType | str, mode: _Mode = "permissive") -> Column:
    """Read CBOR (RFC 8949) as a column of a schema; needs ``pip install "zmq_datasource[cbor]"``.

    As ``from_msgpack``. A date and time (tags 0 and 1) becomes a TIMESTAMP, a bignum an integer. Of a tag that cbor2
    does not know, the content is read: a typed array (RFC 8746) becomes BINARY.

    Raises:
        OptionError: The mode is unknown.
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
    kind: Any = t.DataType.fromDDL(schema) if isinstance(schema, str) else schema

    def read(value: bytes) -> str | None:
        decoded = decode(value)
        return None if decoded is None else msgspec.json.encode(_shaped(decoded, kind)).decode()

    return from_json(
        _applied(function, read, error, column, t.StringType(), mode), kind, {"mode": mode.upper()}
    )


def _shaped(value: Any, kind: t.DataType) -> Any:
    """The value in the shape in which ``from_json`` reads it as this type."""
    if isinstance(kind, t.StructType) and isinstance(value, dict | list | tuple):
        if not isinstance(value, dict):
            value = dict(zip(kind.names, value, strict=False))
        return {
            field.name: _shaped(value.get(field.name, value.get(field.name.encode())), field.dataType)
            for field in kind.fields
        }
    if isinstance(kind, t.ArrayType) and isinstance(
        value, list | tuple
    ):  # cbor2: an array in a tag is a tuple
        return [_shaped(one, kind.elementType) for one in value]
    if isinstance(kind, t.MapType) and isinstance(value, dict):
        return {_shaped(key, kind.keyType): _shaped(item, kind.valueType) for key, item in value.items()}
    if isinstance(kind, t.BinaryType):  # JSON has bytes in base64, which a text is not
        return value if isinstance(value, bytes) else None
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value).replace("nan", "NaN").replace("inf", "Infinity")
    return value


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
        found = pa.array(map(read_one, values.to_pylist()), arrow, size=len(values))
        if isinstance(found, pa.ChunkedArray):
            raise RowError(
                f"{function}: the values of a batch of {len(values)} rows have more than 2 GiB; set "
                f"spark.sql.execution.arrow.maxRecordsPerBatch below {len(values)}"
            )
        return found

    # Spark needs annotations that are types. In this module they are text.
    convert.__annotations__ = {"values": pa.Array, "return": pa.Array}
    made: Any = arrow_udf(convert, kind)  # type: ignore[call-overload]
    applied: Column = made(column)
    return applied
