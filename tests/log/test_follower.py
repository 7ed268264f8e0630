"""Following a log costs what is new in it, not what it holds; and nothing new stays unseen. No JVM."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.log.machines import Machines, MemoryBucket, Watched, WatchedDirectory, fill
from tests.support import need, wait_for
from zmq_datasource.errors import DataLossError, DiskFaultError
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.log.follower import REFRESH_SECONDS, LogFollower
from zmq_datasource.log.layout import Chunk, chunk_name
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.retention import Retention

WITHOUT_NEWS = {"open": 1, "find": 2}


@pytest.fixture(autouse=True)
def _deletes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retention, "look_seconds", 0.0)


class Followed:
    """A log with chunks of a message each, and a follower with a clock of its own."""

    def __init__(self, machines: Machines, chunks: int) -> None:
        self.log = machines.writer()
        self.machines = machines
        self.write(chunks)
        self.now = 0.0
        storage = machines.storage()
        assert isinstance(storage.store, Watched)
        self.store = storage.store
        self.follower = LogFollower(storage, clock=lambda: self.now)
        self.follower.open()

    def write(self, chunks: int) -> None:
        for _ in range(chunks):
            fill(self.log, b"x" * (1 + self.log.durable_end))

    def delete_below(self, end: int) -> None:
        need(self.machines.storage(), end)
        wait_for(lambda: (self.log.retention.tidy(), self.log.needed == end)[1], "the deletion")

    def remove(self, first: int) -> None:
        self.machines.storage().delete_chunk(Chunk(first, first + 1, 1, 0.0))

    def look(self) -> Counter[str]:
        """Look for changes; what that has cost."""
        self.store.calls.clear()
        self.now += REFRESH_SECONDS
        self.follower.refresh()
        return self.store.calls

    def is_all(self) -> bool:
        """Whether it is what a listing of everything finds."""
        index, seen = read_index(self.machines.storage()), self.follower
        return (seen.earliest, seen.durable_end, seen.size) == (
            *(index.earliest, index.durable_end, index.size),
        ) and seen.covering(0, seen.durable_end) == index.all


def test_a_look_without_news_costs_three_requests(anywhere: Machines) -> None:
    followed = Followed(anywhere, 50)
    for _ in range(10):
        assert followed.look() == WITHOUT_NEWS
    assert followed.is_all()


def test_refreshing_twice_at_once_costs_nothing(anywhere: Machines) -> None:
    followed = Followed(anywhere, 1)
    followed.look()
    followed.store.calls.clear()
    followed.follower.refresh()
    assert not followed.store.calls


def test_new_chunks_cost_four_listings_and_five_requests(anywhere: Machines) -> None:
    followed = Followed(anywhere, 50)
    followed.write(2)
    assert followed.look() == {"open": 3, "find": 2, "list": 4}
    assert followed.is_all()
    assert followed.look() == WITHOUT_NEWS


def test_a_file_system_that_remembers_that_a_name_was_not_there_hides_nothing_for_long(
    anywhere: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(anywhere, 5)
    followed.look()
    find, began = followed.store.find, followed.now
    hidden = f"chunks/{chunk_name(5)}"
    monkeypatch.setattr(followed.store, "find", lambda key: None if key == hidden else find(key))
    followed.write(1)
    while followed.follower.durable_end < 6:
        followed.look()
        assert followed.now - began < 1.5


def test_a_chunk_that_is_missing_in_the_middle_is_not_seen_here(anywhere: Machines) -> None:
    """Its predecessor seems to reach to the next one; what reads past that gets an error."""
    followed = Followed(anywhere, 5)
    followed.remove(2)
    followed.write(1)
    followed.look()
    assert (followed.follower.earliest, followed.follower.durable_end) == (0, 6)
    with pytest.raises(DataLossError, match="from 2 to 2 is missing"):
        anywhere.rows()


class Places:
    """A log that is emptied, and comes back."""

    def __init__(self, machines: Machines, memory: MemoryBucket, path: Path) -> None:
        self._bucket = None if isinstance(machines.connect(), DirectoryStore) else memory
        self._path = path

    def empty(self) -> None:
        if self._bucket is not None:
            self._bucket.empty()
            return
        shutil.copytree(self._path / "log", self._path / "away")
        for path in (self._path / "log").rglob("*.*"):
            path.unlink()

    def restore(self, name: str) -> None:
        """Put back what has such a name."""
        if self._bucket is not None:
            self._bucket.restore(name)
            return
        for path in (self._path / "away").rglob(f"*{name}"):
            if path.is_file():
                shutil.copy(path, self._path / "log" / path.relative_to(self._path / "away"))


def test_a_store_that_is_emptied_and_comes_back_piece_by_piece_never_ends_earlier(
    anywhere: Machines, memory: MemoryBucket, tmp_path: Path
) -> None:
    followed = Followed(anywhere, 3)
    anywhere.end(followed.log)
    places = Places(anywhere, memory, tmp_path)
    places.empty()
    for name in ("log.json", chunk_name(1)):
        for _ in range(2):
            with pytest.raises(DiskFaultError, match="Mount or restore it"):
                followed.look()
            with pytest.raises(DiskFaultError, match="Mount or restore it"):
                followed.follower.refresh_now()
            assert (followed.follower.earliest, followed.follower.durable_end) == (0, 3)
        places.restore(name)
    places.restore(chunk_name(2))
    places.restore(chunk_name(0))
    followed.log = anywhere.writer()
    followed.write(1)
    followed.look()
    assert [chunk[:2] for chunk in followed.follower.covering(0, 4)] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_another_log_in_its_place_is_refused(
    anywhere: Machines, memory: MemoryBucket, tmp_path: Path
) -> None:
    followed = Followed(anywhere, 3)
    anywhere.end(followed.log)
    Places(anywhere, memory, tmp_path).empty()
    anywhere.writer()
    with pytest.raises(DataLossError, match="it was created again"):
        followed.look()
    assert followed.follower.durable_end == 3


@given(st.lists(st.sampled_from(["write", "delete", "look", "wait", "restart"]), max_size=40))
@settings(max_examples=60, deadline=None)
def test_each_refresh_finds_what_a_full_listing_finds(steps: list[str]) -> None:
    with TemporaryDirectory() as root:
        machines = Machines(lambda: WatchedDirectory(root))
        followed = Followed(machines, 1)
        try:
            for step in steps:
                if step == "write":
                    followed.write(1)
                elif step == "delete":
                    followed.delete_below(followed.log.earliest + 1)
                elif step == "wait":
                    followed.now += 1.0
                elif step == "restart":
                    machines.end(followed.log)
                    followed.log = machines.writer()
                else:
                    followed.look()
                    assert followed.is_all()
            followed.look()
            assert followed.is_all()
        finally:
            followed.log.close()


def test_an_older_look_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    machines = Machines(lambda: WatchedDirectory(tmp_path))
    followed = Followed(machines, 2)
    listed, go_on = threading.Event(), threading.Event()

    def slow(verb: str, key: str) -> None:
        if threading.current_thread() is metrics and key == f"chunks/{chunk_name(2)}":
            listed.set()
            assert go_on.wait(30)

    followed.store.before = slow
    metrics, spark = threading.Thread(target=followed.look), threading.Thread(target=followed.look)
    metrics.start()
    assert listed.wait(30)
    followed.write(1)
    spark.start()
    spark.join(0.2)  # it may have to wait for the other
    go_on.set()
    metrics.join(30)
    spark.join(30)
    assert followed.follower.durable_end == 3
    followed.log.close()
