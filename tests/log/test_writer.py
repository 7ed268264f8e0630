"""The log's writer: contiguous ids across restarts, bounded size, one writer, clear errors."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.support import batch_of, need, wait_for
from zmq_datasource.errors import (
    DamagedChunkError,
    DiskFaultError,
    LogFormatError,
    LogLockedError,
    LogWriteError,
)
from zmq_datasource.log.index import read_index
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Content
from zmq_datasource.log.writer import LogWriter


def writer(location: Path, **changes: object) -> LogWriter:
    settings: dict[str, object] = {"chunk_bytes": 1 << 20, "max_bytes": 1 << 30}
    made = LogWriter(LogStorage(str(location)), **{**settings, **changes})  # type: ignore[arg-type]
    made.open()
    return made


def fill(log: LogWriter, count: int, size: int = 10) -> int:
    log.append(batch_of([b"x" * size] * count))
    return log.cut().result(10)


def test_only_sealed_messages_count_as_durable(tmp_path: Path) -> None:
    log = writer(tmp_path)
    log.append(batch_of([b"a", b"b"]))
    assert (log.durable_end, log.unsealed) == (0, 2)
    assert log.cut().result(10) == 2
    assert (log.durable_end, log.unsealed) == (2, 0)
    log.close()


def test_a_chunk_is_cut_at_its_size(tmp_path: Path) -> None:
    log = writer(tmp_path, chunk_bytes=10_000)
    for _ in range(10):
        log.append(batch_of([b"x" * 1000] * 5))
    log.close()
    assert 4 <= read_index(LogStorage(str(tmp_path))).chunks <= 6


def test_a_torn_chunk_that_was_forced_to_the_disk_is_left_where_it_is(tmp_path: Path) -> None:
    log = writer(tmp_path)
    fill(log, 10)
    log.close()
    path = next((tmp_path / "chunks").glob("*.arrow"))
    os.truncate(path, 100)
    with pytest.raises(DamagedChunkError):
        writer(tmp_path)
    assert path.exists()


def test_the_directories_above_a_chunk_are_on_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    sync = os.fsync

    def watched(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    log = writer(tmp_path / "a" / "b")
    fill(log, 1)
    log.close()
    directory = tmp_path
    for name in ("a", "b", "0"):
        assert directory in synced, f"the entry of {name} in {directory}"
        directory /= name


def test_a_chunk_larger_than_the_log_does_not_end_it(tmp_path: Path) -> None:
    """The newest chunk stays for ever; once it is committed it must not keep the log full."""
    log = writer(tmp_path, max_bytes=100_000)
    fill(log, 1, 500_000)
    assert log.full
    need(tmp_path, 1)
    wait_for(lambda: not log.full, "room")
    log.close()
    again = writer(tmp_path, max_bytes=1000)  # also one that was written under a larger limit
    assert again.full
    wait_for(lambda: not again.full, "room")
    again.close()


def test_a_second_writer_gets_an_error_that_names_the_first(tmp_path: Path) -> None:
    log = writer(tmp_path)
    with pytest.raises(LogLockedError, match=rf"held by process {os.getpid()} on .*; .* walLocation"):
        writer(tmp_path)
    log.close()
    writer(tmp_path).close()


def test_a_writer_that_is_just_stopping_is_waited_for(tmp_path: Path) -> None:
    first = writer(tmp_path)
    second = LogWriter(LogStorage(str(tmp_path)), chunk_bytes=1, max_bytes=1)
    opening = threading.Thread(target=second.open, args=(30.0,))
    opening.start()
    first.close()
    opening.join(30)
    assert not opening.is_alive()
    second.close()


def test_chunks_without_their_log_json_are_refused(tmp_path: Path) -> None:
    """A new log over old chunks would count 120 messages as 220."""
    log = writer(tmp_path)
    log_id = log.log_id
    for _ in range(2):
        fill(log, 10)
    log.close()
    (tmp_path / "log.json").unlink()

    says = rf"{tmp_path}.*log.json is missing.*begins at id 0.*Restore log.json"
    with pytest.raises(LogFormatError, match=says):
        writer(tmp_path)
    with pytest.raises(LogFormatError, match=r"log\.json is missing"):
        LogStorage(str(tmp_path)).log_id()
    assert not (tmp_path / "log.json").exists()

    (tmp_path / "log.json").write_text(f'{{"format": 3, "log": "{log_id}"}}')
    again = writer(tmp_path)
    assert again.log_id == log_id
    again.close()


def test_a_directory_without_a_log_says_that_it_may_not_be_shared(tmp_path: Path) -> None:
    with pytest.raises(LogFormatError, match="share"):
        LogStorage(str(tmp_path)).log_id()


def stuck_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is forced to the disk until this is set."""
    go_on, sync = threading.Event(), os.fsync

    def wait(descriptor: int) -> None:
        go_on.wait(30)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", wait)
    return go_on


def test_a_disk_slower_than_the_feed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = writer(tmp_path, chunk_bytes=100_000)
    go_on = stuck_disk(monkeypatch)
    for _ in range(4):
        log.append(batch_of([b"x"]))
        log.cut()
    assert log.busy
    assert not log.slow, "what waits is small"
    log.append(batch_of([b"x" * 299_000]))
    assert not log.slow
    log.append(batch_of([b"x" * 1000]))
    assert log.slow
    last = log.cut()
    go_on.set()
    assert last.result(10) == 6
    wait_for(lambda: not log.busy, "the disk caught up")
    assert not log.slow
    log.close()


def test_a_writer_that_takes_over_forces_the_names_of_chunks_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was killed may have linked a chunk, and a query may read it now and write down how far it has come."""
    log = writer(tmp_path)
    log.append(batch_of([b"a"]))
    log.close()
    force, forced = os.fsync, []

    def fsync(descriptor: int) -> None:
        forced.append(os.fstat(descriptor).st_ino)
        force(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    log = writer(tmp_path)
    assert (tmp_path / "chunks").stat().st_ino in forced
    log.close()


# The sealing thread.


class Faulty(LogStorage):
    """Waits, or raises an error, before a chunk is put."""

    refuses: tuple[Exception, ...] = ()
    before_put: Callable[[], object] = staticmethod(lambda: None)

    def put_chunk(self, first: int, content: Content) -> float | None:
        self.before_put()
        if self.refuses:
            error, *rest = self.refuses
            self.refuses = tuple(rest)
            raise error
        return super().put_chunk(first, content)


@pytest.fixture
def storage(tmp_path: Path) -> Faulty:
    return Faulty(str(tmp_path))


def sealing(storage: LogStorage, **changes: float) -> LogWriter:
    made = LogWriter(storage, chunk_bytes=1 << 20, max_bytes=1 << 30, **changes)
    made.open()
    return made


def cut(log: LogWriter, rows: int = 10) -> Future[int]:
    log.append(batch_of([b"x"] * rows))
    return log.cut()


def test_chunks_are_written_in_the_order_in_which_they_were_cut(storage: Faulty) -> None:
    log, go_on = sealing(storage), threading.Event()
    storage.before_put = lambda: go_on.wait(30)
    done = [cut(log, rows) for rows in (10, 0, 5, 1)]
    assert log.unsealed_bytes > 0
    go_on.set()
    assert [each.result(10) for each in done] == [10, 10, 15, 16]
    assert [chunk.first for chunk in log.all] == [0, 10, 15]
    assert log.unsealed_bytes == 0
    log.close()


@pytest.mark.parametrize("error", [LogWriteError("no such directory"), MemoryError("no more")])
def test_nothing_is_sealed_after_a_failed_chunk(error: Exception, storage: Faulty) -> None:
    log = sealing(storage)
    storage.refuses, go_on = (error,), threading.Event()
    storage.before_put = lambda: go_on.wait(30)
    failed, behind = cut(log), cut(log)
    go_on.set()
    with pytest.raises(LogWriteError, match=r"no such directory|sealing ids 0 to 9: .*no more"):
        failed.result(10)
    assert behind.exception(10) is failed.exception(10) is log.failure
    assert storage.chunks() == []
    with pytest.raises(LogWriteError):
        log.append(batch_of([b"x"]))
    with pytest.raises(LogWriteError):
        log.close()


def test_a_disk_that_does_not_answer_ends_the_wait_but_keeps_the_lock(
    storage: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, go_on = sealing(storage), threading.Event()
    storage.before_put = lambda: go_on.wait(30)
    last = cut(log)
    monkeypatch.setattr(log, "end_seconds", 0.01)
    with pytest.raises(LogWriteError, match="the disk did not answer for 0 s"):
        log.close()
    gc.collect()
    with pytest.raises(LogLockedError):
        sealing(Faulty(storage.root))
    go_on.set()
    assert last.result(10) == 10
    again = LogWriter(LogStorage(storage.root), chunk_bytes=1, max_bytes=1 << 30)
    again.open(30.0)
    assert again.durable_end == 10
    again.close()


def test_an_error_of_housekeeping_does_not_end_sealing(storage: Faulty) -> None:
    """Neither behind a chunk that is written, nor between two attempts to write one."""

    def fail() -> None:
        raise RuntimeError("unexpected")

    log = sealing(storage, retry_timeout=30.0)
    log.retention.tidy = fail  # type: ignore[method-assign]
    assert cut(log).result(10) == 10
    storage.refuses = (DiskFaultError("full"), DiskFaultError("full"))
    assert cut(log).result(10) == 20
    assert log.failure is None
    log.close()
