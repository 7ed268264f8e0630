"""Positions of durable subscribers, with real files and a clock of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support import batch_of, wait_for
from zmq_datasource import LogFormatError, LogLockedError
from zmq_datasource.errors import DiskFaultError
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.log.leases import Lease, LeaseFiles, subscriber_key
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.proxy.fetch_protocol import Open
from zmq_datasource.proxy.positions import PRESENT_SECONDS, Position, Positions, bytes_of_topics
from zmq_datasource.proxy.view import LogMoment

EXPIRY = 1000.0
END = 100


class Clock:
    """Seconds, monotonic."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Disk(DirectoryStore):
    """A log's directory that can refuse, stall, and list what was written."""

    fault: str | None = None

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.written: list[str] = []
        self.may_write = threading.Event()
        self.may_write.set()

    def put(self, key: str, content: bytes) -> None:
        assert self.may_write.wait(30)
        if self.fault:
            raise DiskFaultError(self.fault)
        super().put(key, content)
        self.written.append(key)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """A log of ``END`` messages without topics."""
    disk = Disk(str(tmp_path))
    log = LogWriter(LogStorage(disk), chunk_bytes=1 << 20, max_bytes=1 << 30)
    log.open()
    log.append(batch_of([b"value"] * END))
    log.cut().result(10)
    log.close()
    disk.written.clear()
    return disk


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def known(disk: Disk, clock: Clock) -> Iterator[Positions]:
    positions = Known(disk, clock)
    yield positions
    disk.fault = None
    disk.may_write.set()
    positions.close()


class Known(Positions):
    """The positions of an empty log."""

    def __init__(self, disk: Disk, clock: Callable[[], float]) -> None:
        self.moment = LogMoment(LogStorage(disk), END)
        super().__init__(self.moment.storage, EXPIRY, clock=clock)


def opened(
    known: Known, name: str = "me", topics: tuple[bytes, ...] = (), session: int = 1, **wanted: Any
) -> Position:
    """Open a name for a client, which is present then."""
    position: Position = known.submit(
        known.open, Open(name=name, session=session, **wanted), topics, known.moment
    ).result(10)
    position.asked = position.left  # now
    return position


def on_disk(disk: Disk, name: str = "me") -> Lease | None:
    return LeaseFiles(LogStorage(disk)).read(subscriber_key(name))


def kept(disk: Disk, name: str = "me") -> int | None:
    """The position that is on the disk."""
    lease = on_disk(disk, name)
    return None if lease is None else lease.next


# Writing.


def test_a_name_is_on_the_disk_before_its_client_is_answered(known: Known, disk: Disk) -> None:
    disk.may_write.clear()
    future = known.submit(known.open, Open(name="me", session=7, start=30), (b"\xff", b"a"), known.moment)
    with pytest.raises(TimeoutError):
        future.result(0.05)
    assert known.get("me") is None
    disk.may_write.set()
    position = future.result(10)
    assert (position.is_new, position.next, position.is_on_disk, known.get("me")) == (
        True,
        30,
        True,
        position,
    )
    record = on_disk(disk)
    assert record is not None
    assert record.subscriber is not None
    assert (record.next, record.timeout) == (30, EXPIRY)
    assert (record.name, record.subscriber.session, record.subscriber.topics) == (
        "me",
        7,
        [b"\xff", b"a"],
    )


def test_positions_are_restored(disk: Disk, clock: Clock) -> None:
    with closing(Known(disk, clock)) as known:
        position = opened(known, topics=(b"\xff",), start=30)
        position.note(sent=4, lost=2, lost_to=6)
        known.move(position, 50)
    again = Known(disk, clock)
    (found,) = again
    assert (found.next, found.asked, found.notes) == (50, None, position.notes)
    assert (found.name, found.notes.topics, found.notes.lost_to) == ("me", [b"\xff"], 6)
    again.close()


def test_positions_are_written_about_once_a_second(known: Known, disk: Disk, clock: Clock) -> None:
    position = opened(known)
    list_records(known, clock)
    disk.written.clear()
    for done in range(1, 40):
        known.move(position, done)
        clock.now += 0.02
        known.step()
    assert kept(disk) == 0
    clock.now += 0.3
    known.step()
    wait_for(lambda: known.step() or len(disk.written) > 0, "written")
    assert (kept(disk), len(disk.written)) == (39, 1)


def test_a_position_is_written_at_once_if_a_client_waits(known: Known, disk: Disk) -> None:
    position = opened(known)
    known.move(position, 5)
    assert not position.is_on_disk
    known.write_now()
    wait_for(lambda: position.is_on_disk, "written")
    assert kept(disk) == 5
    known.move(position, 4)
    assert (position.next, position.is_on_disk) == (5, True), "a position does not go back"


def test_a_stalled_write_is_not_started_twice(known: Known, disk: Disk) -> None:
    position = opened(known)
    disk.written.clear()
    disk.may_write.clear()
    known.move(position, 1)
    for _ in range(100):
        known.write_now()
    disk.may_write.set()
    wait_for(lambda: position.is_on_disk, "written")
    opened(known, "other")
    assert disk.written.count("readers/subscriber.me.json") == 1


def test_a_refused_write_is_repeated_and_nothing_is_confirmed_before(
    known: Known, disk: Disk, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    position = opened(known)
    disk.fault = "no space left on device"
    with pytest.raises(DiskFaultError):
        opened(known, "other")
    assert known.get("other") is None
    known.move(position, 5)
    known.write_now()
    wait_for(lambda: known.fault == "no space left on device", "a refusal")
    assert not position.is_on_disk
    assert "no space left on device; until it is mended, no position" in caplog.text
    disk.fault = None
    known.write_now()
    clock.now += 0.3
    wait_for(lambda: known.write_now() or position.is_on_disk, "written")
    wait_for(lambda: known.fault is None, "the end of the fault")
    assert kept(disk) == 5
    opened(known, "other")


def test_a_name_that_is_forgotten_leaves_nothing(known: Known, disk: Disk) -> None:
    position = opened(known, topics=(b"abc",))
    known.submit(known.forget, position).result(10)
    assert (known.get("me"), len(known), on_disk(disk)) == (None, 0, None)
    assert not [path for path in (disk.root / "readers").iterdir() if "me" in path.name]
    again = opened(known, start="latest")
    assert (again.next, again.notes.topics) == (END, [])


def test_topics_are_counted(known: Known) -> None:
    position = opened(known, topics=(b"abc", b"d"))
    assert position.topic_bytes == bytes_of_topics((b"abc", b"d")) == 4 + bytes_of_topics([b"", b""])
    assert opened(known, session=2, topics=()).topic_bytes == 0


@pytest.mark.parametrize("name", ["ünï cödé", "x" * 200, "a/b.c", "..", ".", "subscriber.me.x"])
def test_any_name_has_a_lease_of_its_own(disk: Disk, clock: Clock, name: str) -> None:
    with closing(Known(disk, clock)) as known:
        opened(known, name, start=3)
        opened(known, "me", start=4)
        assert (kept(disk, name), kept(disk)) == (3, 4)
    again = Known(disk, clock)
    assert sorted(position.name for position in again) == sorted([name, "me"])
    again.close()


# Reading.


def test_a_damaged_lease_refuses_only_its_own_name(known: Known, disk: Disk, clock: Clock) -> None:
    for name in ("me", "other"):
        opened(known, name, start=40)
    for position in known:
        known.release(position)
    opened(known, "last")  # the keeper has freed the names
    path = disk.root / "readers" / "subscriber.me.json"
    path.write_bytes(path.read_bytes().replace(b'"next":40', b'"next":50'))
    with closing(Known(disk, clock)) as again:
        assert sorted(position.name for position in again) == ["last", "other"]
        with pytest.raises(LogFormatError, match="log readers drop"):
            opened(again, "me", session=2)
        assert opened(again, "other", session=2).next == 40


# Present and away.


def test_a_client_that_asks_for_nothing_is_away_and_others_may_change_its_record(
    known: Known, disk: Disk, clock: Clock
) -> None:
    leases = LeaseFiles(LogStorage(disk))
    position = opened(known, start=20)
    known.move(position, 30)
    with pytest.raises(LogLockedError):
        leases.hold(position.key, 0.0)
    clock.now += PRESENT_SECONDS - 0.01
    known.step()
    assert position.asked is not None
    clock.now += 0.02
    known.step()
    assert position.asked is None
    wait_for(lambda: not leases.is_running(position.key), "the name is free")
    assert kept(disk) == 30, "its position is written before"
    # Nothing has changed: it is locked again.
    assert known.submit(known.lock_again, position, known.moment).result(10) is True
    assert leases.is_running(position.key)
    # Another process has changed it.
    known.release(position)
    wait_for(lambda: not leases.is_running(position.key), "the name is free")
    record = on_disk(disk)
    assert record is not None
    assert record.subscriber is not None
    notes = msgspec.structs.replace(record.subscriber, session=7)
    leases.write(Lease("me", 5, EXPIRY, subscriber=notes))
    assert known.submit(known.lock_again, position, known.moment).result(10) is False
    assert not leases.is_running(position.key)
    again = opened(known, session=2)
    assert again.next == 5
    # Another process has removed it.
    known.release(again)
    wait_for(lambda: not leases.is_running(again.key), "the name is free")
    leases.remove(again.key)
    assert known.submit(known.lock_again, again, known.moment).result(10) is False
    assert known.get("me") is None


def test_a_name_that_another_client_opens_while_its_own_is_leaving_stays_held(
    known: Known, disk: Disk
) -> None:
    leases = LeaseFiles(LogStorage(disk))
    first = opened(known, start=20)
    known.move(first, 30)
    disk.may_write.clear()
    opening = known.submit(known.open, Open(name="me", session=2), (), known.moment)
    known.release(first)  # the keeper does this after the OPEN
    disk.may_write.set()
    second = opening.result(10)
    opened(known, "other")  # the keeper has done everything before
    record = on_disk(disk)
    assert record is not None
    assert record.subscriber is not None
    assert (second.is_new, second.next, record.subscriber.session) == (False, 30, 2)
    assert leases.is_running(second.key)


def test_a_name_that_was_dropped_while_its_client_was_away_is_not_known_any_more(
    known: Known, disk: Disk, clock: Clock
) -> None:
    position = opened(known)
    known.release(position)
    leases = LeaseFiles(LogStorage(disk))
    wait_for(lambda: not leases.is_running(position.key), "the name is free")
    leases.remove(position.key)
    clock.now += 2
    wait_for(lambda: known.step() or known.get("me") is None, "gone")


def test_a_subscriber_is_warned_of_before_it_is_forgotten_and_again_after_it_was_here(
    known: Known, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    opened(known, "here")
    position = opened(known, start=7)
    for count in (1, 2):
        known.release(position)
        clock.now += 790
        list_records(known, clock)
        assert len(caplog.records) == count - 1
        for _ in range(3):
            clock.now += 10
            list_records(known, clock)
        assert len(caplog.records) == count
        assert known.submit(known.lock_again, position, known.moment).result(10)
    assert (
        "durable subscriber 'me' has been away for 802 s and is forgotten in 198 s; messages from id 7 on are kept for "
        "it" in caplog.text
    )


def list_records(known: Known, clock: Clock) -> None:
    """Let the keeper list all records, while the client named here is present."""
    for position in known:
        if position.name == "here":
            position.asked = clock.now
    clock.now += 1
    known.step()
    known.submit(known.open, Open(name="here", session=1), (), known.moment).result(
        10
    )  # the keeper has done everything before


# What the log keeps.


def test_a_client_seeks(known: Known, disk: Disk) -> None:
    opened(known, start=20)
    for session, (wanted, place) in enumerate(
        (
            ({"start": "earliest"}, 20),  # only a new name begins there
            ({"start": "earliest", "seek": True}, 0),
            ({"start": 77, "seek": True}, 77),
            ({"start": "latest", "seek": True}, END),
            ({"start": 1000, "seek": True}, END),
            ({"start": "last", "seek": True}, END - 1),  # of one topic
            ({"since": 0, "seek": True}, 0),
            ({"since": 2**62, "seek": True}, END),
        ),
        2,
    ):
        assert opened(known, session=session, **wanted).next == place
        assert kept(disk) == place
