"""A client that follows docs/protocol.md with only a socket and ``json`` commits transactions."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.acknowledged.test_acknowledged import receiving, values
from tests.support import RawSender, Socket, free_endpoint, log_rows, stop_sooner

Context = zmq.Context[Socket]
PART = {"producer": "mine", "number": 0, "partition": 0}


@pytest.fixture(autouse=True)
def _stop_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_sooner(monkeypatch)


@contextmanager
def connected(context: Context, location: Path) -> Iterator[RawSender]:
    """A client of a receiver with a log at this location."""
    endpoint = free_endpoint()
    with receiving(location, endpoint):
        yield RawSender(context, endpoint)


def hello(client: RawSender, attempt: str) -> dict[str, Any]:
    return client.ask("H", "W", attempt=attempt, producer="mine")


def end(client: RawSender, attempt: str, messages: int, rows: int) -> dict[str, Any]:
    return client.ask("E", "S", attempt=attempt, messages=messages, rows=rows)


def refusal(answer: dict[str, Any]) -> tuple[str, str | None]:
    """The code of a refusal, and its attempt."""
    assert answer["kind"] == "X", answer
    return answer["code"], answer["attempt"]


def test_a_client_that_follows_the_docs_commits_a_transaction(context: Context, tmp_path: Path) -> None:
    attempt = uuid.uuid4().hex
    with connected(context, tmp_path) as client:
        welcome = hello(client, attempt)
        assert (welcome["committed"], welcome["by"]) == (None, None)
        taken = {"kind": "T", "attempt": attempt}
        assert client.data("mine", 0, b"a", b"b", attempt=attempt) == {**taken, "received": 1}
        assert client.data("mine", 0, b"c", attempt=attempt, index=1) == {**taken, "received": 2}
        assert end(client, attempt, 2, 3) == {"kind": "S", "attempt": attempt, "rows": 3}
        committed = {"kind": "K", "producer": "mine", "number": 0, "by": attempt}
        assert client.commit("mine", 0, [attempt], 3) == {**committed, "again": False}
        assert client.commit("mine", 0, [attempt], 3)["again"] is True
        welcome = hello(client, uuid.uuid4().hex)
        assert (welcome["committed"], welcome["by"]) == (0, attempt)  # so the next number is 1
    assert values(tmp_path) == ["a", "b", "c"]
    assert set(log_rows(tmp_path).column("publisher").to_pylist()) == {"mine"}


def test_numbers_may_be_left_out_but_not_used_twice(context: Context, tmp_path: Path) -> None:
    with connected(context, tmp_path) as client:
        for number in (3, 7):
            attempt = client.stage("mine", number, b"%d" % number)
            assert client.commit("mine", number, [attempt], 1)["kind"] == "K"
        assert refusal(client.commit("mine", 5, [attempt], 1))[0] == "refused"
    assert values(tmp_path) == ["3", "7"]


def test_a_transaction_without_rows_is_refused(context: Context, tmp_path: Path) -> None:
    attempt = uuid.uuid4().hex
    with connected(context, tmp_path) as client:
        assert refusal(end(client, attempt, 1, 1)) == ("unknown", attempt)
        assert refusal(client.commit("mine", 0, [attempt], 1)) == ("unknown", None)
        hello(client, attempt)
        assert refusal(client.data("mine", 0, attempt=attempt)) == ("refused", attempt)
        assert refusal(end(client, attempt, 0, 0))[1] == attempt
        assert refusal(client.commit("mine", 0, [], 0)) == ("unknown", None)
        assert hello(client, attempt)["committed"] is None
        assert refusal(client.ask("Z", "X")) == ("refused", None)  # what cannot be read has no attempt


def test_a_wrong_number_of_rows_is_refused_and_can_be_corrected(context: Context, tmp_path: Path) -> None:
    attempt = uuid.uuid4().hex
    with connected(context, tmp_path) as client:
        hello(client, attempt)
        assert client.data("mine", 0, b"a", attempt=attempt)["kind"] == "T"
        two = {**PART, "attempt": attempt, "index": 1, "columns": ["value"], "rows": 5}
        assert refusal(client.ask("D", "T", struct.pack("<3i", 0, 1, 2), b"bc", **two)) == (
            "refused",
            attempt,
        )
        assert client.data("mine", 0, b"b", b"c", attempt=attempt, index=1)["received"] == 2
        assert refusal(end(client, attempt, 2, 4)) == ("refused", attempt)
        assert end(client, attempt, 2, 3)["kind"] == "S"
        assert refusal(client.commit("mine", 0, [attempt], 4)) == ("unknown", None)
        assert refusal(client.commit("mine", 0, [attempt, attempt], 6)) == ("unknown", None)
        assert client.commit("mine", 0, [attempt], 3)["kind"] == "K"
    assert values(tmp_path) == ["a", "b", "c"]
