"""Several receivers of one feed, each with a log partition of its own. No JVM."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zmq

from tests.source.test_feed import Query, send
from tests.support import (
    Socket,
    batch_of,
    bound,
    keep_handlers,
    offer,
    stop_sooner,
    stream_options,
    take_over,
    wait_for,
)
from zmq_datasource.errors import DataLossError, DiskFaultError, LogLockedError
from zmq_datasource.log.reader_records import ReaderRecord, ReaderRecords
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.options import BatchReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.source.feed import Feed
from zmq_datasource.source.feeds import Feeds
from zmq_datasource.source.follow import IdlePartition
from zmq_datasource.source.ingest import Ingest
from zmq_datasource.spark.batch_reader import ZmqLogReader

Context = zmq.Context[Socket]
Row = tuple[int, int, bytes]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)
    stop_sooner(monkeypatch)
    take_over(monkeypatch, standby=0.01)
    monkeypatch.setattr(Feeds, "refresh_seconds", 0.01)


class Several(Query):
    """A query on a log with several partitions; ``placed`` has the committed rows with partition and id."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.placed: list[Row] = []

    def run(self, begin: dict[str, Any], end: dict[str, Any]) -> None:
        if begin != end:
            for share in self.reader.partitions(begin, end):
                for batch in self.reader.read(share):
                    columns = (batch.column(name).to_pylist() for name in ("partition", "id", "value"))
                    self.placed += zip(*columns, strict=True)
            self.reader.commit(end)
            self._checkpoint = end

    def step(self) -> int:
        super().step()
        return len(self.placed)

    @property
    def values(self) -> list[int]:
        return sorted(int(value) for _, _, value in self.placed)

    def check(self) -> None:
        """Check that ids go up by one in each partition."""
        for partition in {p for p, _, _ in self.placed}:
            ids = [i for p, i, _ in self.placed if p == partition]
            assert ids == list(range(ids[0], ids[0] + len(ids)))


@contextmanager
def several(location: Path, checkpoint: dict[str, Any] | None = None, **options: Any) -> Iterator[Several]:
    query = Several(location, checkpoint, **options)
    try:
        yield query
    finally:
        query.reader.stop()


def connected(query: Several) -> bool:
    return all(feed.counters.connections for feed in parts_of(query).values())


def parts_of(query: Several) -> dict[int, Feed]:
    assert query.reader.feeds is not None
    return query.reader.feeds.parts


def received(query: Several) -> int:
    return sum(feed.received_end for feed in parts_of(query).values())


def fill(location: Path, partition: int, *values: bytes) -> None:
    storage = LogStorage(str(location), partition)
    log = LogWriter(storage, chunk_bytes=1 << 20, max_bytes=1 << 30)
    log.open()
    log.append(batch_of(list(values)))
    log.close()


def test_the_sockets_of_a_pull_share_its_messages(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with several(tmp_path, connect=endpoint, receivers=3) as query:
        query.step()
        wait_for(lambda: connected(query), "three connections")
        send(push, 0, 300)
        query.until(300)
        assert query.values == list(range(300))
        shares = Counter(str(p) for p, _, _ in query.placed)
        assert min(shares[p] for p in "012") > 50
        query.check()
        checkpoint = query.checkpoint
        assert checkpoint["next"] == shares
        told = query.reader.reportLatestOffset()
        assert told is not None
        assert told["messagesReceived"] == 300
        assert told["connections"] == 3
        assert {p: told["partitions"][p]["messagesReceived"] for p in "012"} == shares
        assert (told["source"], told["reader"]) == (f"PULL {endpoint}", query.name)
    with several(tmp_path, checkpoint, connect=endpoint, receivers=3) as query:
        query.step()
        wait_for(lambda: connected(query), "three connections")
        send(push, 300, 600)
        query.until(300)
        query.check()
        assert query.values == list(range(300, 600))
        begins = {str(p): min(i for q, i, _ in query.placed if q == p) for p, _, _ in query.placed}
        assert begins == shares


def test_each_sub_receives_from_its_own_publishers(context: Context, tmp_path: Path) -> None:
    pubs = [bound(context, zmq.XPUB) for _ in range(3)]
    endpoints = ",".join(endpoint for _, endpoint in pubs)
    with several(tmp_path, socketType="SUB", connect=endpoints, receivers=2) as query:
        query.step()
        for number, (pub, _) in enumerate(pubs):
            assert pub.recv() == b"\x01"
            assert not pub.poll(100), "a second one subscribes"
            send_framed(pub, number)
        query.until(3)
        assert sorted((p, int(value)) for p, _, value in query.placed) == [(0, 0), (0, 2), (1, 1)]


def send_framed(pub: Socket, number: int) -> None:
    pub.send_multipart([b"topic", b"%d" % number])


def test_a_limit_is_for_the_batch_and_partitions_share_it(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    options = {
        "connect": endpoint,
        "receivers": 2,
        "maxMessagesPerTrigger": 10,
        "startingOffsets": "earliest",
    }
    with several(tmp_path, **options) as query:
        query.step()
        wait_for(lambda: connected(query), "two connections")
        send(push, 0, 100)
        wait_for(lambda: received(query) == 100, "all received")
        assert query.step() <= 10
        steps = [query.step() for _ in range(9)]
        assert max(b - a for a, b in pairwise(steps)) == 10
        query.until(100)
        assert query.values == list(range(100))


@pytest.mark.parametrize("then", [1, 4])
def test_another_number_of_receivers_continues_with_the_same_log(
    context: Context, tmp_path: Path, then: int
) -> None:
    """Fewer receivers: partitions without one are read to their end.

    More receivers: new partitions are read from their first id.
    """
    push, endpoint = bound(context, zmq.PUSH)
    with several(tmp_path, connect=endpoint, receivers=2) as query:
        query.step()
        wait_for(lambda: connected(query), "two connections")
        send(push, 0, 100)
        query.until(100)
        send(push, 100, 200)
        wait_for(lambda: received(query) == 200, "all received")
        checkpoint = query.checkpoint
    with several(tmp_path, checkpoint, connect=endpoint, receivers=then) as query:
        query.until(100)
        filled = [feed for feed in parts_of(query).values() if feed.receives]
        assert len(filled) == then
        wait_for(lambda: all(feed.counters.connections for feed in filled), "connections")
        send(push, 200, 300)
        query.until(200)
        query.check()
        assert query.values == list(range(100, 300))


def test_a_query_that_follows_opens_new_partitions(tmp_path: Path) -> None:
    fill(tmp_path, 0, b"0", b"1")
    with several(tmp_path) as query:
        query.until(2)
        fill(tmp_path, 2, b"2", b"3")
        query.until(4)
        assert query.checkpoint["next"] == {"0": 2, "2": 2}
        fill(tmp_path, 1)  # one that has nothing
        wait_for(lambda: query.step() and 1 in parts_of(query), "that it is seen")
        assert query.checkpoint["next"] == {"0": 2, "2": 2}
        fill(tmp_path, 2, b"4")
        query.until(5)
        checkpoint, name = query.checkpoint, query.name
    assert ReaderRecords(LogStorage(str(tmp_path))).all()[name].next == {0: 2, 1: 0, 2: 3}
    fill(tmp_path, 0, b"5")
    with several(tmp_path, checkpoint) as query:
        query.until(1)
        assert query.placed == [(0, 2, b"5")]


def test_queries_on_a_shared_feed_have_all_partitions(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    options = {"connect": endpoint, "receivers": 2}
    with several(tmp_path, **options) as one:
        one.step()
        wait_for(lambda: connected(one), "two connections")
        with several(tmp_path, **options) as two:
            two.step()
            send(push, 0, 100)
            one.until(100)
            two.until(100)
            assert one.values == two.values == list(range(100))
            one.reader.stop()
            wait_for(lambda: all(feed.receives for feed in parts_of(two).values()), "the other one")
            send(push, 100, 200)
            two.until(200)
            two.check()
            assert two.values == list(range(200))


def test_a_repeated_first_batch_has_no_rows_of_a_newer_partition(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with several(tmp_path, connect=endpoint) as query:
        query.begin()
        send(push, 0, 50)
        wait_for(lambda: received(query) == 50, "all received")
        _, end = query.plan()  # Spark has noted it, and dies
    with several(tmp_path, connect=endpoint, receivers=2) as again:
        again.run(again.beginning(), end)
        assert again.values == list(range(50))
        again.step()
        wait_for(lambda: connected(again), "two connections")
        send(push, 50, 100)
        again.until(100)
        assert again.values == list(range(100))


def test_a_receiver_with_another_division_of_the_feed_is_refused(context: Context, tmp_path: Path) -> None:
    """It would receive some messages twice."""
    endpoints = [bound(context, zmq.XPUB)[1] for _ in range(4)]
    options = {"socketType": "SUB", "connect": ",".join(endpoints), "walLocation": tmp_path, "receivers": 4}
    last = Ingest(stream_options(**options), 3)
    last.start()
    try:
        for other in ({"receivers": 1}, {"receivers": 3}, {"connect": ",".join(reversed(endpoints))}):
            with pytest.raises(
                LogLockedError, match="receives into its partition 3, another feed or with other rec"
            ):
                Ingest(stream_options(**{**options, **other}), 0).open(0.0)
        beside = Ingest(stream_options(**options), 0)
        beside.start()
        beside.stop()
    finally:
        last.stop()


@contextmanager
def shared_otherwise(location: Path) -> Iterator[None]:
    """Another process fills another partition with another share of the feed."""
    other = LogWriter(LogStorage(str(location), 5), chunk_bytes=1 << 20, max_bytes=1 << 30)
    other.open(feed="another division")
    try:
        yield
    finally:
        other.close()


def test_a_standby_with_another_division_of_the_feed_fails(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_over(monkeypatch, takeover=0.1)
    _, endpoint = bound(context, zmq.PUSH)
    options = {"connect": endpoint, "receivers": 2}
    with several(tmp_path, **options) as first, several(tmp_path, **options) as second:
        first.step(), second.step()
        with shared_otherwise(tmp_path):
            first.reader.stop()
            with pytest.raises(LogLockedError, match="receives into its partition 5"):
                wait_for(lambda: second.step() < 0, "an error")


def send_until(push: Socket, number: int, enough: Callable[[], bool]) -> int:
    """Send numbers from this one on until the condition is true. Returns the next number."""

    def is_enough() -> bool:
        nonlocal number
        number += offer(push, b"%d" % number)
        return enough()

    wait_for(is_enough, "enough messages")
    return number


def partitions_since(query: Several, first: int) -> set[int]:
    """The log partitions that have a message from this number on."""
    return {partition for partition, _, value in query.placed if int(value) >= first}


def test_receivers_that_are_programs_have_a_partition_each(context: Context, tmp_path: Path) -> None:
    """One receiver is killed and restarted; the others and the query continue."""
    push, endpoint = bound(context, zmq.PUSH, sndhwm=1)

    def program(share: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "zmq_datasource", "receive", "--socket-type", "PULL"]
        command += ["--connect", endpoint, "--wal-location", str(tmp_path), "--partition", share]
        return subprocess.Popen([*command, "-o", "walFlushInterval=20ms"], text=True)

    programs = [program(f"{k}/3") for k in range(3)]
    try:
        wait_for(lambda: all(LogStorage(str(tmp_path), k).is_written() for k in range(3)), "three receivers")
        with several(tmp_path) as query:
            number = send_until(push, 0, lambda: query.step() and partitions_since(query, 0) == {0, 1, 2})
            programs[1].send_signal(signal.SIGKILL)
            programs[1].wait(30)
            number = send_until(
                push, number, lambda s=number: query.step() and partitions_since(query, s) == {0, 2}
            )
            programs[1] = program("1/3")
            number = send_until(
                push, number, lambda s=number: query.step() and partitions_since(query, s) == {0, 1, 2}
            )
            for each in programs:
                each.send_signal(signal.SIGTERM)
            assert [each.wait(30) for each in programs] == [0, 0, 0]
            query.step()
            query.check()
            assert len(query.values) == len(set(query.values))
            # What the killed one had received and not sealed, and what was on its way there.
            assert len(set(range(number)) - set(query.values)) < 100
    finally:
        for each in programs:
            each.kill()
            each.wait(30)


def test_all_receivers_in_one_program(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    command = [sys.executable, "-m", "zmq_datasource", "receive", "--socket-type", "PULL"]
    command += ["--connect", endpoint, "--wal-location", str(tmp_path), "-o", "receivers=2"]
    program = subprocess.Popen([*command, "-o", "walFlushInterval=20ms"], text=True)
    try:
        wait_for(lambda: all(LogStorage(str(tmp_path), k).is_written() for k in range(2)), "two receivers")
        send(push, 0, 100)
        with several(tmp_path) as query:
            query.until(100)
            assert query.values == list(range(100))
            program.send_signal(signal.SIGTERM)
            assert program.wait(30) == 0
    finally:
        program.kill()
        program.wait(30)


def test_a_batch_read_has_all_partitions(tmp_path: Path) -> None:
    fill(tmp_path, 0, b"0")
    fill(tmp_path, 1, b"1", b"2")
    reader = ZmqLogReader(parse(BatchReadOptions, {"walLocation": str(tmp_path)}))
    rows = pa.Table.from_batches([batch for share in reader.partitions() for batch in reader.read(share)])
    assert rows.select(["partition", "id"]).to_pylist() == [
        {"partition": 0, "id": 0},
        {"partition": 1, "id": 0},
        {"partition": 1, "id": 1},
    ]


def test_a_partition_that_was_away_is_read_on_and_not_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for partition in range(2):
        fill(tmp_path, partition, b"0", b"1")
    with several(tmp_path, failOnDataLoss="false") as query:
        query.until(4)
        checkpoint = query.checkpoint
    aside = (tmp_path / "1").rename(tmp_path / "aside")
    with (
        several(tmp_path, checkpoint) as query,
        pytest.raises(DataLossError, match=r"\[0, 1\], there are \[0\]"),
    ):
        query.step()
    with several(tmp_path, checkpoint, failOnDataLoss="false") as query:
        query.step()
        assert query.step() == 0
        fill(tmp_path, 0, b"2")
        query.until(1)
        checkpoint = query.checkpoint
        assert parts_of(query)[0].counters.data_losses == 1
    assert caplog.text.count("the offset names the log partitions [0, 1], there are [0]") == 1
    aside.rename(tmp_path / "1")
    fill(tmp_path, 1, b"3")
    with several(tmp_path, checkpoint) as query:
        query.until(1)
        query.step()
        assert query.placed == [(1, 2, b"3")]


def test_a_partition_that_comes_before_the_first_batch_is_read_from_its_beginning(tmp_path: Path) -> None:
    """Even with startingOffsets=latest, and if the first batch is repeated."""
    fill(tmp_path, 0, b"0")
    options = {"startingOffsets": "latest", "reader": "me"}
    with several(tmp_path, **options) as query:
        begin, end = query.plan()
        assert begin == end
        fill(tmp_path, 1, b"1", b"2")
        wait_for(lambda: query.plan()[1] != begin, "the new partition")
        _, end = query.plan()
    with several(tmp_path, **options) as query:
        query.run(query.beginning(), end)
        assert query.placed == [(1, 0, b"1"), (1, 1, b"2")]


def test_a_time_that_one_partition_has_is_enough(tmp_path: Path) -> None:
    fill(tmp_path, 0)
    fill(tmp_path, 1, b"1")
    since = "1970-01-01T00:00:00Z"
    with several(tmp_path, startingOffsets=since) as query:
        query.until(1)
    reader = ZmqLogReader(parse(BatchReadOptions, {"walLocation": str(tmp_path), "startingOffsets": since}))
    assert sum(batch.num_rows for share in reader.partitions() for batch in reader.read(share)) == 1


def test_of_two_new_partitions_both_are_opened_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a fault at the second one, nothing would stop the first one."""
    fill(tmp_path, 0, b"0")
    with several(tmp_path) as query:
        query.until(1)
        opened = Feed.open

        def open_all_but_one(feed: Feed, *given: Any, **more: Any) -> None:
            if feed.storage.partition == 2:
                raise DiskFaultError("Too many open files")
            opened(feed, *given, **more)

        with monkeypatch.context() as fault:
            fault.setattr(Feed, "open", open_all_but_one)
            fill(tmp_path, 1, b"1")
            fill(tmp_path, 2, b"2")
            until = time.monotonic() + 0.05
            wait_for(lambda: query.step() and time.monotonic() > until, "some looks")
        query.until(3)
        assert query.values == [0, 1, 2]


def test_after_a_failed_start_there_is_nothing_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 0, b"0")
    query = Several(tmp_path)

    def leave(_: Feed) -> None:
        raise SystemExit(143)  # what SIGTERM becomes

    monkeypatch.setattr(Feed, "start", leave)
    with pytest.raises(SystemExit):
        query.begin()
    query.reader.stop()


def test_committed_chunks_of_a_partition_without_a_receiver_are_deleted(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except the newest chunk, which has the state of its publishers, and messages that another query needs."""
    monkeypatch.setattr(IdlePartition, "check_seconds", 0.0)
    push, endpoint = bound(context, zmq.PUSH)
    for _ in range(5):
        fill(tmp_path, 0, b"0")
        fill(tmp_path, 1, b"0", b"0")
    idle = LogStorage(str(tmp_path), 1)
    log = LogStorage(str(tmp_path))
    ReaderRecords(log).write("slow", ReaderRecord({0: 4, 1: 4}, 1e9))
    with several(tmp_path, connect=endpoint, startingOffsets="earliest", walFlushInterval="20ms") as query:
        query.until(15)
        count = 15

        def chunks_after_a_batch() -> list[int]:
            nonlocal count
            push.send(b"1")
            count += 1
            query.until(count)
            return sorted(chunk.first for chunk in idle.chunks())

        wait_for(lambda: chunks_after_a_batch() == [4, 6, 8], "that two are deleted")
        ReaderRecords(log).remove("slow")
        wait_for(lambda: chunks_after_a_batch() == [8], "that the others are")
        assert not idle.is_written()
        checkpoint = query.checkpoint
    with several(tmp_path, checkpoint, connect=endpoint, receivers=2) as query:
        query.step()
        wait_for(lambda: connected(query), "two connections")
        send(push, 0, 100)
        query.until(100)
        query.check()
