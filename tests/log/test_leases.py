"""Leases: what a log keeps for each reader, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from tests.log.machines import Machines, Watched, fill, no_answer
from tests.support import wait_for
from zmq_datasource.errors import DataLossError, LogFormatError, LogLockedError
from zmq_datasource.log.head import Head
from zmq_datasource.log.leases import Lease, LeaseFiles, Reader, SubscriberNotes
from zmq_datasource.log.records import read_object
from zmq_datasource.log.silence import Leases
from zmq_datasource.log.storage import LogStorage

DAY = 86_400.0
END = 1 << 40  # of the log


@pytest.fixture
def storage(anywhere: Machines) -> LogStorage:
    made = anywhere.storage()
    made.open_log()
    return made


@pytest.fixture
def files(storage: LogStorage) -> LeaseFiles:
    return LeaseFiles(storage)


class Writers:
    """The writers of a log, one after the other, on a machine with two clocks."""

    def __init__(self, storage: LogStorage, keeps_unread: bool = True) -> None:
        self.storage = storage
        self.monotonic, self.wall = 100.0, 1e9
        self.head = Head(at=self.wall)
        self.leases = Leases(storage, keeps_unread=keeps_unread, clock=lambda: self.monotonic)

    def start(self, end: int = END) -> None:
        self.leases.continue_from(self.head, self.wall, end)

    def look(self, seconds: float = 1.0, full: bool = False) -> int:
        self.monotonic += seconds
        self.wall += seconds
        return self.leases.look(END, full)

    def stop(self) -> None:
        self.head = Head(silent=self.leases.silent, at=self.wall)

    def silence(self, name: str) -> float:
        lease = LeaseFiles(self.storage).read(name)
        return 0.0 if lease is None else self.leases.silent[lease.beat]

    def names(self) -> set[str]:
        return set(LeaseFiles(self.storage).entries())


@contextmanager
def reading(storage: LogStorage, name: str | None = "desk", **settings: Any) -> Iterator[Reader]:
    made = Reader(storage, name, settings.pop("timeout", DAY), settings.pop("retry_timeout", 0.0))
    for setting, value in settings.items():
        setattr(made, setting, value)
    try:
        yield made
    finally:
        made.close()


# What is needed.


def test_everything_is_needed_before_the_first_lease_and_then_what_a_lease_needs(
    storage: LogStorage, files: LeaseFiles
) -> None:
    writers = Writers(storage)
    writers.start()
    assert writers.look() == 0
    files.write(Lease("a", 20, DAY))
    files.write(Lease("b", 10, DAY))
    assert writers.look() == 10
    files.write(Lease("b", 30, DAY))
    assert writers.look() == 20


def test_a_proxy_keeps_nothing_for_nobody(storage: LogStorage, files: LeaseFiles) -> None:
    writers = Writers(storage, keeps_unread=False)
    writers.start()
    assert writers.look() == END
    files.write(Lease("billing", 10, 2.0, subscriber=SubscriberNotes(7, [])))
    assert [writers.look() for _ in range(4)] == [10, 10, 10, END]


def test_a_lease_is_dropped_after_its_timeout_and_a_living_one_is_not(
    storage: LogStorage, files: LeaseFiles, caplog: pytest.LogCaptureFixture
) -> None:
    writers = Writers(storage)
    writers.start()
    files.write(Lease("silent", 5, 10.0))
    for second in range(12):
        files.write(Lease("alive", 7, 10.0))  # it does not move
        assert writers.look() == (5 if second <= 10 else 7)
    assert writers.names() == {"alive"}
    assert "dropped the lease of reader 'silent'" in caplog.text


def test_a_lease_of_a_running_reader_is_not_dropped(storage: LogStorage, files: LeaseFiles) -> None:
    writers = Writers(storage)
    writers.start()
    hold = files.hold("desk")
    files.write(Lease("desk", 5, 1.0, named=False))
    files.write(Lease("other", 7, DAY))
    assert [writers.look(full=True) for _ in range(5)] == [5] * 5
    hold.release()
    assert writers.look() == 7


def test_if_none_lives_the_last_lease_counts(storage: LogStorage, files: LeaseFiles) -> None:
    writers = Writers(storage)
    writers.start()
    for number in range(3):
        files.write(Lease(f"r{number}", 10 * number, 1.0))
    assert [writers.look() for _ in range(5)][-1] == 20
    assert writers.names() == {"r2"}


def test_a_query_without_a_name_makes_room_in_a_full_log(
    storage: LogStorage, files: LeaseFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    writers = Writers(storage)
    writers.start()
    files.write(Lease("query-1", 5, DAY, named=False))
    files.write(Lease("desk", 9, DAY))
    assert [writers.look() for _ in range(3)] == [5] * 3
    assert writers.look(full=True) == 9
    assert [record.levelname for record in caplog.records] == ["INFO"], (
        "each run leaves one: that is no warning"
    )


# Silence.


def test_many_short_runs_of_a_writer_drop_leases_of_no_name(storage: LogStorage, files: LeaseFiles) -> None:
    """As a query with Trigger.AvailableNow every five minutes: each run leaves a lease."""
    writers, most = Writers(storage), 0
    for run in range(60):
        writers.start()
        files.write(Lease(f"query-{run}", run, 3600.0))
        writers.look(5.0)
        writers.stop()
        writers.wall += 295
        most = max(most, len(writers.names()))
    assert most <= 14, "an hour has twelve runs"


def test_silence_is_summed_over_writers_and_ends_with_a_sign_of_life(
    storage: LogStorage, files: LeaseFiles
) -> None:
    writers = Writers(storage)
    files.write(Lease("desk", 1, 10.0))
    files.write(Lease("away", 2, 10.0))
    for run in range(4):
        writers.start()
        files.write(Lease("alive", 3, 10.0))
        for _ in range(3):
            writers.look()
        writers.stop()
        if run == 2:
            files.write(Lease("desk", 1, 10.0))  # it has run while no writer did
    assert writers.names() == {"desk", "alive"}


def test_one_jump_of_the_wall_clock_drops_nothing(storage: LogStorage, files: LeaseFiles) -> None:
    files.write(Lease("desk", 1, 7 * DAY))
    files.write(Lease("alive", 2, DAY))
    writers = Writers(storage)
    for jump in (8 * DAY, -8 * DAY, -365 * DAY, 365 * DAY):
        writers.start()
        writers.look()
        writers.wall += jump
        files.write(Lease("alive", 2, DAY))
        assert writers.look() == 1
        writers.stop()
        writers.wall += jump  # and while no writer runs
    writers.start()
    assert writers.look() == 1
    assert writers.silence("desk") < 4 * DAY


def test_time_in_which_a_machine_was_stopped_is_not_silence(storage: LogStorage, files: LeaseFiles) -> None:
    files.write(Lease("desk", 1, 60.0))
    files.write(Lease("other", 2, DAY))
    writers = Writers(storage)
    writers.start()
    writers.look()
    assert writers.look(DAY) == 1
    assert writers.silence("desk") <= 5


def test_a_lease_that_is_written_during_a_look_is_not_silent_for_that_long(
    storage: LogStorage, files: LeaseFiles
) -> None:
    writers, store = Writers(storage), storage.store
    assert isinstance(store, Watched)
    writers.start()

    def write_after_a_stall(verb: str, key: str) -> None:
        store.before = None
        writers.monotonic += 3.0
        files.write(Lease("desk", 1, 60.0))

    store.before = write_after_a_stall
    writers.look()
    writers.look()
    assert writers.silence("desk") == 1.0


def test_10_000_leases_cost_one_listing_after_they_were_read_once(
    storage: LogStorage, files: LeaseFiles
) -> None:
    for number in range(50):
        files.write(Lease(f"r{number}", number, DAY))
    store = storage.store
    assert isinstance(store, Watched)
    writers = Writers(storage)
    writers.start()
    assert store.calls["open"] >= 50
    store.calls.clear()
    writers.look()
    assert dict(store.calls) == {"list": 1}
    files.write(Lease("r7", 7, DAY))
    store.calls.clear()
    assert writers.look() == 0
    assert (store.calls["list"], store.calls["open"]) == (1, 1)


# Damage.


def test_one_damaged_lease_needs_everything_and_the_others_go_on(
    storage: LogStorage, files: LeaseFiles, caplog: pytest.LogCaptureFixture
) -> None:
    writers = Writers(storage)
    files.write(Lease("good", 5, DAY))
    files.write(Lease("bad", 9, DAY))
    content = read_object(storage.store, "readers/bad.json")
    assert content is not None
    storage.store.put("readers/bad.json", content.replace(b'"next":9', b'"next":99'))
    writers.start()
    assert writers.look() == 0
    assert "bad.json: it is not the lease of a reader" in caplog.text
    assert f"zmq-datasource log readers drop {storage.root} bad" in caplog.text
    with pytest.raises(LogFormatError, match=r"bad\.json"):
        Reader(storage, "bad", DAY)
    with reading(storage, "good") as reader:
        assert reader.found is not None
        assert reader.found.next == 5
    files.remove("bad")
    assert writers.look() == 5


def test_a_log_that_ends_before_a_position_is_not_opened(storage: LogStorage, files: LeaseFiles) -> None:
    files.write(Lease("desk", 5, DAY))
    with pytest.raises(DataLossError, match="it ends at id 4, and reader 'desk' has read the ids below 5"):
        Writers(storage).start(end=4)


# A reader.


def test_two_live_queries_of_one_name_are_refused(anywhere: Machines) -> None:
    storage = anywhere.storage()
    storage.open_log()
    with reading(storage) as reader:
        reader.open()
        with pytest.raises(LogLockedError, match=r"as reader=desk.*give each query a reader of its own"):
            _open_at_once(anywhere.storage())
    _open_at_once(anywhere.storage()).close()


def test_a_query_that_has_lost_its_name_does_not_try_to_write_again_and_again(storage: LogStorage) -> None:
    """A batch may last an hour. The query ends when it is over."""
    storage.open_log()
    attempts: list[float] = []

    class Counting(Reader):
        def write(self) -> None:
            attempts.append(time.monotonic())
            super().write()

    reader = Counting(storage, "desk", DAY)
    reader.beat_seconds = 0.2
    reader.open()
    try:
        reader._hold = Mock(wraps=reader._hold, lost="process 7 elsewhere")
        wait_for(lambda: len(attempts) > 1, "a try")
        time.sleep(1)
        assert len(attempts) < 10
        with pytest.raises(LogLockedError, match="has lost the name to process 7 elsewhere"):
            reader.move(1)
    finally:
        reader.close()


def _open_at_once(storage: LogStorage) -> Reader:
    class Impatient(Reader):
        hold_seconds = 0.0

    return Impatient(storage, "desk", DAY)


def test_a_new_reader_keeps_everything_until_it_has_chosen_where_to_begin(
    storage: LogStorage, files: LeaseFiles
) -> None:
    with reading(storage, move_seconds=0.0) as reader:
        assert reader.found is None
        assert reader.open() == 0
        assert _next(files) == 0
        reader.begin(7)
        assert _next(files) == 7
        reader.move(9)
        wait_for(lambda: _next(files) == 9, "the lease to be written")
    with reading(storage) as reader:
        assert reader.found == replace(files.read("desk") or reader.found, beat=reader.found.beat)
        reader.open()
        assert _next(files) == 0


def test_a_query_without_a_checkpoint_begins_again_where_it_has_begun(
    storage: LogStorage, files: LeaseFiles
) -> None:
    with reading(storage) as reader:
        reader.open()
        reader.begin(7)
    with reading(storage) as reader:
        assert reader.found is not None
        assert (reader.found.next, reader.found.begins) == (7, True)
        reader.open()
        assert _next(files) == 7


def test_a_query_that_does_not_start_leaves_the_lease_as_it_was(
    storage: LogStorage, files: LeaseFiles
) -> None:
    reader = Reader(storage, "desk", DAY)
    reader.open()
    reader.close(started=False)
    assert files.entries() == {}
    files.write(Lease("desk", 5, DAY))
    reader = Reader(storage, "desk", DAY)
    reader.open()
    reader.close(started=False)
    assert _next(files) == 5


def test_a_lease_is_written_at_most_once_a_second_and_as_a_sign_of_life(
    storage: LogStorage, files: LeaseFiles
) -> None:
    store = storage.store
    assert isinstance(store, Watched)
    with reading(storage, move_seconds=0.5, beat_seconds=0.2) as reader:
        reader.open()
        beats = {_lease(files).beat}
        wait_for(lambda: len(beats | {_lease(files).beat}) > 1, "a sign of life without a move")
        store.calls.clear()
        written = threading.Event()
        store.before = lambda verb, key: written.set() if verb == "put" else None
        for number in range(1000):
            reader.move(number)
        assert written.wait(10)
        assert store.calls["put"] <= 1
        store.before = None
    assert _next(files) == 999, "the last position is written at the end"


def test_a_position_that_the_store_refuses_is_written_later(
    storage: LogStorage, files: LeaseFiles, caplog: pytest.LogCaptureFixture
) -> None:
    store = storage.store
    assert isinstance(store, Watched)
    with reading(storage, move_seconds=0.05) as reader:
        reader.open()
        store.before = no_answer
        reader.move(3)
        wait_for(lambda: "writing the lease of reader 'desk'" in caplog.text, "the warning")
        store.before = None
        wait_for(lambda: _next(files) == 3, "the lease")


def _lease(files: LeaseFiles) -> Lease:
    found = files.read("desk")
    assert found is not None
    return found


def _next(files: LeaseFiles) -> int:
    return _lease(files).next


# A log and its leases.


def test_a_writer_drops_no_lease_after_another_has_taken_its_place(anywhere: Machines) -> None:
    storage = anywhere.storage()
    files = LeaseFiles(anywhere.storage())
    first = anywhere.writer(storage)
    fill(first, b"0")
    anywhere.lose_lock()
    fill(anywhere.writer(), b"1")
    wait_for(lambda: first.failure, "the failure")
    files.write(Lease("expired", 0, 1.0))
    files.write(Lease("other", 0, DAY))
    writers = Writers(storage)
    writers.start()
    with pytest.raises(LogLockedError):
        for _ in range(5):
            writers.look()
    assert writers.names() == {"expired", "other"}
