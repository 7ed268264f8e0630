"""Transactions over real sockets into real logs are there whole and once, after any kill or repetition."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zmq

from tests.support import (
    Socket,
    free_endpoint,
    log_rows,
    stop_sooner,
    stream_options,
    write_options,
)
from tests.support.middlebox import Middlebox
from zmq_datasource.acknowledged.attempt_files import AttemptFiles, Stored
from zmq_datasource.acknowledged.uplink import Uplink
from zmq_datasource.errors import TransactionError
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.spark.job import Job, TaskReport
from zmq_datasource.spark.write_commit import commit_batch

pytestmark = pytest.mark.spark  # no Spark, but slow processes and kills
Context = zmq.Context[Socket]


@pytest.fixture(autouse=True)
def _stop_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_sooner(monkeypatch)


@contextmanager
def receiving(location: Path, endpoint: str, **options: Any) -> Iterator[FeedReceiver]:
    options = {"socketType": "ROUTER", "bind": endpoint, "walRetention": "0s", **options}
    ingest = FeedReceiver(stream_options(walLocation=location, **options))
    ingest.start()
    try:
        yield ingest
    finally:
        ingest.stop()


def uplink(endpoint: str, number: int = 0, partition: int = 0, producer: str = "q", **options: Any) -> Uplink:
    options = {"sendTimeout": "20s", "zmq_reconnect_ivl": 20, **options}
    return Uplink(
        write_options(socketType="DEALER", connect=endpoint, **options), producer, number, partition
    )


def rows(*values: str) -> pa.RecordBatch:
    return pa.record_batch({"value": list(values)})


def stage(endpoint: str, *values: str, **which: Any) -> str:
    """Send and stage rows. Returns the attempt."""
    with uplink(endpoint, **which) as link:
        assert not link.greet()
        link.send(rows(*values))
        link.finish()
        return link.session.attempt


def commit(endpoint: str, attempts: list[str], count: int, **which: Any) -> bool:
    with uplink(endpoint, **which) as link:
        return link.commit(attempts, count)


def values(location: Path) -> list[str]:
    try:
        return [value.decode() for value in log_rows(location).column("value").to_pylist()]
    except ValueError:  # no chunk yet
        return []


def test_a_transaction_appears_when_it_is_committed(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint) as ingest:
        second = stage(endpoint, "c", "d", partition=1)
        first = stage(endpoint, "a", "b", partition=0)
        assert ingest.seal() == 0
        assert not commit(endpoint, [second, first], 4)
        assert ingest.seal() == 4
        assert values(tmp_path) == ["a", "b", "c", "d"]  # in the order of partitions
        assert not any((tmp_path / "staging").iterdir())
    table = log_rows(tmp_path)
    assert set(table.column("publisher").to_pylist()) == {"q"}
    assert set(table.column("sequence").to_pylist()) == {0}


def test_a_commit_that_is_repeated_has_no_effect(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint):
        attempt = stage(endpoint, "a")
        assert not commit(endpoint, [attempt], 1)
        assert commit(endpoint, [attempt], 1)
    with receiving(tmp_path, endpoint):
        assert commit(endpoint, [attempt], 1)
        with uplink(endpoint) as link:
            assert link.greet()  # a repeated batch sends nothing
            link.count(pa.record_batch({"value": pa.array([b"abc", b"d"])}))
            assert link.session.bytes == 4 + 3 * 4  # as the first time: with their offsets
        with uplink(endpoint, number=1) as link:
            assert not link.greet()
    assert values(tmp_path) == ["a"]


def test_a_repeated_batch_without_rows_is_compared(tmp_path: Path) -> None:
    """A batch that differs when it is computed again. The account says 0 rows, and the log would have one."""
    endpoint = free_endpoint()
    options = write_options(socketType="DEALER", connect=endpoint)
    with receiving(tmp_path, endpoint):
        commit(endpoint, [stage(endpoint, "a", number=7)], 1, number=7)
        commit_batch(options, [TaskReport(Job("q", 8, True, ("q", 8)))])
        with pytest.raises(TransactionError, match="it is in the log with 1 rows"):
            commit_batch(options, [TaskReport(Job("q", 7, True, ("q", 7)))])
        # Its checkpoint was restored.
        with pytest.raises(TransactionError, match="already has transaction 7"):
            commit_batch(options, [TaskReport(Job("q", 6, True, ("q", 6)))])


def test_a_slow_sync_of_one_attempt_does_not_hold_up_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = free_endpoint()
    finish, go_on, forcing = AttemptFiles.finish, threading.Event(), threading.Event()

    def slowly(self: AttemptFiles, name: str, stored: Stored) -> Stored:
        if not forcing.is_set():
            forcing.set()
            go_on.wait(20)
        return finish(self, name, stored)

    monkeypatch.setattr(AttemptFiles, "finish", slowly)
    with receiving(tmp_path, endpoint):
        staging = threading.Thread(target=stage, args=(endpoint, "slow"), kwargs={"producer": "slow"})
        staging.start()
        assert forcing.wait(30)
        commit(endpoint, [stage(endpoint, "a")], 1)
        assert staging.is_alive()
        go_on.set()
        staging.join(20)
    assert values(tmp_path) == ["a"]


# The network.


def test_an_attempt_continues_after_its_connection_breaks(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    batch = pa.record_batch({"value": [b"%07d" % n + b"x" * 993 for n in range(2000)]})
    with receiving(tmp_path, endpoint), Middlebox(endpoint) as box, uplink(box.endpoint) as link:
        link.greet()
        for turn in range(6):
            link.send(batch)
            if turn % 2:
                box.reset()
        link.finish()
        box.reset()
        assert not link.commit([link.session.attempt], 12_000)
    got = log_rows(tmp_path).column("value").to_pylist()
    assert got == batch.column("value").to_pylist() * 6


def test_without_faults_every_message_is_sent_once(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    batch = pa.record_batch({"value": [b"x" * 1000] * 10_000})
    with receiving(tmp_path, endpoint), Middlebox(endpoint) as box, uplink(box.endpoint) as link:
        link.greet()
        link.send(batch)
        link.finish()
        link.commit([link.session.attempt], 10_000)
        assert box.bytes < 1.2 * link.session.bytes


def test_a_stop_answers_the_commits_that_are_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = free_endpoint()
    write = LogStorage.put_chunk
    writing = threading.Event()

    def slowly(*args: Any) -> None:
        writing.set()
        time.sleep(0.3)
        write(*args)

    monkeypatch.setattr(LogStorage, "put_chunk", slowly)
    answered: list[bool] = []
    with receiving(tmp_path, endpoint):
        attempt = stage(endpoint, "a")
        asking = threading.Thread(target=lambda: answered.append(commit(endpoint, [attempt], 1)))
        asking.start()
        assert writing.wait(30)
    asking.join(20)
    assert answered == [False]
