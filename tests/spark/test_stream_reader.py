"""The calls that Spark makes on a stream reader, made here one by one; no JVM."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zmq
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.support import (
    Offering,
    Socket,
    bound,
    keep_handlers,
    offer,
    stop_sooner,
    stream_options,
    wait_for,
)
from zmq_datasource.errors import DataLossError
from zmq_datasource.options import BatchReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.source.receiver import Receiver
from zmq_datasource.spark.batch_reader import ZmqLiveReader
from zmq_datasource.spark.stream_reader import Idle, ZmqStreamReader

Context = zmq.Context[Socket]
ALL = ReadMaxRows(1)  # any limit: ours are options


@contextmanager
def reader(endpoint: str, location: Path, **options: Any) -> Iterator[ZmqStreamReader]:
    options = {"connect": endpoint, "socketType": "PULL", "walRetention": "0s", **options}
    made = ZmqStreamReader(stream_options(walLocation=location, **options))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(autouse=True)
def _keep_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)
    # No publisher sends at the stop.
    stop_sooner(monkeypatch)


def advance(it: ZmqStreamReader, push: Socket, start: dict[str, Any], count: int) -> dict[str, Any]:
    """Send ``count`` messages and wait until ``latestOffset`` covers them."""
    it.latestOffset(start, ALL)  # starts receiving
    for _ in range(count):
        push.send(b"v")
    goal = start["next"] + count

    def reached() -> dict[str, Any] | None:
        end = it.latestOffset(start, ALL)
        return end if end["next"] >= goal else None

    return wait_for(reached, f"offset {goal}") or {}


def ids(it: ZmqStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    shares = pickle.loads(pickle.dumps(it.partitions(start, end)))
    return [i for share in shares for batch in it.read(share) for i in batch.column("id").to_pylist()]


def test_a_constructor_opens_nothing(tmp_path: Path) -> None:
    made = ZmqStreamReader(stream_options(connect="tcp://127.0.0.1:1", walLocation=tmp_path / "wal"))
    pickle.loads(pickle.dumps(made))
    assert not (tmp_path / "wal").exists()


def test_without_new_messages_the_offset_is_the_same_text(context: Context, tmp_path: Path) -> None:
    _, endpoint = bound(context, zmq.PUSH)
    with reader(endpoint, tmp_path) as it:
        start = it.initialOffset()
        texts = {json.dumps(it.latestOffset(start, ALL)) for _ in range(5)}
        assert texts == {json.dumps(start)}
        it.stop()  # which Spark may call twice


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ends at which polls have waited for more."""
    asked: list[int] = []
    wait = FeedReceiver.wait_for_more

    def waiting(it: FeedReceiver, end: int, seconds: float) -> None:
        asked.append(end)
        wait(it, end, seconds)

    monkeypatch.setattr(FeedReceiver, "wait_for_more", waiting)
    return asked


def test_only_a_poll_soon_after_the_last_one_waits(
    context: Context, tmp_path: Path, waits: list[int]
) -> None:
    """A batch for another source of the query, which commits to this one too, is not held up."""
    push, endpoint = bound(context, zmq.PUSH)
    with reader(endpoint, tmp_path) as it:
        it.idle = Idle(poll_seconds=60)
        start = it.initialOffset()
        assert it.latestOffset(start, ALL) == start
        assert waits == []
        assert it.latestOffset(start, ALL) == start
        assert waits == [0]
        it.commit(start)
        it.latestOffset(start, ALL)
        assert waits == [0]
        # What comes meanwhile ends the wait, which would be longer than this test may take.
        it.idle = Idle(poll_seconds=60, wait_seconds=3600)
        push.send(b"v")
        assert it.latestOffset(start, ALL)["next"] == 1


def test_of_the_idle_sources_of_a_query_one_waits(context: Context, tmp_path: Path, waits: list[int]) -> None:
    """Spark polls one after the other, so waits of all would add up before a message is seen."""
    with ExitStack() as stack:
        sources = [
            stack.enter_context(reader(bound(context, zmq.PUSH)[1], tmp_path / str(number)))
            for number in range(3)
        ]
        starts = [it.initialOffset() for it in sources]
        for it in sources:
            it.idle = Idle(poll_seconds=0.4, wait_seconds=0.5)
        for polls in range(4):
            for it, start in zip(sources, starts, strict=True):
                it.latestOffset(start, ALL)
            assert len(waits) == polls  # the first polls wait never


def test_the_end_of_receiving_ends_a_waiting_poll(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, endpoint = bound(context, zmq.PUSH)
    monkeypatch.setattr("zmq_datasource.source.receiver.LogReceiver.receive", lambda *_: 1 // 0)
    with suppress(ZeroDivisionError), reader(endpoint, tmp_path) as it:
        it.idle = Idle(poll_seconds=60, wait_seconds=3600)
        start = it.initialOffset()
        with pytest.raises(ZeroDivisionError):
            wait_for(lambda: it.latestOffset(start, ALL) is None, "an error")


def test_a_range_gives_the_same_rows_again_in_another_process(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with reader(endpoint, tmp_path) as it:
        start = it.initialOffset()
        end = advance(it, push, start, 10)
        assert ids(it, start, end) == list(range(10))
    with reader(endpoint, tmp_path) as it:
        assert ids(it, start, end) == list(range(10))
        assert it.partitions(end, end) == []


def test_a_full_log_is_emptied_before_spark_commits(context: Context, tmp_path: Path) -> None:
    """Spark commits a batch when it plans the next one, for which a full log has no room."""
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10)
    options = {"walMaxBytes": 256 << 10, "rcvhwm": 10}
    with reader(endpoint, tmp_path, **options) as it:
        start = before = it.initialOffset()

        def moves_on() -> bool:
            for _ in range(20):
                offer(push, b" " * 10_000)
            return bool(it.latestOffset(start, ALL) != start)

        for _ in range(3):
            wait_for(lambda: not offer(push, b" " * 10_000), "a full log")
            wait_for(moves_on, f"messages after {start}")
            end = it.latestOffset(start, ALL)
            it.commit(before)  # of the batch before, now that there is one after it
            before, start = start, end


def test_an_offset_beyond_the_end_is_refused_even_if_loss_is_accepted(
    context: Context, tmp_path: Path
) -> None:
    _, endpoint = bound(context, zmq.PUSH)
    with reader(endpoint, tmp_path, failOnDataLoss=False) as it:
        beyond = it.initialOffset()
        beyond["next"] = 99
        with pytest.raises(DataLossError, match="the offset is 99, and the log ends at 0"):
            it.latestOffset(beyond, ALL)


def test_another_log_is_data_loss(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    other = {"log": "another", "next": 7}
    with reader(endpoint, tmp_path) as it:
        end = advance(it, push, it.initialOffset(), 3)
        with pytest.raises(DataLossError, match="of log another"):
            it.latestOffset(other, ALL)
        with pytest.raises(DataLossError, match="ends in log another"):
            it.partitions(end, other)
    with reader(endpoint, tmp_path, failOnDataLoss=False) as it:
        assert ids(it, other, end) == [0, 1, 2]
        assert it.partitions(end, other) == []


def received(options: BatchReadOptions) -> int:
    """How many messages a batch read of a socket returns."""
    reader = ZmqLiveReader(options)
    return sum(batch.num_rows for partition in reader.partitions() for batch in reader.read(partition))


def test_a_live_batch_read_receives_no_more_than_it_returns(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10_000)
    taken = []
    take = Receiver.take

    def counted(receiver: Receiver) -> pa.RecordBatch:
        batch = take(receiver)
        taken.append(batch.num_rows)
        return batch

    monkeypatch.setattr(Receiver, "take", counted)
    options = parse(
        BatchReadOptions, {"connect": endpoint, "socketType": "PULL", "maxMessages": "1500", "timeout": "20s"}
    )
    with Offering(push, 0.0):
        assert received(options) == sum(taken) == 1500
