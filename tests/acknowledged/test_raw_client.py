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
    return client.ask("E", "S", **PART, attempt=attempt, messages=messages, rows=rows)


def refusal(answer: dict[str, Any]) -> tuple[str, str | None]:
    """The code of a refusal, and its attempt."""
    assert answer["kind"] == "X", answer
    return answer["code"], answer["attempt"]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_wrong_digest_is_refused_at_the_first_commit(
    restarted: bool, context: Context, tmp_path: Path
) -> None:
    """Otherwise the repeated commit would be refused, as if another program had used the name."""
    attempt = uuid.uuid4().hex
    with connected(context, tmp_path) as client:
        fields = {**PART, "attempt": attempt, "index": 0, "rows": 1, "columns": ["frames"]}
        frames = [struct.pack("<2i", 0, 2), struct.pack("<3i", 0, 1, 2), b"tv"]
        assert client.ask("D", "T", *frames, **fields)["kind"] == "T"
        assert end(client, attempt, 1, 1)["kind"] == "S"
        if not restarted:
            check_digests(client, attempt)
    if restarted:
        with connected(context, tmp_path) as client:
            check_digests(client, attempt)
    assert values(tmp_path) == ["v"]


def check_digests(client: RawSender, attempt: str) -> None:
    """Commit the row with the topic t and the value v."""
    right, wrong = "8f33520e4922b7a9", "0123456789abcdef"  # the right one is the example in the docs
    refused = client.commit("mine", 0, [attempt], 1, digest=wrong)
    assert refusal(refused) == ("protocol", None)
    assert f"its digest is {wrong}" in refused["reason"]
    assert f"staged rows have {right}" in refused["reason"]
    assert client.commit("mine", 0, [attempt], 1, digest=right)["again"] is False
    assert refusal(client.commit("mine", 0, [attempt], 1, digest=wrong))[0] == "conflict"
    assert client.commit("mine", 0, [attempt], 1)["again"] is True


def test_a_client_that_follows_the_docs_commits_a_transaction(context: Context, tmp_path: Path) -> None:
    attempt = uuid.uuid4().hex
    with connected(context, tmp_path) as client:
        welcome = hello(client, attempt)
        assert (welcome["received"], welcome["committed"], welcome["by"]) == (0, None, None)
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
        assert refusal(client.commit("mine", 5, [attempt], 1))[0] == "conflict"
    assert values(tmp_path) == ["3", "7"]


def test_a_transaction_without_rows_is_refused(context: Context, tmp_path: Path) -> None:
    attempt = uuid.uuid4().hex
    with connected(context, tmp_path) as client:
        assert refusal(end(client, attempt, 1, 1)) == ("unknown", attempt)
        assert refusal(client.commit("mine", 0, [attempt], 1)) == ("unknown", None)
        hello(client, attempt)
        assert refusal(client.data("mine", 0, attempt=attempt)) == ("protocol", attempt)
        assert refusal(end(client, attempt, 0, 0))[1] == attempt
        assert refusal(client.commit("mine", 0, [], 0)) == ("unknown", None)
        assert hello(client, attempt)["committed"] is None
        assert refusal(client.ask("Z", "X")) == ("protocol", None)  # what cannot be read has no attempt


def test_a_wrong_number_of_rows_is_refused_and_can_be_corrected(context: Context, tmp_path: Path) -> None:
    attempt = uuid.uuid4().hex
    with connected(context, tmp_path) as client:
        hello(client, attempt)
        assert client.data("mine", 0, b"a", attempt=attempt)["kind"] == "T"
        two = {**PART, "attempt": attempt, "index": 1, "columns": ["value"], "rows": 5}
        assert refusal(client.ask("D", "T", struct.pack("<3i", 0, 1, 2), b"bc", **two)) == (
            "protocol",
            attempt,
        )
        assert client.data("mine", 0, b"b", b"c", attempt=attempt, index=1)["received"] == 2
        assert refusal(end(client, attempt, 2, 4)) == ("protocol", attempt)
        assert end(client, attempt, 2, 3)["kind"] == "S"
        assert refusal(client.commit("mine", 0, [attempt], 4)) == ("unknown", None)
        assert refusal(client.commit("mine", 0, [attempt, attempt], 6)) == ("unknown", None)
        assert client.commit("mine", 0, [attempt], 3)["kind"] == "K"
    assert values(tmp_path) == ["a", "b", "c"]
