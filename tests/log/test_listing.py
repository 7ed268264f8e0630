"""Following a log costs what is new in it, not what it holds; and nothing new stays unseen. No JVM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadMaxRows
from zmq_datasource.log.listing import ChunkListing

from tests.log.test_readers import written
from tests.support import stream_options
from zmq_datasource.errors import LogFormatError
from zmq_datasource.log.contents import ReadableLog
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.spark.stream_reader import ZmqStreamReader

LATER = 0.05  # seconds between two looks


class Asked(LogStorage):
    """Counts what is asked of the file system."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.asked: Counter[str] = Counter()

    def stamp(self) -> tuple[int, ...]:
        self.asked["stamp"] += 1
        return super().stamp()

    def names(self) -> set[str]:
        self.asked["names"] += 1
        return super().names()

    def find_chunk(self, first: int, end: int) -> Any:
        self.asked["chunk"] += 1
        return super().find_chunk(first, end)

    def _entries(self) -> Any:
        self.asked["all"] += 1
        return super()._entries()


class Followed(ReadableLog):
    """A directory with files named like chunks, a listing of it, and a clock."""

    def __init__(self, root: Path, chunks: int) -> None:
        super().__init__()
        self.directory = root / "0"
        self.directory.mkdir()
        self.storage = Asked(str(root))
        self.now = 0.0
        self.listing = ChunkListing(self.storage, self._contents, lambda: self.now)
        self.end = 0
        self.write(chunks)

    def write(self, chunks: int) -> None:
        for _ in range(chunks):
            (self.directory / chunk_name(self.end, self.end + 10)).write_bytes(b"x" * (self.end + 1))
            self.end += 10

    def remove(self, first: int) -> None:
        (self.directory / chunk_name(first, first + 10)).unlink()

    def look(self) -> Counter[str]:
        """Look for changes; what that asked for."""
        self.storage.asked.clear()
        self.now += LATER
        self.listing.refresh()
        return self.storage.asked

    def look_until_settled(self) -> None:
        for _ in range(3):
            self.look()


def test_without_news_nothing_is_listed(tmp_path: Path) -> None:
    log = Followed(tmp_path, 50)
    log.look_until_settled()
    for _ in range(10):
        assert log.look() == {"stamp": 1}
    assert log.durable_end == 500


def test_only_what_is_new_is_looked_at(tmp_path: Path) -> None:
    log = Followed(tmp_path, 50)
    log.look_until_settled()
    log.write(2)
    assert log.look() == {"stamp": 1, "names": 1, "chunk": 2}
    assert (log.durable_end, log.size) == (520, read_index(log.storage).size)


def test_what_is_gone_at_the_front_is_gone(tmp_path: Path) -> None:
    log = Followed(tmp_path, 50)
    log.look()
    log.remove(0)
    log.remove(10)
    log.write(1)
    assert log.look() == {"stamp": 1, "names": 1, "chunk": 1}
    assert (log.earliest, log.durable_end, log.size) == (20, 510, read_index(log.storage).size)


def unchanging(log: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log.storage, "stamp", lambda: (1, 2, 3))


def test_a_chunk_of_the_same_moment_as_a_listing_is_found_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory's time is as coarse as the file system's clock."""
    log = Followed(tmp_path, 5)
    unchanging(log, monkeypatch)
    log.look()
    log.write(1)
    log.look()
    assert log.durable_end == 60


def test_a_file_system_that_keeps_no_time_hides_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Followed(tmp_path, 5)
    unchanging(log, monkeypatch)
    log.look_until_settled()
    log.write(1)
    began = log.now
    while log.durable_end < 60:
        log.look()
        assert log.now - began < 1.5


def test_a_chunk_that_is_missing_in_the_middle_is_named(tmp_path: Path) -> None:
    log = Followed(tmp_path, 5)
    log.look()
    log.remove(20)
    with pytest.raises(LogFormatError, match="ids 20 to 29 are missing"):
        log.look()
    log.write(1)
    with pytest.raises(LogFormatError, match="ids 20 to 29 are missing"):
        log.look()
    log.remove(0)
    log.remove(10)
    log.look()
    assert (log.earliest, log.durable_end) == (30, 60)


def test_ids_that_are_missing_behind_the_last_chunk_are_named(tmp_path: Path) -> None:
    log = Followed(tmp_path, 5)
    log.look()
    log.end += 10
    log.write(1)
    with pytest.raises(LogFormatError, match="ids 50 to 59 are missing"):
        log.look()


def test_a_reader_that_was_away_finds_only_newer_chunks(tmp_path: Path) -> None:
    log = Followed(tmp_path, 5)
    log.look()
    log.write(5)
    for first in range(0, 90, 10):
        log.remove(first)
    log.look()
    assert (log.earliest, log.durable_end, log.chunks) == (90, 100, 1)


@given(st.lists(st.sampled_from(["write", "remove", "look", "wait"]), max_size=40))
@settings(max_examples=100, deadline=None)
def test_after_each_look_it_is_what_a_listing_of_everything_finds(steps: list[str]) -> None:
    with TemporaryDirectory() as root:
        log = Followed(Path(root), 1)
        first = 0
        for step in steps:
            if step == "write":
                log.write(1)
            elif step == "remove" and first < log.end - 10:
                log.remove(first)
                first += 10
            elif step == "wait":
                log.now += 1.0
            else:
                log.look()
        log.look()
        log.look()
        index = read_index(log.storage)
        assert (log.earliest, log.durable_end, log.size) == (index.earliest, index.end, index.size)
        assert log.covering(0, log.end) == index.covering(0, log.end)


def test_a_trigger_without_news_lists_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, 5).close()
    calls: Counter[str] = Counter()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return method(*args)

        return call

    for name in ("names", "_entries", "find_chunk"):
        monkeypatch.setattr(LogStorage, name, counted(name, getattr(LogStorage, name)))
    monkeypatch.setattr("zmq_datasource.log.follower.LOOKING_SECONDS", 0.0)
    monkeypatch.setattr("zmq_datasource.log.listing._RELISTING_SECONDS", 1e9)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    it = ZmqStreamReader(stream_options(walLocation=tmp_path))
    try:
        begin = it.initialOffset()
        end = it.latestOffset(begin, ReadMaxRows(1))
        for _ in range(3):
            it.latestOffset(end, ReadMaxRows(1))
            it.reportLatestOffset()
        calls.clear()
        for _ in range(20):
            assert it.latestOffset(end, ReadMaxRows(1)) == end
            it.reportLatestOffset()
        assert calls == {}
    finally:
        it.stop()
