"""The session of a durable subscriber, without a socket and with a clock of the test's own.

``test_search`` drives it together with the server; what is here, the search does not judge.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.serving.host import rows_of
from zmq_datasource.errors import NoPeerError, ProtocolError
from zmq_datasource.serving.protocol import (
    Batch,
    Fetch,
    FromServer,
    Open,
    Opened,
    Refused,
    decode,
    encode,
    pack_rows,
)
from zmq_datasource.serving.subscriber_session import SubscriberSession

OPEN = Open(name="me", session=1)
HEAD: dict[str, Any] = {"session": 1, "log": "x", "done": 0}


class Subscribed:
    """A session, its requests, and the time. It was opened at 0, and has sent its first FETCH."""

    def __init__(self, timeout: float = 30.0, opened: bool = True) -> None:
        self.now = 0.0
        self.it = SubscriberSession(OPEN, (b"a", b"b"), 500, timeout, "tcp://server:1")
        self.it.reconnected(0)
        if opened:
            self.receive(Opened(session=1, log="x", next=0, new=True))
            self.sent()

    def receive(self, *messages: FromServer) -> None:
        for message in messages:
            self.it.receive(encode(message), self.now)

    def receive_rows(self, first: int, *ids: int, after: int | None = None) -> None:
        """Receive a BATCH of these ids that ends behind the last one, or before ``after``."""
        rows, columns, buffers = pack_rows(rows_of(ids, [b"a"] * len(ids)))
        end = ids[-1] + 1 if after is None else after
        head = Batch(**HEAD, first=first, next=end, rows=rows, columns=tuple(columns))
        self.it.receive([bytes(memoryview(frame)) for frame in encode(head, buffers)], self.now)

    def sent(self) -> list[Any]:
        """The requests that the session sends now."""
        messages = [decode(frames)[0] for frames in self.it.outbox]
        self.it.outbox.clear()
        return messages

    def pass_time(self, seconds: float, step: float = 0.5) -> list[tuple[float, Any]]:
        """The requests that the session sends meanwhile, with their times."""
        said, end = [], self.now + seconds
        while self.now < end:
            self.now += step
            self.it.wake(self.now)
            said += [(self.now, message) for message in self.sent()]
        return said

    def take(self) -> int | None:
        """Take the next message; return its id."""
        message = self.it.inbox.peek()
        if message is None:
            return None
        self.it.inbox.hand_over(message[0], message[0])
        return message[0]

    def take_ids(self) -> list[int]:
        return list(iter(self.take, None))


def fetch(first: int, done: int = 0, max_bytes: int = 500, confirm: bool = False) -> Fetch:
    return Fetch(name="me", session=1, first=first, done=done, max_bytes=max_bytes, confirm=confirm)


def empty(first: int, after: int | None = None, done: int = 0) -> Batch:
    return Batch(**{**HEAD, "done": done}, first=first, next=first if after is None else after)


def test_a_message_stays_until_the_caller_has_it() -> None:
    """A signal may come between the look and the return."""
    here = Subscribed()
    here.receive_rows(0, 3, 5)
    assert [here.it.inbox.peek() for _ in range(2)] == [(3, (b"a", b"3"))] * 2
    assert here.it.inbox.taken == 0
    assert here.take_ids() == [3, 5]


def test_a_batch_is_the_rest_of_an_answer_and_its_last_id_acknowledges_all_of_it() -> None:
    here = Subscribed()
    here.receive_rows(0, 0, 2, 3, after=5)
    here.receive_rows(5, 6, after=9)
    inbox = here.it.inbox
    assert here.take() == 0
    batch = inbox.peek_batch()
    assert batch is not None
    assert batch.column("id").to_pylist() == [2, 3]
    inbox.hand_over(2, 3, 2)
    assert inbox.done == 0
    inbox.acked = 4
    assert inbox.done == 6, "the ids of other topics are passed, too"
    batch = inbox.peek_batch()
    assert batch is not None
    assert batch.column("id").to_pylist() == [6]
    inbox.hand_over(6, 6)
    inbox.acked = 7
    assert (inbox.answers, inbox.peek_batch(), inbox.done) == (0, None, 9)


@pytest.mark.parametrize(
    "frames",
    [
        [b"HOLA"],
        [
            b"ZDS\3B",
            b'{"session":1,"log":"x","first":0,"next":1,"done":0,"rows":1,"columns":["value"]}',
        ],
    ],
)
def test_a_message_of_another_protocol_is_an_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        Subscribed().it.receive(frames, 1)


# Asking for messages.


def test_the_next_answer_is_asked_for_when_one_has_come_and_two_are_in_memory_at_most() -> None:
    here = Subscribed()
    here.receive_rows(0, 0, 1)
    assert here.sent() == [fetch(2)], "nothing is taken yet"
    here.receive_rows(2, 2, 3)
    assert here.sent() == []
    assert here.pass_time(60) == [], "without a request there is no silence"
    assert [here.take(), here.take(), here.take()] == [0, 1, 2]
    assert here.pass_time(0.5) == [(60.5, fetch(4))]


def test_answers_to_other_requests_are_ignored() -> None:
    here = Subscribed()
    here.receive_rows(5, 5, 6)  # otherwise the ids in between would never come
    other = Batch(**{**HEAD, "log": "y"}, first=0, next=9)
    here.receive(other, Batch(**HEAD, first=5, next=9, lost=4), Opened(session=2, log="x", next=5, new=True))
    assert (here.take_ids(), here.it.lost, here.sent()) == ([], 0, [])


# Silence.


def test_after_silence_it_asks_again_and_then_by_a_new_connection() -> None:
    here = Subscribed()
    assert here.pass_time(6) == [(3.5, fetch(0))]
    assert not here.it.redial
    assert here.pass_time(0.5) == [(6.5, fetch(0))]
    assert here.it.redial


def test_the_bytes_of_a_large_message_are_no_silence() -> None:
    here = Subscribed(timeout=5)
    for _ in range(60):
        assert here.pass_time(1) == []
        here.it.bytes_arrived(here.now)
    assert not here.it.redial


@pytest.mark.parametrize(
    ("opened", "advice"), [(True, "subscribe again to continue"), (False, "check that the server runs")]
)
def test_a_server_that_is_silent_for_the_timeout_is_given_up(opened: bool, advice: str) -> None:
    here = Subscribed(opened=opened)
    with pytest.raises(NoPeerError, match=f"has been silent for 30 s; {advice}"):
        here.pass_time(40)
    assert here.now == 31.0


def test_without_a_timeout_it_waits_for_ever() -> None:
    Subscribed(timeout=math.inf).pass_time(1000, step=1)


def test_time_in_which_this_process_was_stopped_is_no_silence() -> None:
    here = Subscribed(timeout=30)
    here.pass_time(5)
    here.pass_time(4000, step=400)  # stopped, or its caller was busy
    with pytest.raises(NoPeerError):
        here.pass_time(31)


def test_a_queue_that_takes_nothing_more_is_that_of_a_dead_connection() -> None:
    here = Subscribed()
    here.it.reconnected(0)
    here.it.blocked()
    assert here.pass_time(0.5) == [(0.5, fetch(0))]
    assert here.it.redial


# Refusals.


@pytest.mark.parametrize("session", [1, None])
def test_a_refusal_is_the_end(session: int | None) -> None:
    here = Subscribed()
    here.receive(Refused(code="taken", reason="late", session=9))
    assert here.it.refusal is None
    here.receive(Refused(code="taken", reason="\x1b]0;owned\x07" + "x" * 1_000_000, session=session))
    assert str(here.it.refusal).startswith("subscribing as 'me' at tcp://server:1: ")
    assert str(here.it.refusal).isprintable()
    assert len(str(here.it.refusal)) < 3000
    here.receive_rows(0, 0)
    assert here.sent() == []


# Acknowledging.


def test_a_position_that_has_moved_is_sent_once_a_second() -> None:
    here = Subscribed()
    here.receive_rows(0, 0, 1, 2, 3)
    here.receive_rows(4, 4)
    here.sent()
    assert here.take() == 0
    here.it.inbox.acked = 1
    assert here.pass_time(0.5) == []
    assert here.pass_time(0.5) == [(1.0, fetch(5, done=1, max_bytes=0))]
    here.receive(empty(5, done=1))
    assert here.it.confirmed == 1
    assert here.pass_time(10) == [], "it does not move"


def test_a_caller_that_waits_for_the_disk_asks_for_it_until_it_is_confirmed() -> None:
    here = Subscribed()
    here.receive_rows(0, 0, 1)
    here.receive_rows(2, 2)
    here.take()
    here.it.inbox.acked = 1
    here.sent()
    here.it.confirm(here.now)
    asked = fetch(3, done=1, max_bytes=0, confirm=True)
    assert here.sent() == [asked], "there is no room for messages"
    assert here.pass_time(3.5) == [(3.5, asked)]
    here.receive(empty(3, done=0))  # the answer to a FETCH before
    assert here.sent() == [asked]
    assert here.it.has_unconfirmed
    here.receive(empty(3, done=1))
    assert here.sent() == []
    assert not here.it.has_unconfirmed


def test_the_position_of_a_subscriber_to_a_rare_topic_moves() -> None:
    """Otherwise the log would keep everything for it."""
    here = Subscribed()
    here.receive(empty(0, after=50))
    assert (here.take(), here.take()) == (None, None)
    assert here.it.inbox.done == 50
    here.sent()
    here.receive_rows(50, 53, after=60)
    assert here.take_ids() == [53]
    assert here.it.inbox.done == 53, "message 53 may be worked on"
    here.it.inbox.acked = 54
    assert here.it.inbox.done == 60


def test_what_was_lost_is_counted_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    here = Subscribed()
    for end in (10, 10, 12):
        here.receive(Batch(**HEAD, first=0, next=end, lost=end))
    assert here.it.lost == 10
    assert "the 10 messages before id 10 were deleted before they came here" in caplog.text
