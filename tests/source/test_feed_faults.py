"""Queries that share a feed, at bad moments: two things at once, a log that is gone, a name that is taken. No JVM."""

from __future__ import annotations

import shutil
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
    bound,
    free_endpoint,
    keep_handlers,
    stop_sooner,
    stream_options,
    take_over,
    wait_for,
)
from zmq_datasource.errors import DataLossError, EndpointError, LogError, OptionError
from zmq_datasource.log.leases import Reader
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.source.filling import Filling, filling_of
from zmq_datasource.source.receiver import LogReceiver, Receiver


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


def test_a_standby_does_not_make_a_new_log_when_the_log_is_gone(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would receive messages into a log that no checkpoint knows."""
    looks: list[str] = []
    look = LogStorage.log_id_again
    monkeypatch.setattr(LogStorage, "log_id_again", lambda log: (looks.append(log.root), look(log))[1])
    _, endpoint = bound(context, zmq.PUSH)
    log = tmp_path / "log"
    with querying(log, connect=endpoint) as one, querying(log, connect=endpoint) as two:
        one.step(), two.step()
        shutil.rmtree(log)
        looks.clear()
        wait_for(lambda: len(looks) > 5, "some looks of the standby")
        assert not log.exists()
        filled(log, 1).close()
        with pytest.raises(DataLossError, match="another log now"):
            wait_for(lambda: two.step() < 0, "the error")
        assert not two.receives
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
        with (
            querying(tmp_path, startingOffsets=late) as query,
            pytest.raises(OptionError, match="it is in the future"),
        ):
            query.step()
        other = {"log": "another", "next": 1}
        with querying(tmp_path, other) as query, pytest.raises(DataLossError):
            query.step()
    assert positions(tmp_path) == []


# Which messages are kept for which reader.
