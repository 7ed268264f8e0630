"""A durable subscriber's side of its protocol, without a socket and by a clock of the test's own."""

from __future__ import annotations

import pytest

from zmq_datasource.errors import NoPeerError, ProtocolError
from zmq_datasource.proxy.durable_protocol import (
    EARLIEST,
    Ack,
    Acked,
    Close,
    Credit,
    Forget,
    Forgotten,
    FromClient,
    FromProxy,
    Heartbeat,
    Lost,
    Message,
    Ready,
    Refused,
    Subscribe,
    read_from_client,
    write,
)
from zmq_datasource.proxy.subscriber_session import ACK_EVERY, SubscriberSession


class Subscribed:
    """A session, what it says, and the time; it has been welcomed at 0."""

    def __init__(self, timeout: float | None = 30.0, credit: int = 1000, welcomed: bool = True) -> None:
        self.now = 0.0
        self.it = SubscriberSession("me", EARLIEST, credit, (b"a",), timeout, "tcp://proxy:1")
        self.it.listen(0)
        self.it.connected(0)
        if welcomed:
            self.hear(Ready(1, 0, 100, True))
            self.said()

    def hear(self, *messages: FromProxy) -> None:
        for message in messages:
            self.it.receive(write(message), self.now)

    def said(self) -> list[FromClient]:
        """What is to be sent, as if it were sent now."""
        messages = [read_from_client(frames) for frames in self.it.outbox]
        self.it.outbox.clear()
        return messages

    def pass_time(self, seconds: float, step: float = 0.5) -> list[tuple[float, FromClient]]:
        """What is said meanwhile, and when."""
        said, end = [], self.now + seconds
        while self.now < end:
            self.now += step
            self.it.wake(self.now)
            said += [(self.now, message) for message in self.said()]
        return said

    def taken(self) -> list[int]:
        ids = []
        while (message := self.it.take()) is not None:
            ids.append(message.id)
        return ids


def message(number: int) -> Message:
    return Message(number, (b"a", b"x"))


def subscribe(session: int, resume: int | None = None, credit: int = 1000) -> Subscribe:
    return Subscribe("me", session, EARLIEST, resume, credit, (b"a",))


# Beginning.


def test_it_begins_by_saying_who_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    here = Subscribed(welcomed=False)
    assert here.said() == [subscribe(1)]
    assert not here.it.ready
    assert not here.it.forgotten
    here.hear(message(3))
    assert here.taken() == [], "nothing was promised yet"
    here.hear(Ready(2, 0, 100, True))
    assert not here.it.ready, "that answers somebody else"
    here.hear(Ready(1, 0, 100, True))
    assert here.it.ready
    assert here.it.new
    assert "subscribed as 'me' at tcp://proxy:1, from id 0 on" in caplog.text
    here.hear(message(0), message(1))
    assert here.taken() == [0, 1]


def test_what_is_no_message_of_the_protocol_is_an_error() -> None:
    with pytest.raises(ProtocolError):
        Subscribed().it.receive([b"HOLA"], 1)


# Silence.


def test_silence_is_answered_by_the_same_subscribe_then_by_a_new_connection() -> None:
    here = Subscribed()
    assert here.pass_time(6) == [(3.5, subscribe(1, resume=0))]
    assert not here.it.redial
    assert here.pass_time(0.5) == [(6.5, subscribe(2, resume=0))]
    assert here.it.redial
    here.it.redial = False
    assert here.pass_time(6.5) == [(10.0, subscribe(2, resume=0)), (13.0, subscribe(3, resume=0))]
    assert here.it.redial


def test_a_repeated_subscribe_restarts_nothing() -> None:
    here = Subscribed()
    here.hear(message(0))
    assert [said for _, said in here.pass_time(4)] == [subscribe(1, resume=1, credit=999)]
    here.hear(message(1))
    assert here.it.ready
    here.hear(Ready(1, 0, 100, False), message(2))
    assert here.taken() == [0, 1, 2]


def test_a_heartbeat_ends_a_silence() -> None:
    here = Subscribed()
    for _ in range(10):
        assert here.pass_time(3) == []
        here.hear(Heartbeat(100))


def test_an_answer_that_does_not_come_is_asked_for_though_there_are_heartbeats() -> None:
    here = Subscribed(welcomed=False)
    here.said()
    for asked in (3.5, 7.0):
        here.hear(Heartbeat(100), message(5))
        assert here.pass_time(3.0) == []
        here.hear(Heartbeat(100))
        assert here.pass_time(0.5) == [(asked, subscribe(1))]
    here.hear(Ready(1, 0, 100, False), message(0))
    for _ in range(3):
        here.hear(Heartbeat(100))
        assert here.pass_time(3) == []
    assert here.taken() == [0]


def test_bytes_of_a_large_message_are_no_silence() -> None:
    here = Subscribed(timeout=5)
    for _ in range(60):
        assert here.pass_time(1) == []
        here.it.alive(here.now)
    assert not here.it.redial


def test_a_proxy_that_is_silent_for_the_timeout_is_given_up() -> None:
    here = Subscribed(timeout=30)
    with pytest.raises(NoPeerError, match="has been silent for 30 s; come again"):
        here.pass_time(31)
    assert here.now == 30.5


def test_without_a_timeout_it_waits_for_ever() -> None:
    here = Subscribed(timeout=None)
    here.pass_time(1000, step=1)


def test_only_while_the_caller_listens_is_silence_counted() -> None:
    here = Subscribed(timeout=5)
    here.now = 100.0  # the caller was busy
    here.it.listen(100)
    here.pass_time(5)
    with pytest.raises(NoPeerError):
        here.pass_time(1)


def test_a_proxy_that_was_never_there_is_not_silent() -> None:
    """How long to wait for the first answer its caller decides."""
    here = Subscribed(timeout=1, welcomed=False)
    here.pass_time(100, step=1)


def test_a_queue_that_takes_nothing_more_is_that_of_a_dead_connection() -> None:
    here = Subscribed()
    here.it.ack(5)
    here.it.blocked()
    assert here.pass_time(0.5) == [(0.5, subscribe(2, resume=0))]
    assert here.it.redial


# Connections that are lost.


def test_a_new_connection_goes_on_where_it_was_with_what_it_has_acknowledged() -> None:
    here = Subscribed()
    here.hear(*map(message, range(5)))
    assert here.it.take() is not None
    here.it.ack(0)
    here.it.connected(1)
    assert here.said() == [subscribe(2, resume=5, credit=996)]
    here.hear(message(2))  # late, of the old connection
    here.hear(Ready(1, 0, 100, False), message(3))
    assert here.said() == []
    here.hear(Ready(2, 5, 100, False), message(5))
    assert here.said() == [Ack(0)]
    assert here.taken() == [1, 2, 3, 4, 5], "each once"


def test_who_was_new_stays_new() -> None:
    here = Subscribed()
    here.it.connected(1)
    here.hear(Ready(2, 5, 100, False))
    assert here.it.new


def test_a_proxy_that_has_forgotten_the_subscription_ends_it() -> None:
    """Its log may be another one, in which what was received and acknowledged are other messages."""
    here = Subscribed()
    here.hear(*map(message, range(5)))
    here.taken()
    here.it.ack(4)
    here.it.connected(1)
    assert [said for _, said in here.pass_time(1)] == [subscribe(2, resume=5)]
    here.it.ack(4)
    here.it.send_acks()
    assert acks(here) == []
    here.hear(Refused("gone", "the proxy does not know it"))
    assert str(here.it.refusal) == "subscribing as 'me' at tcp://proxy:1: the proxy does not know it"


def test_who_ends_its_subscription_may_find_it_ended() -> None:
    """Where the answer to FORGET was lost."""
    here = Subscribed()
    here.it.insist(Forget(), said=0)
    here.hear(Refused("unknown", "who is that?"))
    here.hear(Refused("gone", "the proxy does not know it"))
    assert here.it.refusal is None
    assert here.it.forgotten


def test_an_acknowledgement_waits_for_the_answer_to_a_repeated_subscribe() -> None:
    """It may have gone out by a connection that is new, to another proxy."""
    here = Subscribed()
    here.hear(message(0))
    here.taken()
    here.said()
    here.pass_time(3.5)
    here.it.ack(0)
    assert acks(here) == []
    here.hear(Ready(1, 0, 100, False))
    assert here.said() == [Ack(0)]


def test_a_proxy_that_was_restarted_is_told_once() -> None:
    here = Subscribed()
    here.hear(Refused("unknown", "who is that?"), Refused("unknown", "who is that?"))
    assert here.said() == [subscribe(2, resume=0)]
    assert here.it.refusal is None
    assert here.pass_time(3.5) == [(3.5, subscribe(2, resume=0))]


def test_no_text_of_a_proxy_steers_the_terminal_of_its_client() -> None:
    here = Subscribed()
    here.hear(Refused("taken", "\x1b]0;owned\x07" + "x" * 1_000_000))
    assert str(here.it.refusal).isprintable()
    assert len(str(here.it.refusal)) < 3000


def test_a_proxy_that_loses_again_and_again_does_not_fill_the_log_output(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = Subscribed()
    for number in range(1000):
        here.hear(Lost(2 * number, 2 * number + 1))
    assert here.it.lost == 1000
    assert 0 < len([r for r in caplog.records if "were deleted" in r.getMessage()]) < 10


def test_any_other_refusal_is_the_end() -> None:
    here = Subscribed()
    here.hear(Refused("taken", "another client is 'me'"))
    assert str(here.it.refusal) == "subscribing as 'me' at tcp://proxy:1: another client is 'me'"


# Credit.


def test_credit_is_given_back_by_halves() -> None:
    here = Subscribed(credit=10)
    here.hear(*map(message, range(10)))
    said = []
    for _ in range(10):
        here.it.take()
        said.append(here.said())
    assert said == [[], [], [], [], [Credit(5)]] * 2


@pytest.mark.parametrize("credit", [1, 2, 3])
def test_a_small_credit_is_given_back_message_by_message(credit: int) -> None:
    here = Subscribed(credit=credit)
    here.hear(message(0))
    here.taken()
    assert here.said() == [Credit(1)]


def test_what_is_owed_is_given_when_there_is_nothing_else_to_do() -> None:
    here = Subscribed(credit=10)
    here.hear(*map(message, range(3)))
    here.taken()
    assert here.pass_time(0.5) == [(0.5, Credit(3))]
    assert here.pass_time(0.5) == []


def test_a_new_connection_begins_with_its_whole_credit() -> None:
    here = Subscribed(credit=10)
    here.hear(*map(message, range(3)))
    here.taken()
    here.it.connected(1)
    here.said()
    here.hear(Ready(2, 3, 100, False))
    assert here.pass_time(0.5) == []


def test_what_waits_to_be_taken_counts_against_the_credit_of_a_new_connection() -> None:
    here = Subscribed(credit=10)
    here.hear(*map(message, range(4)))
    here.it.connected(1)
    (again,) = here.said()
    assert isinstance(again, Subscribe)
    assert again.credit == 6
    here.hear(Ready(2, 4, 100, False))
    here.taken()
    assert here.pass_time(0.5) == [(0.5, Credit(4))]


def test_who_has_not_taken_anything_yet_gets_no_credit_for_it() -> None:
    here = Subscribed(credit=2)
    here.hear(message(0), message(1))
    assert here.pass_time(3.5) == [(3.5, subscribe(1, resume=2, credit=0))]


def test_what_was_taken_since_a_connection_was_made_is_still_owed() -> None:
    here = Subscribed(credit=10)
    here.hear(*map(message, range(4)))
    here.it.connected(0)
    assert here.said() == [subscribe(2, resume=4, credit=6)]
    for _ in range(3):
        here.it.take()
    assert here.pass_time(3.5) == [(3.5, subscribe(2, resume=4, credit=6))]
    here.hear(Ready(2, 4, 100, False))
    assert here.pass_time(0.5) == [(4.0, Credit(3))]


# Acknowledgements.


def test_acknowledgements_are_sent_together() -> None:
    here = Subscribed()
    for number in range(ACK_EVERY):
        here.it.ack(number)
    assert here.said() == [Ack(ACK_EVERY - 1)]
    here.it.ack(ACK_EVERY)
    assert here.pass_time(0.5) == [(0.5, Ack(ACK_EVERY))]


def test_an_acknowledgement_holds_when_the_proxy_says_so() -> None:
    here = Subscribed()
    here.it.ack(7)
    assert here.it.unconfirmed
    here.hear(Acked(7))
    assert here.it.unconfirmed, "7 itself may come again"
    here.hear(Acked(8), Acked(3))
    assert not here.it.unconfirmed


def test_what_is_insisted_on_is_said_every_second_to_a_proxy_that_is_there() -> None:
    here = Subscribed(welcomed=False)
    here.it.insist(Forget())
    here.said()
    assert here.pass_time(2) == []
    here.hear(Ready(1, 0, 100, True))
    assert here.pass_time(2) == [(2.5, Forget()), (3.5, Forget())]
    here.hear(Forgotten())
    assert here.it.forgotten
    here.it.insist(None)
    assert here.pass_time(2) == []


def test_what_was_said_already_is_repeated_a_second_later() -> None:
    here = Subscribed()
    here.it.insist(Ack(3), said=0)
    assert here.pass_time(1) == [(1.0, Ack(3))]


def test_what_was_lost_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    here = Subscribed()
    here.hear(Lost(3, 10), Lost(20, 21))
    assert here.it.lost == 8
    assert "the ids 3 to 9 were deleted before they came here" in caplog.text


def acks(me: Subscribed) -> list[int]:
    return [said.id for _, said in me.pass_time(1) if isinstance(said, Ack)]


def test_what_was_lost_is_counted_once_and_done_with() -> None:
    """Or a proxy that waits for its subscribers would wait for ever for one whose next message is rare."""
    me = Subscribed()
    me.hear(Lost(0, 100))
    assert (me.it.lost, me.pass_time(0.5)) == (100, [])  # what follows may come at once
    assert acks(me) == [99]
    me.it.connected(me.now)
    me.hear(Lost(0, 100))  # of the connection before
    me.hear(Ready(2, 0, 100, False), Lost(0, 100))
    assert me.it.lost == 100
    me.hear(message(100), message(101), Lost(102, 150), message(150))
    assert me.it.lost == 148
    me.said()
    assert me.taken() == [100, 101, 150]
    me.it.ack(100)
    assert acks(me) == [100]
    me.it.ack(101)
    assert acks(me) == [101]  # 150 was taken, and may be worked on
    me.hear(Lost(151, 160))
    assert acks(me) == []
    me.it.ack(150)
    assert acks(me) == [159]


def test_a_loss_of_one_message_is_done_with_after_a_second() -> None:
    me = Subscribed()
    me.now = 50.0
    me.it.alive(me.now)
    me.hear(Lost(0, 1))
    assert me.pass_time(0.5) == []
    assert me.pass_time(0.5) == [(51.0, Ack(0))]


def test_it_says_what_it_is_told_to() -> None:
    here = Subscribed()
    here.it.say(Close())
    assert here.said() == [Close()]
