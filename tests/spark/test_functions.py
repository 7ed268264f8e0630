"""MessagePack, CBOR and compressed values: what libraries write is read, and what does not fit is null or an error."""

from __future__ import annotations

import gzip
import zlib
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import cbor2
import msgspec
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession

from zmq_datasource import OptionError
from zmq_datasource.functions import decompress, from_cbor, from_msgpack

pytestmark = pytest.mark.spark

SCHEMA = (
    "name STRING, count BIGINT, small TINYINT, share DOUBLE, raw BINARY, good BOOLEAN, at TIMESTAMP, "
    "numbers ARRAY<INT>, by MAP<STRING, DOUBLE>, inner STRUCT<a: INT, b: STRING>"
)
FULL: dict[str, Any] = {
    "name": "Oslø",
    "count": 2**63 - 1,
    "small": -128,
    "share": 0.25,
    "raw": b"\0\xff",
    "good": True,
    "at": datetime(2026, 11, 22, 12, 30, 15, 123456, UTC),
    "numbers": [1, None, -3],
    "by": {"x": 1.5},
    "inner": {"a": 1, "b": "two"},
}


def read(spark: SparkSession, value: bytes | None, schema: str, **more: Any) -> Any:
    rows = spark.createDataFrame([(value,)], "value BINARY")
    (row,) = rows.select(from_msgpack("value", schema, **more).alias("read")).collect()
    return row.read


def test_a_map_is_a_struct_by_names(spark: SparkSession) -> None:
    found = read(spark, msgspec.msgpack.encode({**FULL, "unknown": 1}), SCHEMA).asDict(recursive=True)
    found["at"] = found["at"].astimezone(UTC)
    assert {**found, "raw": bytes(found["raw"])} == FULL
    assert read(spark, msgspec.msgpack.encode({"b": 1}), "a INT, b INT") == Row(a=None, b=1)


def test_an_array_is_a_struct_by_the_order_of_its_fields(spark: SparkSession) -> None:
    """As msgspec writes structs with ``array_like``, vLLM's among them."""

    class Event(msgspec.Struct, array_like=True, tag=True):
        hashes: list[int]
        size: float

    value = msgspec.msgpack.encode([1.5, [Event([1, 2], 16), Event([], 8)]])
    schema = "ts DOUBLE, events ARRAY<STRUCT<type: STRING, hashes: ARRAY<BIGINT>, size: DOUBLE, later: INT>>"
    assert read(spark, value, schema) == Row(
        ts=1.5, events=[Row(type="Event", hashes=[1, 2], size=16.0, later=None), Row("Event", [], 8.0, None)]
    )


def test_binary_names_and_text_are_read(spark: SparkSession) -> None:
    """Older encoders, and some options of newer ones, write strings as binary."""
    value = msgspec.msgpack.encode({b"a": b"one", "by": {b"k": 1}, b"\xff": 2})
    found = Row(a="one", by={"k": 1}, missing=None)
    assert read(spark, value, "a STRING, by MAP<STRING, INT>, missing INT", mode="failfast") == found


UNREADABLE = [
    (b"\xc1", "a INT"),  # no MessagePack
    (b"", "a INT"),
    (b"\x93\1", "ARRAY<INT>"),  # cut off
    (b"\x91" * 200_000 + b"\1", "ARRAY<INT>"),  # nested without end
    (b"\x81\xa1a\x91\xa1\xff", "a ARRAY<STRING>"),  # one string that is not UTF-8
    (msgspec.msgpack.encode({b"\xff": 1}), "MAP<STRING, INT>"),
    (msgspec.msgpack.encode({"a": b"\xff"}), "a STRING"),
]


def test_what_is_no_messagepack_is_null_or_fails(spark: SparkSession) -> None:
    for value, schema in UNREADABLE:
        assert read(spark, value, schema) is None
    for value, schema in UNREADABLE[::4]:
        with pytest.raises(PySparkException, match=r"RowError: from_msgpack: .*mode='permissive'"):
            read(spark, value, schema, mode="failfast")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (2**40, "INT"),
        (1.5, "INT"),
        (True, "INT"),
        (1, "BOOLEAN"),
        ("1", "INT"),
        ("abcd", "BINARY"),
        (10**10, "DECIMAL(10, 0)"),
        ([], "MAP<STRING, INT>"),
        ({"b": 1}, "ARRAY<INT>"),
    ],
)
def test_only_the_field_that_does_not_fit_is_null(spark: SparkSession, value: Any, kind: str) -> None:
    """As with ``from_json``."""
    assert read(spark, msgspec.msgpack.encode({"a": value, "b": 1}), f"a {kind}, b INT") == Row(a=None, b=1)


def test_a_field_that_does_not_fit_fails_with_failfast(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="MALFORMED_RECORD_IN_PARSING"):
        read(spark, msgspec.msgpack.encode({"a": 2**40}), "a INT", mode="failfast")


def test_an_unknown_mode_is_refused(spark: SparkSession) -> None:
    with pytest.raises(OptionError, match="'permissive' or 'failfast'"):
        read(spark, b"", "a INT", mode="dropmalformed")


def test_values_that_json_does_not_have_are_read(spark: SparkSession) -> None:
    values = [float("nan"), float("inf"), float("-inf")]
    assert str(read(spark, msgspec.msgpack.encode(values), "ARRAY<DOUBLE>", mode="failfast")) == str(values)
    unsigned = msgspec.msgpack.encode([2**64 - 1, 0])
    assert read(spark, unsigned, "ARRAY<DECIMAL(20, 0)>", mode="failfast") == [Decimal(2**64 - 1), Decimal(0)]
    for null in (None, msgspec.msgpack.encode(None)):
        assert read(spark, null, "a INT", mode="failfast") is None


def test_cbor_is_read_like_messagepack(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(cbor2.dumps({**FULL, "unknown": 1}),)], "value BINARY")
    (row,) = rows.select(from_cbor("value", SCHEMA, mode="failfast").alias("read")).collect()
    found = row.read.asDict(recursive=True)
    found["at"] = found["at"].astimezone(UTC)
    assert {**found, "raw": bytes(found["raw"])} == FULL


NO_CBOR = [
    b"\xff",
    b"",
    b"\x9b\x00\x00\x01\x00\x00\x00\x00\x00",  # says that it has 2**40 elements
    b"\x81" * 200_000 + b"\1",
    b"\x01\x02",  # bytes follow
    b"\xd8\x1d\x00",  # a reference to nothing
    b"\xc1\xfb\x7f\xf0\x00\x00\x00\x00\x00\x00",  # an infinite time
    b"\xf7",  # undefined
]


def test_what_is_no_cbor_is_null_or_fails(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(value,) for value in NO_CBOR], "value BINARY")
    assert rows.select(from_cbor("value", "ARRAY<INT>").alias("read")).collect() == [Row(None)] * len(NO_CBOR)
    for value in NO_CBOR[:5]:
        one = spark.createDataFrame([(value,)], "value BINARY")
        with pytest.raises(PySparkException, match=r"RowError: from_cbor: .*mode='permissive'"):
            one.select(from_cbor("value", "ARRAY<INT>", mode="failfast")).collect()


TEXT = b"a row of text, " * 20
# Made by other programs: python-zstandard 0.25 (a stream, whose size is not in the frame), lz4 4.4, gzip and zlib.
FOREIGN = {
    "zstd": "28b52ffd0058b50000786120726f77206f6620746578742c2001001aa2ce3a",
    "lz4": "04224d186040821b000000ff006120726f77206f6620746578742c200f00ff06506578742c2000000000",
    "gzip": gzip.compress(TEXT).hex(),
    "zlib": zlib.compress(TEXT).hex(),
}


def decompressed(spark: SparkSession, values: list[bytes | None], codec: str, **more: Any) -> list[Any]:
    rows = spark.createDataFrame([(at, value) for at, value in enumerate(values)], "at INT, value BINARY")
    read = rows.orderBy("at").select(decompress("value", codec, **more).alias("read")).collect()
    return [None if row.read is None else bytes(row.read) for row in read]


@pytest.mark.parametrize("codec", FOREIGN)
def test_compressed_values_of_other_programs_are_read(spark: SparkSession, codec: str) -> None:
    frame = bytes.fromhex(FOREIGN[codec])
    values = [frame, None, frame + frame, b"", frame[:-3], b"no frame", frame + b"and more"]
    assert decompressed(spark, values, codec) == [TEXT, None, TEXT + TEXT, None, None, None, None]


def test_a_value_that_would_become_too_large_is_refused(spark: SparkSession) -> None:
    bomb = pa.compress(bytes(1 << 30), "zstd", asbytes=True)
    assert len(bomb) < 100_000
    assert decompressed(spark, [bomb, pa.compress(b"x" * 100, "zstd", asbytes=True)], "zstd") == [
        None,
        b"x" * 100,
    ]
    with pytest.raises(PySparkException, match=r"more than 1000 bytes \(max_bytes\)"):
        decompressed(spark, [bomb], "zstd", max_bytes=1000, mode="failfast")
    at_most = pa.compress(b"x" * 1000, "zstd", asbytes=True)
    assert decompressed(spark, [at_most], "zstd", max_bytes=1000, mode="failfast") == [b"x" * 1000]


def test_wrong_arguments_of_compression_are_refused(spark: SparkSession) -> None:
    for wrong, said in (
        ({"codec": "snappy"}, "must be 'zstd', 'lz4', 'gzip' or 'zlib'"),
        ({"codec": "zstd", "mode": "strict"}, "must be 'permissive' or 'failfast'"),
        ({"codec": "zstd", "max_bytes": 0}, "must be from 1 to"),
        ({"codec": "zstd", "max_bytes": 2**31 - 1}, "must be from 1 to"),
    ):
        with pytest.raises(OptionError, match=said):
            decompress("value", **wrong)  # type: ignore[arg-type]
