"""Queries of several machines on one feed whose log is in object storage. No JVM; the storage is a directory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq_datasource.host.object_store import ObjectStore
from zmq_datasource.log.claims import new_claim
from zmq_datasource.log.reader_files import ReaderRecord
from zmq_datasource.log.stored import StoredLog, storage_at

from tests.log.test_stored import kill
from tests.source.test_feed import Context, Query, _in_this_process, numbered, querying, send  # noqa: F401 - a fixture
from tests.support import Connections, bound, free_endpoint, stream_options, wait_for
from zmq_datasource.errors import LogLockedError, OptionError
from zmq_datasource.log import stored as stored_module
from zmq_datasource.log import tenure as tenure_module
from zmq_datasource.log.follower import LogFollower
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.options.types import Location
from zmq_datasource.source.ingest import Ingest, SharedOtherwiseError

On = Callable[..., AbstractContextManager[Query]]


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> On:
    """A query on a machine of this name."""
    monkeypatch.setattr(stored_module, "_CREATING_SECONDS", 0.0)
    monkeypatch.setattr(tenure_module, "_LOOKING_SECONDS", 0.02)
    monkeypatch.setattr(tenure_module, "_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(tenure_module, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(StoredLog, "leisure", 0.0)

    def made(machine: str, *args: Any, **options: Any) -> AbstractContextManager[Query]:
        return querying(tmp_path / machine, *args, walStore=f"file://{tmp_path}/store", **options)

    return made


def test_a_query_goes_on_at_another_machine(context: Context, on: On) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    connections = Connections(push)
    with connections, on("a", connect=endpoint) as query:
        query.step()
        send(push, 0, 100)
        query.until(100)
        query.reader.stop()
        with on("b", query.checkpoint, connect=endpoint) as again:
            again.step()
            connections.wait_for_only(2)
            send(push, 100, 200)
            again.until(100)
    assert query.rows + again.rows == numbered(200)


def test_queries_of_several_machines_get_every_message_and_one_receives(context: Context, on: On) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with on("a", connect=endpoint) as one, on("b", connect=endpoint) as two, on("c") as three:
        one.step(), two.step(), three.step()
        assert (one.receives, two.receives, three.receives) == (True, False, False)
        send(push, 0, 300)
        for query in (one, two, three):
            query.until(300)
        assert one.rows == two.rows == three.rows == numbered(300)


def test_another_machine_takes_over_when_the_one_that_receives_ends(context: Context, on: On) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with Connections(push) as connections, on("b", connect=endpoint) as two:
        with on("a", connect=endpoint) as one:
            two.step()
            assert two.receives  # it was the first
            one.step()
            send(push, 0, 100)
            two.until(100), one.until(100)
            two.reader.stop()
            wait_for(lambda: one.step() and one.receives, "the other one receives")
            connections.wait_for_only(2)
            send(push, 100, 200)
            one.until(200)
        assert one.rows == numbered(200)


def test_a_query_that_has_just_begun_elsewhere_keeps_its_name(context: Context, on: On) -> None:
    """On one machine its lock tells that it runs; here it would have been taken for one that has died."""
    push, endpoint = bound(context, zmq.PUSH)
    with on("a", connect=endpoint) as one, on("b", connect=endpoint) as two:
        one.step(), two.step()
        assert one.name != two.name
        send(push, 0, 10)
        one.until(10), two.until(10)


def test_what_is_known_of_publishers_goes_along(context: Context, on: On, tmp_path: Path) -> None:
    def numbers(first: int, *rest: int) -> None:
        for number in (first, *rest):
            pub.send_multipart([b"t", b"p", number.to_bytes(8, "big"), b"v"])

    pub, endpoint = bound(context, zmq.PUSH)
    options = {"connect": endpoint, "framing": "sequenced", "onLoss": "count"}
    with on("a", **options) as query:
        query.step()
        numbers(0, 1, 2)
        query.until(3)
    with on("b", query.checkpoint, **options) as again:
        again.step()
        numbers(5, 6)
        again.until(2)
        feeds = again.reader.feeds
        assert feeds is not None
        totals = feeds.parts[0].facts().totals
    assert totals is not None
    assert totals.lost == 2


def test_acknowledged_rows_are_in_the_storage(context: Context, tmp_path: Path, on: On) -> None:
    from zmq_datasource import Producer  # noqa: PLC0415

    endpoint = free_endpoint()
    options = {"bind": endpoint, "socketType": "ROUTER", "walLocation": tmp_path / "a"}
    ingest = Ingest(stream_options(**options, walStore=f"file://{tmp_path}/store"))
    ingest.start()
    try:
        with Producer(endpoint, name="one") as producer, producer.transaction():
            producer.send(b"0")
            producer.send(b"1")
        with on("b") as query:
            query.until(2)
        assert query.rows == numbered(2)
    finally:
        ingest.stop()


def test_a_query_goes_on_when_its_unmounted_store_returns(context: Context, on: On, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    store, away = tmp_path / "store", tmp_path / "away"
    with on("a", connect=endpoint) as query:
        query.step()
        send(push, 0, 5)
        query.until(5)
        store.rename(away)
        store.mkdir()
        send(push, 5, 8)
        assert query.reader.feeds is not None
        log = query.reader.feeds.parts[0].log
        wait_for(lambda: log.fault, "a fault")
        query.step()
        assert list(store.iterdir()) == []
        store.rmdir()
        away.rename(store)
        query.until(8)
        assert query.rows == numbered(8)
        checkpoint = query.checkpoint
    with on("b", checkpoint, connect=endpoint) as elsewhere:
        elsewhere.step()
        send(push, 8, 12)
        elsewhere.until(4)
        assert elsewhere.rows == numbered(12, 8)


@pytest.mark.parametrize("store", ["ftp://host/x", "relative/path", ""])
def test_what_is_no_object_storage_is_refused(store: str) -> None:
    from zmq_datasource.spark.datasource import ZmqDataSource  # noqa: PLC0415

    with pytest.raises(OptionError, match="walStore"):
        ZmqDataSource({"walStore": store}).reader(ZmqDataSource({}).schema())


def test_what_has_no_effect_with_a_store_is_refused() -> None:
    with pytest.raises(OptionError, match="option serveLog has no effect with walStore"):
        stream_options(connect="tcp://a:1", walStore="file:///x", serveLog="tcp://*:5599")


def test_secrets_in_its_location_are_not_shown(tmp_path: Path) -> None:
    options = stream_options(walStore="s3://key:hunter2@bucket/log", walLocation=tmp_path)
    from zmq_datasource.source.location import log_storage  # noqa: PLC0415

    storage = log_storage(options)
    assert isinstance(storage, StoredLog)
    assert (
        "hunter2"
        not in f"{storage!r} {storage} {options!r} {storage.path_of('x')} {storage.reader_path('r')}"
    )


def test_a_query_that_begins_beside_a_deletion_reads_what_is_left(
    context: Context, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredLog, "leisure", 3600.0)
    push, endpoint = bound(context, zmq.PUSH)
    with on("a", connect=endpoint) as one:
        one.step()
        for count in (10, 20, 30):
            send(push, count - 10, count)
            one.until(count)
        write = StoredLog.write_reader
        log = log_of(one)
        assert isinstance(log, LogWriter)
        assert log.earliest < 20

        def written_late(storage: StoredLog, reader: str, record: ReaderRecord) -> None:
            monkeypatch.setattr(StoredLog, "write_reader", write)
            log.retention._next_deletion = 0.0
            before = log.earliest
            log.retention.remove_expired()
            assert log.earliest > before, "a chunk is gone that the query has listed"
            write(storage, reader, record)

        with on("b") as two:
            monkeypatch.setattr(StoredLog, "write_reader", written_late)
            two.step()
            assert two.rows == numbered(30, log.earliest)


def log_of(query: Query) -> LogWriter | LogFollower:
    feeds = query.reader.feeds
    assert feeds is not None
    return feeds.parts[0].log


def test_a_query_elsewhere_takes_over_from_one_that_was_killed(
    context: Context, on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells it that the other one is gone but silence."""
    monkeypatch.setattr(tenure_module, "SILENT_SECONDS", 4.5)
    push, endpoint = bound(context, zmq.PUSH)
    connections = Connections(push)
    options = {"socketType": "PULL", "connect": endpoint, "walFlushInterval": "20ms"}
    arguments = {**options, "walLocation": tmp_path / "a", "walStore": f"file://{tmp_path}/store"}
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ingest_driver", *(f"{k}={v}" for k, v in arguments.items())],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "0\n"
        with connections, on("b", **options, startingOffsets="earliest") as query:
            query.step()
            assert not query.receives
            send(push, 0, 100)
            query.until(100)
            driver.kill()
            driver.wait()
            wait_for(lambda: query.step() and query.receives, "it receives")
            connections.wait_for_only(2)
            send(push, 100, 200)
            query.until(200)
        assert query.rows == numbered(200)
    finally:
        driver.kill()
        driver.wait()
        if driver.stdout is not None:
            driver.stdout.close()


def test_a_log_that_was_claimed_by_a_process_that_died_at_once_goes_on(
    context: Context, on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim without a first id leaves open whether the newest chunk counts; the query's offset says that it does."""
    monkeypatch.setattr(tenure_module, "_BLIND_SECONDS", 0.5)
    push, endpoint = bound(context, zmq.PUSH)
    with Connections(push) as connections:
        with on("a", connect=endpoint) as query:
            query.step()
            send(push, 0, 100)
            query.until(100)
        storage = storage_at(str(tmp_path / "a"), store=Location(f"file://{tmp_path}/store"))
        assert isinstance(storage, StoredLog)
        before = storage.tenures.highest(anew=True)
        feed, claim = storage.tenures.about(before)["feed"], new_claim(before)

        def claim_it() -> None:
            about = {"holder": "process 1 on gone", "feed": feed}
            storage.tenures.beat(claim)
            storage.store.put(f"0/claims/{claim}.json", json.dumps(about).encode())

        claim_it()
        refused = pytest.raises(LogLockedError, match="process 1 on gone has claimed the log")
        with on("late", query.checkpoint) as late, refused:
            late.step()
        claim_it()
        with on("b", query.checkpoint, connect=endpoint) as again:
            again.step()
            assert again.receives
            connections.wait_for_only(2)
            send(push, 100, 200)
            again.until(100)
    assert query.rows + again.rows == numbered(200)


def test_all_receivers_that_may_be_dead_are_listened_to_at_once(on: On, tmp_path: Path) -> None:
    """One after the other, a feed of many would take as many times as long to be received again."""
    location = Location(f"file://{tmp_path}/store")
    for partition in range(3):
        gone = LogWriter(
            storage_at(str(tmp_path / "gone"), partition, location), chunk_bytes=1 << 20, max_bytes=1 << 30
        )
        gone.open(0.0, "another feed")
        kill(gone)
    ingest = Ingest(stream_options(connect=free_endpoint(), walLocation=tmp_path / "b", walStore=location))
    with pytest.raises(SharedOtherwiseError, match="another feed"):
        ingest.open(0.0)
    store = ObjectStore(location)
    assert all(tenure_module.tenures_of(store, partition)._seen for partition in range(3))


def test_a_query_whose_feed_is_silent_hears_that_it_has_lost_the_log(
    context: Context, on: On, tmp_path: Path
) -> None:
    _, endpoint = bound(context, zmq.PUSH)
    with pytest.raises(LogLockedError, match="has lost it to"), on("a", connect=endpoint) as query:
        query.step()
        ObjectStore(Location(f"file://{tmp_path}/store")).put(
            "0/claims/9999999999-ffffffffffffffff.json", b"{}"
        )
        wait_for(lambda: query.step() < 0, "the error")
