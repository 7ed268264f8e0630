"""Small chunks become large ones, and every reader finds the same rows under the same ids."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.log.machines import Machines, fill, numbered
from tests.support import batch_of, facts_of, need, wait_for
from zmq_datasource.errors import DamagedChunkError, DataLossError, DiskFaultError
from zmq_datasource.log.chunk import encode_chunk
from zmq_datasource.log.follower import LogFollower
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import Chunk, key_of, merged_name
from zmq_datasource.log.merging import Merger, choose_run
from zmq_datasource.log.reader import Deletions, first_since, read_index, read_slices, slices
from zmq_datasource.log.verification import verify_log
from zmq_datasource.log.writer import LogWriter


class Log:
    """A log whose chunks are merged when the test says so."""

    def __init__(self, machines: Machines, chunks: int) -> None:
        self.machines, self.storage = machines, machines.storage()
        self.log: LogWriter = machines.writer(self.storage)
        for number in range(chunks):
            fill(self.log, b"%d" % number)
        self.rows = numbered(*(b"%d" % number for number in range(chunks)))

    def merge(self) -> None:
        merger = Merger(self.storage, self.log, 1 << 20, fan_in=2)
        while merger.merge_once():
            pass

    def damage(self, chunk: Chunk) -> None:
        """Change a row of it, and nothing else."""
        key = key_of(chunk.name)
        with self.storage.store.open(key) as file:
            content = bytes(file.read())
        values = b"".join(b"%d" % number for number in range(chunk.first, chunk.end))
        at = content.index(values, 800)  # after the schema
        self.storage.store.delete(key)
        self.storage.store.put_new(key, [content[:at] + b"?" + content[at + 1 :]])


@pytest.fixture
def log(anywhere: Machines) -> Log:
    return Log(anywhere, 9)


def test_all_but_the_newest_chunk_are_merged(log: Log) -> None:
    log.merge()
    assert log.machines.names("merged") == [merged_name(0, 8).rpartition("/")[2]]
    assert log.machines.firsts() == [8]
    assert log.machines.rows() == log.rows
    assert [it[:3] for it in log.log.covering(0, 9)] == [
        it[:3] for it in read_index(log.storage).covering(0, 9)
    ]
    assert list(verify_log(log.storage)) == []


def test_a_task_and_a_follower_whose_small_chunk_is_gone_read_the_merged_one(log: Log) -> None:
    storage = log.machines.storage()
    follower = LogFollower(storage)
    follower.open()
    pieces = slices(follower.covering(2, 7), 2, 7)
    log.merge()
    deletions = Deletions(storage, storage.log_id(), fails=True)
    rows = [
        v for b in read_slices(storage, pieces, deletions=deletions) for v in b.column("value").to_pylist()
    ]
    assert rows == [b"2", b"3", b"4", b"5", b"6"]
    fill(log.log, b"9")
    follower.refresh_now()
    assert (follower.earliest, follower.durable_end, follower.chunks) == (0, 10, 3)


def test_a_task_whose_small_chunk_is_gone_names_the_damaged_file_with_which_it_was_merged(log: Log) -> None:
    storage = log.machines.storage()
    pieces = slices(read_index(storage).covering(2, 3), 2, 3)
    log.merge()
    merged = key_of(log.log.covering(2, 3)[0].name)
    storage.store.delete(merged)
    storage.store.put_new(merged, [b"no Arrow"])
    deletions = Deletions(storage, storage.log_id(), fails=False)
    with pytest.raises(DamagedChunkError, match=merged_name(0, 8)):
        list(read_slices(storage, pieces, deletions=deletions))


def test_a_damaged_chunk_stays_as_it_is_and_its_neighbours_are_merged(log: Log) -> None:
    damaged = log.log.covering(3, 4)[0]
    log.damage(damaged)
    log.log.replace(read_index(log.storage))
    log.merge()
    assert [chunk[:2] for chunk in log.log.covering(0, 9)] == [(0, 3), (3, 4), (4, 8), (8, 9)]
    (found,) = verify_log(log.storage)
    assert damaged.name in found.file


def test_a_merged_chunk_that_was_lost_is_named_by_its_ids_and_the_log_goes_on(log: Log) -> None:
    fill(log.log, b"9")
    merger = Merger(log.storage, log.log, 1 << 20, fan_in=2)
    for first, end in ((0, 3), (3, 6)):
        merger._merge(log.log.covering(first, end))
    for chunk in log.log.covering(0, 6):
        log.storage.delete_chunk(chunk)
    log.machines.end(log.log)
    again = log.machines.writer()
    assert fill(again, b"10") == 11
    assert [chunk[:2] for chunk in again.all] == [(0, 6), *((n, n + 1) for n in range(6, 11))]
    with pytest.raises(DataLossError, match="ids 0 to 5"):
        log.machines.rows()
    (found,) = verify_log(log.storage)
    assert "ids 0 to 5" in found.what
    storage = log.machines.storage()
    pieces, skips = slices(again.all, 0, 11), Deletions(storage, storage.log_id(), fails=False)
    assert [batch.column("id")[0].as_py() for batch in read_slices(storage, pieces, deletions=skips)] == [
        *range(6, 11)
    ]
    need(storage, 7)
    wait_for(lambda: again.earliest == 7, "the deletion")
    assert read_index(storage).earliest == 7


def test_the_parts_that_a_killed_writer_has_left_count_for_nobody_and_are_deleted(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(log.storage, "delete_chunk", lambda _: None)
        log.merge()
    assert len(log.machines.firsts()) == 9
    assert log.machines.rows() == log.rows
    log.machines.end(log.log)
    again = log.machines.writer(storage := log.machines.storage())
    Merger(storage, again, 1 << 20).remove_leftovers()
    assert log.machines.firsts() == [8]
    assert log.machines.rows() == log.rows


def test_the_thread_merges_and_deletes_parts_later_that_a_store_did_not_delete(
    anywhere: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    def refuse(verb: str, key: str) -> None:
        if verb == "delete" and key.startswith("chunks/") and len(refused) < 3:
            refused.append(key)
            raise DiskFaultError(f"deleting {key}: no answer")

    storage = anywhere.storage()
    monkeypatch.setattr(storage.store, "before", refuse)
    log = LogWriter(storage, chunk_bytes=1 << 20, max_bytes=1 << 30)
    log.merge_seconds = 0.01
    log.open()
    for number in range(9):
        fill(log, b"%d" % number)
    wait_for(lambda: anywhere.firsts() == [8], "the deletion of all parts")
    log.close()
    assert len(refused) == 3


def test_parts_stay_while_the_merged_chunk_is_damaged(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(log.storage, "delete_chunk", lambda _: None)
        log.merge()
    log.damage(log.log.covering(0, 1)[0])
    log.log.replace(read_index(log.storage))
    Merger(log.storage, log.log, 1 << 20).remove_leftovers()
    assert len(log.machines.firsts()) == 9


def test_leftovers_do_not_come_back_after_retention(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(log.storage, "delete_chunk", lambda _: None)
        log.merge()
    need(log.machines.storage(), 9)
    wait_for(lambda: log.log.earliest == 8, "the deletion")
    assert read_index(log.machines.storage()).earliest == 8
    assert log.machines.rows() == log.rows[8:]


def test_a_merged_chunk_that_is_half_needed_stays(log: Log) -> None:
    log.merge()
    need(log.machines.storage(), 5)
    wait_for(lambda: log.log.needed == 5, "a look")
    assert log.machines.rows()[-4:] == log.rows[-4:]
    assert len(log.machines.names("merged")) == 1


def test_two_writers_may_have_merged_differently(log: Log) -> None:
    """Merged chunks that overlap have the same rows."""
    rows = [batch_of([b"%d" % number]) for number in range(6)]
    content = encode_chunk(rows, facts_of(rows))
    parts = log.log.covering(4, 8)
    merger = Merger(log.storage, log.log, 1 << 20, fan_in=2)
    merger._merge(parts)
    log.storage.store.put_new(key_of(merged_name(0, 6)), content)
    index = read_index(log.storage)
    assert [chunk[:2] for chunk in index.covering(0, 9)] == [(0, 6), (6, 8), (8, 9)]
    assert log.machines.rows() == log.rows


def test_the_rows_of_a_chunk_that_was_replaced_since_planning_are_not_read(log: Log) -> None:
    """A writer that had lost the log has put other rows under the key of a merged chunk."""
    storage = log.machines.storage()
    pieces = slices(read_index(storage).covering(2, 4), 2, 4)
    log.merge()
    other = [batch_of([b"x"])]
    stray = encode_chunk(other, facts_of(other, 2))
    storage.store.put_new(key_of("00000000000000000002.arrow"), stray)
    with pytest.raises(DataLossError):
        list(read_slices(storage, pieces))
    found = read_slices(storage, pieces, deletions=Deletions(storage, storage.log_id(), fails=True))
    assert next(found).column("value").to_pylist() == [b"2"]


def sealed(sizes: Iterator[int], chunks: int) -> ChunkIndex:
    """An index into which chunks are sealed one after the other, and merged after each."""
    index, copied = ChunkIndex(), 0
    for first in range(chunks):
        index.add(Chunk(first, first + 1, next(sizes), 0.0))
        while run := choose_run(index.all, (), 64 << 20):
            size = sum(chunk.size for chunk in run)
            copied += size
            name = merged_name(run[0].first, run[-1].end)
            index.merge(Chunk(run[0].first, run[-1].end, size, 0.0, name))
    assert copied < 6 * index.size
    return index


def test_a_log_of_very_many_small_chunks_ends_as_some_files() -> None:
    index = sealed((20_000 for _ in count()), 20_000)
    assert index.chunks < 50


def test_a_long_log_is_opened_and_a_time_is_found_by_few_reads(
    anywhere: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(anywhere, 300)
    log.merge()
    store: Any = (storage := anywhere.storage()).store
    index = read_index(storage)
    assert index.chunks < 5
    assert store.calls["open"] <= 3
    store.calls.clear()
    (batch,) = read_slices(storage, slices(index.covering(200, 201), 200, 201))
    at = batch.column("timestamp").cast("int64")[0].as_py()
    store.calls.clear()
    assert first_since(storage, index.covering(0, 300), at) is not None
    assert store.calls["open"] <= 8
