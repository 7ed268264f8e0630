"""One chunk: what was written comes back, and what was changed is never a wrong row."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import DATA, REPOSITORY, batch_of, facts_of, flips, log_rows
from zmq_datasource.errors import (
    DamagedChunkError,
    DataLossError,
    DiskFaultError,
    LogFormatError,
)
from zmq_datasource.log.chunk import (
    CHECKSUM,
    encode_chunk,
    fingerprint,
    read_chunk,
    read_facts,
    write_chunk,
)
from zmq_datasource.log.facts import ChunkFacts, pack
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.state import read_saved_state
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.columns import FRAMING, LOG_SCHEMA, MESSAGE_SCHEMA
from zmq_datasource.messages.framing import decode_plain
from zmq_datasource.messages.raw import raw_of

GOLDEN = DATA / "log-format-3"


@pytest.fixture
def storage(tmp_path: Path) -> LogStorage:
    made = LogStorage(str(tmp_path / "log"))
    made.open_log()
    return made


def put(storage: LogStorage, batches: list[pa.RecordBatch], first: int = 0) -> str:
    return write_chunk(storage, batches, facts_of(batches, first)).name


def write(storage: LogStorage, *sizes: int) -> str:
    batches, first = [], 0
    for size in sizes:
        messages = [[b"topic", b"value %d" % i] for i in range(first, first + size)]
        batches.append(decode_plain(raw_of(messages), [(0, size)]))
        first += size
    return put(storage, batches)


def values(storage: LogStorage, name: str, start: int, end: int) -> list[bytes]:
    return [v for b in read_chunk(storage, name, start, end) for v in b.column("value").to_pylist()]


@pytest.mark.parametrize(("start", "end"), [(0, 30), (0, 1), (29, 30), (9, 11), (10, 20), (12, 12)])
def test_any_range_of_a_chunk_can_be_read(storage: LogStorage, start: int, end: int) -> None:
    name = write(storage, 10, 10, 10)
    assert values(storage, name, start, end) == [b"value %d" % i for i in range(start, end)]


def test_a_chunk_is_an_arrow_file_that_others_can_read(storage: LogStorage) -> None:
    name = write(storage, 3, 4)
    table = pa.ipc.open_file(storage.path_of(name)).read_all()
    assert table.schema.equals(MESSAGE_SCHEMA)
    assert table.column("value").to_pylist() == values(storage, name, 0, 7)


def test_the_documented_lines_add_the_id(storage: LogStorage) -> None:
    _, lines, _ = (REPOSITORY / "docs" / "log-format.md").read_text().split("```", 2)
    for first in (0, 3):
        put(storage, [batch_of([b"v"] * 3)], first)
    found: dict[str, Any] = {}
    exec(lines.removeprefix("python").replace("/data/wal/weather", storage.root), found)
    messages = found["messages"].select(["id", "value"])
    assert messages.to_pydict() == {"id": list(range(6)), "value": [b"v"] * 6}


def test_rows_have_the_ids_that_the_name_says_and_the_framing(storage: LogStorage) -> None:
    batch = decode_plain(raw_of([[b"topic", b"value %d" % i] for i in range(4)]), [(0, 4)])
    framed = batch.replace_schema_metadata({FRAMING: b"sequenced"})
    name = put(storage, [framed] * 2, 7)
    rows = list(read_chunk(storage, name, 9, 13))
    assert [row.column("id").to_pylist() for row in rows] == [[9, 10], [11, 12]]
    assert all(row.schema.equals(LOG_SCHEMA) for row in rows)
    assert all(row.schema.metadata == {FRAMING: b"sequenced"} for row in rows)


def test_no_flipped_bit_gives_a_wrong_row(storage: LogStorage) -> None:
    name = write(storage, 5, 5)
    path = Path(storage.path_of(name))
    whole = path.read_bytes()
    right = [b"value %d" % i for i in range(10)]
    noticed = 0
    for position in flips(path, range(len(whole)), 0x10):
        try:
            # A bit in padding changes no row; every other one must be an error of ours.
            assert values(storage, name, 0, 10) == right, position
        except DamagedChunkError as e:
            assert name in str(e)
            noticed += 1
    assert noticed > len(whole) / 4
    assert path.read_bytes() == whole


def test_a_chunk_with_fewer_rows_than_it_says_is_damaged(storage: LogStorage) -> None:
    rows = batch_of([b"v"] * 5)
    storage.put_chunk(0, encode_chunk([rows], facts_of([rows, rows])))
    with pytest.raises(DamagedChunkError, match="has the ids up to 4, and was written up to id 9"):
        values(storage, chunk_name(0), 0, 10)


def test_a_read_past_the_end_of_a_chunk_says_that_the_next_one_is_missing(storage: LogStorage) -> None:
    """The names show no hole: each chunk seems to reach to the next one."""
    name, found = write(storage, 5), []
    with pytest.raises(DataLossError, match=f"{name}: it holds the ids up to 4, .* from 5 to 9 is missing"):
        for batch in read_chunk(storage, name, 3, 10):
            found += batch.column("id").to_pylist()
    assert found == [3, 4]


@pytest.mark.parametrize("first", [5, 10**19])
def test_a_chunk_that_was_renamed_is_named(storage: LogStorage, first: int) -> None:
    name, renamed = write(storage, 5), chunk_name(first)
    shutil.move(storage.path_of(name), storage.path_of(renamed))
    with pytest.raises(DamagedChunkError, match="written as the ids 0 to 4; the file was renamed") as error:
        values(storage, renamed, first, first + 5)
    assert storage.path_of(renamed) in str(error.value)


def test_a_batch_in_the_place_of_another_one_is_damage(storage: LogStorage) -> None:
    """Batches of one length: a single bit of the footer may have one of them read twice."""
    batches = [batch_of([b"value %d" % i]) for i in range(2)]
    checksums = [{CHECKSUM: fingerprint(batch, before)} for before, batch in enumerate(batches)]
    checksums[0] |= facts_of(batches).to_metadata()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, MESSAGE_SCHEMA) as writer:
        for batch, checksum in reversed(list(zip(batches, checksums, strict=True))):
            writer.write_batch(batch, custom_metadata=checksum)
    storage.put_chunk(0, [sink.getvalue()])
    with pytest.raises(DamagedChunkError, match=r"batch 0 .*its checksum differs"):
        values(storage, chunk_name(0), 0, 2)


def test_a_file_of_another_schema_is_damaged(storage: LogStorage) -> None:
    name = chunk_name(0)
    other = pa.record_batch({"x": [1]})
    with pa.ipc.new_file(storage.path_of(name), other.schema) as writer:
        writer.write_batch(other)
    with pytest.raises(DamagedChunkError, match="schema"):
        values(storage, name, 0, 1)


def test_a_missing_chunk_is_data_loss_and_says_where_to_look(storage: LogStorage) -> None:
    with pytest.raises(DataLossError, match="walLocation"):
        values(storage, chunk_name(0), 0, 5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(st.binary(max_size=50), st.lists(st.binary(max_size=9), min_size=2, max_size=4)), min_size=1
    )
)
def test_a_fingerprint_survives_the_way_through_a_file(messages: list[bytes | list[bytes]]) -> None:
    batch = decode_plain(raw_of(messages), [(7, len(messages))])
    content = pa.py_buffer(b"".join(encode_chunk([batch], facts_of([batch]))))
    read, _ = pa.ipc.open_file(content).get_batch_with_custom_metadata(0)
    assert fingerprint(read, 5) == fingerprint(batch, 5) != fingerprint(batch, 6)
    assert read.equals(batch)


def test_the_format_of_a_log_never_changes() -> None:
    """If this fails, raise FORMAT_VERSION, and refuse this log, or keep reading it."""
    assert LogStorage(str(GOLDEN)).log_id() == "0123456789abcdef0123456789abcdef"
    table = log_rows(GOLDEN)
    assert table.column("id").to_pylist() == list(range(6))
    assert table.column("topic").to_pylist() == [None, "topic", "", "\ufffd", "a", None]
    assert table.column("value").to_pylist() == [b"one frame", b"value", b"", b"bad topic", b"c", b"\x00\xff"]
    assert table.column("frames").to_pylist()[2:5] == [None, [b"\xff", b"bad topic"], [b"a", b"b", b"c"]]
    storage, begin = LogStorage(str(GOLDEN)), 1_700_000_000_000_000
    assert read_saved_state(storage) == b"two"
    assert read_facts(storage, chunk_name(4)) == ChunkFacts(4, 6, begin + 2, begin + 2, pack(b"two"))


def test_a_log_of_an_older_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text('{"format": 2, "log": "0123456789abcdef0123456789abcdef"}')
    drain = r"log\.json: .* version 2, .* to its end with the release that wrote it; .* walLocation .* new checkpoint"
    for use in (LogStorage.log_id, LogStorage.open_log):
        with pytest.raises(LogFormatError, match=drain):
            use(LogStorage(str(tmp_path)))


_CUT_WHILE_READ = """
import os, sys
from zmq_datasource.errors import LogError
from zmq_datasource.log.chunk import read_chunk
from zmq_datasource.log.state import read_saved_state
from zmq_datasource.log.storage import LogStorage

storage, name = LogStorage(sys.argv[1]), sys.argv[2]
batches = read_chunk(storage, name, 0, 3)
print(next(batches).num_rows)
os.truncate(storage.path_of(name), 1000)
try:
    print(next(batches).num_rows)
except LogError as e:
    print(f"{type(e).__name__}: {e}")
"""


def test_a_chunk_that_is_cut_while_it_is_read_is_an_error_and_no_signal(storage: LogStorage) -> None:
    """An I/O error under a mapped file ends the process by SIGBUS; so does a mapped file that is cut."""
    name = put(storage, [batch_of([b"x" * (1 << 20)])] * 3)

    reader = subprocess.run(
        [sys.executable, "-c", _CUT_WHILE_READ, storage.root, name],
        capture_output=True,
        text=True,
        check=False,
    )

    assert reader.returncode == 0, reader.stderr
    first, then = reader.stdout.splitlines()[:2]
    assert first == "1"
    assert then.startswith("DamagedChunkError")
    assert storage.path_of(name) in then
    assert "from id 1" in then


class _Failing(io.FileIO):
    """A file on a disk that has I/O errors for a while."""

    errors = 0

    def read(self, size: int = -1) -> bytes:
        if self.errors:
            self.errors -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(size)


class _FailingDisk(LogStorage):
    """Opens one file; its reads fail once for each of its ``errors``."""

    file: _Failing | None = None

    def open_sealed(self, name: str, modified: float | None = None) -> pa.NativeFile:
        self.file = _Failing(self.path_of(name))
        return pa.PythonFile(self.file, mode="r")


def test_an_io_error_while_rows_are_read_is_waited_out_and_no_damage(storage: LogStorage) -> None:
    name = put(storage, [batch_of([b"x"])] * 2)
    disk = _FailingDisk(storage.root)
    batches = read_chunk(disk, name, 0, 2)
    next(batches)
    assert disk.file is not None
    disk.file.errors = 2

    with pytest.raises(DiskFaultError, match="reading batch 1"):
        next(batches)

    disk.retry_seconds = 30.0
    batches = read_chunk(disk, name, 0, 2)
    next(batches)
    disk.file.errors = 2
    assert next(batches).column("id").to_pylist() == [1]


def test_of_rows_that_are_skipped_only_the_lengths_are_read(storage: LogStorage) -> None:
    name = put(storage, [batch_of([b"x" * (1 << 20)])] * 8)
    read: list[int] = []

    class Counting(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            content = super().read(size)
            read.append(len(content))
            return content

    class CountingDisk(LogStorage):
        def open_sealed(self, name: str, modified: float | None = None) -> pa.NativeFile:
            return pa.PythonFile(Counting(self.path_of(name)), mode="r")

    found = [batch.column("id").to_pylist() for batch in read_chunk(CountingDisk(storage.root), name, 7, 8)]

    assert found == [[7]]
    assert sum(read) < 2 << 20
