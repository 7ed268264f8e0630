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

from tests.support import DATA, REPOSITORY, batch_of, flips, log_rows
from zmq_datasource.errors import (
    DamagedChunkError,
    DataLossError,
    DiskFaultError,
    LogFormatError,
    ZmqDataSourceError,
)
from zmq_datasource.log.chunk import CHECKSUM, Place, fingerprint, read_chunk, write_batches, write_chunk
from zmq_datasource.log.growing import GrowingChunk
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.times import TIMES, times_of
from zmq_datasource.messages.framing import decode_plain
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.messages.schemas import FRAMING, LOG_SCHEMA, MESSAGE_SCHEMA

GOLDEN = DATA / "log-format-2"


@pytest.fixture
def storage(tmp_path: Path) -> LogStorage:
    made = LogStorage(str(tmp_path / "log"))
    made.open_log()
    made.lock(0).release()
    return made


def write(storage: LogStorage, *sizes: int) -> str:
    batches, first = [], 0
    for size in sizes:
        messages = [[b"topic", b"value %d" % i] for i in range(first, first + size)]
        batches.append(decode_plain(raw_of(messages), [(0, size)]))
        first += size
    return write_chunk(storage, 0, batches, {}, sync=True).name


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


def test_the_documented_lines_add_partition_and_id(storage: LogStorage) -> None:
    _, lines, _ = (REPOSITORY / "docs" / "log-format.md").read_text().split("```", 2)
    partition = storage.of(2)
    partition.lock(0).release()
    for first in (0, 3):
        write_chunk(partition, first, [batch_of([b"v"] * 3)], {}, sync=False)
    found: dict[str, Any] = {}
    exec(lines.removeprefix("python").replace("/data/wal/weather/0", partition.path_of("")), found)
    messages = found["messages"].select(["partition", "id", "value"])
    assert messages.to_pydict() == {"partition": [2] * 6, "id": list(range(6)), "value": [b"v"] * 6}


def test_rows_have_the_ids_that_the_name_says_and_the_framing(storage: LogStorage) -> None:
    batch = decode_plain(raw_of([[b"topic", b"value %d" % i] for i in range(4)]), [(0, 4)])
    framed = batch.replace_schema_metadata({FRAMING: b"sequenced"})
    partition = storage.of(3)
    partition.lock(0).release()
    name = write_chunk(partition, 7, [framed, framed], {b"state": b"x" * 10_000}, sync=False).name
    rows = list(read_chunk(partition, name, 9, 13))
    assert [row.column("id").to_pylist() for row in rows] == [[9, 10], [11, 12]]
    assert all(row.column("partition").to_pylist() == [3, 3] for row in rows)
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


@pytest.mark.parametrize("length", [0, 1, 8, 100, -1, -8, -100])
def test_a_truncated_chunk_is_named(storage: LogStorage, length: int) -> None:
    name = write(storage, 5)
    path = Path(storage.path_of(name))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DamagedChunkError, match=name):
        values(storage, name, 0, 5)


def test_a_chunk_with_fewer_rows_than_its_name_says_is_damaged(storage: LogStorage) -> None:
    name, rows = chunk_name(0, 9), batch_of([b"v"] * 5)
    storage.write_chunk(name, lambda file: write_batches(file, Place(0, 0, 9), [rows]), sync=False)
    with pytest.raises(DamagedChunkError, match="ends at id 5, its name says 9"):
        values(storage, name, 0, 9)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize(("partition", "first", "end"), [(0, 0, 9), (0, 0, 4), (0, 5, 10), (1, 0, 5)])
def test_a_chunk_that_was_renamed_or_copied_to_another_place_is_named(
    storage: LogStorage, grows: bool, partition: int, first: int, end: int
) -> None:
    if grows:
        growing = GrowingChunk(storage, 0)
        for size in (2, 3):
            growing.append([batch_of([b"v"] * size)], {})
            growing.write(sync=False)
        name = growing.finish(sync=False).name
    else:
        name = write(storage, 5)
    elsewhere, renamed = storage.of(partition), chunk_name(first, end)
    elsewhere.lock(0).release()
    shutil.move(storage.path_of(name), elsewhere.path_of(renamed))
    with pytest.raises(DamagedChunkError, match="written as the ids 0 to 4 of partition 0") as error:
        values(elsewhere, renamed, first, end)
    assert elsewhere.path_of(renamed) in str(error.value)


def test_a_batch_in_the_place_of_another_one_is_damage(storage: LogStorage) -> None:
    """Batches of one length: a single bit of the footer may have one of them read twice."""
    batches = [batch_of([b"value %d" % i]) for i in range(2)]
    checksums = [{CHECKSUM: fingerprint(batch, before)} for before, batch in enumerate(batches)]
    metadata = {**Place(0, 0, 2).to_metadata(), TIMES: times_of(batches).to_metadata()}

    def write_swapped(file: pa.NativeFile) -> None:
        with pa.ipc.new_file(file, MESSAGE_SCHEMA.with_metadata(metadata)) as writer:
            for batch, checksum in reversed(list(zip(batches, checksums, strict=True))):
                writer.write_batch(batch, custom_metadata=checksum)

    name = chunk_name(0, 2)
    storage.write_chunk(name, write_swapped, sync=False)
    with pytest.raises(DamagedChunkError, match=r"batch 0 .*its checksum differs"):
        values(storage, name, 0, 2)


def test_a_file_of_another_schema_is_damaged(storage: LogStorage) -> None:
    name = chunk_name(0, 1)
    other = pa.record_batch({"x": [1]})
    with pa.ipc.new_file(storage.path_of(name), other.schema) as writer:
        writer.write_batch(other)
    with pytest.raises(DamagedChunkError, match="schema"):
        values(storage, name, 0, 1)


def test_a_missing_chunk_is_data_loss_and_says_where_to_look(storage: LogStorage) -> None:
    with pytest.raises(DataLossError, match="walLocation"):
        values(storage, chunk_name(0, 5), 0, 5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(st.binary(max_size=50), st.lists(st.binary(max_size=9), min_size=2, max_size=4)), min_size=1
    )
)
def test_a_fingerprint_survives_the_way_through_a_file(messages: list[bytes | list[bytes]]) -> None:
    batch = decode_plain(raw_of(messages), [(7, len(messages))])
    sink = pa.BufferOutputStream()
    write_batches(sink, Place(0, 0, len(messages)), [batch])
    read, _ = pa.ipc.open_file(sink.getvalue()).get_batch_with_custom_metadata(0)
    assert fingerprint(read, 5) == fingerprint(batch, 5) != fingerprint(batch, 6)
    assert read.equals(batch)


def test_a_slice_has_no_fingerprint() -> None:
    with pytest.raises(ValueError, match="slice"):
        fingerprint(batch_of([b"a", b"b"]).slice(1), 0)


def test_the_format_of_a_log_never_changes() -> None:
    """If this fails, raise FORMAT_VERSION, and refuse this log, or keep reading it."""
    assert LogStorage(str(GOLDEN)).log_id() == "0123456789abcdef0123456789abcdef"
    table = log_rows(GOLDEN)
    assert table.column("id").to_pylist() == list(range(6))
    assert table.column("topic").to_pylist() == [None, "topic", "", "\ufffd", "a", None]
    assert table.column("value").to_pylist() == [b"one frame", b"value", b"", b"bad topic", b"c", b"\x00\xff"]
    assert table.column("frames").to_pylist()[2:5] == [None, [b"\xff", b"bad topic"], [b"a", b"b", b"c"]]


def test_a_log_of_format_1_is_refused_with_what_to_do(tmp_path: Path) -> None:
    location = tmp_path / "log"
    shutil.copytree(DATA / "log-format-1", location)
    drain = r"log\.json: .* version 1, .* to its end with the release that wrote it; .* new walLocation, .* checkpoint"
    for use in (LogStorage.log_id, LogStorage.open_log):
        with pytest.raises(LogFormatError, match=drain):
            use(LogStorage(str(location)))


def test_every_error_of_storage_is_ours() -> None:
    assert issubclass(DamagedChunkError, ZmqDataSourceError)
    assert issubclass(DataLossError, ZmqDataSourceError)


_CUT_WHILE_READ = """
import os, sys
from zmq_datasource.errors import LogError
from zmq_datasource.log.chunk import read_chunk
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
    name = write_chunk(storage, 0, [batch_of([b"x" * (1 << 20)])] * 3, {}, sync=False).name

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
    """Opens one file, whose reads fail as often as its ``errors`` say."""

    file: _Failing | None = None

    def open_chunk(self, name: str, whole: bool = True) -> pa.NativeFile:
        self.file = _Failing(self.path_of(name))
        return pa.PythonFile(self.file, mode="r")


def test_an_io_error_while_rows_are_read_is_waited_out_and_no_damage(storage: LogStorage) -> None:
    name = write_chunk(storage, 0, [batch_of([b"x"])] * 2, {}, sync=False).name
    disk = _FailingDisk(storage.root)
    batches = read_chunk(disk, name, 0, 2)
    next(batches)
    assert disk.file is not None
    disk.file.errors = 2

    with pytest.raises(DiskFaultError, match="reading batch 1"):
        next(batches)

    disk.patience = 30.0
    batches = read_chunk(disk, name, 0, 2)
    next(batches)
    disk.file.errors = 2
    assert next(batches).column("id").to_pylist() == [1]


def test_of_rows_that_are_skipped_only_the_lengths_are_read(storage: LogStorage) -> None:
    name = write_chunk(storage, 0, [batch_of([b"x" * (1 << 20)])] * 8, {}, sync=False).name
    read: list[int] = []

    class Counting(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            content = super().read(size)
            read.append(len(content))
            return content

    class CountingDisk(LogStorage):
        def open_chunk(self, name: str, whole: bool = True) -> pa.NativeFile:
            return pa.PythonFile(Counting(self.path_of(name)), mode="r")

    found = [batch.column("id").to_pylist() for batch in read_chunk(CountingDisk(storage.root), name, 7, 8)]

    assert found == [[7]]
    assert sum(read) < 2 << 20
