"""Two writers: the one that puts a chunk's key first has given out its ids, however the lock was lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.log.machines import Machines, WatchedDirectory, fill, numbered
from tests.support import batch_of, wait_for
from zmq_datasource.errors import LogLockedError
from zmq_datasource.log.reader_records import ReaderRecord, ReaderRecords
from zmq_datasource.log.readers import Readers


def test_an_idle_writer_notices_that_another_has_the_lock(anywhere: Machines) -> None:
    first = anywhere.writer()
    anywhere.lose_lock()
    anywhere.writer()
    assert isinstance(wait_for(lambda: first.failure, "the failure"), LogLockedError)
    with pytest.raises(LogLockedError):
        first.append(batch_of([b"0"]))


def test_a_writer_drops_no_reader_after_another_one_has_taken_its_place(anywhere: Machines) -> None:
    late = 0.0
    storage = anywhere.storage()
    readers = Readers(storage, clock=lambda: time.time() + late)
    first = anywhere.writer(storage, readers=readers, readers_decide=True)
    fill(first, b"0")
    records = ReaderRecords(anywhere.storage())
    records.write("expired", ReaderRecord(0, 60.0))
    records.write("remaining", ReaderRecord(0, 86_400.0))
    anywhere.lose_lock()
    fill(anywhere.writer(), b"1")
    wait_for(lambda: first.failure, "the failure")
    late = 3600.0
    with pytest.raises(LogLockedError):
        readers.needed()
    assert records.read("expired") is not None


def test_the_open_chunk_of_a_lost_writer_belongs_to_the_next_writer(tmp_path: Path) -> None:
    machines = Machines(lambda: WatchedDirectory(tmp_path / "log"))
    first = machines.writer(retry_timeout=60.0)
    first.append(batch_of([b"0"]))
    assert first.flush().result(10) == 1
    machines.lose_lock()
    second = machines.writer()
    assert second.durable_end == 1
    first.append(batch_of([b"never"]))
    with pytest.raises(LogLockedError):
        first.flush().result(30)
    fill(second, b"1")
    second.close()
    assert machines.rows() == numbered(b"0", b"1")
    with pytest.raises(LogLockedError):
        first.close()
