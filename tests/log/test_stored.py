"""A log in object storage: what is durable is there, another machine goes on, and no id is read from two writers."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.log.test_state import Carrying
from tests.support import batch_of, wait_for
from zmq_datasource.errors import (
    DataLossError,
    DiskFaultError,
    LogFormatError,
    LogLockedError,
    LogWriteError,
    OptionError,
)
from zmq_datasource.host.object_store import ObjectStore
from zmq_datasource.log import files as files_module
from zmq_datasource.log import restoring as restoring_module
from zmq_datasource.log import sealer as sealer_module
from zmq_datasource.log import stored as stored_module
from zmq_datasource.log import tenure as tenure_module
from zmq_datasource.log.claims import new_claim
from zmq_datasource.log.follower import LogFollower
from zmq_datasource.log.layout import LOCK_NAME, Chunk, stored_log_name
from zmq_datasource.log.reader import Slice, read_index, read_slices, slices
from zmq_datasource.log.reader_files import ReaderRecord
from zmq_datasource.log.readers import Reader, Readers
from zmq_datasource.log.retention import Retention
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.stored import StoredLog, storage_at
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.options.offsets import Offset
from zmq_datasource.options.types import Location, Position
from zmq_datasource.workbench.log import seek_reader


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_module, "_CREATING_SECONDS", 0.0)
    monkeypatch.setattr(tenure_module, "_LOOKING_SECONDS", 0.02)
    monkeypatch.setattr(StoredLog, "leisure", 0.0)


class Machines:
    """Machines that see nothing of each other but one storage; each has a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.location = Location(f"file://{path}/store")
        self.running: list[LogWriter] = []

    def storage(self, machine: str) -> StoredLog:
        found = storage_at(str(self.path / machine), 0, self.location)
        assert isinstance(found, StoredLog)
        return found

    def writer(
        self, machine: str, storage: StoredLog | None = None, wait: float = 0.0, **changes: object
    ) -> LogWriter:
        settings: dict[str, object] = {"chunk_bytes": 1 << 20, "max_bytes": 1 << 30}
        made = LogWriter(storage or self.storage(machine), **{**settings, **changes})  # type: ignore[arg-type]
        made.open(wait)
        self.running.append(made)
        return made

    def kill(self, log: LogWriter) -> None:
        kill(log)
        self.running.remove(log)

    def rows(self, machine: str = "reader", patience: float = 0.0) -> list[tuple[int, bytes]]:
        """What a machine without a directory reads."""
        storage = self.storage(machine)
        storage.patience = patience
        index = read_index(storage)
        pieces = slices(index.covering(index.earliest, index.end), index.earliest, index.end)
        found = []
        for batch in read_slices(storage, pieces):
            found += zip(batch.column("id").to_pylist(), batch.column("value").to_pylist(), strict=True)
        return found

    def keys(self, below: str) -> list[str]:
        return sorted(found.key for found in ObjectStore(self.location).objects(f"0/{below}", below=True))


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    made = Machines(tmp_path)
    yield made
    for log in made.running:
        log.close()


def kill(log: LogWriter) -> None:
    """What is left of a process that was killed: its lock is free, and it says nothing any more."""
    tenure = log._sealer._lock
    assert isinstance(tenure, tenure_module.Tenure)
    tenure._ending.set()
    tenure._thread.join()
    tenure._lock.release()
    log._sealer._lock = None


def fill(log: LogWriter, *values: bytes) -> int:
    log.append(batch_of(list(values)))
    return log.cut().result(10)


def numbered(*values: bytes) -> list[tuple[int, bytes]]:
    return list(enumerate(values))


def test_another_machine_goes_on_where_the_first_has_ended(machines: Machines) -> None:
    log = machines.writer("a")
    fill(log, b"0", b"1")
    fill(log, b"2")
    log.close()
    log = machines.writer("b")
    assert log.durable_end == 3
    fill(log, b"3")
    assert machines.rows() == numbered(b"0", b"1", b"2", b"3")
    assert not (machines.path / "reader").exists()


def test_a_log_has_the_same_id_everywhere(machines: Machines) -> None:
    log = machines.writer("a")
    log.close()
    assert machines.writer("b").log_id == log.log_id == machines.storage("reader").log_id()


def test_a_machine_that_has_a_copy_reads_only_what_is_new(machines: Machines) -> None:
    log = machines.writer("a")
    fill(log, b"0")
    log.close()
    other = machines.writer("b")
    fill(other, b"1")
    other.close()
    before = {entry.name: entry.stat().st_ino for entry in os.scandir(machines.path / "a" / "0")}
    again = machines.writer("a")
    assert again.durable_end == 2
    after = {entry.name: entry.stat().st_ino for entry in os.scandir(machines.path / "a" / "0")}
    first = Chunk(0, 1, 0, 0.0).name
    assert after[first] == before[first]


def test_nothing_counts_as_durable_while_the_storage_is_away(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = machines.writer("a", retry_timeout=60.0)
    away = threading.Event()
    away.set()
    put = ObjectStore.put

    def refusing(self: ObjectStore, key: str, content: bytes) -> None:
        if away.is_set():
            raise DiskFaultError(f"writing {self}/{key}: it does not answer")
        put(self, key, content)

    monkeypatch.setattr(ObjectStore, "put", refusing)
    log.append(batch_of([b"0"]))
    done = log.cut()
    wait_for(lambda: log.fault is not None, "a fault")
    assert not done.done()
    assert log.durable_end == 0
    away.clear()
    assert done.result(10) == 1
    assert log.fault is None
    assert machines.rows() == numbered(b"0")


@pytest.mark.parametrize("where", ["before", "after"])
def test_what_was_sealed_when_the_process_died_is_put_there_later(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    log = machines.writer("a")
    fill(log, b"0")
    upload = ObjectStore.upload

    def dying(self: ObjectStore, key: str, path: Path) -> None:
        if where == "after":
            upload(self, key, path)
        raise LogWriteError("killed")

    monkeypatch.setattr(ObjectStore, "upload", dying)
    log.append(batch_of([b"1"]))
    with pytest.raises(LogWriteError, match="killed"):
        log.cut().result(10)
    machines.kill(log)
    monkeypatch.setattr(ObjectStore, "upload", upload)
    log = machines.writer("a")  # at once: who had this directory is gone
    assert log.durable_end == 2
    fill(log, b"2")
    assert machines.rows() == numbered(b"0", b"1", b"2")
    assert not [name for name in os.listdir(machines.path / "a" / "0") if "pending" in name]


def test_what_was_sealed_is_dropped_with_a_word_if_another_machine_has_gone_on(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tenure_module, "SILENT_SECONDS", 0.1)
    log = machines.writer("a")
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "upload", _refuse)
        log.append(batch_of([b"lost", b"lost"]))
        with pytest.raises(LogWriteError):
            log.cut().result(10)
    machines.kill(log)
    other = machines.writer("b", wait=5.0)
    fill(other, b"0")
    other.close()
    machines.writer("a")
    assert "the ids 0 to 1 were received here and not put there" in caplog.text
    assert machines.rows() == numbered(b"0")


def test_what_was_sealed_follows_if_another_machine_has_written_nothing(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenure_module, "SILENT_SECONDS", 0.1)
    log = machines.writer("a", carried=Carrying("one"))
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "upload", _refuse)
        log.append(batch_of([b"0"]))
        with pytest.raises(LogWriteError):
            log.cut().result(10)
    machines.kill(log)
    machines.writer("b", wait=5.0, carried=Carrying("two")).close()
    again = machines.writer("a")
    assert (again.durable_end, again.saved) == (1, b"one")


def _refuse(*_: object) -> None:
    raise LogWriteError("killed")


def test_a_writer_that_is_alive_keeps_other_machines_away(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenure_module, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(tenure_module, "SILENT_SECONDS", 0.5)
    log = machines.writer("a")
    with pytest.raises(LogLockedError, match=r"held by process \d+ on .* no sign of life"):
        machines.writer("b", wait=1.0)
    assert machines.storage("b").is_written()
    fill(log, b"0")
    machines.kill(log)
    storage = machines.storage("b")
    wait_for(lambda: not storage.is_written(), "the writer counts as gone")
    machines.writer("b", storage, wait=5.0)


def test_a_writer_that_was_killed_is_missed_at_once_on_its_own_machine(machines: Machines) -> None:
    log = machines.writer("a")
    storage = machines.storage("a")
    assert storage.is_written()
    machines.kill(log)
    assert not storage.is_written()
    machines.writer("a", storage)


def test_a_writer_that_ends_lets_others_in_at_once(machines: Machines) -> None:
    machines.writer("a").close()
    machines.writer("b").close()


def test_a_writer_that_was_away_finds_out_before_it_counts_anything_as_durable(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenure_module, "_BEAT_SECONDS", 60.0)
    monkeypatch.setattr(tenure_module, "SILENT_SECONDS", 0.1)
    stalled = machines.writer("a")
    fill(stalled, b"0")
    other = machines.writer("b", wait=5.0)
    fill(other, b"1")
    stalled.append(batch_of([b"never"]))
    with pytest.raises(LogLockedError, match=r"has lost it to process"):
        stalled.cut().result(10)
    assert stalled.durable_end == 1
    assert machines.rows() == numbered(b"0", b"1")
    with pytest.raises(LogLockedError):
        stalled.close()
    machines.running.remove(stalled)
    fill(other, b"2")
    assert machines.rows() == numbered(b"0", b"1", b"2")


def test_what_a_lost_writer_has_left_is_read_by_nobody_and_deleted(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenure_module, "_BEAT_SECONDS", 60.0)
    monkeypatch.setattr(tenure_module, "SILENT_SECONDS", 0.1)
    stalled = machines.writer("a")
    fill(stalled, b"0")
    other = machines.writer("b", wait=5.0)
    stalled.append(batch_of([b"never", b"never"]))
    with pytest.raises(LogLockedError):
        stalled.cut().result(10)
    assert len(machines.keys("chunks")) == 2
    assert machines.rows() == numbered(b"0")
    fill(other, b"1")
    assert machines.rows() == numbered(b"0", b"1")
    with pytest.raises(LogLockedError):
        stalled.close()
    machines.running.remove(stalled)
    other.close()
    machines.writer("c", wait=5.0)
    assert len(machines.keys("chunks")) == 2


def test_who_reads_elsewhere_follows(machines: Machines) -> None:
    log = machines.writer("a")
    fill(log, b"0")
    follower = LogFollower(machines.storage("reader"))
    follower.look()
    assert follower.durable_end == 1
    fill(log, b"1", b"2")

    def sees(end: int) -> Callable[[], bool]:
        def look() -> bool:
            follower.look()
            return follower.durable_end == end

        return look

    wait_for(sees(3), "the new chunk")
    log.commit(2)
    assert machines.rows() == [(1, b"1"), (2, b"2")]
    wait_for(lambda: (follower.look(), follower.earliest == 1)[1], "the deletion")


def test_who_has_the_directory_reads_from_it(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    log = machines.writer("a")
    fill(log, b"0")
    opened = []
    monkeypatch.setattr(ObjectStore, "open", lambda self, key, whole: opened.append(key))
    assert machines.rows("a") == numbered(b"0")
    assert opened == []


def test_what_a_query_elsewhere_needs_is_not_deleted(machines: Machines) -> None:
    log = machines.writer("a")
    for value in (b"0", b"1", b"2"):
        fill(log, value)
    elsewhere = machines.storage("reader")
    position = Reader(elsewhere, "far", 1e9)
    position.place(lambda: {0: read_index(elsewhere).earliest})
    log.commit(3)
    assert [first for first, _ in machines.rows()] == [0, 1, 2]
    position.move({0: 2}, lazily=False)
    log.commit(3)
    assert [first for first, _ in machines.rows()] == [2]
    position.discard()
    assert machines.keys("readers") == []


def test_a_query_that_begins_beside_a_deletion_begins_behind_it(machines: Machines) -> None:
    """It lists the log, the writer deletes all that nobody needs, and only then the query's position is there."""
    log = machines.writer("a")
    for value in (b"0", b"1"):
        fill(log, value)
    elsewhere = machines.storage("reader")
    looks = []

    def look() -> dict[int, int]:
        looks.append(read_index(elsewhere).earliest)
        log.commit(2)
        return {0: looks[-1]}

    position = Reader(elsewhere, "far", 1e9)
    position.place(look)
    position.end()
    assert looks == [0, 1]
    assert {name: record.next for name, record in elsewhere.readers().items()} == {"far": {0: 1}}


def test_a_query_that_begins_during_a_deletion_waits_for_its_end(machines: Machines) -> None:
    log = machines.writer("a")
    for value in (b"0", b"1"):
        fill(log, value)
    elsewhere = machines.storage("reader")
    here = log._storage
    assert isinstance(here, StoredLog)
    here.announce_deletion()  # and the positions are read before the query's is there
    looks = []

    def look() -> dict[int, int]:
        looks.append(read_index(elsewhere).earliest)
        return {0: looks[-1]}

    position = Reader(elsewhere, "far", 1e9)
    placing = threading.Thread(target=position.place, args=(look,))
    placing.start()
    wait_for(lambda: bool(looks), "the first look")
    ObjectStore(machines.location).delete(here.chunk_key(here.succession().newest, Chunk(0, 1, 0, 0.0).name))
    here.end_deletion()
    placing.join(10)
    assert looks == [0, 1]
    assert {name: record.next for name, record in elsewhere.readers().items()} == {"far": {0: 1}}
    position.end()


def test_a_reader_that_is_put_back_during_a_deletion_is_put_behind_it(machines: Machines) -> None:
    here = machines.storage("a")
    log = machines.writer("a", here)
    for value in (b"0", b"1"):
        fill(log, value)
    elsewhere = machines.storage("reader")
    position = Reader(elsewhere, "far", 1e9)
    position.move({0: 2}, lazily=False)
    position.end()
    here.announce_deletion()  # and the reader's position is read before it is put back
    places: list[dict[int, int]] = []
    seeking = threading.Thread(
        target=lambda: places.append(seek_reader(elsewhere, "far", Position.read("earliest")))
    )
    seeking.start()
    wait_for(lambda: machines.storage("looking").readers()["far"].next == {0: 0}, "the first record")
    ObjectStore(machines.location).delete(here.chunk_key(here.succession().newest, Chunk(0, 1, 0, 0.0).name))
    here.end_deletion()
    seeking.join(10)
    assert places == [{0: 1}]
    assert machines.storage("looking").readers()["far"].next == {0: 1}


def test_a_seek_whose_id_is_deleted_meanwhile_leaves_the_reader_where_it_was(machines: Machines) -> None:
    here = machines.storage("a")
    log = machines.writer("a", here)
    for value in (b"0", b"1"):
        fill(log, value)
    elsewhere = machines.storage("reader")
    position = Reader(elsewhere, "far", 1e9)
    position.move({0: 2}, lazily=False)
    position.end()
    before = machines.storage("looking").readers()["far"]
    here.announce_deletion()
    errors: list[OptionError] = []

    def seek() -> None:
        with pytest.raises(OptionError) as e:
            seek_reader(elsewhere, "far", Position(None, Offset(None, {0: 0})))
        errors.append(e.value)

    seeking = threading.Thread(target=seek)
    seeking.start()
    wait_for(lambda: machines.storage("looking").readers()["far"].next == {0: 0}, "the first record")
    ObjectStore(machines.location).delete(here.chunk_key(here.succession().newest, Chunk(0, 1, 0, 0.0).name))
    here.end_deletion()
    seeking.join(10)
    assert "has the ids 1 to 1" in str(errors[0])
    assert machines.storage("looking").readers()["far"] == before


def test_ids_that_a_query_has_read_are_not_given_again(machines: Machines) -> None:
    log = machines.writer("a")
    fill(log, b"0")
    position = Reader(machines.storage("reader"), "far", 1e9)
    position.move({0: 5}, lazily=False)
    position.end()
    log.close()
    with pytest.raises(DataLossError, match="has read the ids below 5"):
        machines.writer("b")


def test_a_directory_of_another_log_is_refused(machines: Machines) -> None:
    LogStorage(str(machines.path / "b")).open_log()
    machines.writer("a").close()
    with pytest.raises(LogFormatError, match="set another walLocation, or another walStore"):
        machines.writer("b")


def test_a_log_that_was_only_here_is_put_there(machines: Machines) -> None:
    log = LogWriter(LogStorage(str(machines.path / "a")), chunk_bytes=1 << 20, max_bytes=1 << 30)
    log.open()
    fill(log, b"0")
    fill(log, b"1")
    log.commit(1)
    log.close()
    again = machines.writer("a")
    assert again.log_id == log.log_id
    fill(again, b"2")
    assert machines.rows() == [(1, b"1"), (2, b"2")]


@pytest.mark.parametrize("machine", ["a", "b"], ids=["with its copy", "elsewhere"])
def test_a_log_of_format_1_is_refused_with_what_to_do(machines: Machines, machine: str) -> None:
    log = machines.writer("a")
    fill(log, b"0")
    log.close()
    store = ObjectStore(machines.location)
    store.delete(stored_log_name(log.log_id))
    store.put(f"log-1-{log.log_id}.json", b"{}")

    drain = (
        r"store.*version 1, .* to its end with the release that wrote it; .* new walStore .* new walLocation"
    )
    with pytest.raises(LogFormatError, match=drain):
        machines.writer(machine)
    with pytest.raises(LogFormatError, match=drain):
        machines.storage("reader").log_id()


@pytest.mark.parametrize("machine", ["a", "b"], ids=["with its copy", "elsewhere"])
def test_chunks_in_a_storage_that_has_lost_the_logs_id_are_refused(machines: Machines, machine: str) -> None:
    log = machines.writer("a")
    for value in (b"0", b"1"):
        fill(log, value)
    log.close()
    store = ObjectStore(machines.location)
    key = stored_log_name(log.log_id)
    content = store.get(key)
    store.delete(key)

    says = r"opening the log in file://.*/store.*is missing.*ids from 0 on to 1.*Put that object there again"
    with pytest.raises(LogFormatError, match=says):
        machines.writer(machine)
    with pytest.raises(LogFormatError, match=says):
        machines.storage("reader").log_id()

    store.put(key, content)
    again = machines.writer(machine)
    assert (again.log_id, again.durable_end) == (log.log_id, 2)


def make_hole(machines: Machines) -> None:
    """A log of three chunks, whose second one is gone from the storage."""
    log = machines.writer("a")
    for value in (b"0", b"1", b"2"):
        fill(log, value)
    storage = machines.storage("a")
    storage.store.delete(storage.chunk_key(storage.succession().newest, Chunk(1, 2, 0, 0.0).name))
    log.close()


def test_a_hole_in_the_storage_is_an_error(machines: Machines) -> None:
    make_hole(machines)
    with pytest.raises(LogFormatError, match=r"opening log file://.*/store"):
        machines.writer("b")


def test_foreign_objects_are_left_alone(machines: Machines) -> None:
    store = ObjectStore(machines.location)
    for key in ("readme.txt", "0/notes", "0/chunks/readme.txt", "0/claims/else.json", "7x/chunks/a"):
        path = machines.path / "store" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"foreign")
    log = machines.writer("a")
    fill(log, b"0")
    log.close()
    log = machines.writer("b")
    assert machines.rows() == numbered(b"0")
    assert store.get("0/chunks/readme.txt") == b"foreign"
    assert machines.storage("b").partitions() == [0]


def test_claims_do_not_pile_up(machines: Machines) -> None:
    for turn in range(6):
        log = machines.writer("ab"[turn % 2])
        fill(log, b"%d" % turn)
        log.commit(turn + 1)
        log.close()
    assert len(machines.keys("claims")) <= 4
    assert machines.rows() == [(5, b"5")]
    assert machines.keys("alive") == []


def test_two_partitions_are_written_from_two_machines(machines: Machines) -> None:
    one = machines.writer("a")
    two = machines.writer("b", machines.storage("b").of(1))
    fill(one, b"0")
    fill(two, b"1")
    assert machines.storage("reader").partitions() == [0, 1]
    assert one.log_id == two.log_id


def test_receivers_hear_from_the_storage_that_they_are_to_end(machines: Machines) -> None:
    machines.writer("a")
    machines.storage("a").ask_to_end("token")
    assert machines.storage("b").is_asked_to_end("token")
    machines.storage("a").remove_end("token")
    assert not machines.storage("c").is_asked_to_end("token")


def test_a_chunk_that_the_next_writer_counts_is_left_by_the_one_that_has_lost_the_log(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had put the chunk, and did not hear that nobody else had claimed the log."""
    monkeypatch.setattr(tenure_module, "_BEAT_SECONDS", 60.0)
    monkeypatch.setattr(tenure_module, "SILENT_SECONDS", 0.1)
    cut_off = machines.writer("a", retry_timeout=60.0)
    check, others = tenure_module.Tenure.check, []

    def unanswered(tenure: tenure_module.Tenure) -> None:
        if tenure is cut_off._sealer._lock and not others:
            raise DiskFaultError("listing: no answer")
        check(tenure)

    monkeypatch.setattr(tenure_module.Tenure, "check", unanswered)
    cut_off.append(batch_of([b"0"]))
    done = cut_off.cut()
    wait_for(lambda: cut_off.fault, "no answer")
    others.append(machines.writer("b", wait=5.0))
    with pytest.raises(LogLockedError):
        done.result(10)
    assert others[0].durable_end == 1
    fill(others[0], b"1")
    assert machines.rows() == numbered(b"0", b"1")
    with pytest.raises(LogLockedError):
        cut_off.close()
    machines.running.remove(cut_off)


def test_a_storage_that_is_away_while_the_log_is_opened_costs_nothing(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sealed and not put there is put there also if the first attempts have confirmed a claim and no more."""
    log = machines.writer("a")
    fill(log, b"0")
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "upload", _refuse)
        log.append(batch_of([b"1"]))
        with pytest.raises(LogWriteError):
            log.cut().result(10)
    machines.kill(log)
    upload, attempts = ObjectStore.upload, []

    def away(self: ObjectStore, key: str, path: Path) -> None:
        attempts.append(key)
        if len(attempts) < 3:
            raise DiskFaultError("writing: no answer")
        upload(self, key, path)

    monkeypatch.setattr(ObjectStore, "upload", away)
    assert machines.writer("a", retry_timeout=60.0).durable_end == 2
    assert machines.rows() == numbered(b"0", b"1")


def test_a_query_that_runs_elsewhere_is_known_to_run(machines: Machines) -> None:
    log = machines.writer("a")
    fill(log, b"0")
    here, elsewhere = machines.storage("a"), machines.storage("reader")
    position = Reader(elsewhere, None, 1e9)
    position.place(lambda: {0: 0})
    for _ in range(2):  # to ask leaves no trace
        assert here.is_reading(position.name)
        assert here.is_reading_elsewhere(position.name)
        assert not elsewhere.is_reading_elsewhere(position.name)
    readers = Readers(here, retention=0.0)
    readers.own = "mine"
    assert readers.needed() == 0
    assert not readers.make_room(1)
    position.end()
    assert not here.is_reading(position.name)
    assert machines.keys("reading") == []
    assert readers.needed() is None  # it has not moved for 0 s, and does not run


def test_a_writer_that_has_nothing_to_write_hears_that_it_has_lost_the_log(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenure_module, "_BEAT_SECONDS", 0.05)
    log = machines.writer("a")
    ObjectStore(machines.location).put("0/claims/9999999999-ffffffffffffffff.json", b"{}")
    assert isinstance(wait_for(lambda: log.failure, "the failure"), LogLockedError)
    with pytest.raises(LogLockedError):
        log.append(batch_of([b"0"]))
    with pytest.raises(LogLockedError):
        log.close()
    machines.running.remove(log)


def test_a_chunk_that_may_not_count_waits_for_the_claim_to_be_confirmed(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_module, "_SETTLING_SECONDS", 0.1)
    log = machines.writer("a")
    fill(log, b"0")
    seen, store = LogFollower(machines.storage("reader")), ObjectStore(machines.location)
    seen.look()
    claim = "0000000002-ffffffffffffffff"
    store.put(f"0/claims/{claim}.json", b"{}")
    log.append(batch_of([b"1"]))
    with pytest.raises(LogLockedError):
        log.cut().result(10)
    seen.look()
    assert seen.durable_end == 1  # what has counted goes on counting
    fresh = LogFollower(machines.storage("late"))
    with pytest.raises(LogLockedError, match="has claimed the log and not said"):
        fresh.look()
    before = machines.keys("claims")[0].partition(".")[0]
    store.put(f"0/claims/{claim}.{before}.{1:020d}.json", b"")
    for follower in (seen, fresh):
        follower.look()
        assert follower.durable_end == 1
    with pytest.raises(LogLockedError):
        log.close()
    machines.running.remove(log)


def test_a_claim_that_comes_to_nothing_is_taken_back(machines: Machines) -> None:
    make_hole(machines)
    for _ in range(3):
        with pytest.raises(LogFormatError):
            machines.writer("b")
    assert len(machines.keys("claims")) == 2
    assert machines.storage("reader").tenures.succession().is_settled


def test_of_two_looks_at_once_the_older_is_not_kept(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would say of the new writer that it is gone, as the one before it is."""
    monkeypatch.setattr(tenure_module, "_LOOKING_SECONDS", 60.0)
    machines.writer("a").close()
    tenures, store = machines.storage("b").tenures, ObjectStore(machines.location)
    looking, go_on, find = threading.Event(), threading.Event(), ObjectStore.find

    def find_late(store: ObjectStore, key: str) -> object:
        found = find(store, key)
        if threading.current_thread().name == "older":
            looking.set()
            assert go_on.wait(30)
        return found

    monkeypatch.setattr(ObjectStore, "find", find_late)
    older = threading.Thread(target=tenures.highest, args=(True,), name="older")
    older.start()
    assert looking.wait(30)
    claim = new_claim(tenures.succession().highest)
    store.put(f"0/alive/{claim}", b"alive")
    store.put(f"0/claims/{claim}.json", b"{}")
    newer = threading.Thread(target=tenures.highest, args=(True,))
    newer.start()
    newer.join(0.2)
    go_on.set()
    for thread in (older, newer):
        thread.join(30)
    assert tenures.gone(0.0) is None
    assert tenures.is_held()


def test_silence_counts_only_while_it_is_listened_to(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage of the storage nobody has been heard, alive or not."""
    monkeypatch.setattr(tenure_module, "_BEAT_SECONDS", 60.0)
    monkeypatch.setattr(tenure_module, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(tenure_module, "_BLIND_SECONDS", 0.2)
    machines.writer("a")
    storage = machines.storage("b")
    assert storage.is_written()
    objects = ObjectStore.objects
    with monkeypatch.context() as away:
        away.setattr(ObjectStore, "objects", _no_answer)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            with pytest.raises(DiskFaultError):
                storage.tenures.highest(anew=True)
    assert ObjectStore.objects is objects
    assert storage.is_written()
    wait_for(lambda: not storage.is_written(), "it has been silent")


def _no_answer(*_: object, **__: object) -> None:
    raise DiskFaultError("listing: no answer")


def test_a_chunk_that_is_deleted_while_it_is_read_is_no_damage(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = machines.writer("a")
    fill(log, *(bytes([i]) * 100_000 for i in range(20)))
    monkeypatch.setattr(stored_module, "_WHOLE_BYTES", 1 << 20)
    opened = ObjectStore.open

    def vanishing(self: ObjectStore, key: str, whole: int) -> Interrupted:
        found = Interrupted(opened(self, key, whole), True)
        self.delete(key)
        return found

    monkeypatch.setattr(ObjectStore, "open", vanishing)
    with pytest.raises(DataLossError, match="it does not exist"):
        machines.rows(patience=30.0)


def test_an_opening_that_is_repeated_deletes_what_is_committed(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first attempt knew of the claims is not what counts after the second."""
    log = machines.writer("a")
    fill(log, b"0")
    fill(log, b"1")
    log.close()
    removed, attempts = StoredLog.remove_temporaries, []

    def refused(self: StoredLog) -> None:
        attempts.append(self)
        if len(attempts) == 1:
            raise DiskFaultError("deleting: no answer")
        removed(self)

    monkeypatch.setattr(StoredLog, "remove_temporaries", refused)
    log = machines.writer("b", retry_timeout=30.0)
    assert len(attempts) >= 2
    for value in (b"2", b"3", b"4"):
        fill(log, value)
    log.commit(4)
    assert [first for first, _ in machines.rows()] == [4]
    assert [key.rpartition("/")[2] for key in machines.keys("chunks")] == [Chunk(4, 5, 0, 0.0).name]


def test_a_part_of_a_log_is_neither_read_nor_written_without_the_storage(machines: Machines) -> None:
    """What it lacks would be given again, and what was written would be taken for deleted."""
    log = machines.writer("a")
    fill(log, b"0")
    log.close()
    machines.writer("b").close()
    for machine in ("a", "b"):
        alone = LogStorage(str(machines.path / machine))
        with pytest.raises(LogFormatError, match="part of a log in object storage"):
            LogWriter(alone, chunk_bytes=1 << 20, max_bytes=1 << 30).open()
        with pytest.raises(LogFormatError, match="part of a log in object storage"):
            alone.log_id()
    machines.location = Location(f"file://{machines.path}/another")
    with pytest.raises(
        LogFormatError, match=r"part of a log in object storage.*set the walStore that the log had"
    ):
        machines.writer("b")


def test_an_object_that_a_crash_has_torn_is_put_there_again(machines: Machines) -> None:
    log = machines.writer("a")
    fill(log, b"0")
    fill(log, b"1")
    log.close()
    (torn,) = (machines.path / "store" / "0" / "chunks").glob(f"*/{Chunk(0, 1, 0, 0.0).name}")
    torn.write_bytes(b"")
    machines.writer("a")
    assert machines.rows() == numbered(b"0", b"1")


def test_a_deletion_that_arrives_late_is_seen(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier writer deletes the first chunk when its successor has listed it."""
    log = machines.writer("a")
    for value in (b"0", b"1", b"2"):
        fill(log, value)
    log.close()
    (first,) = (machines.path / "store" / "0" / "chunks").glob(f"*/{Chunk(0, 1, 0, 0.0).name}")
    tidy = restoring_module._tidy

    def late(*args: Any) -> None:
        tidy(*args)
        first.unlink(missing_ok=True)

    monkeypatch.setattr(restoring_module, "_tidy", late)
    for machine in ("a", "b"):
        log = machines.writer(machine)
        assert log.earliest == 1
        assert machines.rows(machine) == [(1, b"1"), (2, b"2")]
        log.close()


def test_who_has_taken_over_reads_here_what_it_has_sealed(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = machines.writer("a")
    fill(log, b"0")
    log.close()
    reader = machines.storage("b")
    assert [row.num_rows for row in read_slices(reader, [Slice(Chunk(0, 1, 0, 0.0).name, 0, 1)])] == [1]
    fill(machines.writer("b"), b"1")
    opened: list[str] = []
    monkeypatch.setattr(ObjectStore, "open", lambda self, key, whole: opened.append(key))
    assert [row.num_rows for row in read_slices(reader, [Slice(Chunk(1, 2, 0, 0.0).name, 1, 2)])] == [1]
    assert opened == []


def test_a_chunk_that_is_damaged_here_is_read_again(machines: Machines) -> None:
    log = machines.writer("a")
    fill(log, b"0")
    fill(log, b"1")
    log.close()
    path = machines.path / "a" / "0" / Chunk(1, 2, 0, 0.0).name
    path.write_bytes(path.read_bytes()[:-100])
    log = machines.writer("a", sync=False)
    assert log.durable_end == 2
    assert machines.rows("a") == numbered(b"0", b"1")


def test_positions_of_a_log_that_was_only_here_are_put_there(machines: Machines) -> None:
    local = LogStorage(str(machines.path / "a"))
    log = LogWriter(local, chunk_bytes=1 << 20, max_bytes=1 << 30)
    log.open()
    fill(log, b"0")
    position = Reader(local, "named", 1e9)
    position.place(lambda: {0: 0})
    position.end()
    log.close()
    machines.writer("a")
    assert machines.storage("reader").readers()["named"].next == {0: 0}


def test_a_position_that_is_replaced_while_it_is_read_is_read_whole(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 is asked for the size, and then for so many bytes."""
    fill(machines.writer("a"), b"0")
    storage = machines.storage("reader")
    storage.write_reader("one", ReaderRecord({0: 9}))
    get = ObjectStore.get

    def replaced(self: ObjectStore, key: str) -> bytes:
        size = len(get(self, key))
        if key.endswith("one.json"):
            machines.storage("other").write_reader("one", ReaderRecord({0: 10**15}))
        return get(self, key)[:size]

    monkeypatch.setattr(ObjectStore, "get", replaced)
    found = storage.reader("one")
    assert found is not None
    assert found.next == {0: 10**15}


def test_a_deletion_makes_way_for_readers(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealer_module, "_EXPIRY_SECONDS", 3600.0)  # only when it is told to
    monkeypatch.setattr(StoredLog, "deletes_for", 0.0)
    log = machines.writer("a")
    for value in (b"0", b"1", b"2", b"3"):
        fill(log, value)
    log.commit(2)
    assert [first for first, _ in machines.rows()] == [1, 2, 3]
    # A query comes between two rounds: what it begins with stays.
    position = Reader(machines.storage("reader"), "far", 1e9)
    position.place(lambda: {0: read_index(machines.storage("reader")).earliest})
    log.commit(3)
    log.commit(3)
    assert [first for first, _ in machines.rows()] == [1, 2, 3]
    position.discard()
    for _ in range(3):
        log.commit(3)
    assert [first for first, _ in machines.rows()] == [3]


def test_a_chunk_for_which_no_file_can_be_opened_is_put_there_later(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = machines.writer("a", retry_timeout=60.0)
    upload, attempts = ObjectStore.upload, []

    def refused(self: ObjectStore, key: str, path: Path) -> None:
        attempts.append(key)
        if len(attempts) < 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        upload(self, key, path)

    monkeypatch.setattr(ObjectStore, "upload", refused)
    assert fill(log, b"0") == 1
    assert machines.rows() == numbered(b"0")


def test_a_lock_that_cannot_be_looked_at_for_a_moment_is_not_lost(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither where a chunk is put nor where others are deleted: the sealing thread lives, and the log closes."""
    log = machines.writer("a", retry_timeout=60.0)
    read_file, refused = files_module.read_file, []

    def refuse(path: Path | str) -> bytes:
        if Path(path).name == LOCK_NAME and len(refused) < 3:
            refused.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read_file(path)

    monkeypatch.setattr(files_module, "read_file", refuse)
    assert fill(log, b"0") == 1
    assert len(refused) == 3
    fill(log, b"1")
    del refused[1:]
    refused += [None]  # one more
    log.commit(1)
    wait_for(lambda: len(refused) == 3 and not machines.keys("chunks")[1:], "the first chunk is deleted", 20)
    monkeypatch.setattr(Retention, "remove_expired", lambda _: 1 / 0)
    wait_for(lambda: "division by zero" in caplog.text, "a fault where it tidies up", 20)
    assert fill(log, b"2") == 3
    assert machines.rows()[-2:] == numbered(b"0", b"1", b"2")[-2:]


def test_reading_is_tried_again(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    log = machines.writer("a")
    fill(log, b"0")
    opened, attempts = ObjectStore.open, []

    def failing(self: ObjectStore, key: str, whole: int) -> pa.NativeFile:
        attempts.append(key)
        if len(attempts) == 1:
            raise DiskFaultError("reading: no answer")
        return opened(self, key, whole)

    monkeypatch.setattr(ObjectStore, "open", failing)
    with pytest.raises(DiskFaultError):
        machines.rows()  # whoever has no patience hears of it at once
    attempts.clear()
    assert machines.rows(patience=30.0) == numbered(b"0")
    assert len(attempts) == 2


class Interrupted:
    """A file of the storage that does not answer when it is read for the third time, or ever again."""

    def __init__(self, file: pa.NativeFile, for_good: bool) -> None:
        self._file, self._for_good, self._reads = file, for_good, 0
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def read(self, size: int = -1) -> bytes:
        self._reads += 1
        if self._reads == 3 or (self._reads > 3 and self._for_good):
            raise OSError(errno.EIO, "When reading: AWS Error NETWORK_CONNECTION")
        found: bytes = self._file.read(size)
        return found


@pytest.mark.parametrize("for_good", [False, True])
def test_a_storage_that_goes_away_within_a_large_chunk_is_no_damage(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, for_good: bool
) -> None:
    log = machines.writer("a")
    large = [bytes([i]) * 100_000 for i in range(20)]
    fill(log, *large)
    opened = ObjectStore.open
    monkeypatch.setattr(stored_module, "_WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(
        ObjectStore, "open", lambda self, key, whole: Interrupted(opened(self, key, whole), for_good)
    )
    if for_good:
        with pytest.raises(DiskFaultError, match="NETWORK_CONNECTION"):
            machines.rows(patience=0.2)
    else:
        assert machines.rows(patience=30.0) == numbered(*large)


def test_who_takes_over_receives_before_it_reads_what_there_is(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = machines.writer("a", chunk_bytes=4 << 20)
    large = [bytes([i]) * 500_000 for i in range(6)]
    fill(log, *large[:3])
    fill(log, *large[3:])
    log.close()
    read = 0
    opened = ObjectStore.open

    class Counted:
        def __init__(self, file: pa.NativeFile) -> None:
            self._file = file
            self.seek, self.tell, self.close = file.seek, file.tell, file.close

        def read(self, size: int = -1) -> bytes:
            nonlocal read
            found: bytes = self._file.read(size)
            read += len(found)
            return found

    monkeypatch.setattr(ObjectStore, "open", lambda self, key, whole: Counted(opened(self, key, whole)))
    storage = machines.storage("b")
    log = machines.writer("b", storage)
    assert log.durable_end == 6
    fill(log, b"last")
    assert read < 100_000
    assert len(list((machines.path / "b" / "0").glob("*.arrow"))) == 1
    # Nobody can tell the difference: whoever writes reads it, others do, and it is deleted.
    index = read_index(storage)
    rows = read_slices(storage, slices(index.covering(0, 7), 0, 7))
    assert [value for batch in rows for value in batch.column("value").to_pylist()] == [*large, b"last"]
    assert machines.rows("b") == machines.rows() == numbered(*large, b"last")
    assert read > 9_000_000
    log.commit(3)
    assert [first for first, _ in machines.rows()] == [3, 4, 5, 6]
    assert read_index(storage).earliest == 3
    log.commit(7)
    assert [first for first, _ in machines.rows()] == [6]
    assert len(machines.keys("chunks")) == 1


@pytest.mark.parametrize("store", ["s3://key:hunt/er2@bucket/log", "s3://key:hunter2@bucket/log?unknown=1"])
def test_a_location_that_makes_no_sense_is_refused_without_its_secret(tmp_path: Path, store: str) -> None:
    with pytest.raises(OptionError) as refused:
        storage_at(str(tmp_path), store=Location(store)).open_log()
    assert "hunt" not in str(refused.value)


@pytest.mark.parametrize("store", ["hdfs://host/log", "/a/directory", "nonsense://x"])
def test_what_does_not_replace_an_object_at_once_is_refused(tmp_path: Path, store: str) -> None:
    with pytest.raises(OptionError, match="must be a URI of object storage"):
        storage_at(str(tmp_path), store=Location(store))
