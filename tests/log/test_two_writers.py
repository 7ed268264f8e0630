"""Two writers: the one that puts a chunk's key first has given out its ids, however the lock was lost."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.log.machines import Machines, Watched, WatchedDirectory, fill, numbered
from tests.support import batch_of, wait_for
from zmq_datasource.errors import DataLossError, LogLockedError, OvertakenError
from zmq_datasource.log.follower import LogFollower
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.reader import read_index, read_slices, slices
from zmq_datasource.log.reader_records import ReaderRecord, ReaderRecords
from zmq_datasource.log.readers import Readers
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter


def cut(log: LogWriter, *values: bytes) -> Future[int]:
    log.append(batch_of(list(values)))
    return log.cut()


def test_a_writer_whose_newest_chunk_is_gone_writes_nothing_until_it_is_back(anywhere: Machines) -> None:
    log = anywhere.writer(retry_timeout=60.0)
    fill(log, b"0")
    fill(log, b"1")
    storage = anywhere.storage()
    content = storage.read(storage.key(chunk_name(1)))
    assert content is not None
    storage.delete_chunk(1)
    pending = cut(log, b"2")
    wait_for(lambda: log.fault, "a fault")
    assert f"{chunk_name(1)}, which was there, is not there any more" in str(log.fault)
    assert (anywhere.firsts(), log.durable_end) == ([0], 2)
    storage.store.put_new(storage.key(chunk_name(1)), [content])
    assert pending.result(30) == 3
    assert anywhere.rows() == numbered(b"0", b"1", b"2")


def test_of_two_writers_one_gives_out_the_ids(anywhere: Machines) -> None:
    first = anywhere.writer()
    fill(first, b"0")
    anywhere.lose_lock()
    second = anywhere.writer()
    fill(second, b"1")
    pending = cut(first, b"never")
    with pytest.raises(OvertakenError, match=rf"put .*{chunk_name(1)}, .* the ids from 1 on"):
        pending.result(10)
    assert first.durable_end == 1
    with pytest.raises(LogLockedError):
        first.append(batch_of([b"never"]))
    fill(second, b"2")
    assert anywhere.rows() == numbered(b"0", b"1", b"2")


def test_a_writer_that_wakes_before_the_other_has_written_continues(
    anywhere: Machines,
) -> None:
    first = anywhere.writer()
    fill(first, b"0")
    anywhere.lose_lock()
    second = anywhere.writer()
    fill(first, b"1")
    pending = cut(second, b"never")
    with pytest.raises(OvertakenError):
        pending.result(10)
    assert anywhere.rows() == numbered(b"0", b"1")


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
    records.write("expired", ReaderRecord({0: 0}, 60.0))
    records.write("remaining", ReaderRecord({0: 0}, 86_400.0))
    anywhere.lose_lock()
    fill(anywhere.writer(), b"1")
    wait_for(lambda: first.failure, "the failure")
    late = 3600.0
    with pytest.raises(LogLockedError):
        readers.needed()
    assert records.read("expired") is not None


def test_a_writer_whose_chunks_another_one_has_deleted_stops_at_once(anywhere: Machines) -> None:
    """It does not wait for them to come back."""
    first = anywhere.writer(retry_timeout=300.0)
    fill(first, b"0")
    go_on_without(anywhere, 1)
    with pytest.raises(LogLockedError, match="with the ids from 2 on while this one was stopped"):
        cut(first, b"never").result(10)
    assert anywhere.firsts() == [2]


def go_on_without(machines: Machines, takeovers: int) -> None:
    """Other writers, one after the other, put and delete so much that only the last chunk is there."""
    machines.lose_lock()
    for _ in range(takeovers):
        log = machines.writer()
        for _ in range(2):
            fill(log, b"%d" % log.durable_end)
        log.commit(log.durable_end)
        machines.end(log)
        machines.lose_lock()


class Stopped:
    """A writer that was stopped just before it put its chunk, until other writers had deleted that key."""

    def __init__(self, machines: Machines, written: int, meanwhile: Callable[[], None]) -> None:
        storage = machines.storage()
        assert isinstance(storage.store, Watched)
        log = machines.writer(storage, retry_timeout=60.0)
        for number in range(written):
            fill(log, b"%d" % number)

        def stop(verb: str, _key: str) -> None:
            if verb == "put_new":
                storage.store.before = None
                meanwhile()

        storage.store.before = stop
        self.result = cut(log, b"never", b"never")


@pytest.mark.parametrize("takeovers", [1, 3], ids=["by one", "by three"])
@pytest.mark.parametrize("written", [0, 1], ids=["a new log", "an old one"])
def test_a_chunk_of_a_writer_that_was_stopped_until_its_key_was_deleted_is_none_of_the_log(
    anywhere: Machines, written: int, takeovers: int
) -> None:
    stopped = Stopped(anywhere, written, lambda: go_on_without(anywhere, takeovers))
    with pytest.raises(LogLockedError, match="while this one was stopped"):
        stopped.result.result(30)
    end = written + 2 * takeovers
    assert anywhere.firsts() == [written, end - 1]
    assert (read_index(anywhere.storage()).earliest, read_index(anywhere.storage()).end) == (end - 1, end)
    assert anywhere.rows() == [(end - 1, b"%d" % (end - 1))]
    follower = LogFollower(anywhere.storage())
    follower.open()
    assert (follower.earliest, follower.durable_end) == (end - 1, end)

    log = anywhere.writer()
    assert (log.earliest, log.durable_end) == (end - 1, end)
    assert anywhere.firsts() == [end - 1]


def test_a_read_that_was_planned_before_gets_no_row_of_such_a_chunk(anywhere: Machines) -> None:
    planned = []

    def meanwhile() -> None:
        anywhere.lose_lock()
        log = anywhere.writer()
        for value in (b"1", b"2", b"3"):
            fill(log, value)
        planned.append(read_index(anywhere.storage()).covering(1, 4))
        log.commit(4)

    stopped = Stopped(anywhere, 1, meanwhile)
    with pytest.raises(LogLockedError):
        stopped.result.result(30)
    assert anywhere.firsts() == [1, 3]
    with pytest.raises(DataLossError, match=f"{chunk_name(1)}: it does not exist"):
        list(read_slices(anywhere.storage(), slices(planned[0], 1, 2)))


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


def test_a_copy_that_lacks_the_newest_chunk_gives_its_ids_to_another_writer(tmp_path: Path) -> None:
    """Which a reader can tell by the writers' names."""
    machines = Machines(lambda: WatchedDirectory(tmp_path / "log"))
    log = machines.writer()
    fill(log, b"0")
    fill(log, b"1")
    machines.end(log)
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    (tmp_path / "copy" / "0" / chunk_name(1)).unlink()
    names = []
    for location in ("log", "copy"):
        it = Machines(lambda location=location: WatchedDirectory(tmp_path / location))  # type: ignore[misc]
        log = it.writer()
        fill(log, b"again")
        log.close()
        names.append(read_index(LogStorage(str(tmp_path / location))).incarnations)
    assert names[0].of(0) == names[1].of(0)
    assert names[0].of(1) != names[1].of(1)
