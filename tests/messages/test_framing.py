"""Plain framing: every message becomes a row, and its frames can be restored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmq_datasource.messages.framing import decode_plain, to_rows
from zmq_datasource.messages.raw import RawMessage, raw_of
from zmq_datasource.messages.rows import number_rows


def rows(messages: list[RawMessage], include_frames: bool = True) -> list[dict[str, object]]:
    batch = decode_plain(raw_of(messages), [(0, len(messages))])
    batch.validate(full=True)
    return to_rows(number_rows(batch, 100), include_frames).to_pylist()


@pytest.mark.parametrize(
    ("message", "topic", "value"),
    [
        (b"v", None, b"v"),
        (b"", None, b""),
        ([b"t", b"v"], "t", b"v"),
        ([b"", b""], "", b""),
        ([b"t", b"x", b"v"], "t", b"v"),
        ([b"\xff", b"v"], "hex:ff", b"v"),
        ([b"t", b"\x00\xff"], "t", b"\x00\xff"),
    ],
)
def test_the_first_frame_is_the_topic_and_the_last_the_value(
    message: RawMessage, topic: str | None, value: bytes
) -> None:
    (row,) = rows([message])
    assert (row["topic"], row["value"]) == (topic, value)
    assert row["frames"] == (message if isinstance(message, list) else [message])


def test_ordinary_messages_are_stored_once() -> None:
    batch = decode_plain(raw_of([b"v", [b"t", b"v"], [b"a", b"b", b"c"], [b"\xff", b"v"]]), [(0, 4)])
    assert batch.column("frames").to_pylist() == [None, None, [b"a", b"b", b"c"], [b"\xff", b"v"]]


def test_a_topic_with_the_replacement_character_is_utf8() -> None:
    batch = decode_plain(raw_of([["\ufffd".encode(), b"v"], [b"\xff", b"v"]]), [(0, 2)])
    assert batch.column("frames").to_pylist() == [None, [b"\xff", b"v"]]


messages = st.lists(st.one_of(st.binary(), st.lists(st.binary(), min_size=2, max_size=5)), min_size=1)


@given(messages)
def test_frames_come_back_exactly_whatever_they_are(sent: list[RawMessage]) -> None:
    got = rows(sent)
    assert [row["frames"] for row in got] == [m if isinstance(m, list) else [m] for m in sent]
    assert [row["value"] for row in got] == [m[-1] if isinstance(m, list) else m for m in sent]
    assert [row["id"] for row in got] == list(range(100, 100 + len(sent)))
