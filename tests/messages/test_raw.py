"""Raw messages, compared with lists of frames in Python."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmq_datasource.messages.columns import FRAMES
from zmq_datasource.messages.raw import RawMessages, raw_of

frames = st.binary(max_size=3)


@st.composite
def lists_of_frames(draw: st.DrawFn) -> list[list[bytes]]:
    """Messages with the same number of frames, or with different numbers."""
    if draw(st.booleans()):
        count = draw(st.integers(1, 5))
        return draw(st.lists(st.lists(frames, min_size=count, max_size=count), min_size=1, max_size=6))
    return draw(st.lists(st.lists(frames, min_size=1, max_size=5), min_size=1, max_size=6))


def both(lists: list[list[bytes]]) -> list[RawMessages]:
    """Raw messages made from lists of Python, from those of Arrow, and from a slice of these."""
    longer = pa.array([[b"before"], *lists, [b"be", b"hind"]], FRAMES)
    return [
        raw_of(list(lists)),
        RawMessages.of_lists(pa.array(lists, FRAMES)),
        RawMessages.of_lists(longer.slice(1, len(lists))),
    ]


@given(lists_of_frames(), st.data())
def test_raw_messages_agree_with_lists_of_frames(lists: list[list[bytes]], chosen: st.DataObject) -> None:
    rows = chosen.draw(st.lists(st.integers(0, len(lists) - 1), max_size=5))
    mask = chosen.draw(st.lists(st.booleans(), min_size=len(lists), max_size=len(lists)))
    for raw in both(lists):
        assert len(raw) == len(lists)
        assert raw.lists().to_pylist() == lists
        assert raw.counts().to_pylist() == [len(message) for message in lists]
        assert raw.counts().type == pa.int32()
        assert [raw.message(row) for row in range(len(raw))] == lists
        for place in range(-min(map(len, lists)), min(map(len, lists))):
            found = raw.frame(place)
            assert found.to_pylist() == [message[place] for message in lists]
            assert found.type == pa.binary()
        assert raw.take(pa.array(rows, pa.int64())).lists().to_pylist() == [lists[row] for row in rows]
        kept = [message for message, keep in zip(lists, mask, strict=True) if keep]
        left = raw.filter(pa.array(mask, pa.bool_()))
        assert left.lists().to_pylist() == kept
        for place in range(-min(map(len, lists)), min(map(len, lists))):
            assert left.frame(place).to_pylist() == [message[place] for message in kept]
        assert raw.only(pa.array(mask, pa.bool_())).to_pylist() == [
            message if keep else None for message, keep in zip(lists, mask, strict=True)
        ]
        raw.lists().validate(full=True)


@pytest.mark.parametrize(
    ("lists", "kept"),
    [([[b"a"], [b"b"]], False), ([[b"a", b"b"], [b"c"]], False), ([[b"a", b"b", b"c"], [b"d"]], True)],
)
def test_the_middle_column_exists_only_if_a_message_needs_it(lists: list[list[bytes]], kept: bool) -> None:
    for raw in both(lists):
        assert (raw.middle is not None) == kept


letters = st.binary(max_size=6).map(lambda content: bytes(b"ab: "[byte % 4] for byte in content))


@given(
    st.lists(st.lists(letters, min_size=1, max_size=3), min_size=1, max_size=6),
    st.sampled_from([b" ", b":", b": ", b"aa"]),
)
def test_a_delimiter_splits_messages_of_one_frame_where_it_comes_first(
    lists: list[list[bytes]], delimiter: bytes
) -> None:
    for raw in both(lists):
        split = raw.split_topics(delimiter)
        assert [split.message(row) for row in range(len(split))] == [
            message[0].split(delimiter, 1) if len(message) == 1 else message for message in lists
        ]
