"""The Producer, the receiver as a program, and queries on its log, with real processes and kills, without a JVM."""

from __future__ import annotations

import os
import random
import shutil
import socket as stdlib_socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.acknowledged.test_acknowledged import receiving, values
from tests.support import RawSender, Socket, free_endpoint, log_rows, stop_sooner, wait_for
from zmq_datasource import (
    OptionError,
    Producer,
    RowError,
    SendTimeoutError,
    SocketError,
    TransactionError,
)
from zmq_datasource.acknowledged.protocol import Committed, Message, Taken, encode

pytestmark = pytest.mark.spark  # no Spark, but slow processes and kills
FAST = {"zmq.reconnect_ivl": "20"}


@pytest.fixture(autouse=True)
def _stop_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_sooner(monkeypatch)


def test_flushed_messages_are_in_the_log(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint) as ingest, Producer(endpoint) as producer:
        producer.send("a", topic="t")
        producer.send(b"b")
        assert ingest.seal() == 0
        producer.flush()
        assert ingest.seal() == 2
        producer.flush()  # nothing to do
        producer.send("c")
    rows = log_rows(tmp_path)
    assert rows.column("value").to_pylist() == [b"a", b"b", b"c"]
    assert rows.column("topic").to_pylist() == ["t", None, None]
    assert rows.column("sequence").to_pylist() == [0, 0, 1]


def test_a_flush_is_a_transaction_and_an_error_drops_it(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint), Producer(endpoint) as producer:
        producer.send("a")
        producer.send("b")
        producer.flush()
        producer.send("after")
        with pytest.raises(KeyError), Producer(endpoint) as failing:
            failing.send("never")
            raise KeyError
    assert values(tmp_path) == ["a", "b", "after"]
    assert log_rows(tmp_path).column("sequence").to_pylist() == [0, 0, 1]


def test_messages_in_memory_are_bounded() -> None:
    producer = Producer(free_endpoint(), max_bytes=1000)
    for _ in range(6):  # a message costs a little more than its bytes
        producer.send("x" * 100)
    with pytest.raises(TransactionError, match="max_bytes=1000; flush first"):
        producer.send("x" * 100)
    producer.close()


def test_a_name_continues_its_numbers_and_belongs_to_one_producer(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint):
        with Producer(endpoint, name="p") as producer:
            producer.send("a")
        with Producer(endpoint, name="p") as producer:
            producer.send("b")
            producer.flush()
            with Producer(endpoint, name="p") as other:
                other.send("c")
            producer.send("d")
            with pytest.raises(TransactionError, match="another producer of this name"):
                producer.flush()
            producer.close()
    assert values(tmp_path) == ["a", "b", "c"]
    assert log_rows(tmp_path).column("sequence").to_pylist() == [0, 1, 2]


def test_a_producer_is_told_what_an_older_copy_of_the_log_has_lost(tmp_path: Path) -> None:
    endpoint, log, copy = free_endpoint(), tmp_path / "log", tmp_path / "copy"
    with Producer(endpoint, name="p") as producer:
        with receiving(log, endpoint):
            producer.send("a")
            producer.flush()
        shutil.copytree(log, copy)
        with receiving(log, endpoint):
            for value in ("b", "c"):
                producer.send(value)
                producer.flush()
        shutil.rmtree(log)
        copy.rename(log)
        with receiving(log, endpoint):
            producer.send("d")
            with pytest.raises(
                TransactionError, match=r"transaction 0 of this name, and 2 was acknowledged.* lost"
            ):
                producer.flush()
            producer.close()
    assert values(log) == ["a"]


def test_a_flush_that_fails_can_be_repeated(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with Producer(endpoint, connectTimeout="100ms", sendTimeout="300ms", **FAST) as producer:
        producer.send("a")
        with pytest.raises(SocketError, match="Start the receiver"):
            producer.flush()
        with receiving(tmp_path, endpoint):
            producer.flush()
        producer.send("b")
        with pytest.raises(SendTimeoutError):
            producer.flush()
        with receiving(tmp_path, endpoint):
            producer.flush()
    assert values(tmp_path) == ["a", "b"]


def encode_without_committed(message: Message) -> list[Any]:
    return encode(Taken(attempt="0" * 32, received=0) if isinstance(message, Committed) else message)


def test_a_flush_without_an_answer_is_found_in_the_log_and_later_messages_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit took place, but its answer was lost. Then more messages are sent."""
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint), Producer(endpoint, sendTimeout="300ms") as producer:
        with monkeypatch.context() as patch:
            patch.setattr("zmq_datasource.acknowledged.acceptor.encode", encode_without_committed)
            producer.send("a")
            with pytest.raises(SendTimeoutError):
                producer.flush()
        producer.send("b")
        producer.flush()
        assert producer.last_committed == 1
    with pytest.raises(OptionError, match="this producer is closed"):
        _ = producer.last_committed
    assert values(tmp_path) == ["a", "b"]
    assert log_rows(tmp_path).column("sequence").to_pylist() == [0, 1]


def test_what_a_receiver_has_refused_is_kept(context: zmq.Context[Socket], tmp_path: Path) -> None:
    endpoint = free_endpoint()
    options = {"walMaxBytes": "100k", "transactionTimeout": "1s"}
    with receiving(tmp_path, endpoint, **options), Producer(endpoint) as producer:
        RawSender(context, endpoint).stage("other", 0, b"x" * 60_000)
        producer.send("debit")
        producer.send("credit" + "x" * 60_000)
        with pytest.raises(TransactionError, match="walMaxBytes"):
            producer.flush()

        def flushed() -> bool:
            with suppress(TransactionError):
                producer.flush()
                return True
            return False

        wait_for(flushed, "the receiver to discard what the other sender has not committed")
    assert [value[:6] for value in values(tmp_path)] == ["debit", "credit"]


def test_threads_may_share_a_producer(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint), Producer(endpoint) as producer:

        def send(name: str) -> None:
            for number in range(200):
                producer.send(f"{name}{number:04}")
                if number % 20 == 0:
                    producer.flush()

        threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    got = values(tmp_path)
    assert sorted(got) == sorted(f"{name}{number:04}" for name in "abc" for number in range(200))
    for name in "abc":
        mine = [value for value in got if value.startswith(name)]
        assert mine == sorted(mine)


def test_wrong_use_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="tcp://host:port"):
        Producer("tcp://nowhere")
    with pytest.raises(OptionError, match="max_bytes=0"):
        Producer("tcp://a:1", max_bytes=0)
    with pytest.raises(OptionError, match="did you mean 'sendTimeout'"):
        Producer("tcp://a:1", sendTimeou="1s")
    with pytest.raises(OptionError, match="transactionId"):
        Producer("tcp://a:1", transactionId="x")
    for name in ("", "x" * 300):
        with pytest.raises(OptionError, match="1 to 256 bytes"):
            Producer("tcp://a:1", name=name)
    with pytest.raises(OptionError, match="sendTimeout='5'"):
        Producer("tcp://a:1", sendTimeout=5)
    with pytest.raises(RowError, match="UTF-8 cannot encode"):
        Producer("tcp://a:1").send("\ud800")
    with pytest.raises(RowError, match=r"a value of 67108865 bytes.*in parts"):
        Producer("tcp://a:1").send(bytes((64 << 20) + 1))
    with pytest.raises(RowError, match="a topic of 67108865 bytes"):
        Producer("tcp://a:1").send(b"", topic=bytes((64 << 20) + 1))
    producer = Producer("tcp://a:1")
    producer.close()
    with pytest.raises(OptionError, match="closed"):
        producer.send("x")


# The receiver as a program.


@contextmanager
def program(location: Path, endpoint: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    process = start(location, endpoint, *more)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def start(location: Path, endpoint: str, *more: str) -> subprocess.Popen[bytes]:
    arguments = [
        "receive",
        "--socket-type",
        "ROUTER",
        "--bind",
        endpoint,
        "--wal-location",
        str(location),
        *more,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "zmq_datasource", *arguments],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def listens(endpoint: str) -> bool:
    host, port = endpoint.removeprefix("tcp://").split(":")
    with stdlib_socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_kills_of_the_receiver_lose_and_double_no_transaction(tmp_path: Path) -> None:
    """After each kill every transaction is in the log once, whole and in order."""
    chance = random.Random(4)
    endpoint = free_endpoint()
    process = start(tmp_path, endpoint)
    done = threading.Event()
    sizes: list[int] = []

    def produce() -> None:
        with Producer(endpoint, name="p", connectTimeout="20s", sendTimeout="20s", **FAST) as producer:
            for number in range(20):
                sizes.append(chance.randint(1, 50))
                for row in range(sizes[-1]):
                    producer.send(f"{number} {row}")
                producer.flush()
        done.set()

    producing = threading.Thread(target=produce)
    producing.start()
    kills = 0
    try:
        while not done.wait(chance.random() / 3) and producing.is_alive():
            wait_for(lambda: done.is_set() or listens(endpoint), "the receiver to be there")
            done.wait(chance.random() / 5)
            process.kill()
            process.wait(30)
            kills += 1
            process = start(tmp_path, endpoint)
        producing.join(60)
        assert done.is_set()
    finally:
        process.kill()
        process.wait(30)
    assert kills >= 1
    expected = [f"{number} {row}" for number, size in enumerate(sizes) for row in range(size)]
    assert values(tmp_path) == expected
    assert log_rows(tmp_path).column("sequence").to_pylist() == [int(v.split()[0]) for v in expected]
