"""What a proxy owes one durable subscriber: without a socket or a file."""

from __future__ import annotations

import time
from typing import cast

import pyarrow as pa
import pytest

from zmq_datasource.errors import ProtocolError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.messages.framing import decode_plain
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.proxy.durable_protocol import EARLIEST, Lost, Message, Subscribe
from zmq_datasource.proxy.durable_session import LEAST, DurableSession
from zmq_datasource.proxy.subscriptions import Subscription, Subscriptions
from zmq_datasource.proxy.view import Cursor
from zmq_datasource.proxy.wire import Wire
from zmq_datasource.transport.kernel import AckedBytes

SHARE = 1 << 20


class Log:
    """A cursor in a log of ``count`` messages of ``size`` bytes each, with the topics a and b in turn."""

    def __init__(
        self, count: int, size: int = 10, position: int = 0, messages: list[list[bytes]] | None = None
    ) -> None:
        self.count, self.size, self.position = count, size, position
        self.messages = messages
        self.earliest = 0

    @property
    def at_end(self) -> bool:
        return self.position >= self.count

    def skip_lost(self) -> tuple[int, int] | None:
        if self.position >= self.earliest:
            return None
        lost, self.position = (self.position, self.earliest), self.earliest
        return lost

    def read(self, rows: int, most_bytes: int) -> pa.RecordBatch | None:
        ids = range(
            self.position, min(self.count, self.position + min(rows, max(1, most_bytes // self.size)))
        )
        if not ids:
            return None
        self.position = ids.stop
        messages = raw_of([self._message(number) for number in ids])
        batch = decode_plain(messages, [(0, len(ids))])
        return batch.add_column(0, "id", pa.array(ids, pa.int64()))

    def _message(self, number: int) -> list[bytes]:
        return [b"ab"[number % 2 :][:1], bytes(self.size)] if self.messages is None else self.messages[number]


class Changes:
    """Notes how urgently positions are to be kept."""

    def __init__(self) -> None:
        self.urgent: list[bool] = []

    def change(self, urgent: bool) -> int:
        self.urgent.append(urgent)
        return len(self.urgent)


class Connection:
    """What the system says that the other end has taken; None if it does not."""

    def __init__(self, taken: int | None = 0) -> None:
        self.taken = taken

    def bytes(self) -> int | None:
        return self.taken


class Serving:
    """A session, and what was sent."""

    def __init__(
        self,
        log: Log,
        credit: int = 1000,
        topics: tuple[bytes, ...] = (),
        taken: int | None = None,
        losses: LimitedLog | None = None,
    ) -> None:
        self.log, self.changes, self.connection = log, Changes(), Connection(taken)
        self.known = Subscription("me", topics, log.position, created=0.0)
        self.it = DurableSession(
            b"peer",
            Subscribe("me", 7, EARLIEST, None, credit, topics),
            self.known,
            cast(Subscriptions, self.changes),
            cast(Cursor, log),
            Wire(cast(AckedBytes, self.connection)),
            losses or LimitedLog("zmq_datasource.test", "losses"),
        )

    def send(self, most: int = 1000, share: int = SHARE) -> list[int | Lost]:
        """As much as it may have: ids, and what it is told to be lost."""
        sent: list[int | Lost] = []
        while len(sent) < most and self.it.may_have(share):
            message = self.it.next(share)
            if message is None:
                break
            if isinstance(message, Message):
                self.it.wire.write([b"MESSAGE", bytes(8), *message.frames])
            self.it.sent()
            sent.append(message.id if isinstance(message, Message) else message)
        return sent


def test_it_gets_as_much_as_its_credit() -> None:
    serving = Serving(Log(20), credit=3)
    assert serving.send() == [0, 1, 2]
    assert serving.send() == []
    serving.it.give_credit(2)
    assert serving.send() == [3, 4]
    assert serving.it.on_way == 3, "credit says that two have arrived"


def test_credit_gives_room_wherever_in_the_log_it_is() -> None:
    serving = Serving(Log(20, position=10), credit=3)
    assert serving.send() == [10, 11, 12]
    serving.it.give_credit(2)
    assert serving.it.on_way == 1


def test_a_subscriber_that_loses_again_and_again_does_not_fill_the_log_output(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It subscribes, hears of its loss, and subscribes again."""
    losses = LimitedLog("zmq_datasource.test", "losses")
    for _ in range(1000):
        log = Log(10)
        log.earliest = 5
        assert Serving(log, losses=losses).send(most=1) == [Lost(0, 5)]
    assert 0 < len(caplog.records) < 10


def test_its_share_of_the_memory_bounds_it_too_but_for_one_message() -> None:
    serving = Serving(Log(20, size=1000))
    assert serving.send(share=2500) == [0, 1, 2]
    assert serving.it.held >= 3000
    assert serving.send(share=2500) == []
    serving.it.acknowledge(1)
    assert serving.send(share=2500) == [3, 4]
    huge = Serving(Log(3, size=10_000))
    assert huge.send(share=1) == [0]


def test_what_is_read_ahead_is_memory_too() -> None:
    serving = Serving(Log(1000, size=1000))
    serving.send(most=1, share=10_000)
    assert serving.it.held <= 11_000


def test_what_is_read_ahead_while_something_is_on_the_way_is_bounded_by_both() -> None:
    serving = Serving(Log(1000, size=1000))
    assert serving.send(share=3_000) == [0, 1, 2]
    assert serving.it.next(10_000) is not None
    assert 8_000 < serving.it.held <= 10_000


def test_of_what_has_arrived_nothing_is_held() -> None:
    serving = Serving(Log(6, size=999))
    assert serving.it.held == 0
    serving.send(most=4, share=4000)
    assert serving.it.held == 4 * 1000
    serving.it.acknowledge(1)
    assert serving.it.held == 2 * 1000
    serving.send(share=4000)
    serving.it.acknowledge(5)
    assert serving.it.held == 0


def test_a_share_that_is_taken_is_taken() -> None:
    serving = Serving(Log(20, size=999))
    assert serving.send(share=2000) == [0, 1]


def test_what_its_system_has_not_taken_counts_whatever_its_credit_says() -> None:
    serving = Serving(Log(1000, size=1000), credit=1000, taken=0)
    share = 2 * LEAST
    sent = len(serving.send(share=share))
    assert share // 1000 - 10 < sent <= share // 1000
    serving.it.give_credit(1000)
    assert serving.send(share=share) == []
    serving.connection.taken = share
    assert serving.send(share=share), "it has begun to take"


def test_where_the_system_does_not_tell_its_credit_is_believed() -> None:
    serving = Serving(Log(1000, size=1000), taken=None)
    sent = len(serving.send(share=100_000))
    serving.it.give_credit(sent)
    assert serving.send(share=100_000)


def test_its_position_moves_by_what_it_acknowledges() -> None:
    serving = Serving(Log(20))
    serving.send(most=5)
    serving.it.acknowledge(3)
    assert (serving.known.next, serving.it.on_way, serving.it.wants_acked) == (4, 1, True)
    assert serving.changes.urgent == [True]
    serving.it.acknowledge(1)
    assert serving.known.next == 4, "it never goes back"


def test_what_it_was_sent_and_when_it_acknowledged_is_noted() -> None:
    serving = Serving(Log(20))
    serving.send(most=5)
    assert (serving.known.sent, serving.known.acknowledged) == (5, None)
    before = time.time()
    serving.it.acknowledge(3)
    assert serving.known.acknowledged is not None
    assert before <= serving.known.acknowledged <= time.time()


def test_it_may_say_again_what_it_has_acknowledged_before() -> None:
    serving = Serving(Log(20, position=5))
    serving.it.acknowledge(4)
    with pytest.raises(ProtocolError, match="ACK of id 5; 4 was the last one sent"):
        serving.it.acknowledge(5)


def test_what_was_not_sent_cannot_be_acknowledged() -> None:
    serving = Serving(Log(20))
    serving.send(most=5)
    with pytest.raises(ProtocolError, match="ACK of id 5; 4 was the last one sent"):
        serving.it.acknowledge(5)


def test_of_other_topics_nothing_comes_and_its_position_moves_past_them() -> None:
    serving = Serving(Log(10), topics=(b"a",))
    assert serving.send() == [0, 2, 4, 6, 8]
    serving.it.acknowledge(6)
    assert serving.known.next == 7, "one is on its way"
    serving.it.acknowledge(8)
    assert serving.known.next == 10


def test_nothing_of_its_topics_moves_it_without_haste() -> None:
    serving = Serving(Log(10), topics=(b"c",))
    assert serving.send() == []
    assert serving.known.next == 10
    assert serving.changes.urgent == [False]


def test_what_was_deleted_is_told_before_what_follows_and_counted_once() -> None:
    serving = Serving(Log(10))
    serving.log.earliest = 4
    assert serving.send(most=2) == [Lost(0, 4), 4]
    assert serving.known.lost == 4
    again = Serving(Log(10))
    again.log.earliest = 5
    again.it.subscription.lost, again.it.subscription.lost_to = 4, 4
    assert again.send(most=2) == [Lost(0, 5), 5]
    assert again.known.lost == 5
    assert again.known.lost_to == 5


def test_a_loss_that_was_counted_with_a_larger_one_is_told_and_not_counted() -> None:
    again = Serving(Log(10))
    again.log.earliest = 3
    again.it.subscription.lost, again.it.subscription.lost_to = 4, 4
    assert again.send(most=1) == [Lost(0, 3)]
    assert (again.known.lost, again.known.lost_to) == (4, 4)


def test_a_loss_is_kept_at_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    serving = Serving(Log(10))
    serving.changes.change(urgent=False)
    serving.log.earliest = 4
    serving.send(most=1)
    assert serving.changes.urgent == [False, True]
    assert serving.it.lost_at == 2
    assert (
        "durable subscriber 'me': the ids 0 to 3 were deleted before it had them (walMaxBytes)" in caplog.text
    )


def test_what_was_told_to_be_lost_can_be_acknowledged() -> None:
    serving = Serving(Log(4))
    serving.log.earliest = 4
    assert serving.send() == [Lost(0, 4)]
    with pytest.raises(ProtocolError, match="ACK of id 4; 3 was the last one sent"):
        serving.it.acknowledge(4)
    serving.it.acknowledge(3)
    assert serving.known.next == 4


def test_a_message_of_one_frame_comes_with_an_empty_topic() -> None:
    serving = Serving(Log(3, messages=[[b"one"], [b"t", b"two"], [b"t", b"x", b"three"]]))
    sent = [cast(Message, serving.it.next(SHARE)).frames]
    for _ in range(2):
        serving.it.sent()
        sent.append(cast(Message, serving.it.next(SHARE)).frames)
    assert sent == [(b"", b"one"), (b"t", b"two"), (b"t", b"x", b"three")]


def test_a_message_without_a_topic_has_the_empty_one() -> None:
    messages = [[b"lone"], [b"t", b"v"]]
    for topics, ids in (((b"X", b"t"), [1]), ((b"X",), []), ((b"",), [0, 1])):
        assert Serving(Log(2, messages=messages), topics=topics).send() == ids


@pytest.mark.parametrize(
    ("topics", "ids"),
    [
        ((b"a", b"b"), [1, 2, 3]),
        ((b"b", b"a"), [1, 2, 3]),
        ((b"\xff",), [4, 5]),
        ((b"\xff\xfe",), [5]),
        ((b"a", b""), [0, 1, 2, 3, 4, 5]),
        ((b"X",), []),
    ],
)
def test_it_gets_what_begins_with_any_of_its_topics(topics: tuple[bytes, ...], ids: list[int]) -> None:
    names = [b"", b"a", b"b", b"ab", b"\xff", b"\xff\xfe"]
    messages = [[b"lone"], *([name, b"v"] for name in names[1:])]
    assert Serving(Log(6, messages=messages), topics=topics).send() == ids


@pytest.mark.parametrize(
    ("session", "name", "topics", "again"),
    [(7, "me", (), True), (8, "me", (), False), (7, "you", (), False), (7, "me", (b"a",), False)],
)
def test_who_says_the_same_again_is_known(
    session: int, name: str, topics: tuple[bytes, ...], again: bool
) -> None:
    serving = Serving(Log(10))
    assert serving.it.is_again(Subscribe(name, session, EARLIEST, 3, 5, topics)) is again
