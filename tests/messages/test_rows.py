"""Building rows: columns in the order of the schema, and nulls for columns that are not given."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmq_datasource.errors import LogFormatError
from zmq_datasource.messages.columns import FRAMING
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.messages.framing.layout import messages_of
from zmq_datasource.messages.rows import message_rows, text_of, times_of
from zmq_datasource.options import PRESETS

TIMES = times_of([(7, 1), (8, 1)])


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
