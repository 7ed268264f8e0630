"""The session of a durable subscriber, without a socket and with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.proxy.model_proxy import rows
from zmq_datasource.errors import NoPeerError, ProtocolError
from zmq_datasource.proxy.fetch_protocol import (
    Batch,
    Fetch,
    Forget,
    Forgotten,
    FromClient,
    FromProxy,
    Lost,
    Open,
    Opened,
    Refused,
    decode,
    encode,
)
from zmq_datasource.proxy.subscriber_session import Start, SubscriberSession, Subscription


class Subscribed:
    """A session, its requests, and the time. It was opened at 0, and has sent its first FETCH."""

    def __init__(
        self, timeout: float | None = 30.0, opened: bool = True, at: int = 0, start: Start | None = None
    ) -> None:
        self.now = 0.0
        subscription = Subscription("me", start or Start(), (b"a", b"b"), 500, timeout, "tcp://proxy:1")
        self.it = SubscriberSession(subscription)
        self.it.restart_silence(0)
        self.it.reconnected(0)
        if opened:
            self.receive(Opened(session=1, next=at, end=100, new=True))
            self.sent()

    def receive(self, *messages: FromProxy) -> None:
        for message in messages:
            self.it.receive(encode(message), self.now)

    def receive_rows(self, first: int, *ids: int, after: int | None = None, done: int = 0) -> None:
        """Receive a BATCH of these ids that ends behind the last one, or before ``after``."""
        columns, buffers = rows([(number, b"a", b"%d" % number) for number in ids])
        head = Batch(
            session=self.session,
            first=first,
            next=ids[-1] + 1 if after is None else after,
            end=100,
            done=done,
            rows=len(ids),
            columns=columns,
        )
        self.it.receive([bytes(frame) for frame in encode(head, buffers)], self.now)

    session = 1

    def sent(self) -> list[FromClient]:
        """The requests that the session sends now."""
        return [message for message, _ in self.sent_with_topics()]

    def sent_with_topics(self) -> list[tuple[Any, Sequence[bytes]]]:
        messages = [decode(frames) for frames in self.it.outbox]
        self.it.outbox.clear()
        return messages

    def pass_time(self, seconds: float, step: float = 0.5) -> list[tuple[float, FromClient]]:
        """The requests that the session sends meanwhile, with their times."""
        said, end = [], self.now + seconds
        while self.now < end:
            self.now += step
            self.it.wake(self.now)
            said += [(self.now, message) for message in self.sent()]
        return said

    def take_ids(self) -> list[int]:
        ids = []
        while (message := self.it.inbox.take()) is not None:
            ids.append(message[0])
        return ids

    def fill_memory(self) -> None:
        """Receive two answers with the ids 0 to 3, so that no request is open."""
        self.receive_rows(0, 0, 1)
        self.receive_rows(2, 2, 3)
        self.sent()


def fetch(
    first: int,
    done: int = 0,
    max_bytes: int = 500,
    wait: int = 1000,
    confirm: bool = False,
    session: int = 1,
) -> Fetch:
    return Fetch(
        name="me",
        session=session,
        first=first,
        done=done,
        max_bytes=max_bytes,
        wait=wait,
        confirm=confirm,
    )


def empty(first: int, after: int | None = None, done: int = 0, session: int = 1) -> Batch:
    return Batch(session=session, first=first, next=first if after is None else after, end=100, done=done)


OPEN = Open(name="me", session=1)


# Beginning.


def test_it_begins_by_opening_its_name_and_asks_for_messages_once_it_has_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    here = Subscribed(opened=False)
    assert here.sent_with_topics() == [(OPEN, [b"a", b"b"])]
    assert (here.it.is_open, here.it.forgotten, here.it.new) == (False, False, False)
    here.receive_rows(0, 0)
    assert (here.take_ids(), here.sent()) == ([], []), "there was no FETCH yet"
    here.receive(Opened(session=2, next=5, end=100, new=True))
    assert not here.it.is_open, "it answers another session"
    here.receive(Opened(session=1, next=7, end=100, new=True))
    assert here.it.is_open
    assert here.it.new
    assert here.sent_with_topics() == [(fetch(7, done=7), [])]
    assert "subscribed as 'me' at tcp://proxy:1, from id 7 on" in caplog.text
    assert (here.it.inbox.done, here.it.confirmed, here.it.inbox.handed) == (7, 7, None)
    assert not here.it.has_unconfirmed


def test_a_name_that_the_proxy_knows_is_not_new() -> None:
    here = Subscribed(opened=False)
    here.receive(Opened(session=1, next=7, end=100, new=False))
    assert here.it.is_open
    assert not here.it.new


@pytest.mark.parametrize(
    ("start", "asked"),
    [
        (Start("latest"), Open(name="me", session=1, start="latest")),
        (Start(9), Open(name="me", session=1, start=9)),
        (Start(since=9), Open(name="me", session=1, since=9)),
    ],
)
def test_it_says_where_a_new_name_begins(start: Start, asked: Open) -> None:
    assert Subscribed(opened=False, start=start).sent() == [asked]


def test_the_number_of_a_session_names_its_client() -> None:
    it = SubscriberSession(Subscription("me", Start(), (), 500, None, "tcp://proxy:1", client=5))
    it.reconnected(0)
    asked, _ = decode(it.outbox[0])
    assert isinstance(asked, Open)
    assert asked.session == (5 << 32) + 1


def test_the_messages_that_come_are_given_with_all_their_frames() -> None:
    here = Subscribed()
    columns, buffers = rows([(3, b"a", b"x"), (5, None, b"y")])
    head = Batch(session=1, first=0, next=9, end=100, done=0, rows=2, columns=columns)
    here.it.receive([bytes(frame) for frame in encode(head, buffers)], 0)
    assert [here.it.inbox.take(), here.it.inbox.take(), here.it.inbox.take()] == [
        (3, (b"a", b"x")),
        (5, (b"", b"y")),
        None,
    ]
    assert here.it.inbox.handed == 5


def test_a_batch_is_the_rest_of_an_answer_and_its_last_id_acknowledges_all_of_it() -> None:
    here = Subscribed()
    here.receive_rows(0, 0, 2, 3, after=5)
    here.receive_rows(5, 6, after=9)
    inbox = here.it.inbox
    assert inbox.take() == (0, (b"a", b"0"))
    batch = inbox.take_batch()
    assert batch is not None
    assert batch.to_pydict() == {
        "id": [2, 3],
        "topic": [b"a", b"a"],
        "value": [b"2", b"3"],
        "frames": [None, None],
    }
    assert (inbox.handed, inbox.answers, inbox.done) == (3, 1, 0)
    inbox.ack(3)
    assert inbox.done == 4, "the ids of other topics are passed when the next messages are asked for"
    batch = inbox.take_batch()
    assert batch is not None
    assert batch.column("id").to_pylist() == [6]
    assert (inbox.handed, inbox.answers, inbox.done) == (6, 0, 5)
    inbox.ack(6)
    assert inbox.take_batch() is None
    assert inbox.done == 9


def test_answers_without_rows_are_passed_over_by_batches() -> None:
    here = Subscribed()
    here.receive(Lost(session=1, first=0, next=4, end=100, done=0))
    here.receive(Batch(session=1, first=4, next=8, end=100, done=0))
    assert here.it.inbox.take_batch() is None
    assert (here.it.lost, here.it.inbox.answers) == (4, 0)
    here.receive_rows(8, 9)
    batch = here.it.inbox.take_batch()
    assert batch is not None
    assert batch.column("id").to_pylist() == [9]


@pytest.mark.parametrize(
    "frames",
    [[b"HOLA"], [b"ZDS\2B", b'{"session":1,"first":0,"next":1,"end":1,"rows":1,"columns":["value"]}']],
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
    assert [here.it.inbox.take(), here.it.inbox.take()] == [(0, (b"a", b"0")), (1, (b"a", b"1"))]
    assert here.pass_time(0.5) == []
    assert here.it.inbox.take() == (2, (b"a", b"2")), "the last message of the first answer"
    assert here.pass_time(0.5) == [(61.0, fetch(4))]
    here.receive_rows(4, 4)
    assert here.take_ids() == [3, 4]


def test_an_answer_without_messages_moves_it_on() -> None:
    here = Subscribed()
    here.receive(empty(0))
    assert here.sent() == [fetch(0)]
    here.receive(empty(0, after=50))
    assert here.sent() == [fetch(50)]
    assert here.take_ids() == []
    here.receive_rows(50, 60, after=70)
    assert here.take_ids() == [60]


def test_a_second_answer_is_ignored() -> None:
    """The request was repeated."""
    here = Subscribed()
    here.receive_rows(0, 0, 1)
    here.sent()
    here.receive_rows(0, 0, 1, 2)
    here.receive(Lost(session=1, first=0, next=9, end=100, done=0), empty(0, after=9))
    assert (here.take_ids(), here.it.lost, here.sent()) == ([0, 1], 0, [])
    assert here.pass_time(3.5) == [(3.5, fetch(2))]


def test_an_answer_beyond_what_was_asked_for_is_ignored() -> None:
    """Otherwise the ids in between would never come."""
    here = Subscribed()
    here.receive_rows(5, 5, 6)
    here.receive(empty(5, after=9), lost(5, 9))
    assert (here.take_ids(), here.it.lost, here.sent()) == ([], 0, [])
    here.receive_rows(0, 0)
    assert here.take_ids() == [0]


def test_an_answer_of_a_session_before_is_ignored() -> None:
    here = Subscribed()
    here.it.seek(Start(50), 0)
    here.receive_rows(0, 0, 1)
    here.receive(Opened(session=2, next=50, end=100, new=False))
    here.receive(empty(50, after=60, done=60))
    assert here.it.confirmed == 50
    assert here.sent()[-1] == fetch(50, done=50, session=2)


# Silence.


def test_after_silence_it_asks_again_and_then_by_a_new_connection() -> None:
    here = Subscribed()
    assert here.pass_time(6) == [(3.5, fetch(0))]
    assert not here.it.redial
    assert here.pass_time(0.5) == [(6.5, fetch(0))]
    assert here.it.redial
    here.it.redial = False
    assert here.pass_time(6.5) == [(10.0, fetch(0)), (13.0, fetch(0))]
    assert here.it.redial


def test_an_open_is_repeated_too() -> None:
    here = Subscribed(opened=False)
    assert here.pass_time(6.5) == [(0.5, OPEN), (3.5, OPEN), (6.5, OPEN)]
    assert here.it.redial


def test_an_answer_ends_a_silence() -> None:
    here = Subscribed()
    for _ in range(10):
        assert here.pass_time(3) == []
        here.receive(empty(0))
        assert here.sent() == [fetch(0)]
    assert not here.it.redial


def test_any_message_ends_silence_but_only_an_answer_ends_a_request() -> None:
    here = Subscribed()
    for _ in range(4):
        here.pass_time(3)
        here.receive(Opened(session=9, next=0, end=100, new=True))
    assert not here.it.redial
    assert here.pass_time(3.5)


def test_the_bytes_of_a_large_message_are_no_silence() -> None:
    here = Subscribed(timeout=5)
    for _ in range(60):
        assert here.pass_time(1) == []
        here.it.bytes_arrived(here.now)
    assert not here.it.redial


def test_silence_begins_with_the_request() -> None:
    """A proxy without a request sends nothing, which is no reason for a new connection."""
    here = Subscribed()
    here.fill_memory()
    here.pass_time(60)
    here.take_ids()
    assert here.pass_time(6) == [(60.5, fetch(4)), (64.0, fetch(4))]
    assert not here.it.redial
    here.pass_time(1)
    assert here.it.redial


def test_a_proxy_that_is_silent_for_the_timeout_is_given_up() -> None:
    here = Subscribed(timeout=30)
    with pytest.raises(NoPeerError, match="has been silent for 30 s; subscribe again"):
        here.pass_time(31)
    assert here.now == 30.5


def test_without_a_timeout_it_waits_for_ever() -> None:
    here = Subscribed(timeout=None)
    here.pass_time(1000, step=1)


def test_silence_is_counted_only_while_the_caller_listens() -> None:
    here = Subscribed(timeout=5)
    here.now = 100.0  # the caller was busy
    here.it.restart_silence(100)
    here.pass_time(5)
    with pytest.raises(NoPeerError):
        here.pass_time(1)


def test_time_in_which_the_proxy_was_heard_is_not_excused_twice() -> None:
    """As when the caller was busy, and then waited for an acknowledgement."""
    here = Subscribed(timeout=5)
    here.now = 100.0
    here.it.restart_silence(100)
    here.it.excuse_silence(0, 100)
    with pytest.raises(NoPeerError):
        here.pass_time(6)


def test_a_proxy_that_is_not_asked_is_not_silent() -> None:
    here = Subscribed(timeout=5)
    here.fill_memory()
    here.pass_time(100)


def test_a_proxy_that_was_never_there_is_not_silent() -> None:
    """The caller bounds the wait for the first answer."""
    here = Subscribed(timeout=1, opened=False)
    here.pass_time(100, step=1)


def test_a_queue_that_takes_nothing_more_is_that_of_a_dead_connection() -> None:
    here = Subscribed()
    here.it.reconnected(0)
    assert here.it.outbox
    here.it.blocked()
    assert not here.it.outbox
    assert here.pass_time(0.5) == [(0.5, fetch(0))]
    assert here.it.redial


# Connections that are lost.


def test_a_new_connection_goes_on_where_it_was_with_what_is_done() -> None:
    here = Subscribed()
    here.receive_rows(0, *range(5))
    assert here.it.inbox.take() is not None
    here.it.inbox.ack(0)
    here.sent()
    here.it.reconnected(1)
    assert here.sent() == [fetch(5, done=1)]
    here.receive_rows(5, 5)
    assert here.take_ids() == [1, 2, 3, 4, 5], "each once"


def test_a_new_connection_while_the_name_is_opened_opens_it() -> None:
    here = Subscribed(opened=False)
    here.sent()
    here.it.reconnected(1)
    assert here.sent_with_topics() == [(OPEN, [b"a", b"b"])]


def test_a_new_connection_asks_nothing_while_there_is_no_room() -> None:
    here = Subscribed()
    here.fill_memory()
    here.it.reconnected(1)
    assert here.sent() == []
    assert here.pass_time(60) == []
    assert here.take_ids() == [0, 1, 2, 3]


def test_what_the_connection_before_did_not_take_is_not_sent_by_the_new_one() -> None:
    here = Subscribed()
    here.receive_rows(0, 0)
    here.it.reconnected(1)
    assert here.sent() == [fetch(1)]


def test_a_name_that_was_new_stays_new() -> None:
    here = Subscribed()
    here.it.seek(Start(5), 0)
    here.receive(Opened(session=2, next=5, end=100, new=False))
    assert here.it.new


# Refusals.


@pytest.mark.parametrize("code", ["taken", "gone", "moved", "ahead", "full", "forbidden", "log", "internal"])
@pytest.mark.parametrize("session", [1, None])
def test_a_refusal_is_the_end(code: str, session: int | None) -> None:
    here = Subscribed()
    here.receive(Refused(code=code, reason="so it is", session=session))
    assert str(here.it.refusal) == "subscribing as 'me' at tcp://proxy:1: so it is"
    assert here.sent() == []


def test_a_refusal_of_a_session_before_is_none() -> None:
    here = Subscribed()
    here.it.seek(Start(5), 0)
    here.receive(Refused(code="taken", reason="late", session=1))
    assert here.it.refusal is None
    here.receive(Opened(session=2, next=5, end=100, new=False))
    assert here.it.is_open


def test_nothing_is_asked_after_a_refusal() -> None:
    here = Subscribed()
    here.receive(Refused(code="taken", reason="so it is", session=1))
    here.receive_rows(0, 0)
    assert here.sent() == []


def test_text_from_a_proxy_has_no_control_characters() -> None:
    here = Subscribed()
    here.receive(Refused(code="taken", reason="\x1b]0;owned\x07" + "x" * 1_000_000))
    assert str(here.it.refusal).isprintable()
    assert len(str(here.it.refusal)) < 3000


# Acknowledging.


def test_the_next_request_carries_done() -> None:
    here = Subscribed()
    here.receive_rows(0, 0, 1, 2)
    assert [here.it.inbox.take(), here.it.inbox.take()] != [None, None]
    here.it.inbox.ack(0)
    here.sent()
    here.receive_rows(3, 3)
    here.receive_rows(4, 4)
    assert (here.it.inbox.done, here.it.confirmed) == (1, 0)
    assert here.pass_time(1) == [(1.0, fetch(5, done=1, max_bytes=0, wait=0))]


def test_a_position_that_has_moved_is_sent_once_a_second() -> None:
    here = Subscribed()
    here.receive_rows(0, 0, 1, 2, 3)
    here.receive_rows(4, 4)
    here.sent()
    assert here.it.inbox.take() is not None
    here.it.inbox.ack(0)
    assert here.pass_time(0.5) == []
    told = fetch(5, done=1, max_bytes=0, wait=0)
    assert here.pass_time(0.5) == [(1.0, told)]
    here.receive(empty(5, done=1))
    assert here.it.confirmed == 1
    assert here.pass_time(10) == [], "it does not move"
    assert here.it.inbox.take() is not None
    here.it.inbox.ack(1)
    assert here.pass_time(0.5) == [(11.5, fetch(5, done=2, max_bytes=0, wait=0))]


def test_a_position_is_confirmed_when_the_proxy_says_so() -> None:
    here = Subscribed()
    here.receive_rows(0, 0, 1, done=0)
    here.take_ids()
    here.it.inbox.ack(1)
    assert here.it.has_unconfirmed
    here.receive(empty(2, done=1))
    assert here.it.has_unconfirmed
    here.receive(empty(0, done=2))  # it comes late
    assert not here.it.has_unconfirmed
    here.receive(Lost(session=1, first=2, next=9, end=100, done=1))
    assert here.it.confirmed == 2, "it never goes back"


def test_a_caller_that_waits_for_the_disk_asks_for_it_at_once() -> None:
    here = Subscribed()
    here.receive_rows(0, 0, 1)
    here.take_ids()
    here.it.inbox.ack(1)
    here.sent()
    here.it.confirm(True, here.now)
    assert here.sent() == [fetch(2, done=2, wait=0, confirm=True)]
    here.receive(empty(2, done=1))  # the answer to the FETCH before
    assert here.sent() == [fetch(2, done=2, wait=0, confirm=True)]
    here.receive(empty(2, done=2))
    assert here.it.confirmed == 2
    here.it.confirm(False, here.now)
    here.sent()
    here.receive(empty(2, done=2))
    assert here.sent() == [fetch(2, done=2)]


def test_a_confirmation_is_asked_for_again_behind_messages_that_have_come() -> None:
    here = Subscribed()
    here.fill_memory()
    assert here.it.inbox.take() is not None
    here.it.inbox.ack(0)
    here.it.confirm(True, here.now)
    asked = fetch(4, done=1, max_bytes=0, wait=0, confirm=True)
    assert here.sent() == [asked], "there is no room for messages"
    assert here.pass_time(3.5) == [(3.5, asked)]
    here.it.reconnected(here.now)
    assert here.sent() == [asked]


def test_without_room_an_answer_that_confirms_too_little_is_followed_by_the_same_request() -> None:
    here = Subscribed()
    here.fill_memory()
    here.it.inbox.take()
    here.it.inbox.ack(0)
    here.it.confirm(True, here.now)
    asked = fetch(4, done=1, max_bytes=0, wait=0, confirm=True)
    assert here.sent() == [asked]
    here.receive(empty(4, done=0))  # the answer to the FETCH before
    assert here.sent() == [asked]
    here.receive(empty(4, done=1))
    assert here.sent() == [], "it is confirmed"
    assert here.pass_time(10) == []


def test_nothing_is_confirmed_before_the_name_is_there() -> None:
    here = Subscribed(opened=False)
    here.sent()
    here.it.confirm(True, here.now)
    assert here.sent() == []
    assert not here.it.has_unconfirmed


def test_ids_of_other_topics_are_acknowledged_after_all_messages_before_them() -> None:
    here = Subscribed()
    here.receive_rows(0, 3, after=10)
    assert here.it.inbox.take() is not None
    assert here.it.inbox.take() is None
    assert here.it.inbox.done == 0, "message 3 may be worked on"
    here.it.inbox.ack(3)
    assert here.it.inbox.done == 4
    assert here.it.inbox.take() is None
    assert here.it.inbox.done == 10


def test_ids_of_other_topics_wait_for_a_message_before_them() -> None:
    here = Subscribed()
    here.receive_rows(0, 3, after=10)
    here.receive_rows(10, 12, after=20)
    assert here.it.inbox.take() is not None
    here.it.inbox.ack(3)
    assert here.it.inbox.take() == (12, (b"a", b"12"))
    assert here.it.inbox.done <= 10
    here.it.inbox.take()
    assert here.it.inbox.done <= 10
    here.it.inbox.ack(12)
    here.it.inbox.take()
    assert here.it.inbox.done == 20


def test_the_position_of_a_subscriber_to_a_rare_topic_moves() -> None:
    """Otherwise the log would keep everything for it."""
    here = Subscribed()
    here.receive(empty(0, after=50))
    assert here.take_ids() == []
    assert here.take_ids() == []
    assert here.it.inbox.done == 50
    assert here.sent() == [fetch(50)]
    here.receive(empty(50))
    assert here.sent() == [fetch(50, done=50)]


def test_done_is_never_beyond_what_has_come() -> None:
    here = Subscribed()
    here.receive_rows(0, 0)
    here.take_ids()
    here.sent()
    here.it.inbox.ack(7)
    here.it.reconnected(0)
    assert here.sent() == [fetch(1, done=1)], "the proxy would refuse a larger done"


# Losses.


def lost(first: int, after: int) -> Lost:
    return Lost(session=1, first=first, next=after, end=1000, done=0)


def test_what_was_lost_is_counted_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    here = Subscribed(at=3)
    here.receive(lost(3, 10), lost(3, 10), lost(3, 12))
    assert here.it.lost == 7
    assert "'me': the proxy deleted the ids 3 to 9 before they came here" in caplog.text
    assert here.sent() == [fetch(10, done=3)]
    here.receive_rows(10, 10)
    here.take_ids()
    here.receive(lost(11, 12))
    assert here.it.lost == 8


def test_lost_ids_are_acknowledged_after_all_messages_before_them() -> None:
    """Otherwise a proxy with whenFull=wait would wait for a subscriber to a rare topic for ever."""
    here = Subscribed()
    here.receive(lost(0, 100))
    assert here.it.inbox.done == 0, "the caller has not asked for the next message"
    here.take_ids()
    here.take_ids()
    assert here.it.inbox.done == 100
    here.receive_rows(100, 100, 101)
    here.take_ids()
    here.receive(lost(102, 150))
    here.take_ids()
    here.it.inbox.ack(100)
    here.take_ids()
    assert here.it.inbox.done == 101
    here.it.inbox.ack(101)
    here.take_ids()
    assert here.it.inbox.done == 150


def test_repeated_losses_do_not_fill_the_log_output(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = Subscribed()
    for number in range(1000):
        here.receive(lost(number, number + 1))
        here.take_ids()
    assert here.it.lost == 1000
    assert 0 < len([r for r in caplog.records if "the proxy deleted" in r.getMessage()]) < 10


# Seeking.


def test_a_subscription_can_be_ended_while_the_proxy_has_not_answered_that_it_has_moved() -> None:
    here = Subscribed()
    here.it.seek(Start("latest"), here.now)
    here.sent()
    here.it.forget(here.now)
    assert here.sent() == [Forget(name="me", session=2)]
    here.receive(Opened(session=2, next=100, end=100, new=False))  # an answer to an earlier session
    here.receive(Forgotten(session=2))
    assert here.it.forgotten


def test_a_seek_drops_messages_that_have_come() -> None:
    here = Subscribed()
    here.receive_rows(0, 0, 1, 2)
    here.it.inbox.take()
    here.it.inbox.ack(0)
    here.receive(lost(3, 40))
    here.sent()
    here.it.seek(Start("latest"), here.now)
    assert not here.it.is_open
    assert not here.it.has_unconfirmed, "it has no position until the proxy answers"
    assert here.take_ids() == []
    assert here.sent_with_topics() == [
        (Open(name="me", session=2, start="latest", seek=True), [b"a", b"b"]),
    ]
    here.session = 2
    here.receive_rows(40, 40)
    here.receive(Opened(session=1, next=0, end=100, new=False))
    assert not here.it.is_open
    here.receive(Opened(session=2, next=20, end=100, new=False))
    assert here.sent() == [fetch(20, done=20, session=2)]
    assert (here.it.inbox.handed, here.it.inbox.done, here.it.confirmed) == (None, 20, 20)
    here.receive_rows(20, 20)
    assert here.take_ids() == [20]
    assert here.it.inbox.done == 20
    here.receive(Lost(session=2, first=21, next=30, end=100, done=20))
    assert here.it.lost == 37 + 9, "a second loss of the same ids counts too"


def test_a_seek_is_repeated_after_silence() -> None:
    here = Subscribed()
    here.it.seek(Start(since=7), here.now)
    asked = Open(name="me", session=2, since=7, seek=True)
    assert here.pass_time(3.5) == [(0.5, asked), (3.5, asked)]
    here.it.reconnected(here.now)
    assert here.sent() == [asked]


def test_the_answer_to_an_open_that_was_repeated_changes_nothing() -> None:
    here = Subscribed()
    here.receive_rows(0, 0, 1)
    here.sent()
    here.receive(Opened(session=1, next=0, end=100, new=False))
    assert here.take_ids() == [0, 1]
    here.receive_rows(2, 2)
    assert here.take_ids() == [2]


# The end of a subscription.


def test_a_subscription_is_ended_and_nothing_is_asked_after_that() -> None:
    here = Subscribed()
    here.it.forget(here.now)
    asked = Forget(name="me", session=1)
    assert here.sent() == [asked]
    assert here.pass_time(3.5) == [(3.5, asked)]
    assert not here.it.forgotten
    here.receive(Forgotten(session=2))
    assert not here.it.forgotten
    here.receive(Forgotten(session=1))
    assert here.it.forgotten
    assert here.it.refusal is None
    assert here.sent() == []
    assert here.pass_time(10) == []


def test_messages_do_not_answer_a_forget() -> None:
    """The FORGET is lost with its connection, and the answer to the FETCH before it arrives."""
    here = Subscribed()
    here.it.forget(here.now)
    here.sent()
    here.receive_rows(0, 0)
    here.receive(empty(1))
    assert here.sent() == []
    here.it.reconnected(here.now)
    assert here.sent() == [Forget(name="me", session=1)]


def test_a_forgotten_subscription_may_be_gone_already() -> None:
    """The answer to FORGET was lost."""
    here = Subscribed()
    here.it.forget(here.now)
    here.receive(Refused(code="gone", reason="the proxy does not know it", session=1))
    assert here.it.refusal is None
    assert here.it.forgotten
