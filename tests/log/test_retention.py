"""How long chunks stay, by a clock and a storage that the test holds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.log.files_in_memory import FilesInMemory, RecordsInMemory, deletions
from zmq_datasource.errors import LogFormatError, LogWriteError
from zmq_datasource.log.index import ChunkIndex, Contents
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.open_chunk import Grown
from zmq_datasource.log.retention import Retention


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch) -> RecordsInMemory:
    """Of the readers of each log."""
    return RecordsInMemory(monkeypatch)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Log:
    """Chunks of ten ids and 100 bytes, sealed ten seconds apart; the newest now."""

    def __init__(self, chunks: int, **settings: Any) -> None:
        self.clock = Clock()
        self.files = FilesInMemory()
        self.contents = Contents()
        self.contents.replace(
            ChunkIndex(Chunk(10 * n, 10 * n + 10, 100, 1000.0 - 10 * (chunks - 1 - n)) for n in range(chunks))
        )
        given = {"seconds": 0.0, "max_bytes": 1 << 20, "chunk_bytes": 100, "clock": self.clock}
        self.retention = Retention(self.files, self.contents, **{**given, **settings})  # type: ignore[arg-type]


def test_a_commit_deletes_chunks_that_end_below_it() -> None:
    log = Log(4)
    log.retention.commit(25)
    assert log.files.did == deletions(0, 10)
    assert (log.contents.earliest, log.contents.durable_end, log.contents.size) == (20, 40, 200)


def test_a_commit_never_goes_back_and_the_newest_chunk_stays() -> None:
    log = Log(3)
    log.retention.commit(30)
    log.retention.commit(10)
    assert log.retention.committed == 30
    assert log.files.did == deletions(0, 10)


def test_if_readers_decide_unneeded_chunks_are_deleted(records: RecordsInMemory) -> None:
    log = Log(3, readers_decide=True)
    records.needs = {"desk": 10, "late": 20}
    log.retention.remove_expired()
    assert log.files.did == deletions(0)
    del records.needs["desk"]
    log.retention.remove_expired()
    assert log.files.did == deletions(0, 10)


def test_where_readers_decide_a_new_reader_may_need_earlier_messages(records: RecordsInMemory) -> None:
    log = Log(3, readers_decide=True, seconds=1e9, max_bytes=0)  # full
    records.needs = {"desk": 20}
    log.retention.remove_expired()
    assert log.retention.committed == 20
    records.needs["late"] = 10
    log.retention.remove_expired()
    assert log.retention.committed == 10


def test_committed_chunks_stay_for_their_retention() -> None:
    log = Log(4, seconds=60.0)
    log.retention.commit(40)
    assert log.files.did == []
    log.clock.now += 40  # the first is 70 seconds old, the second 60
    log.retention.remove_expired()
    assert log.files.did == deletions(0, 10)


def test_only_new_chunks_that_no_reader_needs_leave_the_systems_memory(records: RecordsInMemory) -> None:
    log = Log(2, seconds=1e9)
    log.retention.begin(0)
    for first in (20, 30, 40):
        log.contents.seal(0, Chunk(first, first + 10, 100, 1000.0))
    log.retention.commit(45)
    log.retention.uncache()
    assert log.files.uncached == [20, 30]
    log.retention.commit(50)
    for _ in range(2):  # each chunk once
        log.retention.uncache()
    assert log.files.uncached == [20, 30, 40]
    assert log.files.did == []


def test_a_clock_that_is_set_back_restarts_the_retention_of_existing_chunks() -> None:
    log = Log(3, seconds=60.0)
    log.retention.commit(30)
    log.clock.now -= 3600
    log.retention.remove_expired()
    log.clock.now += 59
    log.retention.remove_expired()
    assert log.files.did == []
    log.clock.now += 1
    log.retention.remove_expired()
    assert log.files.did == deletions(0, 10)


def test_without_a_retention_no_clock_is_asked() -> None:
    def clock() -> float:
        raise AssertionError("it was")

    log = Log(2, clock=clock)
    log.retention.commit(20)
    assert log.files.did == deletions(0)


def test_chunks_that_a_reader_needs_are_kept(records: RecordsInMemory) -> None:
    log = Log(4)
    records.needs = {"one": 10, "other": 35}
    log.retention.commit(40)
    assert log.files.did == deletions(0)
    records.needs = {}
    log.retention.remove_expired()
    assert log.files.did == deletions(0, 10, 20)


def test_nothing_is_deleted_while_records_of_readers_cannot_be_read(
    records: RecordsInMemory, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log(3)
    records.error = LogFormatError("reading one.json: it is not the record of a reader")
    log.retention.commit(30)
    records.error = None
    assert log.files.did == []
    assert "not the record" in caplog.text
    log.retention.remove_expired()
    assert log.files.did == deletions(0, 10)


def test_nothing_goes_while_a_reader_writes_its_first_record(records: RecordsInMemory) -> None:
    log = Log(3)
    records.placed = True
    log.retention.commit(30)
    assert (log.files.did, log.contents.earliest) == ([], 0)
    records.placed = False
    log.retention.remove_expired()
    assert log.files.did == deletions(0, 10)


def test_a_file_that_cannot_be_deleted_counts_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(3)
    log.files.refuses = [LogWriteError("removing chunk: Permission denied")]
    log.retention.commit(30)
    assert "Permission denied" in caplog.text
    assert (log.contents.earliest, log.contents.size, log.contents.chunks) == (20, 300, 3)
    log.retention.remove_expired()
    assert log.files.did == deletions(0, 10)  # the front first, so that a crash in between leaves no hole
    assert (log.contents.size, log.contents.chunks) == (100, 1)


def test_a_reader_that_starts_after_a_failed_deletion_keeps_the_chunk(records: RecordsInMemory) -> None:
    log = Log(3)
    log.files.refuses = [LogWriteError("removing chunk: Permission denied")]
    log.retention.commit(30)
    records.needs = {"late": 10}
    log.retention.remove_expired()
    assert log.files.did == deletions(0)


@pytest.mark.parametrize(("make_room", "committed", "gone"), [("none", 20, []), ("done", 20, [0, 10])])
def test_committed_chunks_make_room_before_their_retention_has_passed(
    make_room: str, committed: int, gone: list[int]
) -> None:
    log = Log(4, seconds=1e9, max_bytes=700, make_room=make_room)  # five chunks more are to fit
    log.retention.commit(committed)
    log.retention.make_room()
    assert log.files.did == deletions(*gone)


def test_only_as_much_makes_room_as_is_needed() -> None:
    log = Log(4, seconds=1e9, max_bytes=800, make_room="done")
    log.retention.commit(40)
    log.retention.make_room()
    assert log.files.did == deletions(0)


def test_with_any_the_oldest_make_room_though_somebody_needs_them(records: RecordsInMemory) -> None:
    log = Log(4, seconds=1e9, max_bytes=700, make_room="any")
    records.needs = {"one": 0}
    log.retention.make_room()
    assert log.files.did == deletions(0, 10)


def test_a_log_is_full_of_all_that_takes_room() -> None:
    log = Log(3, max_bytes=350)
    assert not log.retention.full
    log.contents.count_appended(50)
    assert log.retention.full
    log.contents.grow(50, Grown(30, 40, 35))  # on the disk it takes less
    assert not log.retention.full
    log.contents.count_appended(10)
    assert log.retention.full
    log.contents.seal(10, Chunk(30, 40, 40, 1000.0))
    assert not log.retention.full


def test_the_newest_chunk_alone_fills_nothing_once_it_is_committed() -> None:
    log = Log(1, max_bytes=100)
    assert log.retention.full
    log.retention.commit(10)
    assert not log.retention.full


def test_where_anything_makes_room_the_newest_chunk_alone_fills_nothing() -> None:
    log = Log(1, max_bytes=100, make_room="any")
    assert not log.retention.full
    assert log.contents.occupied(math.inf) == 0
