"""Values that are tables: written rows are read again, and other values become a row of nulls or no row."""

from __future__ import annotations

import re
import struct
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest

from zmq_datasource.messages.arrow_values import ArrowValues, values_of
from zmq_datasource.messages.columns import LOG_SCHEMA

MICROSECONDS = pa.timestamp("us", tz="UTC")


def stream(table: pa.Table | pa.RecordBatch, **options: Any) -> bytes:
    """An Arrow IPC stream, as any program writes it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, **options) as writer:
        writer.write(table)
    return sink.getvalue().to_pybytes()


def log_of(*values: bytes | None) -> pa.RecordBatch:
    count = len(values)
    columns = {
        "id": pa.array(range(count), pa.int64()),
        "topic": pa.array([f"t{i}" for i in range(count)]),
        "value": pa.array(values, pa.binary()),
        "publisher": pa.nulls(count, pa.string()),
        "sequence": pa.array(range(100, 100 + count), pa.int64()),
        "timestamp": pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * count, MICROSECONDS),
        "frames": pa.nulls(count, LOG_SCHEMA.field("frames").type),
    }
    return pa.RecordBatch.from_pydict(columns, schema=LOG_SCHEMA)


class Reading:
    """The rows that are read from values, and the reasons why values do not fit."""

    def __init__(self, schema: pa.Schema, *values: bytes | None, permissive: bool = False) -> None:
        self.why: list[tuple[int, str]] = []
        reader = ArrowValues(schema, permissive)
        self.batches = list(reader.rows(log_of(*values), lambda i, e: self.why.append((i, str(e)))))
        for batch in self.batches:
            batch.validate(full=True)
            assert batch.schema == schema

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches for row in batch.to_pylist()]


TABLE = pa.table(
    {
        "city": ["Bern", None, "Oslo"],
        "celsius": [1.5, 2.5, None],
        "at": pa.array([datetime(2026, 5, 1, tzinfo=UTC)] * 3, MICROSECONDS),
        "tags": pa.array([["a"], [], None], pa.list_(pa.field("element", pa.string()))),
        "place": pa.array([{"x": 1, "y": 2.0}, None, {"x": None, "y": 1.0}]),
    }
)


def test_the_rows_of_several_messages_are_read_in_order() -> None:
    (batch,) = TABLE.to_batches()
    values = values_of(batch, batch.slice(0, 2).nbytes).to_pylist()
    assert [len(pa.ipc.open_stream(value).read_all()) for value in values] == [1, 2]
    assert pa.concat_tables(pa.ipc.open_stream(value).read_all() for value in values) == TABLE
    found = Reading(TABLE.schema, *values)
    assert found.rows == TABLE.to_pylist()
    assert len(found.batches) == 1  # small values are joined for Spark


def test_messages_have_at_most_max_bytes() -> None:
    batch = pa.record_batch({"x": pa.array(range(100_000))})
    sizes = [len(value) for value in values_of(batch, 64 << 10).to_pylist()]
    assert sum(sizes) > 800_000
    assert max(sizes) < 66 << 10
    skewed = pa.record_batch({"x": [b"y" * 100] * 990 + [b"y" * 100_000] * 10})
    assert max(map(len, values_of(skewed, 64 << 10).to_pylist())) < 102_000
    assert len(values_of(pa.record_batch({"x": [b"y" * 1000] * 3}), 1)) == 3  # a row is never divided


def test_columns_of_the_message_can_be_selected() -> None:
    schema = pa.schema(
        [("x", pa.int64()), ("_id", pa.int64()), ("_topic", pa.string()), ("_timestamp", MICROSECONDS)]
    )
    when = datetime(2026, 1, 1, tzinfo=UTC)
    table = pa.table({"x": [1, 2]})
    assert Reading(schema, stream(table), stream(table)).rows == [
        {"x": x, "_id": i, "_topic": f"t{i}", "_timestamp": when} for i in (0, 1) for x in (1, 2)
    ]
    alone = pa.schema([("_sequence", pa.int64()), ("_id", pa.int64())])
    assert Reading(alone, stream(table)).rows == [{"_sequence": 100, "_id": 0}] * 2
    with pytest.raises(ValueError, match="column '_id' has type string"):
        ArrowValues(pa.schema([("_id", pa.string())]), False)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (pa.array([1, 2], pa.int64()), pa.int32()),
        (pa.array([1, 2], pa.int64()), pa.float64()),
        (pa.array([1, 2], pa.uint64()), pa.decimal128(20, 0)),
        (pa.array(["a", "a"]).dictionary_encode(), pa.string()),
        (pa.array([b"ab"], pa.binary(2)), pa.binary()),
        (pa.array([10**9], pa.timestamp("ns", tz="Europe/Zurich")), MICROSECONDS),
        (pa.array([date(2026, 1, 1)], pa.date64()), pa.date32()),
        (pa.array([Decimal("1.50")], pa.decimal256(40, 2)), pa.decimal128(10, 2)),
        (pa.nulls(2), pa.string()),
        (pa.array([True, None]), pa.int64()),
        (pa.array(["1", None]), pa.int64()),
        (pa.array([time(1, 2, 3)], pa.time64("us")), pa.time64("ns")),
        (pa.array([1.5, float("nan"), None]), pa.float32()),
        (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), pa.list_(pa.int64())),
    ],
    ids=str,
)
def test_a_column_is_cast_to_the_type_of_the_schema(given: pa.Array, wanted: pa.DataType) -> None:
    schema = pa.schema([("x", wanted)])
    found = Reading(schema, stream(pa.table({"x": given})))
    assert found.why == []
    (batch,) = found.batches
    plain = given.to_pylist() if pa.types.is_nested(wanted) else given.cast(_wider(wanted)).to_pylist()
    assert str(batch.column("x").cast(_wider(wanted)).to_pylist()) == str(plain)


def _wider(kind: pa.DataType) -> pa.DataType:
    return pa.decimal128(38, kind.scale) if pa.types.is_decimal(kind) else kind


@pytest.mark.parametrize(
    ("given", "wanted", "why"),
    [
        (pa.array(["a"]), pa.int64(), "column 'x' is string, and does not fit int64: Failed to parse"),
        (pa.array([1.5]), pa.int64(), "was truncated"),
        (pa.array([2**40]), pa.int32(), "does not fit int32: Integer value 1099511627776 not in range"),
        (pa.array([1], pa.timestamp("ns")), pa.timestamp("us"), "would lose data"),
        (pa.array([{"a": 1}]), pa.struct([("b", pa.int64())]), "the fields of the struct differ"),
        (pa.array([b"\xff"]), pa.string(), "Invalid UTF8"),
        (pa.array([2**53 + 1]), pa.float64(), "does not fit double"),
        (pa.array([Decimal(2**91 + 1)], pa.decimal128(38, 0)), pa.decimal128(38, 37), "the scales differ"),
        (pa.array([[1]], pa.list_view(pa.int64())), pa.list_(pa.int64()), "the types are too different"),
    ],
    ids=str,
)
def test_a_column_that_cannot_be_cast_safely_does_not_fit(
    given: pa.Array, wanted: pa.DataType, why: str
) -> None:
    value = stream(pa.table({"x": given}))
    found = Reading(pa.schema([("x", wanted)]), value)
    assert found.rows == []
    ((id_, text),) = found.why
    assert id_ == 0
    assert why in text
    kept = Reading(pa.schema([("x", wanted), ("_corrupt_record", pa.binary())]), value, permissive=True)
    assert kept.rows == [{"x": None, "_corrupt_record": value}]


def test_a_column_is_found_by_its_name_and_must_be_unique() -> None:
    schema = pa.schema([("x", pa.int64())])
    more = pa.table({"y": ["other"], "x": [5]})
    assert Reading(schema, stream(more)).rows == [{"x": 5}]
    assert "0 columns 'x'" in Reading(schema, stream(pa.table({"y": [1]}))).why[0][1]
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    assert "2 columns 'x'" in Reading(schema, stream(twice)).why[0][1]


def test_a_null_in_a_not_null_column_does_not_fit() -> None:
    schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    assert Reading(schema, stream(pa.table({"x": [1]}))).rows == [{"x": 1}]
    assert "NOT NULL" in Reading(schema, stream(pa.table({"x": [1, None]}))).why[0][1]
    with pytest.raises(ValueError, match="leave out NOT NULL, or set mode"):
        ArrowValues(schema, True)


def nested(kind: pa.DataType, value: Any) -> bytes:
    return stream(pa.table({"x": pa.array([value], kind)}))


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (
            stream(pa.table({"x": pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", None]))})),
            pa.field("x", pa.string(), nullable=False),
        ),
        (
            nested(pa.list_(pa.int64()), [1, None]),
            pa.field("x", pa.list_(pa.field("element", pa.int64(), nullable=False))),
        ),
        (
            nested(pa.map_(pa.string(), pa.int64()), [("a", None)]),
            pa.field("x", pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))),
        ),
        (
            nested(pa.struct([("a", pa.int64())]), {"a": None}),
            pa.field("x", pa.struct([pa.field("a", pa.int64(), nullable=False)])),
        ),
        (nested(pa.null(), None), pa.field("x", pa.int64(), nullable=False)),
    ],
    ids=["dictionary", "list", "map", "struct", "null"],
)
def test_a_null_is_found_at_any_depth(value: bytes, wanted: pa.Field) -> None:
    found = Reading(pa.schema([wanted]), value)
    assert not found.batches
    assert re.search("NOT NULL|non-nullable", found.why[0][1])


def test_a_null_struct_has_no_fields_that_must_not_be_null() -> None:
    wanted = pa.struct([pa.field("a", pa.int64(), nullable=False)])
    table = pa.table({"x": pa.array([{"a": 1}, None], pa.struct([("a", pa.int64())]))})
    assert Reading(pa.schema([("x", wanted)]), stream(table)).rows == [{"x": {"a": 1}}, {"x": None}]


@pytest.mark.parametrize("name", ["_topic", "_publisher", "_sequence", "_corrupt_record"])
def test_columns_of_the_message_that_can_be_null_must_be_nullable(name: str) -> None:
    kind = {"_sequence": pa.int64(), "_corrupt_record": pa.binary()}.get(name, pa.string())
    with pytest.raises(ValueError, match="leave out NOT NULL"):
        ArrowValues(pa.schema([pa.field(name, kind, nullable=False)]), False)
    with pytest.raises(ValueError, match="write '_id'"):
        ArrowValues(pa.schema([("_ID", pa.int64())]), False)
    with pytest.raises(ValueError, match="no columns"):
        ArrowValues(pa.schema([]), False)


# What ends a Python process, or takes all its memory, if Arrow is let.


def view(kind: pa.DataType, length: int) -> pa.Array:
    """The view of the second row, which is null, has this length."""
    views = struct.pack("<i12s", 3, b"abc") + struct.pack("<i12s", length, b"")
    return pa.Array.from_buffers(kind, 2, [pa.py_buffer(b"\x01"), pa.py_buffer(views)])


@pytest.mark.parametrize("length", [-(2**31), -1, 2**31 - 1])
def test_the_bytes_of_a_null_view_are_not_followed(length: int) -> None:
    text = Reading(pa.schema([("x", pa.string())]), stream(pa.table({"x": view(pa.string_view(), length)})))
    assert text.why
    lists = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), view(pa.binary_view(), length))
    found = Reading(pa.schema([("x", pa.list_(pa.binary()))]), stream(pa.table({"x": lists})))
    assert found.why


@pytest.mark.parametrize("scale", [8323075, 2**31 - 1, -(2**31), 77, -1])
def test_a_decimal_with_an_impossible_scale_does_not_fit(scale: int) -> None:
    kind = pa.decimal128(38, scale)
    column = pa.Array.from_buffers(kind, 1, [None, pa.py_buffer((15).to_bytes(16, "little"))])
    found = Reading(pa.schema([("x", pa.decimal128(10, 2))]), stream(pa.table({"x": column})))
    assert "does not fit" in found.why[0][1]


def test_a_batch_with_a_negative_number_of_rows_does_not_fit() -> None:
    value = stream(pa.RecordBatch.from_arrays([], schema=pa.schema([])))
    schema = pa.schema([("_id", pa.int64())])
    fitting = 0
    for at in range(len(value)):
        for flip in (0xFF, 0x80):
            changed = bytearray(value)
            changed[at] ^= flip
            fitting += not Reading(schema, bytes(changed)).why
    assert fitting


def test_rows_without_bytes_are_bounded() -> None:
    schema = pa.schema([("x", pa.list_(pa.int64()))])
    offsets = pa.array([0, 2**31 - 1], pa.int32())
    huge = pa.ListArray.from_arrays(offsets, pa.nulls(2**31 - 1))
    assert "256 MiB" in Reading(schema, stream(pa.table({"x": huge}))).why[0][1]
    fixed = pa.FixedSizeListArray.from_arrays(pa.nulls(2**28), 2**28)
    assert "256 MiB" in Reading(schema, stream(pa.table({"x": fixed}))).why[0][1]
    columns = pa.schema([(f"x{i}", pa.int64()) for i in range(3)])
    many = pa.RecordBatch.from_arrays([pa.nulls(1 << 24)] * 3, names=columns.names)
    assert "256 MiB" in Reading(columns, stream(many)).why[0][1]
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 300_000, pa.int32()), pa.array(["y" * 1000]))
    assert "256 MiB" in Reading(pa.schema([("x", pa.string())]), stream(pa.table({"x": text}))).why[0][1]
    batches = pa.Table.from_batches([pa.RecordBatch.from_arrays([pa.nulls(1 << 23)], names=["x"])] * 3)
    assert "16777216 rows" in Reading(pa.schema([("_id", pa.int64())]), stream(batches)).why[0][1]
    claims = pa.RecordBatch.from_arrays([pa.nulls(1 << 25)], names=["x"])
    assert "the most are 16777216" in Reading(pa.schema([("x", pa.int64())]), stream(claims)).why[0][1]
    topic = log_of(stream(pa.RecordBatch.from_arrays([pa.nulls(1 << 20)], names=["x"])))
    at = topic.schema.get_field_index("topic")
    topic = topic.set_column(at, topic.schema.field(at), pa.array(["t" * 1000]))
    why: list[str] = []
    reader = ArrowValues(pa.schema([("_topic", pa.string())]), False)
    assert list(reader.rows(topic, lambda _, e: why.append(str(e)))) == []
    assert "256 MiB" in why[0]


def test_offsets_of_empty_lists_are_not_followed() -> None:
    """Offsets need not begin at 0, and Arrow does not validate those of an empty list."""
    inner = pa.ListArray.from_arrays(pa.array([4, 5], pa.int32()), pa.array(range(6)))
    outer = pa.ListArray.from_arrays(pa.array([1, 1], pa.int32()), inner)
    schema = pa.schema([("x", pa.list_(pa.list_(pa.int64())))])
    assert Reading(schema, stream(pa.table({"x": outer}))).rows == [{"x": []}]
    kind = pa.map_(pa.string(), pa.map_(pa.string(), pa.large_string()))
    maps = pa.array([[("a", [("b", "c")])], [], None], kind).slice(1)
    wanted = pa.map_(pa.string(), pa.map_(pa.string(), pa.string()))
    assert Reading(pa.schema([("x", wanted)]), stream(pa.table({"x": maps}))).rows == [{"x": []}, {"x": None}]


def test_memory_of_views_and_dictionaries_is_bounded() -> None:
    def bounded(schema: list[tuple[str, pa.DataType]], *columns: pa.Array) -> bool:
        table = pa.Table.from_arrays(columns, names=[f"x{i or ''}" for i in range(len(columns))])
        return "256 MiB" in Reading(pa.schema(schema), stream(table)).why[0][1]

    size = 1 << 20
    views = struct.pack("<i4sii", size, b"xxxx", 0, 0) * 300
    shared = pa.Array.from_buffers(
        pa.string_view(), 300, [None, pa.py_buffer(views), pa.py_buffer(b"x" * size)]
    )
    assert bounded([("x", pa.string())], shared)
    within = pa.ListArray.from_arrays(pa.array([0, 300], pa.int32()), shared)
    assert bounded([("x", pa.list_(pa.string()))], within)
    inner = pa.Array.from_buffers(pa.list_(pa.null(), 0), 1 << 25, [None], children=[pa.nulls(0)])
    outer = pa.Array.from_buffers(pa.list_(inner.type, 1 << 25), 1, [None], children=[inner])
    assert bounded([("x", pa.list_(pa.list_(pa.int64())))], outer)
    wide = pa.struct([(f"c{i}", pa.int64()) for i in range(200)])
    assert bounded([("x", wide)], pa.nulls(1 << 20))
    message = [("_id", pa.int64()), ("_sequence", pa.int64()), ("_timestamp", MICROSECONDS)]
    assert bounded([*message, ("_id", pa.int64())], pa.nulls(1 << 24))


def test_one_long_value_in_a_dictionary_fits() -> None:
    names = pa.DictionaryArray.from_arrays([0] * 3000 + [1], pa.array(["a", "b" * 100_000]))
    found = Reading(pa.schema([("x", pa.string())]), stream(pa.table({"x": names})))
    assert [len(row["x"]) for row in found.rows[-2:]] == [1, 100_000]


class Strict(pa.ExtensionType):
    """An extension type that raises for any description."""

    def __init__(self) -> None:
        super().__init__(pa.int64(), "tests.strict")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, told: bytes) -> Strict:
        raise RecursionError("too deep")


def test_an_error_of_a_registered_extension_type_affects_only_its_message() -> None:
    value = stream(pa.table({"x": pa.ExtensionArray.from_storage(Strict(), pa.array([1]))}))
    assert Reading(pa.schema([("x", pa.int64())]), value).rows == [
        {"x": 1}
    ]  # the type is not registered here
    pa.register_extension_type(Strict())
    try:
        assert "too deep" in Reading(pa.schema([("x", pa.int64())]), value).why[0][1]
    finally:
        pa.unregister_extension_type("tests.strict")


# A type that is wanted, the values that it may have, and what other programs make of it.


def test_an_error_quotes_at_most_one_short_line_of_a_type() -> None:
    kind = pa.struct([(f"evil\nERROR forged line {i}", pa.int64()) for i in range(3000)])
    value = stream(pa.table({"x": pa.nulls(1, kind)}))
    (_, why), *_ = Reading(pa.schema([("x", pa.int64())]), value).why
    assert "\n" not in why
    assert len(why) < 500


def test_a_value_that_does_not_fit_affects_no_other() -> None:
    schema = pa.schema([("x", pa.int64()), ("_id", pa.int64())])
    good = stream(pa.table({"x": [1]}))
    found = Reading(schema, good, b"", b"no Arrow", good[:-8], good + b"more", good + good, None, good)
    assert [row["_id"] for row in found.rows] == [0, 7]
    assert [id_ for id_, _ in found.why] == [1, 2, 3, 4, 5, 6]
    schema = schema.append(pa.field("_corrupt_record", pa.binary()))
    permissive = Reading(schema, good, b"no Arrow", None, permissive=True)
    assert [tuple(row.values()) for row in permissive.rows] == [
        (1, 0, None),
        (None, 1, b"no Arrow"),
        (None, 2, None),
    ]


def test_many_batches_of_one_value_and_compressed_ones() -> None:
    table = pa.table({"x": range(30_000)})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=7_000)
    found = Reading(table.schema, sink.getvalue().to_pybytes())
    assert [row["x"] for row in found.rows] == list(range(30_000))
    assert len(found.batches) == 3
