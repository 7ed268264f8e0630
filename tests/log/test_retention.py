"""Which chunks stay, and for how long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.log.machines import Machines, Watched, fill
from tests.support import need, wait_for
from zmq_datasource.errors import DiskFaultError, LogWriteError
from zmq_datasource.log.head import read_head
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.retention import Retention
from zmq_datasource.log.silence import Leases
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter

DAY = 86_400.0


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retention, "look_seconds", 0.0)


class Log:
    """A log with chunks of ten messages each, on a machine with a clock."""

    def __init__(self, machines: Machines, chunks: int, **settings: Any) -> None:
        self.machines = machines
        self.now = time.time()
        self.storage = machines.storage()
        self.log = self.writer(**settings)
        for _ in range(chunks):
            self.fill()

    def writer(self, **settings: Any) -> LogWriter:
        return self.machines.writer(self.storage, clock=lambda: self.now, **settings)

    def fill(self) -> None:
        fill(self.log, *[b"x" * 100] * 10)

    def need(self, next_id: int, name: str = "desk") -> None:
        need(self.machines.storage(), next_id, name)

    def after(self, looks: int = 2) -> list[int]:
        """The first ids of the chunks that are there after the writer has looked again."""
        for _ in range(looks):
            self.log.retention.tidy()
        return self.machines.firsts()


@pytest.fixture
def make(anywhere: Machines) -> Iterator[Any]:
    def made(chunks: int, **settings: Any) -> Log:
        return Log(anywhere, chunks, **settings)

    return made


def test_chunks_that_no_reader_needs_are_deleted_and_the_newest_stays(make: Any) -> None:
    it = make(4)
    assert it.after() == [0, 10, 20, 30], "everything is kept until there is a first reader"
    it.need(25)
    assert it.after() == [20, 30]
    assert (it.log.earliest, it.log.durable_end, it.log.needed) == (20, 40, 25)
    head = read_head(it.machines.connect())
    assert (head.announced, head.deleted) == (20, 20)
    it.need(40)
    assert it.after() == [30]
    it.need(31, "other")
    assert it.log.needed == 40
    it.after()
    assert it.log.needed == 31


def test_chunks_stay_for_their_retention(make: Any) -> None:
    it = make(3, retention=60.0)
    it.need(30)
    it.now += 50
    assert it.after() == [0, 10, 20]
    it.now += 15
    assert it.after() == [20]


def test_a_clock_that_jumps_deletes_nothing_that_is_needed_and_keeps_nothing_for_ever(make: Any) -> None:
    it = make(3, retention=60.0)
    it.need(10)
    it.now += 8 * DAY
    assert it.after() == [10, 20]
    it.fill()
    it.now -= 8 * DAY + 3600  # the chunk was sealed in the future
    it.need(10)
    assert it.after() == [10, 20, 30]
    it.need(30)
    assert it.after() == [30]


def test_the_next_writer_continues_a_deletion(make: Any, anywhere: Machines) -> None:
    it = make(3)
    store = it.storage.store
    assert isinstance(store, Watched)

    def refuse(verb: str, key: str) -> None:
        if verb == "delete" and key.startswith("chunks/"):
            raise LogWriteError(f"deleting {key}: Permission denied")

    store.before = refuse
    it.need(30)
    assert it.after() == [0, 10, 20]
    assert read_head(anywhere.connect()).deleted == 20
    assert it.log.earliest == 20
    store.before = None
    anywhere.end(it.log)
    it.log = it.writer()
    assert it.after() == [20]


def test_nothing_is_deleted_while_the_leases_cannot_be_read(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    it = make(3)
    store = it.storage.store
    assert isinstance(store, Watched)

    def refuse(verb: str, key: str) -> None:
        if key.startswith("readers"):
            raise DiskFaultError(f"{verb} {key}: no answer")

    store.before = refuse
    it.need(30)
    assert it.after() == [0, 10, 20]
    assert "no answer" in caplog.text
    store.before = None
    assert it.after() == [20]


@pytest.mark.parametrize(("discards", "needed", "there"), [(False, 20, 2), (True, 0, 1)])
def test_chunks_make_room_before_their_retention_has_passed(
    make: Any, discards: bool, needed: int, there: int
) -> None:
    it = make(4, retention=DAY, max_bytes=1, discards=discards)
    it.need(needed)
    assert len(it.after()) == there


def test_only_as_much_makes_room_as_is_needed(make: Any) -> None:
    it = make(4, retention=DAY)
    size = it.log.size // 4
    it.machines.end(it.log)
    it.log = it.writer(retention=DAY, max_bytes=8 * size + size // 2, chunk_bytes=size)
    it.need(40)
    assert it.after() == [10, 20, 30]


def test_a_deletion_in_a_bucket_costs_few_requests(make: Any) -> None:
    it = make(3)
    it.need(30)
    store = it.storage.store
    assert isinstance(store, Watched)
    it.after()
    asked: list[tuple[str, str]] = []
    store.before = lambda verb, key: asked.append((verb, key.partition("/")[0]))
    it.fill()
    wait_for(lambda: it.log.earliest == 30 or it.log.retention.tidy(), "the deletion")
    assert asked.count(("put_new", "head")) == 2
    assert asked.count(("open", "readers")) == 0
    assert asked.count(("delete", "head")) <= 2
    asked.clear()
    it.log.retention.tidy()
    assert ("list", "readers") in asked


def full(contents: ChunkIndex, max_bytes: int, **settings: Any) -> Retention:
    storage = LogStorage("/nowhere")
    leases = Leases(storage)
    return Retention(storage, contents, leases, seconds=0.0, max_bytes=max_bytes, chunk_bytes=100, **settings)


def test_a_log_is_full_of_all_that_takes_room() -> None:
    contents = ChunkIndex()
    for first in (0, 10, 20):
        contents.add(Chunk(first, first + 10, 100, 1000.0))
    assert not full(contents, 350).full
    assert full(contents, 350, unsealed_bytes=lambda: 50).full


def test_the_newest_chunk_alone_fills_nothing_once_it_is_read() -> None:
    contents = ChunkIndex()
    contents.add(Chunk(0, 10, 100, 1000.0))
    retention = full(contents, 100)
    assert retention.full
    retention.needed = 10
    assert not retention.full
    assert not full(contents, 100, discards=True).full
