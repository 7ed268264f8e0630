"""What a proxy owes one durable subscriber: without a socket or a file."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest

from zmq_datasource.errors import ProtocolError
from zmq_datasource.log.storage import LogStorage
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

    def __init__(self, count: int, size: int = 10, position: int = 0) -> None:
        self.count, self.size, self.position = count, size, position
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
        messages = raw_of([[b"ab"[number % 2 :][:1], bytes(self.size)] for number in ids])
        batch = decode_plain(messages, [(0, len(ids))])
        return batch.add_column(0, "id", pa.array(ids, pa.int64()))


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
        self, log: Log, credit: int = 1000, topics: tuple[bytes, ...] = (), taken: int | None = None
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


def test_a_loss_waits_for_the_disk_and_not_for_what_others_want_to_be_kept(tmp_path: Path) -> None:
    storage = LogStorage(str(tmp_path))
    storage.open_log()
    subscriptions = Subscriptions(storage, 10, 60.0)
    for name in ("a", "b"):
        subscriptions.add(Subscription(name, (), 0, created=0.0))
    lost = subscriptions.change(urgent=True)
    assert not subscriptions.is_kept(lost)
    assert subscriptions.save()
    subscriptions.change(urgent=True)
    assert subscriptions.is_kept(lost)


def test_what_was_told_to_be_lost_can_be_acknowledged() -> None:
    serving = Serving(Log(4))
    serving.log.earliest = 4
    assert serving.send() == [Lost(0, 4)]
    serving.it.acknowledge(3)
    assert serving.known.next == 4


@pytest.mark.parametrize(
    ("session", "name", "topics", "again"),
    [(7, "me", (), True), (8, "me", (), False), (7, "you", (), False), (7, "me", (b"a",), False)],
)
def test_who_says_the_same_again_is_known(
    session: int, name: str, topics: tuple[bytes, ...], again: bool
) -> None:
    serving = Serving(Log(10))
    assert serving.it.is_again(Subscribe(name, session, EARLIEST, 3, 5, topics)) is again
