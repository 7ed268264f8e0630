"""The sending side of the transaction protocol, without a socket and with a clock of the test."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from zmq_datasource.acknowledged.protocol import (
    Commit,
    Committed,
    Data,
    Hello,
    Message,
    Refusal,
    Staged,
    Taken,
    Welcome,
    decode,
    encode,
)
from zmq_datasource.acknowledged.sender_session import ASK_AGAIN_SECONDS, SenderSession
from zmq_datasource.errors import AttemptLostError, RowError, SendTimeoutError, TransactionError

TIMEOUT = 10.0
ROW = pa.record_batch({"value": [b"x" * 100]})


def session() -> SenderSession:
    return SenderSession("me", 7, 0, TIMEOUT, "tcp://receiver:1")


def said(session: SenderSession) -> list[Message]:
    """Take the messages out of the outbox, as if they were sent."""
    messages = [decode(frames)[0] for frames in session.outbox]
    session.outbox.clear()
    return messages


def welcome(session: SenderSession) -> list[bytes]:
    return encode(Welcome(attempt=session.attempt, committed=None, by=None))


def greeted() -> SenderSession:
    """A session that is welcome at the time 0."""
    it = session()
    it.greet(0)
    it.receive(welcome(it), 0)
    said(it)
    return it


def push(it: SenderSession, now: float = 0) -> None:
    """Send one row."""
    size, frames = it.pack(ROW)
    it.send_packed(size, frames, 1, now)


def taken(it: SenderSession, received: int) -> list[bytes]:
    return encode(Taken(attempt=it.attempt, received=received))


def commit(it: SenderSession, now: float = 0) -> None:
    it.commit([it.attempt], 1, 255, now)


def indices(messages: list[Message]) -> list[int]:
    return [message.index for message in messages if isinstance(message, Data)]


# Asking.


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda it: it.greet(0), "a welcome"),
        (push, "the data to be taken"),
        (lambda it: it.end(0), "the end to be staged"),
        (commit, "the commit"),
    ],
)
def test_a_timeout_names_the_missing_answer(ask: Callable[[SenderSession], None], what: str) -> None:
    it = greeted()
    ask(it)
    with pytest.raises(
        SendTimeoutError,
        match=f"^waiting 10.0 for {what} from tcp://receiver:1: no answer. The receiver is stopped, its log is "
        "full, its disk refuses, or the network is down; the transaction can be repeated$",
    ):
        it.wake(TIMEOUT)


def test_a_request_is_repeated_until_the_timeout() -> None:
    it = session()
    it.greet(0)
    said(it)
    asked = []
    now = 0.0
    with pytest.raises(
        SendTimeoutError, match=r"waiting 10\.0 for a welcome from tcp://receiver:1: no answer"
    ):
        while now < 2 * TIMEOUT:
            now += 0.5
            it.wake(now)
            asked += [now] * len(said(it))
    assert asked == [(ASK_AGAIN_SECONDS + 0.5) * n for n in range(1, 4)]
    assert now == TIMEOUT


def test_a_request_is_repeated_on_a_new_connection_at_once() -> None:
    it = session()
    it.greet(0)
    it.reconnected(0.5)
    assert said(it) == [Hello(attempt=it.attempt, producer="me")], "what waited for the old one is void"
    it.wake(2)
    assert said(it) == []
    it.wake(3)
    assert len(said(it)) == 1


def test_answers_to_another_attempt_are_ignored() -> None:
    it = session()
    it.greet(0)
    old = welcome(it)
    it.begin_attempt()
    it.greet(0)
    for frames in (
        old,
        encode(Taken(attempt="f" * 32, received=3)),
        encode(Staged(attempt="f" * 32, rows=1)),
    ):
        it.receive(frames, 1)
    it.receive(encode(Refusal(code="no_room", reason="full", attempt="f" * 32)), 1)
    assert it.waiting


@pytest.mark.parametrize("code", ["unknown", "refused"])
def test_a_refusal_is_raised(code: str) -> None:
    it = session()
    it.greet(0)
    with pytest.raises(TransactionError, match="refused: because") as raised:
        it.receive(encode(Refusal(code=code, reason="because", attempt=it.attempt)), 1)
    assert isinstance(raised.value, AttemptLostError) == (code == "unknown")


def test_control_characters_of_a_refusal_are_escaped() -> None:
    it = session()
    it.greet(0)
    reason = "\x1b]0;owned\x07" + "x" * 1_000_000
    with pytest.raises(TransactionError) as raised:
        it.receive(encode(Refusal(code=reason, reason=reason, attempt=it.attempt)), 1)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 3000


# Data.


def test_data_is_sent_again_until_it_is_taken() -> None:
    it = greeted()
    push(it)
    assert indices(said(it)) == [0]
    it.wake(ASK_AGAIN_SECONDS + 0.1)
    assert indices(said(it)) == [0]
    it.reconnected(3)
    assert indices(said(it)) == [0]
    it.receive(welcome(it), 3)
    assert it.waiting
    it.receive(taken(it, 1), 4)
    assert not it.waiting
    push(it, 4)
    assert indices(said(it)) == [1]
    it.receive(taken(it, 1), 4)  # the answer to data that was sent again
    assert it.waiting
    it.receive(taken(it, 2), 4)
    assert not it.waiting


def test_the_time_before_the_caller_waits_does_not_count() -> None:
    it = greeted()
    push(it)
    it.start_timeout(2 * TIMEOUT)
    it.wake(2 * TIMEOUT)
    with pytest.raises(SendTimeoutError, match="the data to be taken"):
        it.wake(3 * TIMEOUT)


def test_a_row_larger_than_a_receiver_takes_is_an_error() -> None:
    it = greeted()
    it.most_frame_bytes = 100
    it.pack(ROW)
    it.most_frame_bytes = 50
    with pytest.raises(RowError, match="of 100 bytes: a receiver takes 50 at most"):
        it.pack(ROW)


# Transactions.


def test_a_commit_is_repeated_until_it_is_answered() -> None:
    it = session()
    commit(it)
    asked = said(it)
    assert asked == [
        Commit(producer="me", number=7, attempts=[it.attempt], rows=1, digest="00000000000000ff")
    ]
    it.wake(ASK_AGAIN_SECONDS + 0.1)
    assert said(it) == asked
    for producer, number in (("me", 6), ("you", 7)):
        it.receive(encode(Committed(producer=producer, number=number, again=False, by=None)), 3)
        assert it.waiting
    it.receive(encode(Committed(producer="me", number=7, again=True, by=it.attempt)), 3)
    assert not it.waiting
    assert (it.again, it.by) == (True, it.attempt)
