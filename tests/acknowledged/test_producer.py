"""The Producer, the receiver as a program, and queries on its log, with real processes and kills, without a JVM."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import socket as stdlib_socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def test_a_message_of_another_asyncio_task_does_not_join_a_transaction() -> None:
    """It would be dropped with the transaction, and its own flush would succeed."""
    producer = Producer(free_endpoint())

    async def fail_in_a_transaction(sent: asyncio.Event) -> None:
        with producer.transaction():
            producer.send(b"of this task")
            await sent.wait()
            raise ZeroDivisionError

    async def run() -> None:
        sent = asyncio.Event()
        other = asyncio.create_task(fail_in_a_transaction(sent))
        await asyncio.sleep(0)
        for act in (lambda: producer.send(b"of another task"), producer.flush):
            with pytest.raises(TransactionError, match="while another asyncio task is in transaction"):
                act()
        sent.set()
        with pytest.raises(ZeroDivisionError):
            await other
        producer.send(b"now")

    asyncio.run(run())
    producer.close()


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


def test_a_transaction_is_all_or_nothing(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint), Producer(endpoint) as producer:
        producer.send("before")
        with producer.transaction():
            producer.send("a")
            producer.send("b")
        with pytest.raises(KeyError), producer.transaction():
            producer.send("never")
            raise KeyError
        with pytest.raises(TransactionError, match="leave its block"), producer.transaction():
            producer.flush()
        producer.send("after")
        with pytest.raises(KeyError), Producer(endpoint) as failing:
            failing.send("never")
            raise KeyError
    assert values(tmp_path) == ["before", "a", "b", "after"]
    assert log_rows(tmp_path).column("sequence").to_pylist() == [0, 1, 1, 2]


def test_messages_in_memory_are_bounded(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint) as ingest, Producer(endpoint, max_bytes=1000) as producer:
        for _ in range(15):
            producer.send("x" * 100)
        assert ingest.seal() == 12  # a message costs a little more than its bytes
        with pytest.raises(TransactionError, match="max_bytes=1000"), producer.transaction():
            for _ in range(15):
                producer.send("x" * 100)
    assert log_rows(tmp_path).num_rows == 15


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


def transfer(producer: Producer) -> None:
    """Send two rows in a transaction, as a user's code does that runs the block again after an error."""
    with producer.transaction():
        producer.send("debit")
        producer.send("credit" + "x" * 60_000)


def test_a_refused_transaction_is_dropped_and_its_block_can_be_run_again(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    endpoint = free_endpoint()
    with (
        receiving(tmp_path, endpoint, walMaxBytes="100k"),
        Producer(endpoint, sendTimeout="10s") as producer,
    ):
        other = RawSender(context, endpoint)
        attempt = other.stage("other", 0, b"x" * 60_000)
        with pytest.raises(TransactionError, match="walMaxBytes"):
            transfer(producer)
        producer.flush()  # there is nothing to flush
        other.ask("A", "B", producer="other", number=0, attempts=[attempt])
        transfer(producer)
    assert [value[:6] for value in values(tmp_path)] == ["debit", "credit"]


@contextmanager
def receiver_that_answers(
    context: zmq.Context[Socket], endpoint: str, answer: Callable[[str, dict[str, Any]], list[dict[str, Any]]]
) -> Iterator[None]:
    """A receiver that answers each message by a function, which returns the letter ``kind`` and the fields."""
    ended = threading.Event()

    def serve() -> None:
        with context.socket(zmq.ROUTER) as router:
            router.bind(endpoint)
            while not ended.is_set():
                if router.poll(20):
                    peer, head, body, *_ = router.recv_multipart()
                    for fields in answer(chr(head[4]), json.loads(body)):
                        kind = fields.pop("kind").encode()
                        router.send_multipart([peer, b"ZDS\x02" + kind, json.dumps(fields).encode()])

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        yield
    finally:
        ended.set()
        serving.join(10)


def answer_until_the_commit(kind: str, message: dict[str, Any], committed: list[str]) -> list[dict[str, Any]]:
    """What a receiver answers that has committed transaction 0 if there is an attempt in ``committed``."""
    attempt = message.get("attempt")
    match kind:
        case "H":
            done = {"committed": 0, "by": committed[0]} if committed else {"committed": None, "by": None}
            return [{"kind": "W", "attempt": attempt, "received": 0, **done}]
        case "D":
            return [{"kind": "T", "attempt": attempt, "received": 1}]
        case "E":
            return [{"kind": "S", "attempt": attempt, "rows": message["rows"]}]
    return []


def test_a_refusal_keeps_a_transaction_that_an_earlier_commit_may_write(
    context: zmq.Context[Socket],
) -> None:
    """The first commit is not answered, and the second attempt is refused. Then the first commit is executed."""
    endpoint = free_endpoint()
    asked: list[str] = []
    committed: list[str] = []

    def answer(kind: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        match kind:
            case "D" if asked:
                return [{"kind": "X", "attempt": message["attempt"], "code": "no_room", "reason": "full"}]
            case "M":
                asked.extend(message["attempts"])
                return []
        return answer_until_the_commit(kind, message, committed)

    with (
        receiver_that_answers(context, endpoint, answer),
        Producer(endpoint, sendTimeout="300ms", **FAST) as producer,
    ):
        with pytest.raises(SendTimeoutError):
            transfer(producer)
        with pytest.raises(TransactionError, match="no_room"):
            producer.flush()
        with pytest.raises(TransactionError, match=r"Call flush\(\)"):
            transfer(producer)
        committed.extend(asked)
        producer.flush()
        with pytest.raises(TransactionError, match="no_room"):
            transfer(producer)  # the first one is committed, and this is a new one


def test_after_an_error_of_the_receiver_the_commit_is_unknown(context: zmq.Context[Socket]) -> None:
    endpoint = free_endpoint()
    committed: list[str] = []

    def answer(kind: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        if kind == "M":
            committed.extend(message["attempts"])
            return [{"kind": "X", "attempt": None, "code": "internal", "reason": "a fault"}]
        return answer_until_the_commit(kind, message, committed)

    with receiver_that_answers(context, endpoint, answer), Producer(endpoint, **FAST) as producer:
        with pytest.raises(TransactionError, match="a fault"):
            transfer(producer)
        with pytest.raises(TransactionError, match=r"Call flush\(\)"):
            transfer(producer)
        producer.flush()
        assert len(committed) == 1


def test_threads_may_share_a_producer(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint), Producer(endpoint, max_bytes=2000) as producer:

        def send(name: str) -> None:
            for number in range(200):
                producer.send(f"{name}{number:04}")

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
                with producer.transaction():
                    for row in range(sizes[-1]):
                        producer.send(f"{number} {row}")
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
