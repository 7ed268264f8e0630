"""The sealing thread: in order, patient, and with one failure for all that comes after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.support import batch_of, wait_for
from zmq_datasource.errors import DiskFaultError, LogWriteError
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.leases import Leases
from zmq_datasource.log.retention import Retention
from zmq_datasource.log.retrier import Retrier
from zmq_datasource.log.sealer import Sealer, WriteJob
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Content

ROWS = batch_of([b"x"] * 10)


class Files(LogStorage):
    """A log in a directory, whose chunks are only counted.

    Attributes:
        did: The chunks that were put, in order.
        refuses: Raised by what puts a chunk, once for each.
        before_put: Called before a chunk is put.
    """

    def __init__(self, *location: Any) -> None:
        super().__init__(*location)
        self.did: list[str] = []
        self.refuses: list[Exception] = []
        self.before_put: Callable[[], object] = lambda: None

    def put_chunk(self, first: int, content: Content) -> None:
        self.before_put()
        if self.refuses:
            raise self.refuses.pop(0)
        self.did.append(chunk_name(first))


class Held:
    """A hold of no key."""

    lost = None
    held = True

    def release(self) -> None:
        self.held = False


class Sealing:
    """A sealer that is handed chunks of ten ids."""

    def __init__(self, location: Path, seconds: float) -> None:
        self.files, self.contents, self.lock = Files(str(location)), ChunkIndex(), Held()
        self.files.open_log()
        leases = Leases(self.files)
        retention = Retention(
            self.files, self.contents, leases, seconds=0.0, max_bytes=1 << 30, chunk_bytes=1 << 20
        )
        self.sealer = Sealer(self.files, self.contents, retention, Retrier(seconds))
        self.retention = retention
        self.sealer.start(self.lock, 0)
        self._next = 0

    def cut(self, rows: bool = True) -> Future[int]:
        first, size = self._next, ROWS.nbytes if rows else 0
        batches = [ROWS] if rows else []
        self._next += 10 * len(batches)
        done: Future[int] = Future()
        self.sealer.hand_over(WriteJob(batches, size, first, self._next, done, b"state"))
        return done


@pytest.fixture
def sealing(tmp_path: Path) -> Iterator[Sealing]:
    made = Sealing(tmp_path / "log", seconds=30.0)
    yield made
    made.sealer.end()


def test_chunks_are_written_in_the_order_in_which_they_were_cut(sealing: Sealing) -> None:
    done = [sealing.cut() for _ in range(5)]
    assert [each.result(10) for each in done] == [10, 20, 30, 40, 50]
    assert sealing.files.did == [chunk_name(n) for n in range(0, 50, 10)]
    assert (sealing.contents.durable_end, sealing.sealer.unsealed_bytes) == (50, 0)


def test_a_cut_without_rows_writes_nothing_and_is_answered_in_its_turn(sealing: Sealing) -> None:
    sealing.cut()
    assert sealing.cut(rows=False).result(10) == 10
    assert len(sealing.files.did) == 1


def test_a_disk_that_refuses_for_now_is_asked_again(sealing: Sealing) -> None:
    sealing.files.refuses = [DiskFaultError("full"), DiskFaultError("full")]
    assert sealing.cut().result(10) == 10
    assert sealing.sealer.failure is None


@pytest.mark.parametrize("error", [LogWriteError("no such directory"), MemoryError("no more")])
def test_nothing_is_sealed_after_a_failed_chunk(error: Exception, sealing: Sealing) -> None:
    sealing.files.refuses = [error]
    failed, behind = sealing.cut(), sealing.cut()
    with pytest.raises(LogWriteError, match=r"no such directory|sealing ids 0 to 9: .*no more"):
        failed.result(10)
    assert behind.exception(10) is failed.exception(10) is sealing.sealer.failure
    assert sealing.files.did == []
    assert sealing.sealer.unsealed_bytes == 2 * ROWS.nbytes


def test_unwritten_bytes_are_counted(sealing: Sealing) -> None:
    go_on = threading.Event()
    sealing.files.before_put = lambda: go_on.wait(30)
    assert sealing.sealer.unwritten == 0
    sealing.cut()
    assert sealing.sealer.unwritten == 1
    last = sealing.cut()
    assert sealing.sealer.unwritten == 2
    go_on.set()
    last.result(10)
    wait_for(lambda: sealing.sealer.unwritten == 0, "all is written")


def test_a_disk_that_does_not_answer_ends_the_wait_but_keeps_the_lock(sealing: Sealing) -> None:
    go_on = threading.Event()
    sealing.files.before_put = lambda: go_on.wait(30)
    last = sealing.cut()
    with pytest.raises(LogWriteError, match="the disk did not answer for 0 s"):
        sealing.sealer.end(seconds=0.01)
    assert sealing.lock.held
    sealing.sealer.end()  # no second time
    go_on.set()
    assert last.result(10) == 10


def test_the_lock_is_held_until_the_last_chunk_is_written(sealing: Sealing) -> None:
    last = [sealing.cut() for _ in range(3)][-1]
    assert sealing.sealer.running
    assert sealing.lock.held
    sealing.sealer.end()
    assert last.done()
    assert not sealing.sealer.running
    assert not sealing.lock.held


def test_an_error_of_housekeeping_does_not_end_sealing(
    sealing: Sealing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither behind a chunk that is written, nor between two attempts to write one."""

    def fail() -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(sealing.retention, "tidy", fail)
    assert sealing.cut().result(10) == 10
    assert sealing.cut().result(10) == 20
    attempts = iter([DiskFaultError("full"), None])

    def write() -> str:
        if (error := next(attempts)) is not None:
            raise error
        return "written"

    assert Retrier(30.0, sealing.sealer.tidy).retry(write) == "written"
