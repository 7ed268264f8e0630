"""What a proxy keeps of its durable subscribers: real files, and a clock of the test's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from zmq_datasource import DataLossError, LogFormatError
from zmq_datasource.errors import DiskFaultError
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.log.reader_records import ReaderRecords
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.proxy.subscriptions import READER, Subscription, Subscriptions, size_of

EXPIRY = 1000.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Disk(DirectoryStore):
    """A log's directory; it can refuse, and let time pass."""

    fault: str | None = None
    passes: Callable[[], None] = staticmethod(lambda: None)

    def put(self, key: str, content: bytes) -> None:
        if self.fault:
            raise DiskFaultError(self.fault)
        self.passes()
        super().put(key, content)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    disk = Disk(str(tmp_path))
    LogStorage(disk).open_log()
    return disk


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def known(disk: Disk, clock: Clock) -> Subscriptions:
    return Subscriptions(LogStorage(disk), 100, EXPIRY, clock)


def on_disk(disk: Disk) -> dict[str, Subscription]:
    """By name, as a proxy reads them that begins now."""
    return {subscription.name: subscription for subscription in Subscriptions(LogStorage(disk), 100, EXPIRY)}


def add(known: Subscriptions, name: str, position: int = 7) -> Subscription:
    new = Subscription(name, (), position, created=0.0)
    known.add(new)
    return new


# What is written, and when.


def test_nothing_is_written_where_nothing_has_changed(known: Subscriptions, disk: Disk) -> None:
    assert known.save() is False
    assert disk.find("0/subscriptions.json") is None


def test_a_new_one_is_written_at_once(known: Subscriptions, disk: Disk) -> None:
    new = Subscription("me", (b"\xff", b"a"), 7, 3.5, sent=4, lost=2, lost_to=6, away=1.5, acknowledged=5.5)
    known.add(new)
    assert known.save() is True
    assert on_disk(disk) == {"me": new}
    assert known.save() is False


def test_what_nobody_waits_for_is_written_once_a_second(
    known: Subscriptions, disk: Disk, clock: Clock
) -> None:
    me = add(known, "me")
    known.save()
    clock.now += 0.9
    me.sent = 5
    known.change(urgent=False)
    assert known.save() is False
    assert on_disk(disk)["me"].sent == 0
    clock.now += 0.1
    assert known.save() is True
    assert on_disk(disk)["me"].sent == 5
    me.sent = 6
    known.change(urgent=False)
    clock.now += 0.9
    assert known.save() is False
    known.change(urgent=True)
    known.change(urgent=False)
    assert known.save() is True
    assert on_disk(disk)["me"].sent == 6


def test_topics_that_change_are_written_once_a_second_and_all_topics_are_counted(
    known: Subscriptions, disk: Disk, clock: Clock
) -> None:
    me, other = add(known, "me"), add(known, "other")
    assert known.save() is True
    known.set_topics(me, (b"abc", b"d"))
    known.set_topics(other, (b"e",))
    assert known.save() is False
    assert known.topic_bytes == size_of(me.topics) + size_of(other.topics) == 5 + size_of([b""]) * 3
    clock.now += 1
    assert known.save() is True
    assert on_disk(disk)["me"].topics == (b"abc", b"d")
    assert Subscriptions(LogStorage(disk), 100, EXPIRY).topic_bytes == known.topic_bytes
    known.remove("me")
    known.remove("me")
    assert known.topic_bytes == size_of(other.topics)


def test_writing_takes_no_more_than_half_of_the_time(known: Subscriptions, disk: Disk, clock: Clock) -> None:
    add(known, "me")
    disk.passes = lambda: setattr(clock, "now", clock.now + 0.2)
    assert known.save() is True
    change = known.change(urgent=True)
    clock.now += 0.19
    assert known.save() is False
    assert known.pauses
    assert not known.is_kept(change)
    clock.now += 0.02
    disk.passes = lambda: setattr(clock, "now", clock.now + 0.005)
    assert known.save() is True
    assert not known.pauses
    known.change(urgent=True)
    assert known.save() is True, "a quick disk needs no pause"
    known.set_topics(other := add(known, "large"), (bytes(3 << 20),))
    assert known.save() is True
    known.remove(other.name)
    clock.now += 0.1
    assert known.save() is False, "4 MiB on the disk"
    clock.now += 0.1
    assert known.save() is True


def test_who_is_added_or_removed_is_kept_at_once_and_who_comes_or_is_away_soon(
    known: Subscriptions, disk: Disk, clock: Clock
) -> None:
    me = add(known, "me")
    assert known.save() is True
    known.come("me")
    assert known.save() is False
    known.leave("me")
    clock.now += 2
    assert known.save() is True
    clock.now += 2
    known.expire()
    assert known.save() is True, "how long it has been away has changed"
    assert on_disk(disk)["me"].away == me.away == 4
    known.remove("me")
    assert known.save() is True
    assert on_disk(disk) == {}


def test_a_change_is_kept_once_it_is_written(known: Subscriptions) -> None:
    add(known, "me")
    changes = [known.change(urgent=True), known.change(urgent=True)]
    assert [known.is_kept(change) for change in changes] == [False, False]
    assert known.save()
    later = known.change(urgent=True)
    assert [known.is_kept(change) for change in (*changes, later)] == [True, True, False]


def test_a_disk_that_refuses_is_asked_again_soon_and_nobody_hears_that_it_holds(
    known: Subscriptions, disk: Disk, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    disk.fault = "no space left on device"
    add(known, "me")
    change = known.change(urgent=True)
    assert known.unsaved is None, "it was not asked yet"
    assert known.save() is False
    assert known.unsaved == "no space left on device"
    assert not known.is_kept(change)
    assert (
        "no space left on device; positions of durable subscribers are not acknowledged until then"
        in caplog.text
    )
    disk.fault = None
    clock.now += 0.2
    assert known.save() is False
    clock.now += 0.1
    assert known.save() is True
    assert known.unsaved is None
    assert known.is_kept(change)


def test_a_fault_that_nobody_waits_for_is_nobodys_matter(
    known: Subscriptions, disk: Disk, clock: Clock
) -> None:
    known.change(urgent=False)
    clock.now += 1
    disk.fault = "no space left on device"
    assert known.save() is False
    assert known.unsaved is None


# What is read.


def test_a_file_that_makes_no_sense_is_an_error(known: Subscriptions, disk: Disk) -> None:
    add(known, "me")
    known.save()
    path = disk.root / "0" / "subscriptions.json"
    kept = json.loads(path.read_bytes())
    for change, problem in (
        ({"format": 2}, "format 2, this release reads 1"),
        ({"log": "another"}, f"it is about log another, and this is {LogStorage(disk).log_id()}; remove it"),
        ({"subscriptions": 7}, "without it all durable subscribers begin anew"),
    ):
        path.write_text(json.dumps({**kept, **change}))
        with pytest.raises(LogFormatError, match=rf"^reading .*subscriptions\.json: .*{problem}"):
            on_disk(disk)


def test_one_that_has_acknowledged_all_of_the_log_is_known_and_one_that_has_more_is_an_error(
    known: Subscriptions, disk: Disk
) -> None:
    me = add(known, "me", 100)
    known.save()
    assert list(on_disk(disk)) == ["me"]
    me.next = 101
    known.change(urgent=True)
    known.save()
    with pytest.raises(
        DataLossError,
        match=r"it ends at id 100, and durable subscriber 'me' has acknowledged the ids below 101: its newest chunks "
        r"are gone \(after a crash of the machine with walSync=false, or from a copy\)\. Their ids are not given to "
        r"other messages\. Restore the chunks, or use a new walLocation$",
    ):
        on_disk(disk)


# Who is there, and who is not.


def test_who_is_away_too_long_is_forgotten_after_a_warning(
    known: Subscriptions, disk: Disk, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("here", "away"):
        add(known, name)
    known.come("here")
    clock.now += 790
    known.expire()
    assert known.get("away") is not None
    assert not caplog.records
    clock.now += 20
    known.expire()
    known.expire()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert (
        "durable subscriber 'away' has been away for 13.5 minutes and is forgotten in 3.2 minutes; messages from "
        "id 7 on are kept for it" in caplog.text
    )
    known.save()
    # The time while no proxy runs does not count.
    clock.now += 5000
    again = Subscriptions(LogStorage(disk), 100, EXPIRY, clock)
    assert {s.name for s in again} == {"here", "away"}
    again.expire()
    assert {s.name for s in again} == {"here", "away"}
    clock.now += 190
    caplog.clear()
    again.expire()
    assert {s.name for s in again} == {"here"}
    assert "'away' was away for 16.7 minutes and is forgotten; it was at id 7" in caplog.text
    assert again.save() is True, "that it is gone is kept at once"
    assert list(on_disk(disk)) == ["here"]


def test_who_comes_back_is_away_from_its_next_leaving_on_and_warned_of_again(
    known: Subscriptions, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    me = add(known, "me")
    for _ in range(2):
        clock.now += 900
        known.expire()
        assert me.away == 900
        known.come("me")
        assert me.away == 0
        clock.now += 5000
        known.expire()
        assert me.away == 0
        known.leave("me")
    assert len(caplog.records) == 2
    clock.now += 3
    known.leave("me")  # whoever says so twice
    assert me.away == 3


def test_a_name_that_is_used_again_begins_anew(
    known: Subscriptions, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    add(known, "me")
    known.come("me")
    known.remove("me")
    assert (known.get("me"), len(known)) == (None, 0)
    me = add(known, "me")
    clock.now += 900
    known.expire()
    assert me.away == 900, "the one before was there, this one is not"
    known.remove("me")
    add(known, "me")
    clock.now += 900
    known.expire()
    assert len(caplog.records) == 2
    known.remove("nobody")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (59.9, "59.9 s"),
        (60, "1.0 minutes"),
        (3600, "1.0 hours"),
        (86_400, "1.0 days"),
        (86_399, "24.0 hours"),
    ],
)
def test_times_are_told_in_their_own_unit(
    disk: Disk, clock: Clock, caplog: pytest.LogCaptureFixture, seconds: float, words: str
) -> None:
    known = Subscriptions(LogStorage(disk), 100, seconds, clock)
    add(known, "me")
    clock.now += seconds
    known.expire()
    assert f"was away for {words} and is forgotten" in caplog.text


# What the log keeps for them.


def test_the_log_keeps_what_the_one_that_is_least_far_needs(known: Subscriptions) -> None:
    assert known.earliest_needed is None
    add(known, "a", 9)
    add(known, "b", 7)
    assert known.earliest_needed == 7
    known.remove("b")
    assert known.earliest_needed == 9


def test_the_beginning_of_a_new_one_is_held_until_the_writer_has_heard_of_it(
    known: Subscriptions, disk: Disk, clock: Clock
) -> None:
    def held() -> int | None:
        record = ReaderRecords(LogStorage(disk)).read(READER)
        return None if record is None else record.needs(0)

    known.let_go()  # nothing yet
    with known.placing():
        known.hold(7)
    assert held() == 7
    clock.now += 2
    known.hold(9)
    assert held() == 7, "both need it"
    known.hold(5)
    assert held() == 5
    clock.now += 2.9
    known.let_go()
    assert held() == 5
    clock.now += 0.1
    known.let_go()
    assert held() is None
    known.hold(9)
    assert held() == 9
