"""When messages were received: found without reading them, and never wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import batch_of
from zmq_datasource.errors import DamagedChunkError, DataLossError
from zmq_datasource.log.chunk import encode_chunk, read_facts, times_of, write_chunk
from zmq_datasource.log.facts import ChunkFacts, Incarnations, PastTimes
from zmq_datasource.log.layout import Chunk, chunk_name
from zmq_datasource.log.reader import first_chunk_since, first_since, read_index
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter


def written(location: Path, *chunks: list[int]) -> LogStorage:
    """A log with a message for each time; a chunk a list, a batch a message."""
    storage = LogStorage(str(location))
    log = LogWriter(storage, chunk_bytes=1 << 20, max_bytes=1 << 30)
    log.open()
    for times in chunks:
        for time in times:
            log.append(batch_of([b"v"], time))
        log.cut().result(10)
    log.close()
    return storage


def facts(first: int, times: list[int], past: PastTimes) -> ChunkFacts:
    rows = [batch_of([b"v"], at) for at in times]
    return ChunkFacts(first, first + len(times), times_of(rows), past, Incarnations(((0, "w"),)))


def since(storage: LogStorage, time: int) -> int | None:
    index = read_index(storage)
    return first_since(storage, index.covering(index.earliest, index.end), time)


def test_a_chunk_knows_its_times(tmp_path: Path) -> None:
    """The clock may be set back within it."""
    storage = written(tmp_path, [5, 9, 3], [4])
    assert [tuple(read_facts(storage, chunk.first).times) for chunk in storage.chunks()] == [(3, 9), (4, 4)]


def test_times_that_were_changed_hide_nothing(tmp_path: Path) -> None:
    storage = written(tmp_path, [1_000_005], [1_000_006])
    chunks = read_index(storage).covering(0, 2)
    path = Path(storage.path_of(chunk_name(0)))
    content = path.read_bytes()
    assert content.count(b"[1000005,1000005]") >= 1
    path.write_bytes(content.replace(b"[1000005,1000005]", b"[1000005,1000001]"))
    with pytest.raises(DamagedChunkError, match="were changed after it was written"):
        first_chunk_since(storage, chunks, 1_000_005)
    path.write_bytes(b"no chunk")
    with pytest.raises(DamagedChunkError):
        first_chunk_since(storage, chunks, 1_000_005)
    path.unlink()
    with pytest.raises(DataLossError, match="deleted"):
        first_chunk_since(storage, chunks, 1_000_005)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=5), min_size=1, max_size=6),
    st.integers(-1, 22),
)
def test_the_first_message_since_a_time_is_found_after_any_change_of_the_clock(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[list[int]], time: int
) -> None:
    storage = LogStorage(str(tmp_path_factory.mktemp("log")))
    storage.open_log()
    first, past = 0, PastTimes()
    for times in chunks:
        about = facts(first, times, past)
        first = write_chunk(storage, [batch_of([b"v"], at) for at in times], about, {}).end
        past = past.and_then(about.times.latest)
    every = [at for times in chunks for at in times]
    assert since(storage, time) == next((n for n, at in enumerate(every) if at >= time), None)


class CountingOpens(LogStorage):
    """Counts how often a chunk is opened."""

    opens = 0

    def open_sealed(self, *args: Any, **options: Any) -> pa.NativeFile:
        self.opens += 1
        return super().open_sealed(*args, **options)


class ChunksInMemory(CountingOpens):
    """Chunks with one message each.

    Args:
        times: Of each chunk: when its message was received, and whether its writer counted on from the chunk before.
    """

    def __init__(self, times: list[tuple[int, bool]]) -> None:
        super().__init__("/memory")
        self.content: dict[str, pa.Buffer] = {}
        past = PastTimes()
        for first, (time, counts_on) in enumerate(times):
            past = past if counts_on else PastTimes()
            content = encode_chunk([batch_of([b"v"], time)], facts(first, [time], past).to_metadata())
            self.content[chunk_name(first)] = pa.py_buffer(b"".join(content))
            past = past.and_then(time)

    def open_sealed(self, name: str, whole: bool = True) -> pa.NativeFile:
        self.opens += 1
        return pa.BufferReader(self.content[name])


def most_opens(chunks: int) -> int:
    """For each doubling of the number of chunks two up and two down, and the first and the last one."""
    return 4 * chunks.bit_length() + 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from([True] * 8 + [False])), min_size=1, max_size=40),
    st.integers(0, 39),
    st.integers(-1, 22),
)
def test_the_chunk_of_a_time_is_found_after_any_deletion_and_new_count(
    times: list[tuple[int, bool]], deleted: int, time: int
) -> None:
    storage = ChunksInMemory(times)
    kept = [at for at, _ in times][deleted:]
    chunks = [Chunk(first, first + 1, 1, 0.0) for first in range(deleted, len(times))]
    found = first_chunk_since(storage, chunks, time)
    assert found == next((n for n, at in enumerate(kept) if at >= time), len(kept))
    if all(counts_on for _, counts_on in times):
        assert storage.opens <= most_opens(len(kept))


def test_a_time_is_found_in_a_long_log_by_opening_few_chunks(tmp_path: Path) -> None:
    """Across restarts of the writer, after the deletion of a chunk from the future, and with the clock set back."""
    early = [1000 if n == 5 else 10 * n for n in range(70)]
    late = [10 * n - (300 if 100 <= n < 110 else 0) for n in range(70, 150)]
    written(tmp_path, *([time] for time in early))
    written(tmp_path, *([time] for time in late))
    storage = CountingOpens(str(tmp_path))
    for first in range(12):
        Path(storage.path_of(chunk_name(first))).unlink()
    kept = [*early, *late][12:]
    for time in range(0, 1500, 37):
        storage.opens = 0
        assert since(storage, time) == next((12 + n for n, at in enumerate(kept) if at >= time), None)
        assert storage.opens <= most_opens(len(kept)) + 1  # and once for the rows
