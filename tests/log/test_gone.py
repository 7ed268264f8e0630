"""A directory or a bucket that goes away: unmounted, removed, emptied. Nothing is begun in its place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.log.machines import Machines, MemoryBucket
from tests.support import batch_of, log_rows, wait_for
from zmq_datasource.errors import DiskFaultError, LogWriteError
from zmq_datasource.log.follower import LogFollower
from zmq_datasource.log.leases import Reader
from zmq_datasource.log.reader import Deletions, read_index, read_slices, slices
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter


def nothing(_: Path) -> None:
    """What is left of a directory that was removed."""


def mount_point(path: Path) -> None:
    """What is left of a directory that was unmounted."""
    path.mkdir()


def emptied(path: Path) -> None:
    """What is left of a directory of which all files were deleted."""
    for directory in [path.with_name("away"), *path.with_name("away").rglob("*")]:
        if directory.is_dir():
            (path / directory.relative_to(path.with_name("away"))).mkdir(parents=True)


Left = Callable[[Path], None]
ways = pytest.mark.parametrize("left", [nothing, mount_point, emptied], ids=lambda left: left.__name__)


class Place:
    """A directory that goes away and comes back."""

    def __init__(self, path: Path, left: Left) -> None:
        self.path = path
        self._left = left

    def goes(self) -> None:
        self.path.rename(self.path.with_name("away"))
        self._left(self.path)

    def returns(self) -> None:
        if self.path.exists():
            shutil.rmtree(self.path)
        self.path.with_name("away").rename(self.path)

    @property
    def files(self) -> list[Path]:
        """What was put there; a lock's file holds nothing."""
        return [path for path in self.path.rglob("*") if path.is_file() and path.stat().st_size]


def put(log: LogWriter, value: bytes) -> Future[int]:
    log.append(batch_of([value]))
    return log.cut()


def open_log(location: Path, **changes: float) -> LogWriter:
    made = LogWriter(LogStorage(str(location)), chunk_bytes=1 << 20, max_bytes=1 << 30, **changes)
    made.open()
    return made


@ways
def test_a_directory_that_goes_away_is_waited_for(tmp_path: Path, left: Left) -> None:
    place = Place(tmp_path / "log", left)
    log = open_log(place.path, retry_timeout=60.0)
    put(log, b"0").result(10)
    place.goes()
    pending = put(log, b"1")
    wait_for(lambda: log.fault, "a fault")
    assert "Mount or restore it" in log.fault
    assert place.files == []
    assert log.durable_end == 1

    place.returns()

    assert pending.result(30) == 2
    log.close()
    assert log_rows(place.path).column("value").to_pylist() == [b"0", b"1"]


@ways
def test_a_directory_that_stays_away_ends_the_writer_and_nothing_is_written_there(
    tmp_path: Path, left: Left
) -> None:
    place = Place(tmp_path / "log", left)
    log = open_log(place.path, retry_timeout=0.2)
    put(log, b"0").result(10)
    place.goes()
    with pytest.raises(LogWriteError, match=r"Mount or restore it.*tried again for"):
        put(log, b"1").result(30)
    assert place.files == []
    with pytest.raises(LogWriteError):
        log.close()
    place.returns()
    again = open_log(place.path)
    put(again, b"again").result(10)
    again.close()
    assert log_rows(place.path).column("value").to_pylist() == [b"0", b"again"]


@ways
def test_a_query_that_follows_waits_for_a_directory_that_goes_away(tmp_path: Path, left: Left) -> None:
    place = Place(tmp_path / "log", left)
    log = open_log(place.path)
    put(log, b"0").result(10)
    storage = LogStorage(str(place.path))
    patient, hasty = LogFollower(storage, 60.0), LogFollower(storage)
    for follower in (patient, hasty):
        follower.open()
    place.goes()
    patient.refresh()
    with pytest.raises(DiskFaultError, match="Mount or restore it"):
        hasty.refresh_now()
    patient.refresh()
    assert patient.durable_end == 1
    place.returns()
    put(log, b"1").result(10)
    wait_for(lambda: patient.refresh() or patient.durable_end == 2, "the new chunk")
    log.close()


@ways
def test_a_task_waits_for_a_directory_that_goes_away(
    tmp_path: Path, left: Left, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path / "log", left)
    log = open_log(place.path)
    put(log, b"0").result(10)
    storage = LogStorage(str(place.path))
    storage.retry_seconds = 60.0
    index, deletions = read_index(storage), Deletions(storage, storage.log_id(), fails=True)
    place.goes()
    caplog.set_level("INFO")
    with ThreadPoolExecutor(1) as executor:
        rows = executor.submit(
            lambda: list(read_slices(storage, slices(index.covering(0, 1), 0, 1), deletions=deletions))
        )
        wait_for(lambda: "trying again" in caplog.text, "a second try")
        place.returns()
        (batch,) = rows.result(30)
    assert batch.column("value").to_pylist() == [b"0"]
    log.close()


@pytest.mark.parametrize("left", [nothing, mount_point], ids=lambda left: left.__name__)
def test_a_position_is_not_recorded_where_the_log_is_not(tmp_path: Path, left: Left) -> None:
    place = Place(tmp_path / "log", left)
    log = open_log(place.path)
    put(log, b"0").result(10)
    log.close()
    held = Reader(LogStorage(str(place.path)), "desk", 1e9)
    place.goes()
    with pytest.raises(DiskFaultError, match="Mount or restore it"):
        held.begin(1)
    assert place.files == []
    held.close()


# In a bucket.


def test_a_bucket_that_is_emptied_is_waited_for(machines: Machines, memory: MemoryBucket) -> None:
    """What is put there meanwhile would be the beginning of another log."""
    log = machines.writer(retry_timeout=60.0)
    put(log, b"0").result(10)
    memory.empty()
    pending = put(log, b"1")
    wait_for(lambda: log.fault, "a fault")
    assert "Mount or restore it" in log.fault
    assert memory.names() == []
    assert log.durable_end == 1

    memory.restore()

    assert pending.result(30) == 2
    assert machines.rows() == [(0, b"0"), (1, b"1")]
    machines.end(log)
    assert machines.writer().durable_end == 2
