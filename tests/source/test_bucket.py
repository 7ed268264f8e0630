"""Queries of several machines on one feed whose log is in a bucket. No JVM."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import zmq

from tests.source.test_feed import (
    Context,
    Query,
    _in_this_process,  # noqa: F401 - a fixture
    numbered,
    querying,
    send,
)
from tests.support import (
    Connections,
    bound,
    free_endpoint,
    log_rows,
    stream_options,
    wait_for,
)
from tests.support.bucket_server import BucketServer
from tests.support.programs import receiving
from zmq_datasource import Producer
from zmq_datasource.errors import OptionError, SocketError
from zmq_datasource.log.bucket_store import BucketStore
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter

CHUNK = 256 << 10


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BucketStore, "silent_seconds", 4.0)
    monkeypatch.setattr(LogStorage, "request_interval", 0.0)


def values(bucket: str) -> list[int]:
    return [int(value) for value in log_rows(bucket)["value"].to_pylist()]


# Several machines.


def test_a_query_takes_over_from_a_process_that_was_killed(context: Context, bucket: str) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with (
        Connections(push) as connections,
        receiving(bucket, socketType="PULL", connect=endpoint, walRetention="0s") as receiver,
        querying(bucket, connect=endpoint, startingOffsets="earliest") as query,
    ):
        query.step()
        assert not query.receives
        send(push, 0, 100)
        query.until(100)
        receiver.kill()
        wait_for(lambda: query.step() and query.receives, "it receives")
        connections.wait_for_only(2)
        send(push, 100, 200)
        query.until(200)
    assert query.rows == numbered(200)


# A bucket that is away.


def test_senders_wait_while_the_bucket_is_away_and_nothing_is_lost(
    context: Context, server: BucketServer, bucket: str
) -> None:
    """Memory fills up to its bound, and only messages in the bucket count as received."""
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10, sndbuf=4096)
    options = {"connect": endpoint, "walMaxBytes": 16 * CHUNK, "rcvhwm": 10, "zmq_rcvbuf": 4096}
    numbers = itertools.count()

    def send_one() -> int:
        push.send(b"%d" % (number := next(numbers)) + b" " * 10_000)
        return number + 1

    with querying(bucket, **options) as query:
        query.step()
        query.until(send_one())
        with server.away():
            while push.poll(1000, zmq.POLLOUT):
                assert send_one() < 5000, "nothing holds the sender back"
            log = log_of(query)
            assert log.fault
            assert CHUNK < log.unsealed_bytes < 6 * CHUNK
            assert log.durable_end == 1
        query.until(sent := send_one())
    assert [(i, int(value)) for i, value in query.rows] == [(i, i) for i in range(sent)]


def log_of(query: Query) -> LogWriter:
    assert query.reader.log is not None
    log = query.reader.log.contents
    assert isinstance(log, LogWriter)
    return log


def test_an_acknowledged_transaction_is_in_the_bucket(server: BucketServer, bucket: str) -> None:
    endpoint = free_endpoint()
    options = {"socketType": "ROUTER", "bind": endpoint, "walRetention": "0s"}
    with receiving(bucket, **options) as receiver, Producer(endpoint, name="p", sendTimeout="2s") as producer:
        for number in range(3):
            producer.send(b"%d" % number)
            producer.flush()
        assert values(bucket) == [0, 1, 2]
        with server.away():
            producer.send(b"3")
            with pytest.raises(SocketError):
                producer.flush()
            receiver.kill()
            receiver.wait()
        assert values(bucket) == [0, 1, 2]
        with receiving(bucket, **options):
            producer.flush()  # which settles it
            producer.send(b"4")
            producer.flush()
        assert values(bucket) == [0, 1, 2, 3, 4]


# The option.


def test_options_without_effect_in_a_bucket_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="option serveLog has no effect with walStore"):
        stream_options(connect="tcp://a:1", walStore="s3://bucket/log", serveLog="tcp://*:5599")
    with pytest.raises(OptionError, match="a log is in one place"):
        stream_options(connect="tcp://a:1", walStore="s3://bucket/log", walLocation=tmp_path)
