"""Queries that share a feed, at bad moments: two things at once, a log that is gone, a name that is taken. No JVM."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import zmq

from tests.source.test_feed import (
    Context,
    Query,
    ends_at,
    filled,
    positions,
    querying,
    send,
)
from tests.support import (
    Connections,
    batch_of,
    bound,
    free_endpoint,
    keep_handlers,
    stop_sooner,
    take_over,
    wait_for,
)
from tests.support.proxies import ProxyThreads, endpoints
from zmq_datasource.errors import DataLossError, DiskFaultError, EndpointError, LogLockedError, OptionError
from zmq_datasource.log.reader_records import ReaderRecord, ReaderRecords
from zmq_datasource.log.readers import Reader, Readers
from zmq_datasource.log.retention import Retention
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.source.ingest import Ingest
from zmq_datasource.spark.stream_reader import Idle


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)
    stop_sooner(monkeypatch)
    take_over(monkeypatch, standby=0.01)
    monkeypatch.setattr(Reader, "hold_seconds", 0.1)


# Standing by.


def test_each_query_that_cannot_receive_in_place_of_another_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt of one query holds the lock for a moment, which the others see."""
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
            wait_for(lambda: two.step() < 0, "an error")


def test_any_error_of_a_takeover_ends_the_query_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any error must end the query, and not only its thread, even while a batch is held back."""
    take_over(monkeypatch, takeover=0.1)
    endpoint = free_endpoint()
    held_back = {"bind": endpoint, "minMessagesPerTrigger": 1000}
    with querying(tmp_path, bind=endpoint) as one, querying(tmp_path, **held_back) as two:
        one.step(), two.step()

        def open_(_ingest: Ingest, _wait: float) -> None:
            raise MemoryError("no memory")

        monkeypatch.setattr(Ingest, "open", open_)
        one.reader.stop()
        with pytest.raises(MemoryError, match="no memory"):
            wait_for(lambda: two.step() < 0, "an error")


def test_a_standby_does_not_make_a_new_log_when_the_log_is_gone(context: Context, tmp_path: Path) -> None:
    """It would receive messages into a log that no checkpoint knows."""
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
        with pytest.raises(DataLossError, match="created again"):
            two.step()


def test_a_query_that_follows_a_feed_fails_when_another_feed_is_received(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two receivers the lock is free, and a process with another feed may take it."""
    take_over(monkeypatch, standby=0.3)
    _, endpoint = bound(context, zmq.PUSH)
    with querying(tmp_path, connect=endpoint) as one, querying(tmp_path, connect=endpoint) as two:
        one.step(), two.step()
        one.reader.stop()
        other = LogWriter(LogStorage(str(tmp_path)), chunk_bytes=1 << 20, max_bytes=1 << 30)
        other.open(1.0, "feed other")
        with pytest.raises(LogLockedError, match="another feed"):
            wait_for(lambda: two.step() < 0, "an error")
        other.close()


def test_a_query_stopped_during_a_takeover_seals_the_received_messages(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The takeover drains its socket for longer than ``stop`` waits for the standby thread."""
    stop_sooner(monkeypatch, 1.0)
    push, endpoint = bound(context, zmq.PUSH)
    with (
        Connections(push) as connections,
        querying(tmp_path, connect=endpoint, walFlushInterval="1h") as one,
    ):
        one.step()
        two = Query(tmp_path, connect=endpoint, walFlushInterval="1h")
        two.step()
        assert two.reader.feed is not None
        feed = two.reader.feed
        feed.join_seconds = 0.5
        stops, stop, start = threading.Event(), feed.stop, Ingest.start

        def slow(ingest: Ingest) -> None:
            start(ingest)
            assert stops.wait(30)

        def stop_feed() -> None:
            stops.set()
            stop()

        monkeypatch.setattr(Ingest, "start", slow)
        monkeypatch.setattr(feed, "stop", stop_feed)
        one.reader.stop()
        connections.wait_for_only(2)
        send(push, 0, 10)
        two.reader.stop()
        assert ends_at(tmp_path, 10)  # and the process may end now


def test_a_takeover_that_takes_longer_than_stop_waits_leaves_no_receiver(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would go on receiving, with the log's lock, in a process whose query has ended."""
    _, endpoint = bound(context, zmq.PUSH)
    with querying(tmp_path, connect=endpoint) as one:
        one.step()
        two = Query(tmp_path, connect=endpoint)
        two.step()
        assert two.reader.feed is not None
        feed = two.reader.feed
        feed.join_seconds = 0.1
        starts, stopped, start = threading.Event(), threading.Event(), Ingest.start

        def slow(ingest: Ingest) -> None:
            starts.set()
            assert stopped.wait(30)
            start(ingest)

        monkeypatch.setattr(Ingest, "start", slow)
        one.reader.stop()
        assert starts.wait(30)
        two.reader.stop()
        stopped.set()
        wait_for(lambda: not LogStorage(str(tmp_path)).is_written(), "the log to be free")


# Beginnings.


def test_a_mistyped_offset_is_an_option_error_and_no_data_loss(tmp_path: Path) -> None:
    filled(tmp_path, 4).close()
    with (
        querying(tmp_path, startingOffsets='{"next": 99}', failOnDataLoss=False) as query,
        pytest.raises(OptionError, match="option startingOffsets: it is 99, and the log ends before id 4"),
    ):
        query.begin()


def test_a_query_that_is_refused_leaves_no_position(tmp_path: Path) -> None:
    """Each position would keep all messages from then on."""
    filled(tmp_path, 4).close()
    for _ in range(3):
        late = "2200-01-01T00:00:00Z"
        with querying(tmp_path, startingOffsets=late) as query, pytest.raises(OptionError):
            query.step()
        other = {"log": "another", "next": 1}
        with querying(tmp_path, other) as query, pytest.raises(DataLossError):
            query.step()
    assert ReaderRecords(LogStorage(str(tmp_path))).names() == []


# Which messages are kept for which reader.


def test_a_full_log_drops_no_more_readers_than_necessary(tmp_path: Path) -> None:
    storage = LogStorage(str(tmp_path))
    storage.open_log()
    records = ReaderRecords(storage)
    readers = Readers(storage)
    readers.own = "mine"
    for name, needed in (("slow", 1), ("restarts", 9)):
        records.write(name, ReaderRecord(needed))
    assert readers.make_room(5)
    assert positions(tmp_path) == ["restarts"]
    assert not readers.make_room(5)
    records.write("slow", ReaderRecord(1))
    records.write("named", ReaderRecord(2, 1e9))
    assert not readers.make_room(5)  # what the named one needs stays, so dropping the other gains nothing
    assert positions(tmp_path) == ["named", "restarts", "slow"]


def test_the_timeout_of_a_reader_begins_when_its_query_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its feed had been silent for long, so its record was old."""
    storage = LogStorage(str(tmp_path))
    filled(tmp_path, 4).close()
    path = ReaderRecords(storage).path_of("desk")
    with querying(tmp_path, reader="desk") as query:
        query.until(4)
        query.step()
        os.utime(path, (1, 1))
    assert time.time() - os.stat(path).st_mtime < 60
    monkeypatch.setattr(Reader, "rewrite_seconds", 0.0)
    with querying(tmp_path, query.checkpoint, reader="desk") as query:
        query.step()
        os.utime(path, (1, 1))
        query.step()  # and if it is killed, when it was last seen
        assert time.time() - os.stat(path).st_mtime < 60


def test_a_proxy_keeps_nothing_for_a_query_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Retention, "records_seconds", 0.0)
    filled(tmp_path, 4).close()
    with querying(tmp_path, reader="desk", readerTimeout="1m", maxMessagesPerTrigger=1) as query:
        query.begin()
    path = ReaderRecords(LogStorage(str(tmp_path))).path_of("desk")
    with ProxyThreads(tmp_path, endpoints("bind", "publish")) as proxy:
        log = proxy.flow.journal.log
        log.retention.remove_expired()
        assert log.earliest == 0
        assert os.path.exists(path)
        os.utime(path, (1, 1))
        wait_for(lambda: not os.path.exists(path), "the record dropped")


def test_a_proxy_keeps_what_a_query_with_the_name_proxy_has_not_read(tmp_path: Path) -> None:
    filled(tmp_path, 4).close()
    with querying(tmp_path, reader="proxy", readerTimeout="1m", maxMessagesPerTrigger=1) as query:
        query.begin()
    with ProxyThreads(tmp_path, endpoints("bind", "publish"), walRetention="0s") as proxy:
        log = proxy.flow.journal.log
        log.retention.remove_expired()
        assert log.earliest == 0
        assert log.retention.committed == 0


def test_a_passing_disk_fault_does_not_end_a_query_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path, 2)
    with querying(tmp_path) as query:
        query.reader.idle = Idle(wait_seconds=0.05)  # several polls before the fault ends the query
        query.until(2)

        def refuse(_: LogStorage) -> str:
            raise DiskFaultError("reading log.json: Too many open files")

        with monkeypatch.context() as fault:
            fault.setattr(LogStorage, "log_id_again", refuse)
            until = time.monotonic() + 0.1
            wait_for(lambda: query.step() == 2 and time.monotonic() > until, "some looks")
        log.append(batch_of([b"2"]))
        log.cut().result(30)
        query.until(3)
    log.close()
