"""The transaction protocol's bytes: golden frames, any bytes at all, and columns that come back."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import DATA
from zmq_datasource.acknowledged import protocol
from zmq_datasource.acknowledged.protocol import (
    Data,
    decode,
    encode,
    pack_columns,
    split_batch,
    unpack_columns,
)
from zmq_datasource.errors import ProtocolError

GOLDEN = json.loads((DATA / "protocol-1.json").read_text(encoding="utf-8"))
ATTEMPT = "0123456789abcdef0123456789abcdef"
FRAMES = pa.list_(pa.field("element", pa.binary()))


def data(rows: int, columns: list[str]) -> Data:
    return Data(attempt=ATTEMPT, producer="p", number=0, partition=0, index=0, rows=rows, columns=columns)


def as_bytes(frames: list[Any]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@pytest.mark.parametrize("entry", GOLDEN, ids=[entry["message"] for entry in GOLDEN])
def test_the_bytes_of_version_1_never_change(entry: dict[str, Any]) -> None:
    """If this fails, raise the version, and go on reading 1."""
    frames = [bytes.fromhex(frame) for frame in entry["frames"]]
    message, buffers = decode(frames)
    assert type(message).__name__ == entry["message"]
    assert json.loads(frames[1]) == entry["header"]
    assert as_bytes(encode(message, buffers)) == frames
    if isinstance(message, Data):
        columns = unpack_columns(message, buffers)
        assert {name: [in_hex(v) for v in c.to_pylist()] for name, c in columns.items()} == entry["rows"]


def in_hex(value: bytes | list[bytes] | None) -> str | list[str] | None:
    if isinstance(value, list):
        return [frame.hex() for frame in value]
    return None if value is None else value.hex()


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([b"hello"], "no message of the transaction protocol"),
        ([b"ZDS\x01H"], "no message"),
        ([b"ZDS\x02H", b"{}"], "version 2"),
        ([b"ZDS\x01?", b"{}"], "unknown kind"),
        ([b"ZDS\x01H", b"{}"], "missing required field"),
        ([b"ZDS\x01H", b"[" * 100_000], "the header"),
        ([b"ZDS\x01H", b'{"attempt": "../../etc/passwd", "producer": "p"}'], "not 32 hexadecimal digits"),
        (
            [b"ZDS\x01H", b'{"attempt": "%s", "producer": "p\\n2026 ERROR"}' % ATTEMPT.encode()],
            "bytes of printable text",
        ),
        ([b"ZDS\x01H", b'{"attempt": "%s", "producer": ""}' % ATTEMPT.encode()], "producer's name"),
        ([b"ZDS\x01H", b'{"attempt": "%s", "producer": "%s"}' % (ATTEMPT.encode(), b"x" * 300)], "1 to 256"),
        (
            [b"ZDS\x01M", b'{"producer": "p", "number": -1, "attempts": [], "rows": 0}'],
            "number -1 is out of range",
        ),
        ([b"ZDS\x01M", b'{"producer": "p", "number": 0, "attempts": ["x"], "rows": 0}'], "attempt 'x'"),
    ],
)
def test_what_is_no_message_is_refused_with_a_reason(frames: list[bytes], says: str) -> None:
    with pytest.raises(ProtocolError, match=says.replace("(", r"\(")):
        decode(frames)


kinds = st.sampled_from([b"ZDS\x01" + bytes([k]) for k in b"HWDCESMKABX"])


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
@settings(max_examples=300)
def test_any_buffers_are_rows_or_refused(rows: int, columns: list[str], buffers: list[bytes]) -> None:
    try:
        found = unpack_columns(data(rows, columns), buffers)
    except ProtocolError:
        return
    for column in found.values():
        assert len(column.to_pylist()) == rows


@pytest.mark.parametrize("offsets", [[0, 5, 3], [0, 2, 100], [-1, 2, 3], [0, 1, 2**31 - 1], [3, 2, 1]])
def test_offsets_that_point_elsewhere_are_refused(offsets: list[int]) -> None:
    raw = b"".join(n.to_bytes(4, "little", signed=True) for n in offsets)
    with pytest.raises(ProtocolError, match="damaged"):
        unpack_columns(data(2, ["value"]), [raw, b"abcde"])


texts = st.one_of(st.none(), st.binary(max_size=5))


@given(st.lists(st.tuples(texts, st.binary(max_size=9)), min_size=1, max_size=20), st.data())
def test_rows_come_back_as_they_were(rows: list[tuple[bytes | None, bytes]], chosen: st.DataObject) -> None:
    begin = chosen.draw(st.integers(0, len(rows) - 1))
    batch = pa.record_batch(
        {
            "topic": pa.array([topic for topic, _ in rows], pa.binary()),
            "value": pa.array([value for _, value in rows], pa.binary()),
        }
    ).slice(begin)
    columns, buffers = pack_columns(batch)
    found = unpack_columns(data(batch.num_rows, columns), as_bytes(buffers))
    assert list(zip(found["topic"].to_pylist(), found["value"].to_pylist(), strict=True)) == rows[begin:]


@given(st.lists(st.lists(st.binary(max_size=5), min_size=1, max_size=4), min_size=1, max_size=10), st.data())
def test_frames_come_back_as_they_were(messages: list[list[bytes]], chosen: st.DataObject) -> None:
    begin = chosen.draw(st.integers(0, len(messages) - 1))
    batch = pa.record_batch({"frames": pa.array(messages, FRAMES)}).slice(begin)
    columns, buffers = pack_columns(batch)
    found = unpack_columns(data(batch.num_rows, columns), as_bytes(buffers))
    assert found["frames"].to_pylist() == messages[begin:]


def test_text_is_sent_as_its_bytes() -> None:
    batch = pa.record_batch({"topic": ["a", None], "value": ["é", ""]})
    columns, buffers = pack_columns(batch)
    found = unpack_columns(data(2, columns), as_bytes(buffers))
    assert found["value"].to_pylist() == ["é".encode(), b""]
    assert found["topic"].to_pylist() == [b"a", None]


def test_batches_are_split_by_size_and_a_row_is_never_torn() -> None:
    batch = pa.record_batch({"value": [b"x" * 1000] * 100})
    pieces = list(split_batch(batch, 10_000))
    assert sum(piece.num_rows for piece in pieces) == 100
    assert all(piece.num_rows <= 10 for piece in pieces)
    assert [piece.num_rows for piece in split_batch(batch, 1)] == [1] * 100
