"""The sending side of the transaction protocol, without a socket and with a clock of the test."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from zmq_datasource.acknowledged.protocol import (
    BUSY,
    MOST_BYTES_ON_THE_WAY,
    Abort,
    Aborted,
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


def welcome(session: SenderSession, received: int = 0, **fields: int | str) -> list[bytes]:
    told = {"committed": None, "by": None, **fields}
    return encode(Welcome(attempt=session.attempt, received=received, **told))  # type: ignore[arg-type]


def greeted() -> SenderSession:
    """A session that is welcome at the time 0."""
    it = session()
    it.greet(0)
    it.receive(welcome(it), 0)
    said(it)
    return it


def push(it: SenderSession) -> int:
    """Send one row. Returns its size."""
    size, frames = it.pack(ROW)
    it.send_packed(size, frames, 1)
    return size


def taken(it: SenderSession, received: int) -> list[bytes]:
    return encode(Taken(attempt=it.attempt, received=received))


def busy(it: SenderSession) -> list[bytes]:
    return encode(Refusal(code=BUSY, reason="256 senders are sending already", attempt=it.attempt))


def commit(it: SenderSession, now: float = 0) -> None:
    it.commit([it.attempt], 1, 255, now)


def indices(messages: list[Message]) -> list[int]:
    return [message.index for message in messages if isinstance(message, Data)]


# Asking.


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda it: it.greet(0), "a welcome"),
        (lambda it: it.wait_for_room(1, 0), "room for data"),
        (lambda it: it.wait_until_taken(0), "the last data to be taken"),
        (lambda it: it.end(0), "the end to be staged"),
        (commit, "the commit"),
        (lambda it: it.abort([it.attempt], 0), "the abort"),
    ],
)
def test_a_timeout_names_the_missing_answer(ask: Callable[[SenderSession], None], what: str) -> None:
    it = greeted()
    push(it)
    ask(it)
    with pytest.raises(
        SendTimeoutError,
        match=f"^waiting 10.0 for {what} from tcp://receiver:1: no answer. The receiver is stopped, its log is "
        "full, or the network is down; the transaction can be repeated$",
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


@pytest.mark.parametrize("code", ["unknown", "no_room"])
def test_a_refusal_is_raised(code: str) -> None:
    it = session()
    it.greet(0)
    with pytest.raises(TransactionError, match=rf"refused \({code}\): because") as raised:
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


# Data on the way.


def test_one_data_message_is_on_the_way_before_the_first_is_taken_and_two_after_it() -> None:
    def waits(size: int, sent: int, of_them_taken: int = 0) -> bool:
        it = greeted()
        for _ in range(sent):
            push(it)
        it.receive(taken(it, of_them_taken), 0)
        it.wait_for_room(size, 0)
        return it.waiting

    size = push(greeted())
    assert not waits(1 << 30, 0)
    assert waits(1, 1)
    assert not waits(MOST_BYTES_ON_THE_WAY - size, 2, 1)
    assert waits(MOST_BYTES_ON_THE_WAY - size + 1, 2, 1), "a large message is on the way alone"
    assert waits(1, 3, 1)


def test_waiting_for_room_asks_only_after_silence() -> None:
    it = greeted()
    it.wait_for_room(200, 0)
    assert not it.waiting
    push(it)
    said(it)
    it.wait_for_room(200, 0)
    assert it.waiting
    assert said(it) == []
    it.wake(ASK_AGAIN_SECONDS + 0.1)
    assert said(it) == [Hello(attempt=it.attempt, producer="me")]
    it.receive(taken(it, 1), 3)
    assert not it.waiting


def test_a_receiver_whose_disk_refuses_data_is_asked_until_it_takes_it() -> None:
    it = greeted()
    push(it)
    said(it)
    it.wait_until_taken(0)
    hello = Hello(attempt=it.attempt, producer="me")
    for second in range(0, 50, 5):  # longer than the timeout, but the receiver answers
        it.receive(busy(it), second)
        assert said(it) == []
        it.wake(second + 4.8)
        assert said(it) == [hello]
        it.receive(welcome(it), second + 4.9)
        assert indices(said(it)) == [0]
    it.receive(taken(it, 1), 55)
    assert not it.waiting


def test_an_attempt_whose_repeated_data_was_taken_is_staged() -> None:
    it = greeted()
    push(it)
    it.wait_until_taken(0)
    said(it)
    for now, answer in (
        (1, busy(it)),
        (2, welcome(it)),
        (5, welcome(it)),
    ):  # repeated twice, with the same answer
        it.receive(answer, now)
    assert indices(said(it)) == [0, 0]
    it.receive(busy(it), 6)
    it.receive(taken(it, 1), 6)
    assert not it.waiting
    it.end(7)
    it.receive(encode(Staged(attempt=it.attempt, rows=1)), 7)
    said(it)
    it.abort_unfinished()
    assert said(it) == []


def test_a_busy_receiver_that_becomes_silent_is_a_timeout() -> None:
    it = greeted()
    push(it)
    it.wait_until_taken(0)
    it.receive(busy(it), 1)
    it.wake(TIMEOUT)
    with pytest.raises(SendTimeoutError, match="the last data to be taken"):
        it.wake(TIMEOUT + 1)


def test_progress_extends_the_timeout_and_repeats_no_request() -> None:
    it = greeted()
    for _ in range(9):
        push(it)
    it.wait_until_taken(0)
    said(it)
    for received in range(1, 9):
        it.receive(taken(it, received), received * (TIMEOUT - 1))
        it.wake(received * (TIMEOUT - 1))
        assert said(it) == []
    with pytest.raises(SendTimeoutError, match="the last data to be taken"):
        it.wake(9 * (TIMEOUT - 1) + 1)


def test_messages_without_progress_do_not_extend_the_timeout() -> None:
    it = greeted()
    push(it)
    it.wait_until_taken(0)
    it.receive(taken(it, 0), TIMEOUT - 1)
    with pytest.raises(SendTimeoutError):
        it.receive(taken(it, 0), TIMEOUT)


def test_a_row_larger_than_a_receiver_takes_is_an_error() -> None:
    it = greeted()
    it.most_frame_bytes = 100
    it.pack(ROW)
    it.most_frame_bytes = 50
    with pytest.raises(RowError, match="of 100 bytes: a receiver takes 50 at most"):
        it.pack(ROW)


# Lost connections.


def test_data_is_sent_again_from_the_message_that_the_receiver_names() -> None:
    it = greeted()
    for _ in range(5):
        push(it)
    assert indices(said(it)) == [0, 1, 2, 3, 4]
    it.receive(taken(it, 1), 1)
    it.wait_until_taken(1)
    it.reconnected(2)
    assert said(it) == [Hello(attempt=it.attempt, producer="me")]
    it.receive(welcome(it, received=3), 3)
    assert indices(said(it)) == [3, 4]
    it.receive(taken(it, 5), 4)
    assert not it.waiting


def test_after_a_pause_of_the_receiver_data_is_sent_again_once() -> None:
    it = greeted()
    push(it)
    it.wait_until_taken(0)
    said(it)
    for now in (2.1, 4.2):  # its log is full
        it.wake(now)
        assert said(it) == [Hello(attempt=it.attempt, producer="me")]
    for _ in range(2):
        it.receive(welcome(it), 5)
    assert indices(said(it)) == [0]
    it.reconnected(5.1)
    said(it)
    it.receive(welcome(it), 5.2)
    assert indices(said(it)) == [0], "on a new connection it was not sent yet"
    it.wake(5.3 + ASK_AGAIN_SECONDS)
    it.receive(welcome(it), 5.4 + ASK_AGAIN_SECONDS)
    assert indices(said(it)) == [0], "it was lost"


def test_a_receiver_that_has_lost_taken_data_ends_the_attempt() -> None:
    it = greeted()
    push(it)
    it.receive(taken(it, 1), 0)
    push(it)
    it.wait_until_taken(0)
    it.reconnected(1)
    with pytest.raises(AttemptLostError, match="the receiver has restarted"):
        it.receive(welcome(it, received=0), 2)


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


def test_an_abort_waits_for_its_answer() -> None:
    it = session()
    it.abort(["f" * 32], 0)
    assert said(it) == [Abort(producer="me", number=7, attempts=["f" * 32])]
    it.receive(encode(Aborted(producer="me", number=7)), 1)
    assert not it.waiting


def stage(it: SenderSession) -> None:
    it.greet(0)
    it.receive(welcome(it), 0)
    it.end(0)
    it.receive(encode(Staged(attempt=it.attempt, rows=0)), 0)
    said(it)


@pytest.mark.parametrize(
    ("before", "given_back"),
    [(lambda it: None, False), (lambda it: (it.greet(0), said(it))[0], True), (stage, False)],
)
def test_an_announced_attempt_is_aborted_unless_it_is_staged(
    before: Callable[[SenderSession], None], given_back: bool
) -> None:
    it = session()
    before(it)
    attempt = it.attempt
    it.begin_attempt()
    assert it.attempt != attempt
    aborted = [Abort(producer="me", number=7, attempts=[attempt])] if given_back else []
    assert said(it) == aborted
    assert not it.waiting
