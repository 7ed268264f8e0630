"""Queries that read along a log: nothing is deleted that they were promised, no id is given twice. No JVM."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.support import (
    Socket,
    batch_of,
    bound,
    keep_handlers,
    log_rows,
    need,
    stop_sooner,
    stream_options,
    wait_for,
)
from zmq_datasource import receive as receive_module
from zmq_datasource.errors import DataLossError
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.options import ReceiveOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.spark.stream_reader import Idle, ZmqStreamReader

Context = zmq.Context[Socket]
ALL = ReadMaxRows(1)  # any limit: ours are options


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)
    # No peer sends when these stop.
    stop_sooner(monkeypatch)


@contextmanager
def reader(location: Path, **options: Any) -> Iterator[ZmqStreamReader]:
    """Of a socket with ``connect``, else along the log that another process fills."""
    if "connect" in options:
        options = {"socketType": "PULL", "walRetention": "0s", **options}
    made = ZmqStreamReader(stream_options(walLocation=location, **options))
    try:
        yield made
    finally:
        made.stop()


@contextmanager
def receiving(location: Path, endpoint: str, **options: Any) -> Iterator[FeedReceiver]:
    options = {"socketType": "PULL", "walRetention": "0s", **options}
    ingest = FeedReceiver(stream_options(connect=endpoint, walLocation=location, **options))
    ingest.start()
    try:
        yield ingest
    finally:
        ingest.stop()


def written(location: Path, chunks: int, **settings: Any) -> LogWriter:
    """A log with chunks of a message each: 0, 1, ..."""
    log = LogWriter(LogStorage(str(location)), **{"chunk_bytes": 1 << 20, "max_bytes": 1 << 30, **settings})
    log.open()
    write(log, chunks)
    return log


def write(log: LogWriter, chunks: int) -> None:
    for number in range(log.durable_end, log.durable_end + chunks):
        log.append(batch_of([b"%d" % number]))
        log.cut().result(30)


def sealed(ingest: FeedReceiver, push: Socket, count: int) -> None:
    """Have ``count`` messages received, a chunk each."""
    for _ in range(count):
        goal = ingest.log.durable_end + 1
        push.send(b"%d" % (goal - 1))
        wait_for(lambda goal=goal: ingest.seal() == goal, f"{goal} messages")  # type: ignore[misc]


def until(it: ZmqStreamReader, start: dict[str, Any], goal: int) -> dict[str, Any]:
    def reached() -> dict[str, Any] | None:
        end = it.latestOffset(start, ALL)
        return end if end["next"] >= goal else None

    return wait_for(reached, f"offset {goal}") or {}


def values(it: ZmqStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[bytes]:
    batches = (batch for share in it.partitions(start, end) for batch in it.read(share))
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def chunks(location: Path) -> list[Path]:
    return [location / "chunks" / chunk_name(chunk.first) for chunk in LogStorage(str(location)).chunks()]


# Where a query begins.


def test_a_full_log_names_the_reader_that_needs_it(
    context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10)
    options = {"connect": endpoint, "socketType": "PULL", "walLocation": str(tmp_path), "walMaxBytes": "50k"}
    ended = threading.Event()
    receiver = threading.Thread(
        target=receive_module.receive_until,
        args=(parse(ReceiveOptions, options), ended),
        kwargs={"full_line_seconds": 0.0},
    )
    receiver.start()
    try:
        push.send(b"x" * 60_000)
        wait_for(lambda: "no query has read it yet" in caplog.text, "the warning")
        need(tmp_path, 0, "slow")
        wait_for(lambda: "reader slow still needs the messages from id 0" in caplog.text, "the slow reader")
        assert f"zmq-datasource log readers drop {tmp_path} slow" in caplog.text
    finally:
        ended.set()
        receiver.join(30)
    assert log_rows(tmp_path).num_rows == 1


# What is kept for it.


def test_a_query_that_follows_a_log_also_waits_for_a_chunk(tmp_path: Path) -> None:
    """Spark asks an idle query a hundred times a second, and each answer costs it more than it costs us."""
    log = written(tmp_path, 2)
    with reader(tmp_path) as it:
        end = it.latestOffset(it.initialOffset(), ALL)
        it.idle = Idle(poll_seconds=60)
        assert it.latestOffset(end, ALL) == end
        it.idle = Idle(poll_seconds=60, wait_seconds=3600)
        later = threading.Timer(0.2, write, (log, 1))
        later.start()
        assert it.latestOffset(end, ALL)["next"] == 3
        later.join()
    log.close()


# Ids are never given twice.


def copied(location: Path) -> Path:
    """A copy of the log, as a backup holds it."""
    return Path(shutil.copytree(location, location.with_name(f"{location.name}-copy")))


def restore(location: Path, copy: Path) -> None:
    shutil.rmtree(location)
    copy.rename(location)


def test_a_position_is_checked_before_anything_new_is_received(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=100)
    log = tmp_path / "log"
    options = {"connect": endpoint, "timeout": "300ms", "walFlushInterval": "10ms"}
    with reader(log, **options) as it:
        begin = it.initialOffset()
        assert it.latestOffset(begin, ALL) == begin
        push.send(b"0")
        middle = until(it, begin, 1)
    copy = copied(log)
    with reader(log, **options) as it:
        assert it.latestOffset(middle, ALL)
        push.send(b"1")
        end = until(it, middle, 2)
    restore(log, copy)
    for now in (True, False):
        with reader(log, **options) as it:
            if now:
                it.prepareForTriggerAvailableNow()
            with pytest.raises(DataLossError, match="the offset is 2, and the log ends at 1"):
                it.latestOffset(end, ALL)
            assert not push.poll(100, zmq.POLLOUT), "it has connected"
    with reader(log, **options) as it, pytest.raises(DataLossError, match="the offset is 2"):
        it.partitions(middle, end)  # a batch that was planned
    assert log_rows(log).column("value").to_pylist() == [b"0"]


@pytest.mark.parametrize("along", [False, True], ids=["own", "along"])
def test_ids_of_lost_chunks_that_a_query_has_read_are_not_given_again(
    context: Context, tmp_path: Path, along: bool
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    options = {"connect": endpoint, "walRetention": "10m"}
    with receiving(tmp_path, endpoint) as ingest:
        sealed(ingest, push, 3)
    with reader(tmp_path, **({} if along else options), startingOffsets="earliest") as it:
        end = until(it, it.initialOffset(), 3)
        it.latestOffset(end, ALL)  # Spark asks for more: the batch is done
    chunks(tmp_path)[-1].unlink()
    with (
        reader(tmp_path, **options) as it,
        pytest.raises(DataLossError, match="has read the ids below 3"),
    ):
        it.initialOffset()  # a new query, with a new checkpoint
    with pytest.raises(DataLossError, match=r"it ends at id 2.*has read the ids below 3"):
        FeedReceiver(stream_options(connect=endpoint, walLocation=tmp_path, socketType="PULL")).start()
