"""When messages were received: found without reading them, and never wrong."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support import batch_of, facts_of
from zmq_datasource.errors import DamagedChunkError, DataLossError
from zmq_datasource.log.chunk import write_chunk
from zmq_datasource.log.head import HeadWriter
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.reader import first_since, read_index
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


def test_times_that_were_changed_hide_nothing(tmp_path: Path) -> None:
    storage = written(tmp_path, [1_000_005], [1_000_006])
    chunks = read_index(storage).covering(0, 2)
    path = Path(storage.path_of(chunk_name(0)))
    content = path.read_bytes()
    assert content.count(b'"latest":1000005') >= 1
    path.write_bytes(content.replace(b'"latest":1000005', b'"latest":1000001'))
    with pytest.raises(DamagedChunkError, match="were changed after it was written"):
        first_since(storage, chunks, 1_000_005)
    path.write_bytes(b"no chunk")
    with pytest.raises(DamagedChunkError):
        first_since(storage, chunks, 1_000_005)
    path.unlink()
    with pytest.raises(DataLossError, match="it does not exist"):
        first_since(storage, chunks, 1_000_005)
    head = HeadWriter(storage.store)
    head.write(replace(head.take_over(), deleted=1))
    assert first_since(storage, chunks, 1_000_005) == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=3), min_size=1, max_size=12),
    st.integers(0, 11),
    st.integers(-1, 22),
)
def test_the_first_message_since_a_time_is_found_after_any_change_of_the_clock(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[list[int]], deleted: int, time: int
) -> None:
    storage = LogStorage(str(tmp_path_factory.mktemp("log")))
    storage.open_log()
    first = past = 0
    for times in chunks:
        rows = [batch_of([b"v"], at) for at in times]
        past = max(past, *times)
        first = write_chunk(storage, rows, replace(facts_of(rows, first), past=past)).end
    index = read_index(storage)
    kept = index.covering(sum(map(len, chunks[: min(deleted, len(chunks) - 1)])), index.durable_end)
    every = list(enumerate(itertools.chain(*chunks)))[kept[0].first :]
    assert first_since(storage, kept, time) == next((n for n, at in every if at >= time), None)


class CountingOpens(LogStorage):
    """Counts how often a chunk is opened."""

    opens = 0

    def open_sealed(self, *args: Any, **options: Any) -> pa.NativeFile:
        self.opens += 1
        return super().open_sealed(*args, **options)


def test_a_time_is_found_in_a_long_log_by_opening_few_chunks(tmp_path: Path) -> None:
    """Across a restart of the writer, and with the clock set back."""
    times = [10 * n - (300 if 60 <= n < 70 else 0) for n in range(150)]
    written(tmp_path, *([time] for time in times[:65]))
    written(tmp_path, *([time] for time in times[65:]))
    storage = CountingOpens(str(tmp_path))
    index = read_index(storage)
    for time in range(0, 1500, 37):
        storage.opens = 0
        found = first_since(storage, index.all, time)
        assert found == next((n for n, at in enumerate(times) if at >= time), None)
        assert storage.opens <= 10  # 8 for the search, and 2 for the rows
