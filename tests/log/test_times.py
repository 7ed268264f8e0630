"""When messages were received: found without reading them, and never wrong."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import batch_of
from zmq_datasource.errors import DamagedChunkError, DataLossError
from zmq_datasource.log.chunk import write_batches
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.reader import first_since, read_index
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.times import TIMES, read_times
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.messages.rows import number_rows


def written(location: Path, *chunks: list[int], grow: bool = False) -> LogStorage:
    """A log with a message for each time; a chunk a list, a batch a message."""
    storage = LogStorage(str(location))
    log = LogWriter(storage, chunk_bytes=1 << 20, max_bytes=1 << 30)
    log.open()
    for times in chunks:
        for time in times:
            log.append(batch_of([b"v"], time))
            if grow:
                log.flush().result(10)
        log.cut().result(10)
    log.close()
    return storage


def since(storage: LogStorage, time: int) -> int | None:
    index = read_index(storage)
    return first_since(storage, index.covering(index.earliest, index.end), time)


@pytest.mark.parametrize("grow", [False, True])
def test_a_chunk_knows_its_times(tmp_path: Path, grow: bool) -> None:
    """Also one that grows group by group, as a proxy's; the clock may be set back within it."""
    storage = written(tmp_path, [5, 9, 3], [4], grow=grow)
    assert [tuple(read_times(storage, chunk.name)) for chunk in sorted(storage.chunks())] == [(3, 9), (4, 4)]


def test_times_that_were_changed_hide_nothing(tmp_path: Path) -> None:
    storage = written(tmp_path, [1_000_005])
    path = Path(storage.path_of(chunk_name(0, 1)))
    content = path.read_bytes()
    assert content.count(b"1000005,1000005") >= 1
    path.write_bytes(content.replace(b"1000005,1000005", b"1000005,1000001"))
    with pytest.raises(DamagedChunkError, match="checksum differs"):
        read_times(storage, chunk_name(0, 1))
    path.write_bytes(b"no chunk")
    with pytest.raises(DamagedChunkError):
        read_times(storage, chunk_name(0, 1))
    path.unlink()
    with pytest.raises(DataLossError, match="removed"):
        read_times(storage, chunk_name(0, 1))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=5), min_size=1, max_size=6),
    st.integers(-1, 22),
)
def test_the_first_message_since_a_time_is_found_whatever_the_clock_did(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[list[int]], time: int
) -> None:
    storage = LogStorage(str(tmp_path_factory.mktemp("log")))
    storage.open_log()
    storage.lock(0).release()
    first = 0
    for times in chunks:
        batches = [number_rows(batch_of([b"v"], at), 0, first + n) for n, at in enumerate(times)]
        end = first + len(times)
        storage.write_chunk(
            chunk_name(first, end), lambda file, b=batches: write_batches(file, b), sync=False
        )
        first = end
    every = [at for times in chunks for at in times]
    assert since(storage, time) == next((n for n, at in enumerate(every) if at >= time), None)


def test_metadata_of_times_is_where_others_find_it(tmp_path: Path) -> None:
    storage = written(tmp_path, [7])
    with pa.ipc.open_file(storage.path_of(chunk_name(0, 1))) as reader:
        assert reader.schema.metadata[TIMES].startswith(b"7,7,")
