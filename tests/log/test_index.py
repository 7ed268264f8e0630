"""The list of chunks, and how a range of ids is found in it and shared out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmq_datasource.errors import DataLossError
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.reader import split_range


def index_of(*counts: int, first: int = 0, size: int = 100) -> ChunkIndex:
    chunks = []
    for count in counts:
        chunks.append(Chunk(first, first + count, size, float(first)))
        first += count
    return ChunkIndex(chunks)


def test_ranges_are_half_open() -> None:
    index = index_of(10, 10, 10)
    names = lambda start, end: [(c.first, c.end) for c in index.covering(start, end)]  # noqa: E731
    assert names(0, 10) == [(0, 10)]
    assert names(9, 11) == [(0, 10), (10, 20)]
    assert names(10, 11) == [(10, 20)]
    assert names(10, 10) == []
    assert names(29, 30) == [(20, 30)]
    assert names(30, 40) == []


def test_the_newest_chunk_is_never_deleted() -> None:
    index = index_of(10, 10, 10)
    assert [chunk.first for chunk in index.delete_below(19)] == [0]
    assert (index.earliest, index.covering(0, 15), index.size) == (10, index.all[:1], 200)
    assert index.delete_below(5) == ()
    assert [chunk.first for chunk in index.delete_below(99)] == [10]
    assert (index.earliest, index.durable_end, index.chunks, index.size) == (20, 30, 1, 100)


counts = st.lists(st.integers(1, 50), min_size=1, max_size=20)


@given(counts, st.data(), st.integers(1, 40), st.integers(1, 3000))
def test_shares_cover_the_range_once_and_in_order(
    counts: list[int], data: st.DataObject, least: int, max_bytes: int
) -> None:
    index = index_of(*counts)
    start = data.draw(st.integers(0, index.durable_end - 1))
    end = data.draw(st.integers(start + 1, index.durable_end))
    shares = split_range(index.covering(start, end), start, end, least, max_bytes)
    ids = [i for share in shares for piece in share for i in range(piece.first, piece.end)]
    assert ids == list(range(start, end))
    assert all(share for share in shares)
    assert len(shares) >= min(least, end - start)


def test_a_batch_is_split_by_size() -> None:
    index = index_of(100, 100, 100, 100, size=1000)
    shares = split_range(index.covering(0, 400), 0, 400, 1, 1000)
    assert [(s[0].first, s[-1].end) for s in shares] == [(0, 100), (100, 200), (200, 300), (300, 400)]


def test_nothing_is_shared_out_of_an_empty_range() -> None:
    assert split_range([], 5, 5, 4, 100) == []


@pytest.mark.parametrize(
    ("there", "told"),
    [
        (range(0), "the log has none of them"),
        (range(200, 400), "the log has only the ids 200 to 349"),
        (range(300), "the log has only the ids 50 to 299"),
    ],
)
def test_a_range_with_deleted_chunks_is_an_error(there: range, told: str) -> None:
    chunks = [Chunk(first, first + 100, 1000, 0.0) for first in there[::100]]
    with pytest.raises(DataLossError, match=f"^planning a batch of the ids 50 to 349: {told}"):
        split_range(chunks, 50, 350, 1, 1000)


@given(counts, st.data())
def test_the_size_of_a_range_is_that_of_its_chunks_and_of_parts_of_them(
    counts: list[int], data: st.DataObject
) -> None:
    index = index_of(*counts, size=1000)
    index.delete_below(data.draw(st.integers(0, index.durable_end)))
    start = data.draw(st.integers(0, index.durable_end))
    end = data.draw(st.integers(0, index.durable_end + 5))
    parts = [
        chunk.size * (min(end, chunk.end) - max(start, chunk.first)) / (chunk.end - chunk.first)
        for chunk in index.covering(start, end)
    ]
    assert index.size_of(start, end) == pytest.approx(sum(parts), abs=2)
    assert index.size_of(0, index.durable_end) == 1000 * len(index.all)


@given(counts, st.data())
def test_the_end_within_some_bytes_is_the_largest(counts: list[int], data: st.DataObject) -> None:
    index = index_of(*counts, size=1000)
    start = data.draw(st.integers(0, index.durable_end - 1))
    end = data.draw(st.integers(start + 1, index.durable_end))
    most = data.draw(st.integers(1, 1000 * len(counts)))
    found = index.end_within_bytes(start, end, most)
    assert start <= found <= end
    assert index.size_of(start, found) <= most
    assert found == end or index.size_of(start, found + 1) >= most
