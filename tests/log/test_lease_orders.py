"""A new reader and a writer that deletes, in every order of their steps: see ``tests.log.orders``."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.log.orders import Check, Note, Now, Process, Steps, World, every_order
from zmq_datasource.errors import DiskFaultError, LogLockedError
from zmq_datasource.log.head import HeadWriter, read_head
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import LOG_NAME, Chunk, chunk_name, key_of
from zmq_datasource.log.leases import Lease, LeaseFiles
from zmq_datasource.log.retention import Retention
from zmq_datasource.log.silence import Leases
from zmq_datasource.log.storage import LogStorage

CHUNKS = tuple(Chunk(first, first + 10, 5, 0.0) for first in (0, 10, 20))


@pytest.fixture(autouse=True)
def without_clock_and_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogStorage, "request_interval", 0.0)
    monkeypatch.setattr(Retention, "look_seconds", 0.0)


class Fixed:
    """Random names that are the same in each run of a process."""

    def __init__(self, name: str) -> None:
        self.hex = (name.encode().hex() + 32 * "0")[:32]


class Begins(Check):
    """A reader that was told where to begin finds everything from there on, for ever."""

    def note(self, name: str, note: Note, world: World) -> None:
        self._check(note.about, world, name)

    def end(self, name: str, error: Exception | None, world: World) -> None:
        assert error is None or isinstance(error, (LogLockedError, DiskFaultError)), repr(error)

    def state(self, world: World) -> None:
        files = LeaseFiles(LogStorage(Now(world)))
        for key in files.entries():
            lease = files.read(key)
            if lease is not None and lease.begins:  # the reader has chosen
                self._check(lease.next, world, key)

    def _check(self, begins: int, world: World, name: str) -> None:
        for chunk in CHUNKS:
            if chunk.end > begins:
                assert world.get(f"chunks/{chunk_name(chunk.first)}"), (
                    f"{name} begins at {begins}, and {chunk.name} is gone"
                )


def deleting(name: str, monkeypatch: pytest.MonkeyPatch, looks: int = 2) -> Process:
    """A writer that takes over, looks, and deletes."""

    def run(store: Steps) -> None:
        monkeypatch.setattr(uuid, "uuid4", lambda: Fixed(name))
        storage = LogStorage(store)
        there = [chunk for chunk in CHUNKS if storage.store.find(key_of(chunk.name)) is not None]
        contents = ChunkIndex()
        contents.replace(ChunkIndex(there))
        leases = Leases(storage, clock=lambda: 0.0)
        retention = Retention(
            storage, contents, leases, seconds=0, max_bytes=1 << 30, chunk_bytes=1, clock=lambda: 0.0
        )
        head = HeadWriter(storage.store, name)
        head.take_over()
        retention.begin(head)
        for _ in range(looks):
            retention.tidy()

    return run


def beginning(name: str, monkeypatch: pytest.MonkeyPatch) -> Process:
    """A new query: what ``Reader`` does, without its thread."""

    def run(store: Steps) -> None:
        monkeypatch.setattr(uuid, "uuid4", lambda: Fixed(name))
        storage = LogStorage(store)
        files = LeaseFiles(storage)
        files.write(Lease(name, 0, 1e9))
        announced = read_head(storage.store).announced
        listed = [chunk.first for chunk in storage.chunks()]
        files.write(Lease(name, max(announced, listed[0]), 1e9, begins=True))
        store.tell("begins", max(announced, listed[0]))

    return run


def world(needed: int, monkeypatch: pytest.MonkeyPatch) -> World:
    """A log of three chunks, of which one reader needs the last ids only."""
    monkeypatch.setattr(uuid, "uuid4", lambda: Fixed("0"))
    made = World().with_object(LOG_NAME, b"{}")
    for chunk in CHUNKS:
        made = made.with_object(f"chunks/{chunk_name(chunk.first)}", b"chunk")
    store = Now(made)
    LeaseFiles(LogStorage(store)).write(Lease("other", needed, 1e9))
    return store.world


def test_a_new_reader_finds_what_it_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = {"writer": deleting("w", monkeypatch), "reader": beginning("r", monkeypatch)}
    tried = every_order(world(25, monkeypatch), processes, Begins(), still=())
    assert tried.orders > 1_000


def test_a_new_reader_finds_what_it_begins_with_after_a_writer_was_stopped_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first writer has read the leases, and stands before the head that says what it deletes."""
    processes = {
        "stalled": deleting("s", monkeypatch, looks=1),
        "writer": deleting("w", monkeypatch, looks=1),
        "reader": beginning("r", monkeypatch),
    }
    tried = every_order(
        world(15, monkeypatch), processes, Begins(), still=(), begun={"stalled": "delete", "writer": "delete"}
    )
    assert tried.orders > 1_000


def test_without_the_second_look_an_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The orders see what must not happen: a writer that deletes what it has seen before it announced it."""
    looks: dict[Any, int] = {}

    def look_once(self: Retention) -> None:
        self.needed = looks.setdefault(id(self), self._leases.look(self._index.durable_end))

    monkeypatch.setattr(Retention, "_look", look_once)
    processes = {"writer": deleting("w", monkeypatch), "reader": beginning("r", monkeypatch)}
    with pytest.raises(AssertionError, match="begins at"):
        every_order(world(25, monkeypatch), processes, Begins(), still=())
