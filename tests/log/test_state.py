"""What the log keeps beside its rows: as new as they are, never newer, whenever the writer dies."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.sequences.test_sequences import memory
from tests.support import batch_of, facts_of, flips, log_rows, need, stream_options
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DamagedChunkError
from zmq_datasource.log.chunk import read_facts
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.log.state import read_saved_state
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Content
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.messages.framing import to_rows
from zmq_datasource.messages.raw import RawMessage, raw_of
from zmq_datasource.sequences import SequenceTracker
from zmq_datasource.source.facts import read_gaps
from zmq_datasource.source.intake import Arrival, Intake


class Carrying:
    """A state that is text."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def state(self) -> bytes:
        return self.text.encode()


def writer(location: Path, carried: Any, **options: Any) -> LogWriter:
    made = LogWriter(
        LogStorage(str(location)), chunk_bytes=1 << 20, max_bytes=1 << 30, carried=carried, **options
    )
    made.open()
    return made


def saved(location: Path) -> bytes:
    return read_saved_state(LogStorage(str(location)))


def newest(location: Path) -> Path:
    return max((location / "chunks").glob("[0-9]*.arrow"))


def test_a_state_is_that_of_the_cut_also_if_it_changes_during_the_write(tmp_path: Path) -> None:
    carried = Carrying("one")
    log = writer(tmp_path, carried)
    log.append(batch_of([b"v"]))
    done = log.cut()
    carried.text = "two"
    done.result()
    assert saved(tmp_path) == b"one"
    log.close()


def test_a_state_is_text_in_the_file(tmp_path: Path) -> None:
    """Readers of Arrow files in other languages refuse metadata that is no UTF-8."""
    log = writer(tmp_path, Carrying("\0" * 1000))
    log.append(batch_of([b"v"]))
    log.close()
    entry = read_facts(LogStorage(str(tmp_path)), newest(tmp_path).name).to_metadata()[b"chunk"]
    assert entry.isascii()
    assert entry.decode().isprintable()
    assert len(entry) < 200


def test_the_text_of_a_state_never_changes() -> None:
    assert replace(facts_of([batch_of([b"v"])]), packed="KLUv/SAFKQAAdGhyZWU=").state == b"three"


# A crash between any two durable steps.


class Photographed(DirectoryStore):
    """Copies the log after each new object, as a crash would leave it."""

    def __init__(self, location: Path, album: Path) -> None:
        super().__init__(location)
        self._album = album
        self.photos: list[Path] = []

    def _photograph(self) -> None:
        photo = self._album / str(len(self.photos))
        shutil.copytree(self.root, photo)
        self.photos.append(photo)

    def put_new(self, key: str, content: Content) -> None:
        super().put_new(key, content)
        self._photograph()


class Recording(Intake):
    """Notes what it handed over, and the end of the log at that moment."""

    def __init__(self, **options: Any) -> None:
        super().__init__(stream_options(connect="tcp://feed:1", **options), SourceCounters())
        assert self.tracker is not None
        self.tracker = SequenceTracker(self.tracker.numbering, 1000, max_gaps=4)
        self.handed_over: list[tuple[int, object]] = [(0, self.remembered())]
        self.rows = 0

    def remembered(self) -> object:
        assert self.tracker is not None
        return copy.deepcopy(memory(self.tracker)), self.counters.to_json()

    def state(self) -> bytes:
        self.handed_over.append((self.rows, self.remembered()))
        return super().state()


steps = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12)), max_size=5),
        st.sampled_from(["append", "cut", "commit"]),
    ),
    min_size=1,
    max_size=8,
)


@given(steps)
@settings(max_examples=25, deadline=None)
def test_state_and_rows_match_after_a_crash_at_any_step(
    tmp_path_factory: pytest.TempPathFactory, taken: list[tuple[list[tuple[str, int]], str]]
) -> None:
    tmp_path = tmp_path_factory.mktemp("crash")
    options = {"framing": "sequenced", "deduplicate": "true"}
    feed = Recording(**options)
    store = Photographed(tmp_path / "log", tmp_path / "album")
    log = LogWriter(LogStorage(store), chunk_bytes=1 << 20, max_bytes=1 << 30, carried=feed)
    log.open()
    for numbers, then in taken:
        messages: list[RawMessage] = [
            [b"t", name.encode(), n.to_bytes(8, "big"), b"%d" % n] for name, n in numbers
        ]
        if messages:
            batch, _ = feed.read(raw_of(messages), [Arrival(0, len(messages), "tcp://feed:1")])
            log.append(batch)
            feed.rows += batch.num_rows
        if then != "append":
            log.cut().result()
        if then == "commit":
            need(LogStorage(store), feed.rows)
            log.retention.tidy()
    log.close()
    for photo in [*store.photos, tmp_path / "log"]:
        again = Recording(**options)
        log = LogWriter(LogStorage(str(photo)), chunk_bytes=1 << 20, max_bytes=1 << 30, carried=again)
        log.open()
        again.restore(log.saved)
        possible = [remembered for end, remembered in feed.handed_over if end == log.durable_end]
        assert again.remembered() in possible
        # The same table without a writer.
        assert again.tracker is not None
        gaps = read_gaps(log.saved)
        assert [row["messages"] for row in gaps] == [gap.size for gap in again.tracker.gaps]
        log.close()
    assert again.remembered() == feed.handed_over[-1][1]
    shutil.rmtree(tmp_path)


def test_ten_thousand_publishers_and_gaps_cost_a_chunk_half_a_megabyte(tmp_path: Path) -> None:
    feed = Intake(stream_options(connect="tcp://feed:1", framing="sequenced"), SourceCounters())
    log = writer(tmp_path, feed)
    sent: list[RawMessage] = [
        [b"", b"publisher-%d" % (p * p), p.to_bytes(8, "big"), b"v"] for p in range(10_000)
    ]
    log.append(feed.read(raw_of(sent), [Arrival(0, len(sent), "tcp://feed:1")])[0])
    log.cut().result()
    log.append(feed.read(raw_of([[b"", b"p", bytes(8), b"v"]]), [Arrival(0, 1, "tcp://feed:1")])[0])
    log.close()
    assert newest(tmp_path).stat().st_size < 500_000
    again = Intake(stream_options(connect="tcp://feed:1", framing="sequenced"), SourceCounters())
    again.restore(saved(tmp_path))
    assert again.tracker is not None
    assert feed.tracker is not None
    assert memory(again.tracker) == memory(feed.tracker)


def test_no_flipped_bit_gives_wrong_frames_or_a_wrong_state(tmp_path: Path) -> None:
    feed = Intake(stream_options(connect="tcp://feed:1", framing="bitcoin"), SourceCounters())
    log = writer(tmp_path, feed)
    sent: list[RawMessage] = [[b"t", b"v", n.to_bytes(4, "little")] for n in (0, 2)]
    log.append(feed.read(raw_of(sent), [Arrival(0, 2, "tcp://feed:1")])[0])
    log.close()
    path = newest(tmp_path)
    whole, right = path.read_bytes(), saved(tmp_path)
    at_metadata = [at for name in (b"framing", b"chunk") for at in _places(whole, name)]
    for position in flips(path, sorted({p for at in at_metadata for p in range(at - 8, at + 40)}), 0x01):
        with suppress(DamagedChunkError):
            (batch,) = log_rows(tmp_path).to_batches()
            assert to_rows(batch, include_frames=True).column("frames").to_pylist() == sent, position
        with suppress(DamagedChunkError):
            assert saved(tmp_path) == right, position


def _places(content: bytes, name: bytes) -> Iterator[int]:
    at = content.find(name)
    while at >= 0:
        yield at
        at = content.find(name, at + 1)
