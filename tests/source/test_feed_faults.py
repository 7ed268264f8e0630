"""Queries that share a feed, at bad moments: two things at once, a log that is gone, a name that is taken. No JVM."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.source.test_feed import (
    Context,
    filled,
    positions,
    querying,
)
from tests.support import (
    batch_of,
    bound,
    free_endpoint,
    keep_handlers,
    stop_sooner,
    stream_options,
    take_over,
    wait_for,
)
from zmq_datasource.errors import DataLossError, DiskFaultError, EndpointError, LogError, OptionError
from zmq_datasource.log.leases import Reader
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.source.filling import Filling, filling_of
from zmq_datasource.source.receiver import LogReceiver, Receiver
from zmq_datasource.spark.stream_reader import Idle


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)
    stop_sooner(monkeypatch)
    take_over(monkeypatch, standby=0.01)
    monkeypatch.setattr(Reader, "hold_seconds", 0.1)


# Standing by.


class Failing(Receiver):
    """Sockets that cannot be opened."""

    error: Exception = EndpointError("in use")

    def __enter__(self) -> Failing:
        raise Failing.error


def failing(options: StreamReadOptions, *given: Any) -> Filling:
    filling = filling_of(options, *given)
    receiver = Failing(options, given[1])
    return filling._replace(filler=LogReceiver(receiver, filling.log), state=receiver.intake)


@contextmanager
def standing_by(location: Path, count: int = 1) -> Iterator[tuple[FeedReceiver, list[FeedReceiver]]]:
    """A receiver, and others that stand by for it, whose sockets are ``Failing``."""
    options = stream_options(socketType="PULL", bind=free_endpoint(), walLocation=location)
    one = FeedReceiver(options)
    others = [FeedReceiver(options, fill=failing) for _ in range(count)]
    one.start()
    for other in others:
        other.start()
        assert other.state == "waiting"
    try:
        yield one, others
    finally:
        for each in (one, *others):
            each.stop()


def test_each_standby_that_cannot_receive_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt of one holds the lock for a moment, which the others see."""
    with standing_by(tmp_path, 3) as (one, others):
        one.stop()
        for each in others:
            wait_for(lambda each=each: each.state == "ended", "an error")  # type: ignore[misc]
            with pytest.raises(EndpointError, match="in use"):
                each.check()
        assert not one.storage.writer()


def test_any_error_of_a_takeover_ends_receiving_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "error", MemoryError("no memory"))
    with standing_by(tmp_path) as (one, (two,)):
        one.stop()
        wait_for(lambda: two.state == "ended", "an error")
        with pytest.raises(MemoryError, match="no memory"):
            two.check()


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
        with pytest.raises(DataLossError, match="another log now"):
            two.step()
        with suppress(LogError):  # its log is gone
            one.reader.stop()


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
    assert positions(tmp_path) == []


# Which messages are kept for which reader.


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
