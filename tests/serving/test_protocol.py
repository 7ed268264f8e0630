"""The protocol of durable subscribers, byte by byte."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmq_datasource.errors import ProtocolError
from zmq_datasource.messages.framing import decode_plain
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.serving.protocol import (
    Batch,
    Fetch,
    FromClient,
    FromServer,
    Open,
    Opened,
    Refused,
    decode,
    encode,
    pack_rows,
    unpack_rows,
)
from zmq_datasource.serving.subscriber_session import SubscriberInbox


def as_bytes(frames: list[Any]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def messages_of(rows: pa.RecordBatch) -> list[tuple[int, tuple[bytes, ...]]]:
    inbox, found = SubscriberInbox(), []
    inbox.add(rows, 0)
    while (message := inbox.peek()) is not None:
        found.append(message)
        inbox.hand_over(message[0], message[0])
    return found


def ids(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(8, "little", signed=True) for n in numbers)


def offsets(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(4, "little") for n in numbers)


# A client that was written from docs/durable-protocol.md depends on these bytes. If one fails, raise the version.
GOLDEN: list[tuple[FromClient | FromServer, list[bytes], list[bytes]]] = [
    (Open(name="me", session=7), [b"ZDS\3O", b'{"name":"me","session":7}'], []),
    (
        Open(name="me", session=7, log="x", start="latest"),
        [b"ZDS\3O", b'{"name":"me","session":7,"log":"x","start":"latest"}'],
        [b"a", b"\xff"],
    ),
    (Open(name="me", session=7, start=9), [b"ZDS\3O", b'{"name":"me","session":7,"start":9}'], []),
    (
        Opened(session=7, log="x", next=8, new=True),
        [b"ZDS\3R", b'{"session":7,"log":"x","next":8,"new":true}'],
        [],
    ),
    (
        Fetch(name="me", session=7, first=9, done=8, max_bytes=9),
        [b"ZDS\3F", b'{"name":"me","session":7,"first":9,"done":8,"max_bytes":9}'],
        [],
    ),
    (
        Fetch(name="me", session=7, first=9, done=8, max_bytes=0, confirm=True),
        [b"ZDS\3F", b'{"name":"me","session":7,"first":9,"done":8,"max_bytes":0,"confirm":true}'],
        [],
    ),
    (
        Batch(session=7, log="x", first=3, next=9, done=2),
        [b"ZDS\3B", b'{"session":7,"log":"x","first":3,"next":9,"done":2}'],
        [],
    ),
    (
        Batch(session=7, log="x", first=3, next=9, done=2, lost=6),
        [b"ZDS\3B", b'{"session":7,"log":"x","first":3,"next":9,"done":2,"lost":6}'],
        [],
    ),
    (
        Batch(session=7, log="x", first=3, next=9, done=2, rows=2, columns=("frames",)),
        [
            b"ZDS\3B",
            b'{"session":7,"log":"x","first":3,"next":9,"done":2,"rows":2,"columns":["frames"]}',
        ],
        [b"1", b"2", b"3"],
    ),
    (
        Refused(code="taken", reason="why", session=7),
        [b"ZDS\3X", b'{"code":"taken","reason":"why","session":7}'],
        [],
    ),
    (Refused(code="protocol", reason="why"), [b"ZDS\3X", b'{"code":"protocol","reason":"why"}'], []),
]


@pytest.mark.parametrize(("message", "frames", "rest"), GOLDEN)
def test_each_message_is_written_and_read_as_specified(
    message: FromClient | FromServer, frames: list[bytes], rest: list[bytes]
) -> None:
    assert encode(message, rest) == [*frames, *rest]
    assert decode([*frames, *rest]) == (message, rest)


def test_fields_that_a_client_leaves_out_have_their_defaults() -> None:
    named, _ = decode([b"ZDS\3F", b'{"name": "me", "session": 7, "first": 9, "done": 8, "later": []}'])
    assert named == Fetch(name="me", session=7, first=9, done=8, max_bytes=1 << 20, confirm=False)
    opening, _ = decode([b"ZDS\3O", b'{"name": "me", "session": 1}'])
    assert opening == Open(name="me", session=1, start="earliest", log=None)


def opened(name: str = "me", session: str = "7", more: str = "") -> list[bytes]:
    return [b"ZDS\3O", f'{{"name": "{name}", "session": {session}{more}}}'.encode()]


def fetched(more: str) -> list[bytes]:
    return [b"ZDS\3F", f'{{"session": 7, {more}}}'.encode()]


A_NAME = "a name has 1 to 200 bytes of printable text"


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ([], "^this is no message of the protocol of durable subscribers$"),
        ([b"SUBSCRIBE", b"1", b"me"], "no message of the protocol of durable subscribers"),
        ([b"ZDS\3O"], "no message of the protocol"),
        ([b"", b"ZDS\3O", b"{}"], "begins with an empty frame: its DEALER puts a delimiter in front"),
        (
            [b"ZDS\2O", b"{}"],
            "^version 2 of the protocol of durable subscribers; this side speaks version 3$",
        ),
        ([b"ZDS\3?", b"{}"], r"^unknown kind of message b'\?'$"),
        ([b"ZDS\3O", b"{}"], "^the header of a Open message: Object missing required field `name`"),
        ([b"ZDS\3O", b"\xff"], "the header of a Open message"),
        (opened(name=""), A_NAME),
        (opened(name="x" * 201), A_NAME),
        (opened(name="é" * 101), A_NAME),
        (opened(name="a\\nb"), A_NAME),
        (opened(name="\\ud800"), "the header of a Open message|" + A_NAME),
        (opened(session="0"), "^session 0, which means no session"),
        ([b"ZDS\3F", b'{"name": "me", "first": 1, "done": 1}'], "missing required field `session`"),
        (opened(session="-1"), r"Expected `int` >= 0 - at `\$.session`"),
        (opened(session=str(1 << 63)), r"Expected `int` <= 9223372036854775807 - at `\$.session`"),
        (opened(session="true"), "Expected `int`, got `bool`"),
        (opened(more=', "start": "now"'), "start 'now' is not earliest, latest, last, or an id"),
        (opened(more=', "start": -1'), r">= 0 - at `\$.start`"),
        (opened(more=', "start": "' + "x" * 17 + '"'), "length <= 16"),
        ([*opened(), *[b"t"] * 1001], "^1001 topics of 1001 bytes; 1000 of 32768 are the most$"),
        ([*opened(), b"t" * 32_769], "^1 topics of 32769 bytes"),
        (fetched('"done": 1, "name": "me"'), "missing required field `first`"),
        (fetched('"first": 1, "name": "me"'), "missing required field `done`"),
        (fetched('"first": 1, "done": 1'), "missing required field `name`"),
        (fetched('"first": 1, "done": 2, "name": "me"'), "^done 2 is beyond first 1$"),
    ],
)
def test_messages_that_no_client_sends_are_refused(frames: list[bytes], problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        decode(frames)


@pytest.mark.parametrize(
    ("message", "topics"),
    [
        (Open(name="x", session=1), []),
        (Open(name="x" * 200, session=1), []),
        (Open(name="é" * 100, session=1), []),
        (Open(name="me", session=(1 << 63) - 1, start=(1 << 63) - 1), []),
        (Open(name="me", session=1, start="last"), [b"t"] * 1000),
        (Open(name="me", session=1), [b"t" * 32_768]),
        (Fetch(name="me", session=1, first=5, done=5), []),
    ],
)
def test_messages_at_the_bounds_are_read(message: FromClient, topics: list[bytes]) -> None:
    assert decode(encode(message, topics)) == (message, topics)


@pytest.mark.parametrize(("after", "lost"), [(2, 0), (3, 1)])
def test_an_answer_that_leads_back_is_refused(after: int, lost: int) -> None:
    """A client would send the same FETCH again and again, or count messages as lost that are not."""
    header = b'{"session": 7, "log": "x", "first": 3, "next": %d, "done": 0, "lost": %d}' % (after, lost)
    with pytest.raises(ProtocolError, match=f"^a BATCH from 3 to before {after}, of which {lost} are lost$"):
        decode([b"ZDS\3B", header])


# The rows of a BATCH.


def rows_of(numbers: list[int], messages: list[list[bytes]]) -> pa.RecordBatch:
    """Rows of the log, as a proxy reads them."""
    batch = decode_plain(raw_of(messages), [(0, len(messages))])
    return batch.add_column(0, "id", pa.array(numbers, pa.int64()))


def given_back(batch: pa.RecordBatch) -> list[tuple[int, tuple[bytes, ...]]]:
    _, columns, buffers = pack_rows(batch)
    numbers = batch.column("id").to_pylist()
    head = Batch(
        session=7,
        log="x",
        first=numbers[0],
        next=numbers[-1] + 1,
        done=numbers[0],
        rows=batch.num_rows,
        columns=tuple(columns),
    )
    message, rest = decode(as_bytes(encode(head, buffers)))
    assert isinstance(message, Batch)
    return messages_of(unpack_rows(message, rest))


def test_the_rows_of_a_batch_are_these_bytes() -> None:
    _, columns, buffers = pack_rows(rows_of([3, 5], [[b"one"], [b"t", b"two"]]))
    assert columns == ["topic", "value"]
    assert as_bytes(buffers) == [
        ids(3, 5),
        b"\2",
        offsets(0, 0, 1),
        b"t",
        offsets(0, 3, 6),
        b"onetwo",
    ]
    _, columns, buffers = pack_rows(rows_of([3], [[b"t", b"two"]]))
    assert as_bytes(buffers)[1] == b"", "no topic is missing"
    _, columns, buffers = pack_rows(rows_of([3, 5], [[b"one"], [b"t", b"x", b"two"]]))
    assert columns == ["frames"]
    assert as_bytes(buffers) == [ids(3, 5), offsets(0, 1, 4), offsets(0, 3, 4, 5, 8), b"onetxtwo"]


def test_the_messages_of_a_batch_come_back() -> None:
    plain = [[b"one"], [b"t", b"two"], [b"", b"three"]]
    expected = [(1, (b"", b"one")), (4, (b"t", b"two")), (9, (b"", b"three"))]
    assert given_back(rows_of([1, 4, 9], plain)) == expected
    with_frames = [*plain, [b"\xff", b"x"], [b"t", b"u", b"v"]]
    expected += [(10, (b"\xff", b"x")), (12, (b"t", b"u", b"v"))]
    assert given_back(rows_of([1, 4, 9, 10, 12], with_frames)) == expected


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.binary(max_size=5), min_size=1, max_size=3)),
        min_size=1,
        max_size=8,
    ),
    st.data(),
)
def test_any_messages_come_back(messages: list[tuple[int, list[bytes]]], drawn: st.DataObject) -> None:
    """Also the rows of a slice, and rows with any ids left out."""
    numbers, number = [], 0
    for step, _ in messages:
        number += step
        numbers.append(number)
    begin = drawn.draw(st.integers(0, len(messages) - 1))
    expected = [
        (number, tuple(frames) if len(frames) > 1 else (b"", *frames))
        for number, (_, frames) in zip(numbers, messages, strict=True)
    ]
    end = drawn.draw(st.integers(begin + 1, len(messages)))
    batch = rows_of(numbers, [frames for _, frames in messages])
    assert given_back(batch.slice(begin, end - begin)) == expected[begin:end]


def batch_head(rows: int = 2, first: int = 3, after: int = 9, columns: tuple[str, ...] = ("value",)) -> Batch:
    return Batch(session=7, log="x", first=first, next=after, done=first, rows=rows, columns=columns)


VALUES = [offsets(0, 1, 2), b"ab"]


def test_a_batch_without_topics_is_read() -> None:
    assert messages_of(unpack_rows(batch_head(), [ids(3, 8), *VALUES])) == [
        (3, (b"", b"a")),
        (8, (b"", b"b")),
    ]
    assert messages_of(unpack_rows(batch_head(rows=0, columns=()), [])) == []


@pytest.mark.parametrize(
    ("head", "buffers", "problem"),
    [
        (batch_head(rows=0), [b"x"], "^a BATCH without rows, and 1 buffers$"),
        (batch_head(), [], "^2 rows, and not as many ids$"),
        (batch_head(), [ids(3), *VALUES], "2 rows, and not as many ids"),
        (batch_head(), [ids(3, 4) + b"x", *VALUES], "2 rows, and not as many ids"),
        (batch_head(rows=1 << 19), [ids(3, 4), *VALUES], "524288 rows, and not as many ids"),
        (batch_head(rows=1 << 62), [ids(3, 4), *VALUES], "rows, and not as many ids"),
        (batch_head(), [ids(2, 8), *VALUES], "the ids of a BATCH from 3 to 8 do not grow within these"),
        (batch_head(), [ids(3, 9), *VALUES], "do not grow within these"),
        (batch_head(), [ids(4, 4), *VALUES], "do not grow within these"),
        (batch_head(), [ids(5, 4), *VALUES], "do not grow within these"),
        (batch_head(), [ids(-1, 4), *VALUES], "do not grow within these"),
        (batch_head(after=0, first=0), [ids(0, 1), *VALUES], "do not grow within these"),
        (batch_head(), [ids(3, 4), *VALUES, b""], r"columns \('value',\) and 3 buffers"),
        (batch_head(columns=("x",)), [ids(3, 4), *VALUES], r"columns \('x',\) and 2 buffers"),
        (batch_head(columns=()), [ids(3, 4), *VALUES], "and 2 buffers"),
        (batch_head(), [ids(3, 4), offsets(0, 1, 100), b"ab"], "column value is damaged"),
        (
            batch_head(columns=("frames",)),
            [ids(3, 4), offsets(0, 0, 1), offsets(0, 1), b"a"],
            "^a message without frames$",
        ),
    ],
)
def test_rows_that_no_proxy_sends_are_refused(head: Batch, buffers: list[bytes], problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        unpack_rows(head, buffers)


def test_ids_at_the_end_of_all_ids_are_read() -> None:
    last = (1 << 63) - 2
    found = list(
        messages_of(unpack_rows(batch_head(first=last - 1, after=last + 1), [ids(last - 1, last), *VALUES]))
    )
    assert [number for number, _ in found] == [last - 1, last]


def test_as_many_rows_as_a_batch_has_at_most_are_read() -> None:
    rows = 1 << 18
    buffers = [bytes(4 * (rows + 1)), b""]  # empty values
    head = batch_head(rows=rows, first=0, after=rows)
    numbers = pa.array(range(rows), pa.int64()).buffers()[1].to_pybytes()[: 8 * rows]
    assert len(messages_of(unpack_rows(head, [numbers, *buffers]))) == rows
    numbers += ids(rows)
    head = batch_head(rows=rows + 1, first=0, after=rows + 1)
    with pytest.raises(ProtocolError, match="262145 rows, and not as many ids"):
        unpack_rows(head, [numbers, *buffers])


# Any bytes.

kinds = st.sampled_from([b"ZDS\3" + bytes([letter]) for letter in b"ORFBX"])
headers = st.sampled_from([bytes(frames[1]) for _, frames, _ in GOLDEN])


@given(st.lists(st.one_of(st.binary(max_size=30), kinds, headers), max_size=6))
@settings(max_examples=100)
def test_any_frames_are_read_or_refused(frames: list[bytes]) -> None:
    try:
        message, rest = decode(frames)
        found = messages_of(unpack_rows(message, rest)) if isinstance(message, Batch) else []
    except ProtocolError:
        return
    assert isinstance(message, FromClient | FromServer)
    assert len(found) == getattr(message, "rows", 0)


@given(
    st.integers(1, 4),
    st.sampled_from([("value",), ("topic", "value"), ("frames",), ("x",), ()]),
    st.lists(st.one_of(st.binary(max_size=24), st.just(offsets(0, 1, 2)), st.just(b"")), max_size=6),
)
@settings(max_examples=100)
def test_any_buffers_behind_ids_are_messages_or_refused(
    rows: int, columns: tuple[str, ...], buffers: list[bytes]
) -> None:
    head = batch_head(rows=rows, first=0, after=rows, columns=columns)
    try:
        found = messages_of(unpack_rows(head, [ids(*range(rows)), *buffers]))
    except ProtocolError:
        return
    assert [number for number, _ in found] == list(range(rows))
    assert all(len(frames) >= 2 and all(isinstance(f, bytes) for f in frames) for _, frames in found)
