"""Queries that share a feed, at bad moments: two things at once, a log that is gone, a name that is taken. No JVM."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.source.test_feed import (
    ALL,
    Context,
    Query,
    ends_at,
    filled,
    first_batch,
    numbered,
    positions,
    querying,
    read,
    send,
)
from tests.support import Connections, batch_of, bound, free_endpoint, stop_sooner, take_over, wait_for
from zmq_datasource.errors import DataLossError, DiskFaultError, EndpointError, LogLockedError, OptionError
from zmq_datasource.log.held_position import HeldPosition
from zmq_datasource.log.reader_files import ReaderPosition
from zmq_datasource.log.readers import Readers
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.proxy.server import Server
from zmq_datasource.proxy.view import Progress
from zmq_datasource.source import feed as feed_module
from zmq_datasource.source.ingest import Ingest


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest's own process keeps its handlers
    stop_sooner(monkeypatch)
    take_over(monkeypatch, standby=0.01)
    monkeypatch.setattr(feed_module, "LOCK_WAIT_SECONDS", 0.1)


def test_a_query_that_begins_while_nobody_can_read_who_receives_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, feed, faults = free_endpoint(), LogStorage.feed, [DiskFaultError("too many open files")]

    def refused(storage: LogStorage) -> str:
        if faults:
            raise faults.pop()
        return feed(storage)

    with querying(tmp_path, bind=endpoint) as one, querying(tmp_path, bind=endpoint) as two:
        one.step()
        monkeypatch.setattr(LogStorage, "feed", refused)
        two.step()
        assert not faults
        assert not two.receives


# Standing by.


def test_of_several_that_cannot_receive_in_place_of_another_each_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has the lock for a moment whenever it tries, and the others see that."""
    take_over(monkeypatch, takeover=0.3)
    endpoint = free_endpoint()
    with querying(tmp_path, bind=endpoint) as one, querying(tmp_path, bind=endpoint) as two:
        one.step(), two.step()

        def start(ingest: Ingest) -> None:
            ingest.log.close()
            raise EndpointError("in use")

        looks = iter(range(1 << 30))
        monkeypatch.setattr(Ingest, "start", start)
        monkeypatch.setattr(LogStorage, "is_written", lambda _: next(looks) % 2 == 0)
        one.reader.stop()
        with pytest.raises(EndpointError, match="in use"):
            wait_for(lambda: two.step() < 0, "an error", 5.0)


@pytest.mark.parametrize("least", [1, 1000])
def test_whatever_keeps_a_query_from_receiving_in_place_of_another_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """An error that nobody has thought of must not end the thread alone; and is heard while a batch is held back."""
    take_over(monkeypatch, takeover=0.1)
    endpoint = free_endpoint()
    held_back = {"bind": endpoint, "minMessagesPerTrigger": least}
    with querying(tmp_path, bind=endpoint) as one, querying(tmp_path, **held_back) as two:
        one.step(), two.step()

        def open_(_ingest: Ingest, _wait: float) -> None:
            raise MemoryError("no memory")

        monkeypatch.setattr(Ingest, "open", open_)
        one.reader.stop()
        with pytest.raises(MemoryError, match="no memory"):
            wait_for(lambda: two.step() < 0, "an error", 5.0)


def test_a_log_that_is_gone_is_not_made_anew_by_who_stands_by(context: Context, tmp_path: Path) -> None:
    """It would take messages into a log that no checkpoint knows."""
    _, endpoint = bound(context, zmq.PUSH)
    log = tmp_path / "log"
    with querying(log, connect=endpoint) as one, querying(log, connect=endpoint) as two:
        one.step(), two.step()
        shutil.rmtree(log)
        time.sleep(0.2)
        assert not two.receives
        assert not log.exists()
        filled(log, 1).close()
        time.sleep(0.2)
        assert not two.receives
        with pytest.raises(DataLossError, match="made anew"):
            two.step()


def test_who_follows_a_feed_does_not_go_on_with_another(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two that receive the lock is free, and whoever comes then may receive something else."""
    take_over(monkeypatch, standby=0.3)
    _, endpoint = bound(context, zmq.PUSH)
    with querying(tmp_path, connect=endpoint) as one, querying(tmp_path, connect=endpoint) as two:
        one.step(), two.step()
        one.reader.stop()
        other = LogWriter(LogStorage(str(tmp_path)), chunk_bytes=1 << 20, max_bytes=1 << 30)
        other.open(1.0, "feed other")
        with pytest.raises(LogLockedError, match="another feed"):
            wait_for(lambda: two.step() < 0, "an error", 5.0)
        other.close()


def test_a_query_that_is_stopped_while_it_takes_over_seals_what_it_has_taken(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drains for longer than a thread is waited for."""
    monkeypatch.setattr(feed_module, "_JOIN_SECONDS", 0.5)
    stop_sooner(monkeypatch, 1.0)
    push, endpoint = bound(context, zmq.PUSH)
    with (
        Connections(push) as connections,
        querying(tmp_path, connect=endpoint, walFlushInterval="1h") as one,
    ):
        one.step()
        two = Query(tmp_path, connect=endpoint, walFlushInterval="1h")
        two.step()
        assert two.reader.feeds is not None
        stopping, start = two.reader.feeds.parts[0]._stopping, Ingest.start

        def slow(ingest: Ingest) -> None:
            start(ingest)
            assert stopping.wait(30)

        monkeypatch.setattr(Ingest, "start", slow)
        one.reader.stop()
        connections.wait_for_only(2)
        send(push, 0, 10)
        two.reader.stop()
        assert ends_at(tmp_path, 10)  # and the process may end now


# Names.


def test_a_first_batch_whose_name_another_query_has_is_no_older_copy(tmp_path: Path) -> None:
    """A checkpoint was copied before its first batch was done."""
    filled(tmp_path, 4).close()
    with querying(tmp_path) as one:
        _, end = one.plan()
        with querying(tmp_path) as two:
            assert read(two.reader, two.begin(), end) == numbered(4)
            assert two.name != one.name


def test_a_query_that_was_taken_for_another_leaves_it_its_beginning(context: Context, tmp_path: Path) -> None:
    """Two begin, and one of them was given nothing before both are killed."""
    push, endpoint = bound(context, zmq.PUSH)
    with querying(tmp_path, connect=endpoint) as one:
        begin, end = first_batch(one, push, 0, 10)
        planned = read(one.reader, begin, end)
        with querying(tmp_path, connect=endpoint) as two:
            two.begin()
            name = two.name
        LogStorage(str(tmp_path)).remove_start(one.name)  # so that it is taken for the other
    with querying(tmp_path, connect=endpoint) as one:
        begin = one.begin()
        assert begin["reader"] == name
        assert read(one.reader, begin, end) == planned
        send(push, 10, 20)
        one.run(begin, end)
        one.until(20)
    with querying(tmp_path, connect=endpoint) as two:
        two.until(10)
        assert (two.name, two.rows) == (name, numbered(20, 10))


def test_an_empty_first_batch_is_repeated_though_another_query_has_its_name_and_went_on(
    tmp_path: Path,
) -> None:
    """Nothing was given under the name: who begins alike has it."""
    filled(tmp_path, 4).close()
    earliest = {"maxMessagesPerTrigger": "1", "startingOffsets": "earliest"}
    with querying(tmp_path, **earliest) as one:
        begin = one.begin()
    with querying(tmp_path, **earliest) as two:
        two.begin()
        assert two.name == begin["reader"]
        two.until(4)
        with querying(tmp_path, **earliest) as one:
            assert read(one.reader, one.begin(), begin) == []
            one.run(begin, begin)
            assert one.name != two.name
    with querying(tmp_path, **earliest) as one:
        assert read(one.reader, one.begin(), begin) == []
        one._checkpoint = begin
        one.until(4)
        assert one.rows == numbered(4)


def test_a_query_whose_first_batch_had_no_rows_keeps_its_name(context: Context, tmp_path: Path) -> None:
    """Spark's first batch needs none; from then on its checkpoint has the name, and a new query is another one."""
    push, endpoint = bound(context, zmq.PUSH)
    with querying(tmp_path, connect=endpoint) as one:
        begin, end = one.plan()
        assert read(one.reader, begin, end) == []
        assert one.reader.latestOffset(end, ALL) == end
        name = one.name
    with querying(tmp_path, connect=endpoint) as two:
        two.step()
        assert two.name != name
        send(push, 0, 10)
        two.until(10)
        with querying(tmp_path, end, connect=endpoint) as one:
            one.until(10)
            assert (one.name, one.rows) == (name, numbered(10))


def test_a_checkpoint_without_a_name_is_no_beginning(tmp_path: Path) -> None:
    """A user has written it by hand; another query's beginning is nothing for it."""
    filled(tmp_path, 4).close()
    with querying(tmp_path) as one:
        one.begin()
        name = one.name
    checkpoint = {"log": LogStorage(str(tmp_path)).log_id(), "next": {"0": 2}}
    with querying(tmp_path, checkpoint) as two:
        two.step()
        assert two.name != name
        assert two.rows == numbered(4, 2)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ('{"next": {"0": 99}}', "it says 99, and partition 0 of the log ends before id 4"),
        ('{"next": {"7": 1}}', r"the log has no partition \[7\], only \[0\]"),
    ],
)
def test_offsets_that_a_user_has_mistyped_are_no_data_loss(tmp_path: Path, offsets: str, said: str) -> None:
    filled(tmp_path, 4).close()
    with (
        querying(tmp_path, startingOffsets=offsets, failOnDataLoss=False) as query,
        pytest.raises(OptionError, match=f"option startingOffsets: {said}"),
    ):
        query.begin()


def test_a_query_that_is_refused_leaves_no_position(tmp_path: Path) -> None:
    """Each would keep all messages from its time on, for a week."""
    filled(tmp_path, 4).close()
    for _ in range(3):
        late = "2200-01-01T00:00:00Z"
        with querying(tmp_path, startingTimestamp=late) as query, pytest.raises(OptionError):
            query.step()
        other = {"log": "another", "next": {"0": 1}, "reader": "query-0"}
        with querying(tmp_path, other) as query, pytest.raises(DataLossError):
            query.step()
    assert os.listdir(tmp_path / "0" / "readers") == []


# What is kept for whom.


def test_a_full_log_drops_only_those_that_keep_it_full(context: Context, tmp_path: Path) -> None:
    """The query that receives is the slow one; the other is ahead of it, and only just being restarted."""
    push, endpoint = bound(context, zmq.PUSH)
    options: dict[str, Any] = {"connect": endpoint, "walMaxBytes": "50k"}
    with querying(tmp_path, **options) as slow:
        begin = slow.begin()
        slow.reader.latestOffset(begin, ALL)
        with querying(tmp_path, **options) as quick:
            quick.step()
            name = quick.name
            assert slow.reader.feeds is not None
            log = slow.reader.feeds.parts[0].log
            for count in range(1, 100):
                push.send(b"x" * 5000)
                quick.until(count)
                if log.full:
                    break
            quick.step()
            assert log.full
        slow.reader.latestOffset(begin, ALL)
        assert name in positions(tmp_path)


def test_room_is_made_by_dropping_no_more_than_that_takes(tmp_path: Path) -> None:
    storage = LogStorage(str(tmp_path))
    storage.open_log()
    readers = Readers(storage)
    readers.own = "mine"
    for name, needed in (("slow", 1), ("restarts", 9)):
        storage.write_reader(name, ReaderPosition(needed, None, False))
    assert readers.give_way(5)
    assert positions(tmp_path) == ["restarts"]
    assert not readers.give_way(5)
    storage.write_reader("slow", ReaderPosition(1, None, False))
    storage.write_reader("named", ReaderPosition(2))
    assert not readers.give_way(5)  # what the named one needs stays, so dropping the other gains nothing
    assert positions(tmp_path) == ["named", "restarts", "slow"]


def test_the_time_of_a_query_that_does_not_run_begins_when_it_stops(tmp_path: Path) -> None:
    """Its feed was silent for long, so its position had not moved."""
    storage = LogStorage(str(tmp_path))
    readers = Readers(storage, 100.0)
    filled(tmp_path, 4).close()
    with querying(tmp_path) as query:
        query.until(4)
        query.step()
        name = query.name
        os.utime(storage.reader_path(name), (1, 1))
    assert readers.needed() == 4
    os.utime(storage.reader_path(name), (1, 1))
    with querying(tmp_path, query.checkpoint) as query:
        query.step()
        assert query.reader.feeds is not None
        held = query.reader.feeds.parts[0]
        os.utime(storage.reader_path(name), (1, 1))
        held._position._recorded_at -= 3600  # and if it is killed, when it was last seen
        query.step()
        moved = storage.moved_at(name)
        assert moved is not None
        assert time.time() - moved < 60


def test_what_is_looked_at_is_not_used(tmp_path: Path) -> None:
    """Another query's beginning, which is not that of this one."""
    filled(tmp_path, 4).close()
    storage = LogStorage(str(tmp_path))
    with querying(tmp_path) as query:
        query.begin()
        name = query.name
    os.utime(storage.reader_path(name), (1, 1))
    assert HeldPosition.of_a_start(storage, "latest") is None
    assert storage.moved_at(name) == 1


def test_a_proxy_keeps_nothing_for_a_query_that_is_gone(tmp_path: Path) -> None:
    """Each that fails, or begins anew, leaves a name that nobody will ever use again."""
    filled(tmp_path, 4).close()
    with querying(tmp_path) as query:
        query.begin()
        name = query.name
    options = {"bind": free_endpoint(), "publish": free_endpoint(), "walLocation": str(tmp_path)}
    with Server(parse(ProxyOptions, options), Progress(0, 4, None)) as server:
        server.step()
        assert server.status()["hold"] == 0
        os.utime(LogStorage(str(tmp_path)).reader_path(name), (1, 1))
        server._next_look = 0.0
        server.step()
        assert server.status()["hold"] == 4


def test_a_passing_fault_of_the_disk_ends_no_query_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lasts for walRetryTimeout does."""
    log = filled(tmp_path, 2)
    with querying(tmp_path, walRetryTimeout="200ms") as query:
        query.until(2)

        def refuse(_: LogStorage) -> str:
            raise DiskFaultError("reading log.json: Too many open files")

        with monkeypatch.context() as fault:
            fault.setattr(LogStorage, "log_id", refuse)
            until = time.monotonic() + 0.1
            wait_for(lambda: query.step() == 2 and time.monotonic() > until, "some looks")
        log.append(batch_of([b"2"]))
        log.cut().result(30)
        query.until(3)
        monkeypatch.setattr(LogStorage, "log_id", refuse)
        with pytest.raises(DiskFaultError, match="Too many open files"):
            wait_for(lambda: query.step() < 0, "an error")
        monkeypatch.undo()
    log.close()
