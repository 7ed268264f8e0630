"""Queries that share a feed: each gets every message, one receives, and another goes on when it ends. No JVM."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.support import (
    Connections,
    Socket,
    batch_of,
    bound,
    free_endpoint,
    keep_handlers,
    log_at,
    log_options,
    log_rows,
    stop_sooner,
    stream_options,
    take_over,
    wait_for,
)
from zmq_datasource import Producer
from zmq_datasource.errors import DataLossError
from zmq_datasource.log.leases import LeaseFiles
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.spark.stream_reader import ZmqStreamReader

Context = zmq.Context[Socket]
ALL = ReadMaxRows(1)  # any limit: ours are options
Offset = dict[str, Any]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)
    stop_sooner(monkeypatch)
    take_over(monkeypatch, standby=0.01)


class Query:
    """A query that makes Spark's calls in Spark's order; ``rows`` has the committed rows.

    Args:
        checkpoint: The offset that an earlier run has ended at; None if there was none.
    """

    def __init__(self, location: Path | str, checkpoint: Offset | None = None, **options: Any) -> None:
        if "connect" in options or "bind" in options:
            options = {"socketType": "PULL", "walFlushInterval": "20ms", "walRetention": "0s", **options}
        self.location = location
        self.reader = ZmqStreamReader(stream_options(**log_options(location), **options))
        self.rows: list[tuple[int, bytes]] = []
        self._checkpoint = checkpoint

    def begin(self) -> Offset:
        """Ask for the beginning of the query until there is one, and then for the latest offset, as Spark does."""
        return self.plan()[0]

    def plan(self) -> tuple[Offset, Offset]:
        begin = self.beginning() if self._checkpoint is None else self._checkpoint
        return begin, self.reader.latestOffset(begin, ALL)

    def beginning(self) -> Offset:
        """Make the calls that Spark makes before it repeats a planned first batch."""
        return self.reader.initialOffset()

    def run(self, begin: Offset, end: Offset) -> None:
        if begin != end:
            self.rows += read(self.reader, begin, end)
            self.reader.commit(end)
            self._checkpoint = end

    def step(self) -> int:
        self.run(*self.plan())
        return len(self.rows)

    def until(self, count: int) -> None:
        wait_for(lambda: self.step() >= count, f"{count} rows")

    @property
    def checkpoint(self) -> Offset:
        assert self._checkpoint is not None
        return self._checkpoint

    @property
    def name(self) -> str:
        assert self.reader.log is not None
        return self.reader.log.reader.name

    @property
    def receives(self) -> bool:
        return self.reader.log is not None and self.reader.log.filling is not None


def read(reader: ZmqStreamReader, begin: Offset, end: Offset) -> list[tuple[int, bytes]]:
    batches = [batch for share in reader.partitions(begin, end) for batch in reader.read(share)]
    return [
        row
        for batch in batches
        for row in zip(batch.column("id").to_pylist(), batch.column("value").to_pylist(), strict=True)
    ]


@contextmanager
def querying(location: Path | str, checkpoint: Offset | None = None, **options: Any) -> Iterator[Query]:
    query = Query(location, checkpoint, **options)
    try:
        yield query
    finally:
        query.reader.stop()


def numbered(count: int, start: int = 0) -> list[tuple[int, bytes]]:
    return [(i, b"%d" % i) for i in range(start, count)]


def send(sock: Socket, start: int, end: int) -> None:
    for i in range(start, end):
        sock.send(b"%d" % i)


def positions(location: Path) -> list[str]:
    return sorted(LeaseFiles(LogStorage(str(location))).entries())


def ends_at(location: Path | str, end: int) -> bool:
    return read_index(log_at(location)).durable_end == end


def filled(location: Path | str, chunks: int) -> LogWriter:
    """A log with the messages 0, 1, ..., each in its own chunk."""
    log = LogWriter(log_at(location), chunk_bytes=1 << 20, max_bytes=1 << 30)
    log.open()
    for number in range(chunks):
        log.append(batch_of([b"%d" % number]))
        log.cut().result(30)
    return log


# Everybody gets everything.


def test_each_query_on_a_feed_gets_every_message(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with querying(tmp_path, connect=endpoint) as one, querying(tmp_path, connect=endpoint) as two:
        one.step(), two.step()
        assert (one.receives, two.receives) == (True, False)
        send(push, 0, 500)
        one.until(500), two.until(500)
        assert one.rows == two.rows == numbered(500)
        assert one.name != two.name


def test_a_query_does_not_delete_messages_that_another_has_not_read(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with querying(tmp_path, connect=endpoint) as fast, querying(tmp_path, connect=endpoint) as slow:
        fast.step(), slow.step()
        for count in range(10, 110, 10):
            send(push, count - 10, count)
            fast.until(count)
            assert fast.step() == count
        slow.until(100)
        assert slow.rows == numbered(100)
        slow.step(), fast.step()
        send(push, 100, 101)
        fast.until(101), slow.until(101), slow.step()
        # What both are done with goes.
        wait_for(lambda: fast.step() and log_rows(tmp_path).num_rows == 1, "one row left")


# One ends, another receives.


def test_when_the_receiving_query_stops_another_query_receives(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    # The retention keeps the messages that the first query has not read when it is stopped.
    options = {"connect": endpoint, "walRetention": "1h"}
    with Connections(push) as connections, querying(tmp_path, **options) as two:
        with querying(tmp_path, **options) as one:
            one.step(), two.step()  # the first to ask receives
            assert one.receives
            send(push, 0, 100)
            one.until(100)
            checkpoint = one.checkpoint
        wait_for(lambda: two.receives, "the other query to receive")
        connections.wait_for_only(2)
        send(push, 100, 200)
        two.until(200)
        assert two.rows == numbered(200)
        with querying(tmp_path, checkpoint, **options) as again:
            again.until(100)
            assert not again.receives
            assert again.rows == numbered(200, 100)


def test_receive_stands_by_for_another(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    command = [
        sys.executable,
        "-m",
        "zmq_datasource",
        "receive",
        "--socket-type",
        "ROUTER",
        "--bind",
        endpoint,
    ]
    command += ["--wal-location", str(tmp_path), "-o", "walFlushInterval=20ms"]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    second = None
    try:
        with Producer(endpoint) as producer:
            producer.send("a")
            producer.flush()
            second = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            assert second.stderr is not None
            while "waiting to receive in its place" not in (line := second.stderr.readline()):
                assert line, "it has ended"
            first.send_signal(signal.SIGKILL)
            first.wait(30)
            producer.send("b")
            producer.flush()
        assert log_rows(tmp_path).column("value").to_pylist() == [b"a", b"b"]
        second.send_signal(signal.SIGTERM)
        second.communicate(timeout=30)
        assert second.returncode == 0
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.communicate(timeout=30)


# Where a query goes on.


def test_a_query_continues_from_its_checkpoint_and_not_from_its_record(tmp_path: Path) -> None:
    filled(tmp_path, 4).close()
    with querying(tmp_path, maxMessagesPerTrigger=1) as query:
        query.step(), query.step()
    with querying(tmp_path, query.checkpoint) as query:
        query.step()
        assert query.rows == numbered(4, 2)


def test_a_new_query_with_latest_gets_no_older_messages_of_another_query(
    context: Context, tmp_path: Path
) -> None:
    """Even if that query has the same options, and was stopped in its first batch or before it."""
    push, endpoint = bound(context, zmq.PUSH)
    with querying(tmp_path, connect=endpoint) as one:
        one.begin()
        send(push, 0, 10)
        wait_for(lambda: ends_at(tmp_path, 10), "ten rows")
        one.plan()
    with querying(tmp_path, connect=endpoint) as two:
        two.step()
        send(push, 10, 20)
        two.until(10)
        assert two.rows == numbered(20, 10)


def test_a_query_with_a_copied_checkpoint_loses_no_messages_of_the_original(
    context: Context, tmp_path: Path
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    options = {"connect": endpoint, "walRetention": "10m"}
    with querying(tmp_path, **options) as one:
        one.step()
        send(push, 0, 5)
        one.until(5)
    with querying(tmp_path, one.checkpoint, **options) as copy:
        copy.step()
        send(push, 5, 10)
        copy.until(5)
        copy.step()
    with (
        querying(tmp_path, one.checkpoint, **options) as again,
        querying(tmp_path, one.checkpoint, **options) as beside,
    ):
        again.until(5), beside.until(5)
        assert again.rows == beside.rows == numbered(10, 5)


# Readers that do not run.


def test_a_query_whose_position_was_dropped_fails_with_the_reason(context: Context, tmp_path: Path) -> None:
    """With real queries: the log is full, one query runs, and another does not come back in time."""
    push, endpoint = bound(context, zmq.PUSH)
    options = {"connect": endpoint, "walMaxBytes": "50k", "walRetention": "10m"}
    with querying(tmp_path, **options) as running:
        running.step()
        with querying(tmp_path, **options) as gone:
            gone.step()
            push.send(b"0")
            gone.until(1)
        for count in range(1, 40):
            push.send(b"x" * 5000)
            running.until(count + 1)
        with (
            querying(tmp_path, gone.checkpoint, **options) as gone,
            pytest.raises(DataLossError, match=r"ids 1 to \d+ are no longer.*With the option reader"),
        ):
            gone.step()
        assert [i for i, _ in running.rows] == list(range(40))


def test_a_named_query_that_is_away_holds_a_full_log(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10, sndbuf=4096)
    options = {"connect": endpoint, "walMaxBytes": "50k", "rcvhwm": 10, "zmq_rcvbuf": 4096}
    with querying(tmp_path, **options) as running:
        running.step()
        with querying(tmp_path, reader="desk", **options) as away:
            away.step()
            push.send(b"x" * 5000)
            away.until(1)
        running.until(1)
        sent = 1
        while push.poll(300, zmq.POLLOUT):
            push.send(b"x" * 5000)
            sent += 1
            running.step()
        assert len(running.rows) < sent  # the log is full, and so is what is before it
        with querying(tmp_path, away.checkpoint, reader="desk", **options) as away:
            wait_for(lambda: (running.step(), away.step() >= sent - 1)[1], "all of it")
        assert [i for i, _ in away.rows] == list(range(1, sent))


def test_a_query_counts_messages_that_a_full_log_has_discarded(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    options = {"connect": endpoint, "walMaxBytes": "50k", "whenFull": "discard"}
    with querying(tmp_path, **options) as fast:
        fast.step()
        for reader, fails in (("strict", True), ("lenient", False)):
            with querying(tmp_path, reader=reader, failOnDataLoss=fails, **options) as slow:
                slow.step()
                first = len(fast.rows)
                for count in range(first + 1, first + 40):
                    push.send(b"x" * 5000)
                    fast.until(count)
                retention = fast.reader.log.receiver.log.retention
                wait_for(lambda retention=retention: not retention.needs_room, "room")  # type: ignore[misc]
                if fails:
                    with pytest.raises(DataLossError, match=f"ids {first} to .*whenFull=discard"):
                        slow.step()
                    continue
                slow.until(1)
                shown = slow.reader.reportLatestOffset() or {}
                assert shown["messagesExpired"] == slow.rows[0][0] - first
        assert [i for i, _ in fast.rows] == list(range(len(fast.rows)))


def test_queries_started_together_read_the_same_messages_with_earliest(
    context: Context, tmp_path: Path
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with querying(tmp_path, connect=endpoint, startingOffsets="earliest") as first:
        first.step()
        send(push, 0, 10)
        first.until(10)
        with (
            querying(tmp_path, connect=endpoint, startingOffsets="earliest") as second,
            querying(tmp_path, connect=endpoint) as late,
        ):
            late.step()
            second.until(10)
            send(push, 10, 20)
            for query, count in ((first, 20), (second, 20), (late, 10)):
                query.until(count)
            assert second.rows == first.rows
            assert late.rows == first.rows[10:]
