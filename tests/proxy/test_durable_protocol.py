"""durable_protocol: the wire of durable subscribers, byte by byte."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmq_datasource import ProtocolError
from zmq_datasource.proxy.durable_protocol import (
    Ack,
    Acked,
    Close,
    Credit,
    Forget,
    Forgotten,
    FromClient,
    FromProxy,
    Heartbeat,
    Lost,
    Message,
    Ready,
    Refused,
    Subscribe,
    read_from_client,
    read_from_proxy,
    write,
)

ZERO = bytes(8)
LARGEST, TOO_LARGE = b"\x7f" + b"\xff" * 7, b"\x80" + bytes(7)
SEVEN = b"\0\0\0\0\0\0\0\7"
NINE = b"\0\0\0\0\0\0\0\x09"

# What docs/proxy.md says, as bytes: who has written a client from it must not be left behind.
GOLDEN: list[tuple[FromClient | FromProxy, list[bytes]]] = [
    (
        Subscribe("me", 9, b"latest", None, 7, (b"a", b"b")),
        [b"SUBSCRIBE", b"1", b"me", NINE, b"latest", b"", SEVEN, b"a", b"b"],
    ),
    (Subscribe("me", 0, SEVEN, 9, 7, ()), [b"SUBSCRIBE", b"1", b"me", ZERO, SEVEN, NINE, SEVEN]),
    (Ack(7), [b"ACK", SEVEN]),
    (Credit(7), [b"CREDIT", SEVEN]),
    (Close(), [b"CLOSE"]),
    (Forget(), [b"FORGET"]),
    (Ready(0, 7, 9, True), [b"READY", ZERO, SEVEN, NINE, b"new"]),
    (Ready(0, 7, 9, False), [b"READY", ZERO, SEVEN, NINE, b"known"]),
    (Message(7, (b"t", b"v")), [b"MESSAGE", SEVEN, b"t", b"v"]),
    (Acked(7), [b"ACKED", SEVEN]),
    (Heartbeat(9), [b"HEARTBEAT", NINE]),
    (Lost(7, 9), [b"LOST", SEVEN, NINE]),
    (Forgotten(), [b"FORGOTTEN"]),
    (Refused("taken", "why"), [b"REFUSED", b"taken", b"why"]),
]


@pytest.mark.parametrize(("message", "frames"), GOLDEN)
def test_each_message_is_written_and_read_as_specified(
    message: FromClient | FromProxy, frames: list[bytes]
) -> None:
    assert write(message) == frames
    read = read_from_client if isinstance(message, FromClient) else read_from_proxy
    assert read(frames) == message


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ([], "without frames"),
        (
            [b"SUBSCRIBE", b"\x1b[31m" * 20_000],
            r"^version '\\x1b.{27}…' of the protocol; this proxy speaks '1'$",
        ),
        ([b"HELLO"], "SUBSCRIBE, ACK, CREDIT"),
        ([b"READY", ZERO, SEVEN, NINE, b"new"], "begins with b'READY'"),  # not for a proxy
        ([b"SUBSCRIBE"], r"version '' of"),
        ([b"SUBSCRIBE", b"1"], "with 2 frames"),
        ([b"SUBSCRIBE", b"2", b"me", ZERO, b"latest", b"", SEVEN], r"version '2' of"),
        ([b"SUBSCRIBE", b"1", b"me"], "3 frames"),
        ([b"SUBSCRIBE", b"1", b"", ZERO, b"latest", b"", SEVEN], "a name has"),
        ([b"SUBSCRIBE", b"1", b"x" * 201, ZERO, b"latest", b"", SEVEN], "a name has"),
        ([b"SUBSCRIBE", b"1", b"a\nb", ZERO, b"latest", b"", SEVEN], "a name has"),
        ([b"SUBSCRIBE", b"1", b"\xff", ZERO, b"latest", b"", SEVEN], "not UTF-8"),
        ([b"SUBSCRIBE", b"1", b"me", ZERO, b"now", b"", SEVEN], "start"),
        ([b"SUBSCRIBE", b"1", b"me", b"7", b"latest", b"", SEVEN], "^session has 1 bytes"),
        ([b"SUBSCRIBE", b"1", b"me", ZERO, b"latest", b"1", SEVEN], "^resume has 1 bytes"),
        ([b"SUBSCRIBE", b"1", b"me", ZERO, b"latest", b"", TOO_LARGE], "^credit has 8 bytes or is too large"),
        ([b"SUBSCRIBE", b"1", b"me", ZERO, b"latest", b"", SEVEN, *[b"t"] * 1001], "1001 topics"),
        ([b"SUBSCRIBE", b"1", b"me", ZERO, b"latest", b"", SEVEN, b"t" * 32_769], "1 topics of 32769 bytes"),
        ([b"ACK"], "0 frames; it has 1"),
        ([b"ACK", b"7"], "^id has 1 bytes"),
        ([b"CLOSE", SEVEN], "it has 0"),
    ],
)
def test_what_no_client_sends_is_named(frames: list[bytes], problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        read_from_client(frames)


@pytest.mark.parametrize(
    "message",
    [
        Subscribe("x", 0, b"latest", None, 7, ()),
        Subscribe("x" * 200, 0, b"latest", None, 7, ()),
        Subscribe("me", 0, b"latest", None, 7, (b"t",) * 1000),
        Subscribe("me", 0, b"latest", None, 7, (b"t" * 32_768,)),
    ],
    ids=["shortest name", "longest name", "most topics", "longest topics"],
)
def test_what_is_just_allowed_is_read(message: Subscribe) -> None:
    assert read_from_client(write(message)) == message


def test_an_id_has_63_bits() -> None:
    assert read_from_client([b"ACK", LARGEST]) == Ack((1 << 63) - 1)


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ([b"HELLO", b"x"], "begins with b'HELLO' and has 2 frames"),
        ([b"MESSAGE", b"7", b"v"], "^id has 1 bytes"),
        ([b"READY", b"7", SEVEN, NINE, b"new"], "^session has 1 bytes"),
        ([b"READY", ZERO, b"7", NINE, b"new"], "^next has 1 bytes"),
        ([b"READY", ZERO, SEVEN, TOO_LARGE, b"new"], "^end has 8 bytes or is too large"),
        ([b"LOST", SEVEN], "LOST with 1 frames; it has 2"),
    ],
)
def test_what_no_proxy_sends_is_named(frames: list[bytes], problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        read_from_proxy(frames)


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_no_bytes_end_either_side(frames: list[bytes]) -> None:
    words = [b"SUBSCRIBE", b"ACK", b"MESSAGE", b"READY", b"LOST", b"REFUSED", b"FORGET"]
    for given_frames in [frames, *([word, *frames] for word in words)]:
        for read in (read_from_client, read_from_proxy):
            if not given_frames and read is read_from_proxy:
                continue
            with suppress(ProtocolError):
                read(given_frames)
