"""A client that follows docs/protocol.md with only a socket and ``json``, without this package."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support import Socket, free_endpoint, log_rows, stop_sooner, stream_options
from zmq_datasource.source.feed_receiver import FeedReceiver

Context = zmq.Context[Socket]
Answer = tuple[str, dict[str, Any]]


@contextmanager
def receiving(location: Path, **options: Any) -> Iterator[str]:
    endpoint = free_endpoint()
    ingest = FeedReceiver(stream_options(socketType="ROUTER", bind=endpoint, walLocation=location, **options))
    ingest.start()
    try:
        yield endpoint
    finally:
        ingest.stop()


@pytest.fixture(autouse=True)
def _stop_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_sooner(monkeypatch)


def buffers(*values: str) -> list[bytes]:
    """The column ``value``: offsets, data."""
    data = [value.encode() for value in values]
    ends = [0]
    for value in data:
        ends.append(ends[-1] + len(value))
    return [struct.pack(f"<{len(ends)}i", *ends), b"".join(data)]


class Client:
    """A client as in another language."""

    def __init__(self, context: Context, endpoint: str, producer: str = "mine") -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self.producer = producer

    def send(self, letter: str, fields: dict[str, Any], *more: bytes) -> None:
        self._socket.send_multipart([b"ZDS\x02" + letter.encode(), json.dumps(fields).encode(), *more])

    def hear(self) -> Answer:
        assert self._socket.poll(20_000), "no answer"
        head, body, *more = self._socket.recv_multipart()
        assert (head[:4], more) == (b"ZDS\x02", [])
        return head[4:].decode(), json.loads(body)

    def hello(self, attempt: str) -> Answer:
        self.send("H", {"attempt": attempt, "producer": self.producer})
        return self.hear()

    def data(self, attempt: str, number: int, index: int, *values: str, **wrong: Any) -> Answer:
        fields = {"attempt": attempt, "producer": self.producer, "number": number, "partition": 0}
        fields |= {"index": index, "rows": len(values), "columns": ["value"], **wrong}
        self.send("D", fields, *buffers(*values))
        return self.hear()

    def end(self, attempt: str, number: int, messages: int, rows: int) -> Answer:
        fields = {"attempt": attempt, "producer": self.producer, "number": number, "partition": 0}
        self.send("E", fields | {"messages": messages, "rows": rows})
        return self.hear()

    def commit(self, attempts: list[str], number: int, rows: int, **more: str) -> Answer:
        fields = {"producer": self.producer, "number": number, "attempts": attempts, "rows": rows, **more}
        self.send("M", fields)
        return self.hear()

    def stage(self, number: int, *values: str) -> str:
        attempt = uuid.uuid4().hex
        assert self.hello(attempt)[0] == "W"
        assert self.data(attempt, number, 0, *values)[0] == "T"
        assert self.end(attempt, number, 1, len(values)) == ("S", {"attempt": attempt, "rows": len(values)})
        return attempt


def values(location: Path) -> list[str]:
    return [value.decode() for value in log_rows(location).column("value").to_pylist()]


def refusal(answer: Answer) -> tuple[str, str | None]:
    """The code of a refusal, and its attempt."""
    letter, fields = answer
    assert letter == "X", answer
    return fields["code"], fields["attempt"]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_wrong_digest_is_refused_at_the_first_commit(
    restarted: bool, context: Context, tmp_path: Path
) -> None:
    """Otherwise the repeated commit would be refused, as if another program had used the name."""
    right, wrong = "8f33520e4922b7a9", "0123456789abcdef"  # the right one is the example in the docs
    attempt = uuid.uuid4().hex
    frames = [struct.pack("<2i", 0, 2), struct.pack("<3i", 0, 1, 2), b"tv"]
    with receiving(tmp_path) as endpoint:
        client = Client(context, endpoint)
        fields = {"attempt": attempt, "producer": "mine", "number": 0, "partition": 0, "index": 0, "rows": 1}
        client.send("D", fields | {"columns": ["frames"]}, *frames)
        assert client.hear()[0] == "T"
        assert client.end(attempt, 0, 1, 1)[0] == "S"
        if not restarted:
            check_digests(client, attempt, right, wrong)
    if restarted:
        with receiving(tmp_path) as endpoint:
            check_digests(Client(context, endpoint), attempt, right, wrong)
    assert values(tmp_path) == ["v"]


def check_digests(client: Client, attempt: str, right: str, wrong: str) -> None:
    """Commit the row with the topic t and the value v."""
    refused = client.commit([attempt], 0, 1, digest=wrong)
    assert refusal(refused) == ("protocol", None)
    assert f"its digest is {wrong}" in refused[1]["reason"]
    assert f"staged rows have {right}" in refused[1]["reason"]
    letter, committed = client.commit([attempt], 0, 1, digest=right)
    assert (letter, committed["again"]) == ("K", False)
    assert client.commit([attempt], 0, 1, digest=right)[1]["again"] is True
    assert refusal(client.commit([attempt], 0, 1, digest=wrong))[0] == "conflict"
    assert client.commit([attempt], 0, 1)[1]["again"] is True


def test_a_client_that_follows_the_docs_commits_a_transaction(context: Context, tmp_path: Path) -> None:
    with receiving(tmp_path) as endpoint:
        client = Client(context, endpoint)
        attempt = uuid.uuid4().hex
        letter, welcome = client.hello(attempt)
        assert letter == "W"
        assert (welcome["received"], welcome["committed"], welcome["by"]) == (0, None, None)
        assert client.data(attempt, 0, 0, "a", "b") == ("T", {"attempt": attempt, "received": 1})
        assert client.data(attempt, 0, 1, "c") == ("T", {"attempt": attempt, "received": 2})
        assert client.end(attempt, 0, 2, 3)[0] == "S"
        assert client.commit([attempt], 0, 3) == (
            "K",
            {"producer": "mine", "number": 0, "again": False, "by": attempt},
        )
        assert client.commit([attempt], 0, 3)[1]["again"] is True
        _, welcome = client.hello(uuid.uuid4().hex)
        assert (welcome["committed"], welcome["by"]) == (0, attempt)  # so the next number is 1
    assert values(tmp_path) == ["a", "b", "c"]
    assert set(log_rows(tmp_path).column("publisher").to_pylist()) == {"mine"}


def test_numbers_may_be_left_out_but_not_used_twice(context: Context, tmp_path: Path) -> None:
    with receiving(tmp_path) as endpoint:
        client = Client(context, endpoint)
        for number in (3, 7):
            attempt = client.stage(number, f"{number}")
            assert client.commit([attempt], number, 1)[0] == "K"
        client.commit([attempt], 5, 1)  # the answer does not matter here
    assert values(tmp_path) == ["3", "7"]


def test_a_transaction_without_rows_is_refused(context: Context, tmp_path: Path) -> None:
    with receiving(tmp_path) as endpoint:
        client = Client(context, endpoint)
        attempt = uuid.uuid4().hex
        client.hello(attempt)
        assert refusal(client.data(attempt, 0, 0)) == ("protocol", attempt)
        code, about = refusal(client.end(attempt, 0, 0, 0))
        assert code in ("protocol", "unknown")
        assert about == attempt
        assert refusal(client.commit([], 0, 0)) == ("unknown", None)
        assert client.hello(attempt)[1]["committed"] is None


def test_a_wrong_number_of_rows_is_refused_and_can_be_corrected(context: Context, tmp_path: Path) -> None:
    with receiving(tmp_path) as endpoint:
        client = Client(context, endpoint)
        attempt = uuid.uuid4().hex
        client.hello(attempt)
        assert client.data(attempt, 0, 0, "a")[0] == "T"
        assert refusal(client.data(attempt, 0, 1, "b", "c", rows=5)) == ("protocol", attempt)
        assert client.data(attempt, 0, 1, "b", "c") == ("T", {"attempt": attempt, "received": 2})
        assert refusal(client.end(attempt, 0, 2, 4)) == ("protocol", attempt)
        assert client.end(attempt, 0, 2, 3)[0] == "S"
        assert refusal(client.commit([attempt], 0, 4)) == ("unknown", None)
        assert client.commit([attempt], 0, 3)[0] == "K"
    assert values(tmp_path) == ["a", "b", "c"]


def test_an_attempt_without_data_is_unknown(context: Context, tmp_path: Path) -> None:
    with receiving(tmp_path) as endpoint:
        client = Client(context, endpoint)
        attempt = uuid.uuid4().hex
        assert refusal(client.end(attempt, 0, 1, 1)) == ("unknown", attempt)
        assert refusal(client.commit([attempt], 0, 1)) == ("unknown", None)
        # A message that cannot be read is refused without an attempt, too.
        client.send("Z", {})
        assert refusal(client.hear()) == ("protocol", None)
