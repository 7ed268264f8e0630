"""The compiled core and the Python core: how they send rows."""

from __future__ import annotations

import threading
import time

import pyarrow as pa
import pytest
import zmq

from tests.support import Consuming, wait_for
from tests.transport.cores import (
    LARGEST,
    MIB,
    Context,
    binary,
    give_all,
    lists,
    offsets,
    pair,
    raw_lists,
    read_all,
)
from zmq_datasource.messages.columns import FRAMES
from zmq_datasource.transport.columns import Column, FrameColumn, FramesColumn, NumberColumn, SameColumn
from zmq_datasource.transport.core import Outbox

pytestmark = pytest.mark.usefixtures("core_name")


def test_columns_make_the_frames_of_a_message(context: Context) -> None:
    push, pull = pair(context)
    values = pa.array([b"a", None, b"", b"d"])
    topics = pa.array(["t", "u", None, "ü"])
    give_all(
        push, [FrameColumn(topics), SameColumn(b"same"), NumberColumn(255), FrameColumn(values, True)], 4
    )
    assert read_all(pull) == [
        [b"t", b"same", (255).to_bytes(8, "big"), b"a"],
        [b"u", b"same", (256).to_bytes(8, "big"), b""],
        [b"same", (257).to_bytes(8, "big"), b""],
        ["ü".encode(), b"same", (258).to_bytes(8, "big"), b"d"],
    ]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()])
def test_a_slice_of_a_column_sends_its_own_rows(context: Context, kind: pa.DataType) -> None:
    push, pull = pair(context)
    values = pa.array([None if i % 7 == 0 else "v" * i for i in range(100)], kind)
    for part in (values, values[3:], values[9:57], values[64:66], values[8:][5:20], values[100:]):
        give_all(push, [FrameColumn(part, empty=True), SameColumn(b".")], len(part))
        frames = part.cast(pa.large_binary()).to_pylist()
        assert read_all(pull) == [[frame or b"", b"."] for frame in frames]


def test_a_slice_of_lists_sends_its_own_rows(context: Context) -> None:
    push, pull = pair(context)
    messages = [[b"%d" % i] * (i % 4 + 1) for i in range(50)]
    for kind in (FRAMES, pa.list_(pa.large_binary())):
        column = lists(messages, kind)
        inner = pa.ListArray.from_arrays([0, 1, 3], column.values[5:8])
        assert inner.values.offset
        for part in (
            column,
            column[1:],
            column[10:31],
            column[50:],
            column.filter(pa.array([True] * 50)),
            inner,
        ):
            give_all(push, [FramesColumn(part)], len(part))
            assert read_all(pull) == part.to_pylist()


def test_offsets_need_not_be_aligned(context: Context) -> None:
    push, pull = pair(context)
    data, ends = pa.py_buffer(b"abc"), pa.py_buffer(b"?" + bytes(offsets(0, 1, 3)))[1:]
    values = pa.Array.from_buffers(pa.binary(), 2, [None, ends, data])
    places = pa.py_buffer(b"?" + bytes(offsets(0, 1, 2)))[1:]
    messages = pa.Array.from_buffers(FRAMES, 2, [None, places], children=[values])
    for column in (FrameColumn(values), FramesColumn(messages)):
        give_all(push, [column], 2)
        assert read_all(pull) == [[b"a"], [b"bc"]]


GOOD = binary(b"abcdef", 0, 1, 2, 3)
NOT_WHOLE = {
    "decreasing": FrameColumn(binary(b"abc", 0, 2, 1, 3)),
    "negative at first": FrameColumn(binary(b"abc", -1, 1, 2, 3)),
    "negative": FrameColumn(binary(b"abc", 0, 1, -2, 3)),
    "beyond the data": FrameColumn(binary(b"abc", 0, 1, 2, 4)),
    "far beyond the data": FrameColumn(binary(b"abc", 0, 1, 2, LARGEST)),
    "too few rows": FrameColumn(binary(b"abc", 0, 1, 2)),
    "too few rows behind an offset": FrameColumn(binary(b"abc", 0, 1, 2, 3, offset=1)),
    "no frame": FrameColumn(pa.array([b"a", b"b", None])),
    "lists, decreasing": FramesColumn(raw_lists(GOOD, 0, 1, 2, 1)),
    "lists, negative": FramesColumn(raw_lists(GOOD, -1, 1, 2, 3)),
    "lists, beyond the frames": FramesColumn(raw_lists(GOOD, 0, 1, 2, 4)),
    "lists, far beyond the frames": FramesColumn(raw_lists(GOOD, 0, 1, 2, LARGEST)),
    "an empty list": FramesColumn(raw_lists(GOOD, 0, 1, 2, 2)),
    "frames of a list, decreasing": FramesColumn(raw_lists(binary(b"abc", 0, 1, 2, 1), 0, 1, 2, 3)),
    "frames of a list, beyond the data": FramesColumn(raw_lists(binary(b"abc", 0, 1, 9, 3), 0, 1, 2, 3)),
    "no list": FramesColumn(lists([[b"a"], [b"b"], None])),
    "too few lists": FramesColumn(lists([[b"a"], [b"b"]])),
    "a number below 0": NumberColumn(-1),
    "numbers beyond 63 bits": NumberColumn(2**63 - 2),
}


@pytest.mark.parametrize("column", NOT_WHOLE.values(), ids=NOT_WHOLE.keys())
def test_rows_that_are_not_whole_are_refused_before_anything_is_sent(column: Column) -> None:
    with pytest.raises(ValueError, match=r"row|column"):
        Outbox([column], 3)


@pytest.mark.parametrize(
    "column",
    [
        FrameColumn(pa.array([1, 2, 3])),
        FrameColumn(pa.array([b"a"] * 3, pa.binary_view())),
        FrameColumn(pa.array([b"a"] * 3, pa.binary(1))),
        FrameColumn(lists([[b"a"]] * 3)),
        FramesColumn(lists([[b"a"]] * 3, pa.large_list(pa.binary()))),
        FramesColumn(pa.array([b"a"] * 3)),
        FramesColumn(pa.array([[1]] * 3)),
    ],
    ids=["numbers", "views", "fixed", "lists", "large lists", "no lists", "lists of numbers"],
)
def test_columns_that_are_not_binary_are_refused(column: Column) -> None:
    with pytest.raises(TypeError, match=r"binary|lists"):
        Outbox([column], 3)


def test_rows_that_do_not_exist_are_refused(context: Context) -> None:
    push, pull = pair(context)
    rows = Outbox([SameColumn(b"row")], 3)
    for start, end in ((-1, 2), (0, 4), (2, 1), (4, 4)):
        with pytest.raises(ValueError, match="rows"):
            rows.give(push, start, end)
        with pytest.raises(ValueError, match="rows"):
            rows.size(start, end)
    assert rows.give(push, 3, 3) == 3
    assert read_all(pull) == []
    for columns, count in (([], 1), ([SameColumn(b"")] * 9, 1), ([SameColumn(b"")], -1)):
        with pytest.raises(ValueError, match=r"row|column"):
            Outbox(columns, count)


# Room.


@pytest.mark.parametrize("frames", [1, 3])
def test_sending_stops_at_the_row_that_finds_no_room(context: Context, frames: int) -> None:
    push, pull = pair(context, hwm=10)
    rows = Outbox([SameColumn(b"frame")] * (frames - 1) + [NumberColumn(0)], 200)
    expected = [[b"frame"] * (frames - 1) + [i.to_bytes(8, "big")] for i in range(200)]
    position, received, refusals = 0, [], 0
    while position < 200:
        position = rows.give(push, position, 200)
        received += read_all(pull)
        assert received == expected[:position]
        refusals += 1
    assert refusals > 5


def test_waiting_for_room_ends_with_room_or_with_the_timeout(context: Context) -> None:
    push, pull = pair(context, hwm=10)
    rows = Outbox([SameColumn(b"frame"), NumberColumn(0)], 200)
    began = time.monotonic()
    start = rows.give(push, 0, 200, wait=0.05)
    assert 0 < start < 200
    assert 0.04 < rows.waited_seconds <= time.monotonic() - began < 10
    with Consuming(pull) as consuming:
        assert rows.give(push, start, 200, wait=60) == 200
        consuming.wait_for(200)
    assert consuming.got == [[b"frame", i.to_bytes(8, "big")] for i in range(200)]


def _wait_for_the_end_of_the_connection(sender: zmq.Socket[bytes]) -> None:
    """Until libzmq knows of the end of a connection, it sends more messages into it."""
    wait_for(lambda: not sender.poll(0, zmq.POLLOUT), "the end of the connection")


@pytest.mark.parametrize("wait", [0.0, 0.1])
@pytest.mark.parametrize("kinds", [(zmq.PUSH, zmq.PULL), (zmq.DEALER, zmq.DEALER)])
def test_a_message_whose_connection_is_lost_on_the_way_is_whole_or_not_at_all(
    context: Context, kinds: tuple[int, int], wait: float
) -> None:
    """libzmq discards the rest of such a message in silence; the next message must keep its first frames."""
    messages = [[b"%d" % i, *[b"x" * MIB] * 30, b"end"] for i in range(2)]
    rows = Outbox([FramesColumn(lists(messages))], 2)
    for delay in (0.002, 0.006):
        sender, receiver = pair(context, *kinds)
        leaving = threading.Timer(delay, receiver.close, [0])
        leaving.start()
        start = rows.give(sender, 0, 2, wait)
        leaving.join()
        _wait_for_the_end_of_the_connection(sender)
        receiver = context.socket(kinds[1])
        receiver.connect(sender.last_endpoint.decode())
        assert rows.give(sender, start, 2, wait=60) == 2
        sender.send(b"behind")
        *received, last = read_all(receiver)
        assert last == [b"behind"]
        assert received == messages[2 - len(received) :]
        assert len(received) >= 2 - start
        for sock in (sender, receiver):
            sock.close(0)
