"""The bytes of the transaction protocol: golden frames, random bytes, and columns to bytes and back."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import DATA
from zmq_datasource.acknowledged import protocol
from zmq_datasource.acknowledged.protocol import (
    Data,
    End,
    Message,
    decode,
    encode,
    is_name,
    rows_of,
    split_batch,
)
from zmq_datasource.errors import ProtocolError
from zmq_datasource.messages.columns import MESSAGE_SCHEMA
from zmq_datasource.messages.packed import pack_columns, unpack_columns

GOLDEN = json.loads((DATA / "protocol-2.json").read_text(encoding="utf-8"))
ATTEMPT = "0123456789abcdef0123456789abcdef"
FRAMES = pa.list_(pa.field("element", pa.binary()))


def data(rows: int, columns: list[str]) -> Data:
    return Data(attempt=ATTEMPT, producer="p", number=0, partition=0, index=0, rows=rows, columns=columns)


def as_bytes(frames: list[Any]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@pytest.mark.parametrize("entry", GOLDEN, ids=[entry["message"] for entry in GOLDEN])
def test_the_bytes_of_version_2_never_change(entry: dict[str, Any]) -> None:
    """If this fails, raise the version of the protocol."""
    frames = [bytes.fromhex(frame) for frame in entry["frames"]]
    message, buffers = decode(frames)
    assert type(message).__name__ == entry["message"]
    assert json.loads(frames[1]) == entry["header"]
    assert as_bytes(encode(message, buffers)) == frames
    if isinstance(message, Data):
        columns = unpack_columns(message.columns, message.rows, buffers)
        assert {name: [in_hex(v) for v in c.to_pylist()] for name, c in columns.items()} == entry["rows"]


def in_hex(value: bytes | list[bytes] | None) -> str | list[str] | None:
    if isinstance(value, list):
        return [frame.hex() for frame in value]
    return None if value is None else value.hex()


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([b"hello"], "no message of the transaction protocol"),
        ([], "no message"),
        ([b"ZDS\x02H"], "no message"),
        ([b"ZDX\x01H", b"{}"], "no message"),
        ([b"ZDS\x02HH", b"{}"], "no message"),
        ([b"ZDS\x09H", b"{}"], "version 9"),
        ([b"ZDS\x02?", b"{}"], "unknown kind of message b'?'"),
        ([b"ZDS\x02H", b"{}"], "missing required field"),
        ([b"ZDS\x02H", b"[" * 100_000], "the header"),
        ([b"ZDS\x02H", b'{"attempt": "../../etc/passwd", "producer": "p"}'], "not 32 hexadecimal digits"),
        (
            [b"ZDS\x02H", b'{"attempt": "%s", "producer": "p\\n2026 ERROR"}' % ATTEMPT.encode()],
            "bytes of printable text",
        ),
        ([b"ZDS\x02H", b'{"attempt": "%s", "producer": ""}' % ATTEMPT.encode()], "producer's name"),
        ([b"ZDS\x02H", b'{"attempt": "%s", "producer": "%s"}' % (ATTEMPT.encode(), b"x" * 300)], "1 to 256"),
        (
            [b"ZDS\x02M", b'{"producer": "p", "number": -1, "attempts": [], "rows": 0}'],
            "number -1 is out of range",
        ),
        ([b"ZDS\x02M", b'{"producer": "p", "number": 0, "attempts": ["x"], "rows": 0}'], "attempt 'x'"),
        (
            [b"ZDS\x02M", b'{"producer": "p", "number": 0, "attempts": [], "rows": 0, "digest": "7"}'],
            "digest '7' is not 16 hexadecimal digits",
        ),
    ],
)
def test_frames_that_are_no_message_are_refused_with_a_reason(frames: list[bytes], says: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(says)):
        decode(frames)


BOUNDED = [
    Data(attempt=ATTEMPT, producer="p", number=0, partition=0, index=0, rows=0, columns=[]),
    End(attempt=ATTEMPT, messages=0, rows=0),
]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        *((BOUNDED[0], field) for field in ("number", "partition", "index", "rows")),
        (BOUNDED[1], "messages"),
    ],
)
def test_numbers_have_63_bits(message: Message, field: str) -> None:
    largest = msgspec.structs.replace(message, **{field: 2**63 - 1})
    assert decode(encode(largest))[0] == largest
    for wrong in (-1, 2**63):
        with pytest.raises(ProtocolError, match=f"^{field} {wrong} is out of range"):
            decode(encode(msgspec.structs.replace(message, **{field: wrong})))


@pytest.mark.parametrize("name", ["x", "x" * 256, "é" * 128])
def test_a_name_has_up_to_256_bytes(name: str) -> None:
    assert is_name(name)
    assert not is_name(name + "é" * 128)


kinds = st.sampled_from([b"ZDS\x02" + bytes([k]) for k in b"HWDTESMKX"])


@given(st.lists(st.one_of(st.binary(max_size=30), kinds, st.just(b"{}")), max_size=6))
def test_any_frames_are_read_or_refused(frames: list[bytes]) -> None:
    try:
        message, _ = decode(frames)
    except ProtocolError:
        return
    assert type(message).__name__ in protocol.__all__


@given(
    st.integers(1, 8),
    st.sampled_from([["value"], ["topic", "value"], ["frames"], ["x"], []]),
    st.lists(st.binary(max_size=40), max_size=6),
)
@settings(max_examples=100)
def test_any_buffers_are_rows_or_refused(rows: int, columns: list[str], buffers: list[bytes]) -> None:
    try:
        found = unpack_columns(columns, rows, buffers)
    except ProtocolError:
        return
    for column in found.values():
        assert len(column.to_pylist()) == rows


@pytest.mark.parametrize("offsets", [[0, 5, 3], [0, 2, 100], [-1, 2, 3], [0, 1, 2**31 - 1], [3, 2, 1]])
def test_offsets_that_point_elsewhere_are_refused(offsets: list[int]) -> None:
    raw = b"".join(n.to_bytes(4, "little", signed=True) for n in offsets)
    with pytest.raises(ProtocolError, match="damaged"):
        unpack_columns(["value"], 2, [raw, b"abcde"])


@pytest.mark.parametrize(
    ("rows", "columns", "buffers", "says"),
    [
        (1, ["value"], 3, "data with columns ['value'] and 3 buffers"),
        (1, ["key"], 2, "data with columns ['key'] and 2 buffers"),
        (0, ["value"], 2, "data with 0 rows"),
        ((1 << 18) + 1, ["value"], 2, "data with 262145 rows"),
    ],
)
def test_buffers_that_do_not_fit_the_header_are_refused(
    rows: int, columns: list[str], buffers: int, says: str
) -> None:
    with pytest.raises(ProtocolError, match=re.escape(says)):
        unpack_columns(columns, rows, [bytes(4 * (rows + 1))] * buffers)


def test_only_the_bytes_of_a_slice_are_sent() -> None:
    batch = pa.record_batch(
        {
            "topic": pa.array([b"a", None, b"cc", b"d"] * 10, pa.binary()),
            "value": pa.array([b"x" * 100] * 40, pa.binary()),
        }
    )
    _, buffers = pack_columns(batch.slice(1, 2))
    assert as_bytes(buffers) == [b"\x02", offsets(0, 0, 2), b"cc", offsets(0, 100, 200), b"x" * 200]
    lists = pa.record_batch({"frames": pa.array([[b"a", b"bb"], [b"c"], [b"d"]], FRAMES)})
    _, buffers = pack_columns(lists.slice(1, 1))
    assert as_bytes(buffers) == [offsets(0, 1), offsets(0, 1), b"c"]


def offsets(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(4, "little") for n in numbers)


# Rows.


def test_rows_have_the_producer_and_number_of_their_message() -> None:
    batch = pa.record_batch({"topic": [b"a", None, b"\xff"], "value": [b"1", b"2", b"3"]})
    columns, buffers = pack_columns(batch)
    message = msgspec.structs.replace(data(3, columns), producer="me", number=7)
    rows = rows_of(message, as_bytes(buffers), 1_000_000)
    rows.validate(full=True)
    assert rows.schema == MESSAGE_SCHEMA
    common = {"publisher": "me", "sequence": 7, "timestamp": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)}
    assert [
        {name: row[name] for name in (*common, "topic", "value", "frames")} for row in rows.to_pylist()
    ] == [
        {**common, "topic": "a", "value": b"1", "frames": None},
        {**common, "topic": None, "value": b"2", "frames": None},
        {**common, "topic": "hex:ff", "value": b"3", "frames": [b"\xff", b"3"]},
    ]


def test_frames_become_the_same_row_as_a_received_message() -> None:
    batch = pa.record_batch({"frames": pa.array([[b"v"], [b"t", b"v"], [b"t", b"u", b"v"]], FRAMES)})
    columns, buffers = pack_columns(batch)
    message = msgspec.structs.replace(data(3, columns), producer="me", number=7)
    rows = rows_of(message, as_bytes(buffers), 1_000_000).to_pylist()
    assert [(row["topic"], row["value"], row["frames"]) for row in rows] == [
        (None, b"v", None),
        ("t", b"v", None),
        ("t", b"v", [b"t", b"u", b"v"]),
    ]
    assert {(row["publisher"], row["sequence"]) for row in rows} == {("me", 7)}


_FRAME = st.binary(max_size=3) | st.sampled_from([b"", b"t", "\u00e4".encode(), b"\xff"])


@given(
    st.lists(st.tuples(st.none() | _FRAME, _FRAME), min_size=1, max_size=20)
    | st.lists(st.lists(_FRAME, min_size=1, max_size=4), min_size=1, max_size=10),
    st.data(),
)
def test_rows_are_unpacked_as_they_were(rows: list[Any], chosen: st.DataObject) -> None:
    if isinstance(rows[0], tuple):
        topics, values = (pa.array(column, pa.binary()) for column in zip(*rows, strict=True))
        batch = pa.record_batch({"topic": topics, "value": values})
    else:
        batch = pa.record_batch({"frames": pa.array(rows, FRAMES)})
    batch = batch.slice(chosen.draw(st.integers(0, len(rows) - 1)))
    columns, buffers = pack_columns(batch)
    found = unpack_columns(columns, batch.num_rows, as_bytes(buffers))
    assert {name: column.to_pylist() for name, column in found.items()} == batch.to_pydict()


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.large_binary(), pa.binary()])
def test_text_is_sent_as_its_bytes(kind: pa.DataType) -> None:
    text = pa.record_batch({"topic": ["a", None], "value": ["é", ""]})
    batch = text.cast(pa.schema([("topic", kind), ("value", kind)]))
    columns, buffers = pack_columns(batch)
    found = unpack_columns(columns, 2, as_bytes(buffers))
    assert found["value"].to_pylist() == ["é".encode(), b""]
    assert found["topic"].to_pylist() == [b"a", None]


def test_batches_are_split_by_size_between_rows() -> None:
    values = [b"x"] * 90 + [b"x" * 10_000] * 10
    batch = pa.record_batch({"value": values})
    assert [piece.num_rows for piece in split_batch(batch)] == [100]
    assert list(split_batch(batch.slice(0, 0))) == []
    assert [piece.num_rows for piece in split_batch(batch, 1)] == [1] * 100
    pieces = list(split_batch(batch, 5_000))
    assert [v for piece in pieces for v in piece.column("value").to_pylist()] == values
    assert max(piece.num_rows for piece in pieces[-10:]) == 1
    assert pieces[0].num_rows > 1
