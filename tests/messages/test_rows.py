"""Building rows: columns in the order of the schema, and nulls for columns that are not given."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmq_datasource.errors import LogFormatError
from zmq_datasource.messages.columns import FRAMES, FRAMING, MESSAGE_SCHEMA, only_rows
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.messages.framing.layout import messages_of
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.messages.rows import message_rows, text_of, times_of
from zmq_datasource.options import PRESETS

TIMES = times_of([(7, 1), (8, 1)])


def test_columns_that_are_not_given_are_null() -> None:
    batch = message_rows(pa.array([b"a", b"b"], pa.binary()), TIMES)
    assert batch.schema.equals(MESSAGE_SCHEMA, check_metadata=True)
    assert [batch.column(name).null_count for name in batch.schema.names] == [2, 0, 2, 2, 0, 2]
    batch.validate(full=True)


def test_columns_are_in_the_order_of_the_schema() -> None:
    batch = message_rows(
        pa.array([b"a", b"b"], pa.binary()),
        TIMES,
        frames=pa.array([None, [b"x", b"y"]], FRAMES),
        sequence=pa.array([1, 2], pa.int64()),
        topic=pa.array(["t", None], pa.string()),
        publisher=pa.array(["p", "q"], pa.string()),
    )
    second = batch.to_pylist()[1]
    assert (second["publisher"], second["sequence"], second["frames"]) == ("q", 2, [b"x", b"y"])
    assert batch.column("topic").to_pylist() == ["t", None]


def test_a_batch_can_have_no_rows() -> None:
    assert message_rows(pa.array([], pa.binary()), times_of([])).schema == MESSAGE_SCHEMA


def test_only_rows_that_need_them_keep_frames() -> None:
    raw = raw_of([b"0", b"1", [b"2", b"3"]]).lists()
    assert only_rows(raw, {1, 2}).to_pylist() == [None, [b"1"], [b"2", b"3"]]
    assert only_rows(raw, pa.array([True, False, False])).to_pylist() == [[b"0"], None, None]


def test_topics_that_are_not_utf8_are_listed_for_any_column() -> None:
    topics = [b"a", None, b"\xff", "\ufffd".encode()]
    for column in (pa.array(topics, pa.binary()), pa.array([b"z", *topics], pa.binary())[1:]):
        text, bad = text_of(column)
        assert text.to_pylist() == ["a", None, "hex:ff", "\ufffd"]
        assert bad == {2}


@given(
    st.lists(
        st.binary(max_size=5) | st.text(max_size=3).map(lambda text: b"hex:" + text.encode()), max_size=6
    )
)
def test_different_names_are_different_texts_that_give_them_back(names: list[bytes]) -> None:
    texts, in_hex = text_of(pa.array(names, pa.binary()))
    found = texts.to_pylist()
    assert [
        bytes.fromhex(text[4:]) if row in in_hex else text.encode() for row, text in enumerate(found)
    ] == names
    assert all(text.startswith("hex:") == (row in in_hex) for row, text in enumerate(found))


def test_long_names_that_are_not_utf8_stay_distinct() -> None:
    names = [b"\xff" * 5000 + last for last in (b"a", b"b")]
    texts = text_of(pa.array(names, pa.binary()))[0].to_pylist()
    assert len(set(texts)) == 2
    assert all(len(text) < 2100 for text in texts)


def test_a_message_without_a_topic_has_no_frame_for_it() -> None:
    layout = PRESETS["vllm"].layout
    assert layout is not None
    topics, values = pa.array([b"t", None], pa.binary()), pa.array([b"a", b"b"], pa.binary())
    messages = messages_of(layout, topics, topics, pa.array([1, 2], pa.int64()), values)
    assert messages.lists().to_pylist() == [
        [b"t", (1).to_bytes(8, "big"), b"a"],
        [(2).to_bytes(8, "big"), b"b"],
    ]


def test_frames_of_a_framing_of_another_release_are_not_restored_as_plain() -> None:
    batch = message_rows(pa.array([b"a", b"b"], pa.binary()), TIMES).replace_schema_metadata(
        {FRAMING: b"later"}
    )
    with pytest.raises(LogFormatError, match="framing=later, which this release does not know"):
        raw_messages(batch)
