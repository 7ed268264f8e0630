"""Rows become messages as they are, from any layout of Arrow columns, with both cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import zmq

from tests.support import Socket, binary, bound, take, write_options
from zmq_datasource.sink.sender import Sender

Context = zmq.Context[Socket]


@contextmanager
def sending(context: Context, **options: str) -> Iterator[tuple[Sender, Socket]]:
    pull, endpoint = bound(context, zmq.PULL)
    with Sender(write_options(connect=endpoint, **options), publisher="p") as sender:
        yield sender, pull


def numbered(first: int, *messages: tuple[bytes, bytes]) -> list[list[bytes]]:
    return [
        [topic, b"p", (first + at).to_bytes(8, "big"), value] for at, (topic, value) in enumerate(messages)
    ]


def test_a_null_topic_is_no_frame_and_an_empty_topic_is_an_empty_frame(context: Context) -> None:
    with sending(context) as (sender, pull):
        sender.send(binary([b"", b"", b"v", b""]), binary([None, b"", b"t", b"t"]))
        counters = sender.finish()
    assert take(pull, 4) == [[b""], [b"", b""], [b"t", b"v"], [b"t", b""]]
    assert (counters.sent, counters.bytes) == (4, 3)


def test_bytes_behind_a_null_are_neither_sent_nor_counted(context: Context) -> None:
    """Arrow allows them."""
    offsets, valid = pa.py_buffer(b"\0\0\0\0\4\0\0\0\6\0\0\0"), pa.py_buffer(b"\2")
    topics = pa.Array.from_buffers(pa.binary(), 2, [valid, offsets, pa.py_buffer(b"nulltt")])
    with sending(context) as (sender, pull):
        sender.send(binary([b"a", b"b"]), topics)
        counters = sender.finish()
    assert take(pull, 2) == [[b"a"], [b"tt", b"b"]]
    assert counters.bytes == 4


def test_sequences_continue_and_a_null_topic_is_an_empty_frame(context: Context) -> None:
    with sending(context, framing="sequenced") as (sender, pull):
        sender.send(binary([b"a", b"b", b""]), binary([b"t", None, b""]))
        sender.send(binary([b"skipped", b"c"]).slice(1))
        counters = sender.finish()
    sent = numbered(0, (b"t", b"a"), (b"", b"b"), (b"", b""), (b"", b"c"))
    assert take(pull, 5) == [*sent, [b"", b"p", (4).to_bytes(8, "big")]]
    assert (counters.rows, counters.bytes) == (4, sum(len(frame) for message in sent for frame in message))


def test_a_row_that_is_dropped_leaves_its_number_out(context: Context) -> None:
    with sending(context, framing="sequenced") as (sender, pull):
        sender.send(binary([None, b"a", None, None, b"b"]), binary([b"t"] * 5))
        sender.send(binary([]))
        sender.send(binary([None]), binary([None]))
        counters = sender.finish()
    sent = [*numbered(1, (b"t", b"a")), *numbered(4, (b"t", b"b"))]
    assert take(pull, 3) == [*sent, [b"", b"p", (6).to_bytes(8, "big")]]
    assert (counters.rows, counters.sent, dict(counters.dropped)) == (6, 2, {"null": 4})
    assert counters.bytes == sum(len(frame) for message in sent for frame in message)
