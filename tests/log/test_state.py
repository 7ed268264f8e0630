"""What the log keeps beside its rows: as new as they are, never newer, whenever the writer dies."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sequences.test_sequences import memory
from tests.support import DATA, batch_of, flips, log_rows, stream_options
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DamagedChunkError, LogFormatError
from zmq_datasource.log.layout import Chunk, StateFile
from zmq_datasource.log.state import SavedState, StateRecord, StateRecorder, read_saved_state
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.messages.framing import to_rows
from zmq_datasource.messages.raw import RawMessage, raw_of
from zmq_datasource.sequences import state as sequences_state
from zmq_datasource.source.intake import Arrival, Intake
from zmq_datasource.source.kept import read_gaps


class Carrying:
    """A state that is text; ``large`` and ``changed`` are up to the test."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.large = False
        self.changed = True

    def full(self) -> bytes:
        self.changed = False
        return f"full {self.text}".encode()

    def delta(self) -> bytes:
        self.changed = False
        return f"delta {self.text}".encode()


def writer(location: Path, carried: Any, **options: Any) -> LogWriter:
    made = LogWriter(
        LogStorage(str(location)), chunk_bytes=1 << 20, max_bytes=1 << 30, carried=carried, **options
    )
    made.open()
    return made


def saved(location: Path) -> SavedState:
    return read_saved_state(LogStorage(str(location)))


def files(location: Path) -> list[str]:
    return sorted(path.name for path in (location / "0").glob("state-*"))


def test_a_log_of_nobody_keeps_nothing(tmp_path: Path) -> None:
    log = writer(tmp_path, None)
    log.append(batch_of([b"v"]))
    log.close()
    assert saved(tmp_path) == SavedState()


def test_a_chunk_carries_the_state_of_its_end(tmp_path: Path) -> None:
    carried = Carrying("one")
    log = writer(tmp_path, carried)
    log.append(batch_of([b"v"]))
    log.cut().result()
    carried.text = "two"
    log.append(batch_of([b"v"]))
    log.cut().result()
    carried.text, carried.changed = "three", False
    log.close()
    assert saved(tmp_path).delta == b"delta two"
    assert files(tmp_path) == []


def test_a_change_without_rows_is_kept_when_asked_for(tmp_path: Path) -> None:
    carried = Carrying("one")
    log = writer(tmp_path, carried)
    log.append(batch_of([b"v"]))
    log.cut().result()
    carried.text, carried.changed = "two", True
    log.cut().result()
    assert saved(tmp_path).delta == b"delta one"
    log.cut(keep=True).result()
    assert (saved(tmp_path).full, saved(tmp_path).delta) == (b"full two", None)
    log.cut(keep=True).result()
    assert len(files(tmp_path)) == 1
    log.append(batch_of([b"v"]))
    carried.text = "three"
    log.close()
    assert (saved(tmp_path).full, saved(tmp_path).delta) == (b"full two", b"delta three")
    assert len(files(tmp_path)) == 1


def test_records_are_numbered_one_after_another_and_a_chunks_names_its_base() -> None:
    carried = Carrying("one")
    recorder = StateRecorder(carried)
    recorder.go_on_from(SavedState(version=7, base=4))
    _, _, metadata = recorder.record(end=10, rows=True, keep=False)
    assert (metadata[b"state.version"], metadata[b"state.base"]) == (b"8", b"4")
    carried.large = True
    file, content, metadata = recorder.record(end=20, rows=True, keep=False)
    assert file == StateFile(9, 20)
    assert content.endswith(b"\nfull one")
    assert (metadata[b"state.version"], metadata[b"state.base"]) == (b"10", b"9")


@pytest.mark.parametrize(
    ("changed", "keep", "kept"), [(False, True, False), (True, False, False), (True, True, True)]
)
def test_without_rows_a_record_is_made_of_what_has_changed_and_is_to_be_kept(
    changed: bool, keep: bool, kept: bool
) -> None:
    carried = Carrying("one")
    carried.changed = changed
    record = StateRecorder(carried).record(end=10, rows=False, keep=keep)
    assert record.file == (StateFile(1, 10) if kept else None)
    assert record.metadata == {}


def test_a_chunk_says_that_it_carries_no_state() -> None:
    """With a checksum: a chunk that says nothing is damaged."""
    recorder = StateRecorder(None)
    assert recorder.record(end=10, rows=False, keep=True) == StateRecord()
    record = recorder.record(end=10, rows=True, keep=True)
    assert (record.file, set(record.metadata)) == (None, {b"state.xxh3"})


def test_a_large_state_is_written_once_and_chunks_carry_what_changes(tmp_path: Path) -> None:
    carried = Carrying("one")
    carried.large = True
    log = writer(tmp_path, carried)
    for text in ("one", "two"):
        carried.text = text
        log.append(batch_of([b"v"]))
        log.cut().result()
        carried.large = False
    log.close()
    assert (saved(tmp_path).full, saved(tmp_path).delta) == (b"full one", b"delta two")


def test_the_next_writer_goes_on_from_it(tmp_path: Path) -> None:
    carried = Carrying("one")
    carried.large = True
    log = writer(tmp_path, carried)
    log.append(batch_of([b"v"]))
    log.close()
    before = saved(tmp_path)
    log = writer(tmp_path, Carrying("two"))
    assert log.saved == before
    log.append(batch_of([b"v"]))
    log.close()
    after = saved(tmp_path)
    assert after.version > before.version
    assert (after.full, after.delta) == (b"full one", b"delta two")


def test_the_base_of_a_chunk_that_a_crash_prevented_does_not_count(tmp_path: Path) -> None:
    carried = Carrying("one")
    log = writer(tmp_path, carried)
    log.append(batch_of([b"v"]))
    log.cut().result()
    carried.text, carried.large = "two", True
    log.append(batch_of([b"v"]))
    log.cut().result()
    newest = max(LogStorage(str(tmp_path)).chunks())
    assert isinstance(newest, Chunk)
    (tmp_path / "0" / newest.name).unlink()  # as if the writer had died before it
    assert saved(tmp_path).delta == b"delta one"
    log.close()
    writer(tmp_path, carried).close()
    assert saved(tmp_path).delta in (None, b"delta one")


@pytest.mark.parametrize("torn", ["chunk", "state", "state in chunk"])
def test_without_fsync_a_crash_of_the_machine_costs_the_state_and_not_the_log(
    torn: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    carried = Carrying("one")
    log = writer(tmp_path, carried, sync=False)
    for last in (False, True):  # each with a state file, which replaces the one before
        carried.large = not (last and torn == "state in chunk")
        log.append(batch_of([b"v"]))
        log.cut().result()
    carried.changed = False
    log.close()
    chunks = sorted((tmp_path / "0").glob("*.arrow"))
    path = tmp_path / "0" / files(tmp_path)[0] if torn == "state" else chunks[-1]
    content = path.read_bytes()
    assert torn != "state in chunk" or b"delta one" in content
    path.write_bytes(
        content.replace(b"delta one", b"delta two") if torn == "state in chunk" else content[:10]
    )
    whole = 1 if torn == "chunk" else 2
    for _ in range(2):
        carried = Carrying("two")
        log = writer(tmp_path, carried, sync=False)
        assert log.durable_end == whole
        log.append(batch_of([b"v"]))
        log.close()
        whole += 1
    assert "begins anew" in caplog.text
    assert saved(tmp_path).delta == b"delta two"


def test_a_damaged_state_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    carried = Carrying("one")
    log = writer(tmp_path, carried)
    log.close()
    (name,) = files(tmp_path)
    path = tmp_path / "0" / name
    path.write_bytes(path.read_bytes().replace(b"one", b"two"))
    with pytest.raises(DamagedChunkError, match=name):
        saved(tmp_path)


def test_a_missing_base_is_an_error(tmp_path: Path) -> None:
    carried = Carrying("one")
    carried.large = True
    log = writer(tmp_path, carried)
    log.append(batch_of([b"v"]))
    log.close()
    (name,) = files(tmp_path)
    (tmp_path / "0" / name).unlink()
    with pytest.raises(LogFormatError, match="it is missing"):
        saved(tmp_path)


# A crash between any two durable steps.


class Photographed(LogStorage):
    """Copies the log after each step that touches the disk, as a crash would leave it."""

    def __init__(self, location: str, album: Path) -> None:
        super().__init__(location)
        self._album = album
        self.photos: list[Path] = []

    def _photograph(self) -> None:
        photo = self._album / str(len(self.photos))
        shutil.copytree(self.root, photo)
        self.photos.append(photo)

    def write_chunk(self, *args: Any) -> Chunk:
        chunk = super().write_chunk(*args)
        self._photograph()
        return chunk

    def write_state(self, *args: Any) -> None:
        super().write_state(*args)
        self._photograph()

    def remove_states(self, but: int | None) -> None:
        for file in self.states():
            if file.version != but:
                (self._directory / file.name).unlink()
                self._photograph()


class Recording(Intake):
    """Notes what it handed over, and the end of the log at that moment."""

    def __init__(self, **options: Any) -> None:
        super().__init__(stream_options(connect="tcp://feed:1", **options), SourceCounters())
        self.handed_over: list[tuple[int, object]] = [(0, self.remembered())]
        self.rows = 0
        self.force_large = False

    @property
    def large(self) -> bool:
        return self.force_large

    def remembered(self) -> object:
        assert self.tracker is not None
        return copy.deepcopy(memory(self.tracker)), self._counters.to_json()

    def full(self) -> bytes:
        self.handed_over.append((self.rows, self.remembered()))
        return super().full()

    def delta(self) -> bytes:
        self.handed_over.append((self.rows, self.remembered()))
        return super().delta()


steps = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12)), max_size=5),
        st.sampled_from(["append", "cut", "keep", "large", "commit"]),
    ),
    min_size=1,
    max_size=8,
)


@given(steps)
@settings(max_examples=25, deadline=None)
def test_whenever_it_dies_state_and_rows_belong_together(
    tmp_path_factory: pytest.TempPathFactory, taken: list[tuple[list[tuple[str, int]], str]]
) -> None:
    tmp_path = tmp_path_factory.mktemp("crash")
    options = {"framing": "sequenced", "deduplicate": "true", "maxGaps": 4}
    feed = Recording(**options)
    storage = Photographed(str(tmp_path / "log"), tmp_path / "album")
    log = LogWriter(storage, chunk_bytes=1 << 20, max_bytes=1 << 30, sync=False, carried=feed)
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
            feed.force_large = then == "large"
            log.cut(keep=then == "keep").result()
        if then == "commit":
            log.commit(feed.rows)
    log.close()
    for photo in [*storage.photos, tmp_path / "log"]:
        again = Recording(**options)
        log = LogWriter(LogStorage(str(photo)), chunk_bytes=1 << 20, max_bytes=1 << 30, carried=again)
        log.open()
        assert again.restore(log.saved.full, log.saved.delta)
        possible = [remembered for end, remembered in feed.handed_over if end == log.durable_end]
        assert again.remembered() in possible
        # The same table without a writer.
        assert again.tracker is not None
        gaps = read_gaps(log.saved.full, log.saved.delta)
        assert [row["messages"] for row in gaps] == [gap.size for gap in again.tracker.gaps]
        log.close()
    assert again.remembered() == feed.remembered()
    shutil.rmtree(tmp_path)


def test_a_hundred_thousand_publishers_cost_a_chunk_only_what_has_changed(tmp_path: Path) -> None:
    feed = Intake(stream_options(connect="tcp://feed:1", framing="sequenced"), SourceCounters())
    log = writer(tmp_path, feed)

    def receive(publishers: range, number: int) -> None:
        messages: list[RawMessage] = [
            [b"", b"publisher-%d" % p, number.to_bytes(8, "big"), b"v"] for p in publishers
        ]
        batch, _ = feed.read(raw_of(messages), [Arrival(0, len(messages), "tcp://feed:1")])
        log.append(batch)
        log.cut().result()

    receive(range(20_000), 0)
    (name,) = files(tmp_path)
    receive(range(10), 1)
    assert files(tmp_path) == [name]
    assert len(saved(tmp_path).delta or b"") < 2000
    log.close()
    again = Intake(stream_options(connect="tcp://feed:1", framing="sequenced"), SourceCounters())
    assert again.restore(saved(tmp_path).full, saved(tmp_path).delta)
    assert again.tracker is not None
    assert feed.tracker is not None
    assert memory(again.tracker) == memory(feed.tracker)
    assert sequences_state.is_large(again.tracker) is False


def test_rows_say_how_their_frames_come_back(tmp_path: Path) -> None:
    feed = Intake(stream_options(connect="tcp://feed:1", framing="vllm"), SourceCounters())
    log = writer(tmp_path, feed)
    sent: list[RawMessage] = [[b"t", n.to_bytes(8, "big"), b"v"] for n in range(3)]
    log.append(feed.read(raw_of(sent), [Arrival(0, 3, "tcp://feed:1")])[0])
    log.close()
    rows = log_rows(tmp_path)
    assert rows.column("frames").null_count == 3
    (batch,) = rows.to_batches()
    assert to_rows(batch, include_frames=True).column("frames").to_pylist() == sent
    assert pa.types.is_list(batch.schema.field("frames").type)


@pytest.mark.parametrize("framing", ["vllm", "bitcoin"])
def test_no_flipped_bit_gives_wrong_frames_or_a_wrong_state(framing: str, tmp_path: Path) -> None:
    feed = Intake(stream_options(connect="tcp://feed:1", framing=framing), SourceCounters())
    log = writer(tmp_path, feed)
    sequence = [n.to_bytes(8, "big") if framing == "vllm" else n.to_bytes(4, "little") for n in (0, 2)]
    sent: list[RawMessage] = [[b"t", n, b"v"] if framing == "vllm" else [b"t", b"v", n] for n in sequence]
    log.append(feed.read(raw_of(sent), [Arrival(0, 2, "tcp://feed:1")])[0])
    log.close()
    (chunk,) = LogStorage(str(tmp_path)).chunks()
    path = tmp_path / "0" / chunk.name
    whole, right = path.read_bytes(), saved(tmp_path)
    at_metadata = [at for name in (b"framing", b"state") for at in _places(whole, name)]
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


def test_the_format_of_a_state_never_changes() -> None:
    """A log with sequences: a gap, half healed, a state file, and its delta."""
    golden = DATA / "log-format-2-sequences"
    rows = to_rows(log_rows(golden).combine_chunks().to_batches()[0], include_frames=True)
    assert rows.column("sequence").to_pylist() == [0, 1, 5, 6, 3, 3, 0]
    assert rows.column("frames").to_pylist()[0] == [b"kv@pod", bytes(8), b"value 0"]
    assert rows.column("frames").to_pylist()[6] == [b"\xff", bytes(8), b"bad topic"]
    kept = saved(golden)
    assert kept.full is not None
    assert kept.delta is not None
    assert [(row["first"], row["last"], row["healed"]) for row in read_gaps(kept.full, kept.delta)] == [
        (2, 2, None),
        (3, 3, 1_700_000_000_000_000),
        (4, 4, None),
    ]
    feed = Intake(stream_options(connect="tcp://feed:1", framing="vllm"), SourceCounters())
    assert feed.restore(kept.full, kept.delta)
    assert feed.tracker is not None
    assert (feed.tracker.totals.lost, feed.tracker.totals.healed, feed.tracker.totals.duplicates) == (2, 1, 1)
    assert (feed.counters.received, feed.counters.malformed) == (7, 1)
    assert len(feed.tracker.expected) == 2


def test_long_names_are_remembered_short(tmp_path: Path) -> None:
    feed = Intake(stream_options(connect="tcp://feed:1", framing="sequenced"), SourceCounters())
    names = [bytes(100_000) + b"%d" % n for n in range(20)] + [b"\xff" * 300, b"0xff", b"plain"]
    messages: list[RawMessage] = [[b"", name, bytes(8), b"v"] for name in names]
    batch, _ = feed.read(raw_of(messages), [Arrival(0, len(messages), "tcp://feed:1")])
    assert len(set(batch.column("publisher").to_pylist())) == len(names)
    saved_text = feed.full()
    assert len(saved_text) < 1000 * len(names)
    again = Intake(stream_options(connect="tcp://feed:1", framing="sequenced"), SourceCounters())
    assert again.restore(saved_text, None)
    assert again.tracker is not None
    assert len(again.tracker.expected) == len(names)
    batch, _ = again.read(raw_of(messages), [Arrival(0, len(messages), "tcp://feed:1")])
    assert again.tracker.totals.duplicates == len(names)


def test_a_feed_that_is_numbered_in_another_way_leaves_nothing_of_the_old_behind(tmp_path: Path) -> None:
    ways = [
        {"framing": "sequenced"},
        {"framing": "sequenced", "sequenceBy": "none"},
        {"framing": "sequenced"},
    ]
    for turn, options in enumerate(ways):
        feed = Intake(stream_options(connect="tcp://feed:1", **options), SourceCounters())
        log = writer(tmp_path, feed)
        feed.restore(log.saved.full, log.saved.delta)
        sent: list[RawMessage] = [[b"", b"p%d" % turn, n.to_bytes(8, "big"), b"v"] for n in (0, 2)]
        log.append(feed.read(raw_of(sent), [Arrival(0, 2, "tcp://feed:1")])[0])
        log.cut().result()
        if turn == 0:
            log.cut(keep=True).result()
        log.close()
    again = Intake(stream_options(connect="tcp://feed:1", framing="sequenced"), SourceCounters())
    assert again.restore(saved(tmp_path).full, saved(tmp_path).delta)
    assert again.tracker is not None
    assert list(again.tracker.expected) == [b"p2"]
    assert [row["publisher"] for row in read_gaps(saved(tmp_path).full, saved(tmp_path).delta)] == ["p2"]
    assert again.counters.received == 6


def small_chunk(location: Path, grows: bool) -> Path:
    """The newest chunk of a log: three groups with a state each, written at once or group by group."""
    carried = Carrying()
    log = writer(location, carried)
    for text in ("one", "two", "three"):
        carried.text = text
        log.append(batch_of([text.encode()]))
        if grows:
            log.flush().result()
    log.cut().result()
    carried.changed = False
    log.close()
    (chunk,) = LogStorage(str(location)).chunks()
    return location / "0" / chunk.name


def metadata_region(content: bytes) -> range:
    """The message of the last batch, and the footer: both have metadata; the schema with its own is in the footer."""
    footer = len(content) - 10 - int.from_bytes(content[-10:-6], "little")
    end_of_stream = content.rindex(b"\xff\xff\xff\xff", 0, footer)
    return range(content.rindex(b"\xff\xff\xff\xff", 0, end_of_stream), len(content))


@pytest.mark.parametrize("grows", [False, True])
def test_no_flipped_bit_hides_the_state_or_gives_an_older_one(grows: bool, tmp_path: Path) -> None:
    path = small_chunk(tmp_path, grows)
    right, noticed = saved(tmp_path), 0
    assert right.delta == b"delta three"
    region = metadata_region(path.read_bytes())
    for bit in range(8):
        for position in flips(path, region, 1 << bit):
            try:
                assert saved(tmp_path) == right, (position, bit)
            except DamagedChunkError as e:
                assert path.name in str(e)
                noticed += 1
    assert noticed > 1000
