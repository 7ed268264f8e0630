"""The server process: durable subscribers, and their bounds."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zmq
from click.testing import CliRunner, Result

from tests.support import Socket, free_endpoint, keep_handlers, wait_for
from tests.support.middlebox import Middlebox
from tests.support.proxies import Client, ProxyThreads, endpoints
from zmq_datasource import (
    DurableSubscriber,
    NoPeerError,
    OptionError,
    SubscriptionError,
)
from zmq_datasource.cli import main as cli
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.log.leases import Lease, LeaseFiles, SubscriberNotes
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.proxy import fetch_wire
from zmq_datasource.proxy.fetch_protocol import Fetch, Forget, Open, Opened, Refused, session_number
from zmq_datasource.proxy.fetch_wire import FetchWire, Request
from zmq_datasource.proxy.names import NAME_BOUNDS, NameBounds
from zmq_datasource.proxy.positions import Position, Positions
from zmq_datasource.proxy.view import Progress

SIDES = ("pull", "durable")
LIVE = (*SIDES, "publish")
DISCARDS = {"walMaxBytes": "1m", "whenFull": "discard"}

pytestmark = pytest.mark.spark  # there are many tests, and each one waits for sockets to connect and close


def feed(context: zmq.Context[Socket], proxy: ProxyThreads, *messages: list[bytes]) -> None:
    """Send messages, and wait until they are in the log, and the server has them."""
    push = context.socket(zmq.PUSH)
    push.connect(proxy.sides["pull"])
    end = proxy.flow.journal.next_id + len(messages)
    for message in messages:
        push.send_multipart(message)
    wait_for(lambda: proxy.server.view.end == end, "the messages in the log")
    push.close(1000)


def take(subscriber: DurableSubscriber, count: int) -> list[bytes]:
    values = []
    for _ in range(count):
        message = subscriber.receive(30)
        assert message is not None, values
        values.append(message.value)
    return values


def places(proxy: ProxyThreads) -> dict[str, int]:
    """The position of each durable subscriber in the newest status."""
    return {account["name"]: account["nextId"] for account in proxy.status.get("durable", ())}


def account(proxy: ProxyThreads, name: str) -> dict[str, Any]:
    """The figures of one durable subscriber in the newest status."""
    return next((a for a in proxy.status.get("durable", ()) if a["name"] == name), {})


def record(location: Path, name: str) -> Lease:
    """The lease of a durable subscriber on the disk."""
    found = LeaseFiles(LogStorage(str(location))).read(f"subscriber.{name}")
    assert found is not None
    return found


def notes(location: Path, name: str) -> SubscriberNotes:
    kept = record(location, name).subscriber
    assert kept is not None
    return kept


def test_a_subscriber_that_was_away_gets_missed_messages_and_then_live_ones(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, [b"a", b"0"], [b"b", b"1"])
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            assert me.new
            assert take(me, 2) == [b"0", b"1"]
        feed(context, proxy, [b"c", b"2"])
        wait_for(lambda: proxy.flow.journal.log.chunks >= 1, "sealed")
        feed(context, proxy, [b"x", b"y", b"3"])
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            assert not me.new
            missed = [me.receive(30), me.receive(30)]
            assert [(m.id, m.topic, m.value, m.frames) for m in missed if m] == [
                (2, b"c", b"2", (b"c", b"2")),
                (3, b"x", b"3", (b"x", b"y", b"3")),
            ]
            feed(context, proxy, [b"live"])
            assert take(me, 1) == [b"live"]
            assert me.receive(0.05) is None


def test_a_batch_has_the_messages_of_an_answer_in_columns_and_is_acknowledged_as_a_whole(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(
            context, proxy, [b"a", b"0"], [b"1"], [b"\xff", b"2"], [b"x", b"y", b"3"], [b"x", b"", b"", b"4"]
        )
        with DurableSubscriber(proxy.sides["durable"], "me", topics=["x"]) as me:
            batch = me.receive_batch(30)
            assert batch is not None
            assert batch.to_pylist() == [
                {"id": 3, "topic": b"x", "value": b"3", "frames": [b"x", b"y", b"3"]},
                {"id": 4, "topic": b"x", "value": b"4", "frames": [b"x", b"", b"", b"4"]},
            ]
        with pytest.raises(ZeroDivisionError), DurableSubscriber(proxy.sides["durable"], "all") as me:
            assert take(me, 1) == [b"0"]
            batch = me.receive_batch(30)  # acknowledges 0
            assert batch is not None
            assert batch.column("id").to_pylist() == [1, 2, 3, 4]
            assert batch.column("topic").to_pylist() == [b"", b"\xff", b"x", b"x"]
            assert batch.column("value").to_pylist() == [b"1", b"2", b"3", b"4"]
            raise ZeroDivisionError
        with DurableSubscriber(proxy.sides["durable"], "all") as me:
            assert take(me, 2) == [b"1", b"2"]
            batch = me.receive_batch(30)
            assert batch is not None
            assert batch.column("value").to_pylist() == [b"3", b"4"]
            assert me.receive_batch(0.05) is None
            feed(context, proxy, [b"live"])
            batch = me.receive_batch(30)
            assert batch is not None
            assert batch.to_pylist() == [{"id": 5, "topic": b"", "value": b"live", "frames": None}]
            assert batch.schema.names == ["id", "topic", "value", "frames"]
        wait_for(lambda: places(proxy) == {"me": 5, "all": 6}, "all acknowledged")


def test_only_what_was_acknowledged_does_not_come_again(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(10)))
        with DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False) as me:
            take(me, 8)
            me.ack(4, wait=True)
            with pytest.raises(OptionError, match="has not come yet"):
                me.ack(9)
        with pytest.raises(ZeroDivisionError), DurableSubscriber(proxy.sides["durable"], "me") as me:
            assert take(me, 2) == [b"5", b"6"]  # asking for the second acknowledges the first
            raise ZeroDivisionError
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            assert take(me, 4) == [b"6", b"7", b"8", b"9"]
        wait_for(lambda: places(proxy) == {"me": 10}, "all acknowledged")


def test_topics_are_prefixes_and_other_topics_are_no_backlog(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with (
        ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy,
        DurableSubscriber(proxy.sides["durable"], "me", topics=["a.", b"b"]) as me,
    ):
        feed(context, proxy, [b"a.1", b"0"], [b"c", b"1"], [b"b", b"2"], [b"a", b"3"], [b"4"])
        assert take(me, 2) == [b"0", b"2"]
        wait_for(
            lambda: me.receive(0.05) is None and places(proxy) == {"me": 5},
            "a position behind the other topics",
        )
        account = proxy.status["durable"][0]
        assert (account["backlog"], account["sent"]) == (0, 2)


def test_where_a_new_subscription_begins(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(4)))
        wait_for(lambda: proxy.server.view.end == 4, "the server to follow the log")
        for name, start, first in (("e", "earliest", b"0"), ("i", 2, b"2"), ("l", "latest", b"4")):
            with DurableSubscriber(proxy.sides["durable"], name, start=start) as me:
                if name == "l":
                    feed(context, proxy, [b"t", b"4"])
                assert take(me, 1) == [first]


def test_a_client_of_a_replaced_log_is_refused(context: zmq.Context[Socket], tmp_path: Path) -> None:
    """In the new log, the acknowledged ids are those of other messages."""
    sides = endpoints(*SIDES)
    with ProxyThreads(tmp_path / "old", sides) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(5)))
        me = DurableSubscriber(sides["durable"], "me", auto_ack=False).__enter__()
        take(me, 5)
    me.ack(4)
    with ProxyThreads(tmp_path / "new", sides) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(10, 20)))
        try:
            with pytest.raises(SubscriptionError, match="its log was replaced"):
                me.receive(30)
        finally:
            me.__exit__(None, None, None)
        with DurableSubscriber(sides["durable"], "me") as again:
            assert take(again, 10) == [b"%d" % i for i in range(10, 20)]


def test_a_subscription_can_be_ended(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, [b"t", b"0"])
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            take(me, 1)
            me.forget()
        wait_for(lambda: proxy.status.get("durable") == [], "gone")
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            assert me.new


def test_without_a_proxy_subscribing_fails_after_the_timeout() -> None:
    me = DurableSubscriber(endpoints("durable")["durable"], "me", timeout=0.2)
    with pytest.raises(NoPeerError, match="no proxy has answered within"), me:
        pass


def test_receiving_fails_when_the_proxy_is_silent_for_the_timeout(tmp_path: Path) -> None:
    sides = endpoints(*SIDES)
    me = DurableSubscriber(sides["durable"], "me", timeout=0.3)
    with ProxyThreads(tmp_path, sides):
        me.__enter__()
    with pytest.raises(NoPeerError, match="has been silent"):
        me.receive(30)
    me.__exit__(RuntimeError, None, None)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"topics": "orders"}, "a list of prefixes"),
        ({"max_bytes": 0}, "no message would ever come"),
        ({"name": ""}, "1 to 200 bytes"),
        ({"start": "now"}, "earliest, latest, last, an id, or a time"),
        ({"start": datetime(2026, 1, 1)}, "no time zone"),
        ({"endpoint": "here:1"}, "tcp://"),
        ({"endpoint": "tcp://a:1,tcp://b:1"}, "has one endpoint"),
        ({"options": {"rcvhwm": "1"}}, "only libzmq's options"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], problem: str) -> None:
    given: dict[str, object] = {"endpoint": "tcp://127.0.0.1:1", "name": "me", **arguments}
    with pytest.raises(OptionError, match=problem):
        DurableSubscriber(**given)  # type: ignore[arg-type]


def test_requests_that_are_not_of_the_protocol_are_refused(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        client = Client(context, proxy.sides["durable"])
        client.socket.send_multipart([b"x"])
        assert client.refused().code == "protocol"
        for message, code in (
            (Fetch(name="me", session=1, first=0, done=0), "gone"),
            (Opened(session=1, next=0, end=0, new=True), "protocol"),
            (Fetch(name="me", session=1, first=0, done=1), "protocol"),
        ):
            client.send(message)  # type: ignore[arg-type]
            assert client.refused().code == code
        client.open("me")


# Large messages, lost connections, lost messages.


def test_a_connection_that_is_cut_leaves_no_gap(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy, Middlebox(proxy.sides["durable"]) as between:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(5000)))
        with DurableSubscriber(between.endpoint, "me", max_bytes=2000) as me:
            got = take(me, 700)
            between.reset()
            got += take(me, 1300)
            between.reset()
            got += take(me, 3000)
        assert got == [b"%d" % i for i in range(5000)]
        assert between.connections >= 3


def test_a_subscriber_outside_of_its_block_is_an_error_that_says_so() -> None:
    me = DurableSubscriber(free_endpoint(), "me")
    for act in (me.receive, me.receive_batch, me.forget, lambda: me.seek("earliest"), lambda: me.ack(0)):
        with pytest.raises(OptionError, match="outside of its block"):
            act()


def test_a_displaced_client_does_not_disturb_its_successor(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(10)))
        with DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False, max_bytes=1) as first:
            assert take(first, 2) == [b"0", b"1"]
            first.ack(0, wait=True)
            with DurableSubscriber(proxy.sides["durable"], "me") as second:
                with pytest.raises(SubscriptionError, match="another client"):
                    while True:  # the first ones were on the way already
                        first.receive(30)
                first.__exit__(SubscriptionError, None, None)
                assert take(second, 9) == [b"%d" % i for i in range(1, 10)]


def test_lost_messages_are_counted_once_though_the_client_is_killed(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*LIVE), **DISCARDS) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(20)))
        with DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False) as me:
            take(me, 20)
            me.ack(9, wait=True)
        feed(context, proxy, *([b"t", b"." * 10_000] for _ in range(300)))
        log = proxy.flow.journal.log
        wait_for(
            lambda: not log.unsealed and log.size <= (1 << 20) - 5 * (1 << 16),
            "the oldest messages to be deleted",
        )
        wait_for(lambda: proxy.server.view.earliest == log.earliest, "the server to know")
        came = []
        for _ in range(2):
            with (
                pytest.raises(ZeroDivisionError),
                DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False) as me,
            ):
                message = me.receive(30)
                assert message is not None
                came.append((me.lost, message.id))
                # A killed server would never count the ids again behind which the client continues.
                assert notes(tmp_path, "me").lost == message.id - 10
                raise ZeroDivisionError
        assert came[0] == (message.id - 10, message.id)
        # The killed client may have acknowledged the loss, but never the message behind it.
        assert came[1] in ((message.id - 10, message.id), (0, message.id))
        # The newest status may be older than the count.
        wait_for(lambda: account(proxy, "me").get("lost") == message.id - 10, "counted once")
        assert places(proxy)["me"] in (10, message.id)


def test_an_unexpected_error_at_one_subscriber_does_not_affect_others(
    context: zmq.Context[Socket],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    known, pack = Positions.get, fetch_wire.pack_rows

    def get(self: Positions, name: str) -> Position | None:
        return known(self, name) if name != "unlucky" else 1 // 0  # type: ignore[return-value]

    def pack_rows(batch: pa.RecordBatch) -> tuple[list[str], list[object]]:
        if b"bad" in batch.column("value").to_pylist():
            raise ZeroDivisionError("an error without a name")
        return pack(batch)

    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy, caplog.at_level(logging.ERROR):
        with DurableSubscriber(proxy.sides["durable"], "me", topics=["a"]) as me:
            monkeypatch.setattr(Positions, "get", get)
            with (
                pytest.raises(SubscriptionError, match="ZeroDivisionError"),
                DurableSubscriber(proxy.sides["durable"], "unlucky"),
            ):
                pass
            with DurableSubscriber(proxy.sides["durable"], "other", topics=["b"]) as other:
                monkeypatch.setattr(fetch_wire, "pack_rows", pack_rows)
                feed(context, proxy, [b"b", b"bad"], [b"a", b"good"])
                with pytest.raises(SubscriptionError, match="an unexpected error of the proxy"):
                    other.receive(30)
                assert take(me, 1) == [b"good"]
                monkeypatch.setattr(fetch_wire, "pack_rows", pack)
            with DurableSubscriber(proxy.sides["durable"], "other", topics=["b"]) as other:
                assert take(other, 1) == [b"bad"]  # the position has not moved
        assert proxy.failure is None
    assert "Traceback" in caplog.text


def test_a_live_process_that_reads_no_status_stops_no_subscriber(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    """The status of so many subscribers fills the pipe in a second."""
    log = LogWriter(LogStorage(str(tmp_path)), chunk_bytes=1 << 20, max_bytes=1 << 30)
    log.open()
    sides = endpoints("durable")
    given = {"walLocation": str(tmp_path), "pull": endpoints("pull")["pull"], **sides}
    progress = Progress(log.earliest, log.durable_end)
    server = subprocess.Popen(
        [sys.executable, "-c", "from zmq_datasource.proxy.server import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        for line in ({"options": given, "logLevel": logging.WARNING}, progress):
            server.stdin.write(json.dumps(line).encode() + b"\n")
        server.stdin.flush()
        assert "status" in json.loads(server.stdout.readline())
        client = Client(context, sides["durable"])
        for at in range(110):
            client.open(f"{at:03d}" + "x" * 190, topics=[b"t" * 60] * 10)
        for _ in range(5):  # in this time the pipe is full
            client.fetch("000" + "x" * 190, 0, wait=200)
    finally:
        server.kill()
        server.wait()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.close()
        server.stdout.close()
        log.close()


# Single requests.


def test_a_repeated_request_has_the_same_answer(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(50)))
        wait_for(lambda: proxy.server.view.end == 50, "the server to follow the log")
        client = Client(context, proxy.sides["durable"])
        for _ in range(2):  # the first answer may be lost
            opened = client.open("me")
            assert (opened.next, opened.end, opened.new) == (0, 50, True)
        for _ in range(2):
            batch, values = client.fetch("me", 0, wait=1000)
            assert (batch.first, batch.next, batch.end, batch.done) == (0, 50, 50, 0)
            assert values == [b"%d" % i for i in range(50)]
        # One message at least, of any size; and none if none is asked for.
        for most, found in ((1, 1), (100, 2), (0, 0)):
            batch, values = client.fetch("me", 10, done=10, max_bytes=most)
            assert (batch.next, values[:found]) == (
                10 + len(values),
                [b"%d" % i for i in range(10, 10 + found)],
            )
            assert len(values) == found or most == 100
        assert not client.open("me").new
        # The position moves past other topics, also if there are no other messages.
        assert client.open("me", 2, [b"nothing"]).next == 10
        batch, values = client.fetch("me", 10, 2)
        assert (batch.next, values) == (50, [])


def test_a_fetch_waits_for_a_message_for_at_most_its_wait(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        client = Client(context, proxy.sides["durable"])
        client.open("me")
        began = time.monotonic()
        batch, values = client.fetch("me", 0, wait=300)
        assert (batch.next, values) == (0, [])
        assert time.monotonic() - began >= 0.29
        client.send(Fetch(name="me", session=1, first=0, done=0, wait=1000))
        feed(context, proxy, [b"t", b"0"])
        assert client.batch()[1] == [b"0"]
        batch, _ = client.fetch("me", 1, wait=60_000)  # the proxy waits for a second at most
        assert batch.next == 1


def test_a_position_is_on_the_disk_before_it_is_confirmed(
    context: zmq.Context[Socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, is_slow = DirectoryStore.put, False

    def slow(store: DirectoryStore, key: str, content: bytes) -> None:
        if is_slow and key.endswith("subscriber.me.json"):
            time.sleep(0.2)
        put(store, key, content)

    monkeypatch.setattr(DirectoryStore, "put", slow)
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(20)))
        with DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False) as me:
            assert record(tmp_path, "me").next == 0, "the record of an open name is on the disk"
            is_slow = True
            for number in (3, 4, 9):
                while (message := me.receive(30)) is not None and message.id < number:
                    pass
                me.ack(number, wait=True)
                assert record(tmp_path, "me").next == number + 1
            take(me, 10)
            me.ack(19)
        assert record(tmp_path, "me").next == 20, "the end of the block waits too"
        client = Client(context, proxy.sides["durable"])
        client.open("raw")
        batch, _ = client.fetch("raw", 5, done=5, confirm=True)
        assert (batch.done, record(tmp_path, "raw").next) == (5, 5)
        batch, _ = client.fetch("raw", 7, done=2)  # an older request, which comes late
        assert batch.done == 5


def test_a_confirmation_is_answered_though_another_subscriber_begins_at_that_moment(
    context: zmq.Context[Socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, [b"t", b"0"])
        one, other = (Client(context, proxy.sides["durable"]) for _ in range(2))
        one.open("one")
        receive, held = FetchWire.receive, list[Request]()

        def both_at_once(router: FetchWire) -> None:
            receive(router)
            held.extend(router.requests)
            router.requests.clear()
            if len(held) > 1:
                router.requests.extend(held)
                held.clear()

        monkeypatch.setattr(FetchWire, "receive", both_at_once)
        one.send(Fetch(name="one", session=1, first=1, done=1, confirm=True))
        wait_for(lambda: len(held) == 1, "the acknowledgement")
        other.send(Open(name="other", session=2, start="latest"))
        assert one.batch()[0].done == 1
        assert isinstance(other.receive()[0], Opened)


def test_a_late_open_of_an_earlier_session_does_not_take_the_name_back(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    """The disk stalls, the client redials, and the proxy reads from the new connection before the old one."""
    mine, others = session_number(7, 0), session_number(8, 0)
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        old, new, third = (Client(context, proxy.sides["durable"]) for _ in range(3))
        new.open("me", mine + 2)
        old.send(Open(name="me", session=mine + 1))
        assert old.refused().code == "taken"
        old.send(Fetch(name="me", session=mine + 1, first=0, done=0))
        assert old.refused().code == "taken"
        assert new.fetch("me", 0, mine + 2)[0].next == 0
        # Nor after another client has taken the name over and the client before was refused.
        third.open("me", others + 1)
        new.send(Fetch(name="me", session=mine + 2, first=0, done=0))
        assert new.refused().code == "taken"
        new.send(Open(name="me", session=mine + 2))
        assert new.refused().code == "taken"
        assert third.fetch("me", 0, others + 1)[0].next == 0
        # A later session takes it over, on any connection.
        old.open("me", mine + 3)
        third.send(Fetch(name="me", session=others + 1, first=0, done=0))
        assert third.refused().code == "taken"


def test_repeated_fetches_during_a_long_transfer_have_few_answers(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    """docs/proxy.md says: after three seconds of silence, send the same FETCH again."""
    small = {"zmq.sndbuf": 64 << 10}
    with (
        ProxyThreads(tmp_path, endpoints(*SIDES), **small) as proxy,
        Middlebox(proxy.sides["durable"]) as slow,
    ):
        slow.bytes_per_second = 10_000_000
        feed(context, proxy, [b"t", bytes(10_000_000)])
        client = Client(context, slow.endpoint)
        client.open("me")
        client.send(Fetch(name="me", session=1, first=0, done=0, wait=1000))
        wait_for(lambda: account(proxy, "me").get("sent"), "the message to be sent")
        for _ in range(9):
            client.send(Fetch(name="me", session=1, first=0, done=0, wait=1000))
        answers = 0
        while client.socket.poll(30_000 if answers < 2 else 1500):
            batch, values = client.batch()
            assert (batch.next, [len(value) for value in values]) == (1, [10_000_000])
            answers += 1
        assert answers in (2, 3), "of the requests that wait, only the newest is answered"


def test_a_fetch_beyond_the_end_of_the_log_is_refused(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        client = Client(context, proxy.sides["durable"])
        client.open("me")
        client.send(Fetch(name="me", session=1, first=1, done=0))
        assert client.refused().code == "ahead"


# Where a subscription begins.


def test_the_newest_message_of_each_topic_comes_first_and_then_all_that_follow(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, [b"a", b"a0"], [b"b", b"b0"], [b"a", b"a1"], [b"no topic 0"], [b"\xff", b"x0"])
        wait_for(lambda: proxy.flow.journal.log.chunks >= 1, "sealed")
        feed(
            context,
            proxy,
            [b"b", b"b1"],
            [b"no topic 1"],
            [b"c", b"c0"],
            [b"\xff", b"y", b"x1"],
            [b"c", b"c1"],
        )
        wait_for(lambda: proxy.server.view.end == 10, "the server to follow the log")
        snapshot = [b"a1", b"b1", b"no topic 1", b"x1", b"c1"]
        with DurableSubscriber(proxy.sides["durable"], "me", start="last") as me:
            feed(context, proxy, [b"a", b"a2"], [b"a", b"a3"], [b"no topic 2"])
            assert take(me, 8) == [*snapshot, b"a2", b"a3", b"no topic 2"]
            assert me.receive(0.05) is None
            assert me.lost == 0
        with DurableSubscriber(proxy.sides["durable"], "some", topics=["c", b"\xff"], start="last") as some:
            feed(context, proxy, [b"b", b"b2"], [b"c", b"c2"], [b"c", b"c3"])
            assert take(some, 4) == [b"x1", b"c1", b"c2", b"c3"]
        # A known name continues at its position.
        with DurableSubscriber(proxy.sides["durable"], "me", start="last") as me:
            assert take(me, 3) == [b"b2", b"c2", b"c3"]


def test_a_snapshot_continues_after_a_restart_of_the_server(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints(*SIDES)
    with ProxyThreads(tmp_path, sides) as proxy:
        feed(context, proxy, *([b"%d" % (i % 10), b"%d" % i] for i in range(100)), [b"0", b"100"])
        wait_for(lambda: proxy.server.view.end == 101, "the server to follow the log")
        me = DurableSubscriber(sides["durable"], "me", start="last", max_bytes=1, auto_ack=False)
        me.__enter__()
        assert take(me, 3) == [b"91", b"92", b"93"]
        me.ack(92, wait=True)
    with ProxyThreads(tmp_path, sides) as proxy:
        feed(context, proxy, [b"0", b"101"], [b"1", b"102"])
        assert take(me, 9) == [b"%d" % i for i in (94, 95, 96, 97, 98, 99, 100, 101, 102)]
        me.__exit__(None, None, None)
        # A subscriber that comes back, too, from its record.
        with DurableSubscriber(sides["durable"], "me") as again:
            assert take(again, 10) == [b"%d" % i for i in (93, 94, 95, 96, 97, 98, 99, 100, 101, 102)]
        assert notes(tmp_path, "me").snapshot == 0


def test_a_subscription_begins_at_a_time(context: zmq.Context[Socket], tmp_path: Path) -> None:
    times = []
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        for i in range(4):
            times.append(datetime.now(UTC))
            feed(context, proxy, [b"t", b"%d" % i])
            time.sleep(0.01)
        times.append(datetime.now(UTC))
        for first, start in enumerate([*times[:-1], times[-1]]):
            with DurableSubscriber(proxy.sides["durable"], f"at{first}", start=start) as me:
                if first == 4:
                    feed(context, proxy, [b"t", b"4"])
                assert take(me, 1) == [b"%d" % first]
        with DurableSubscriber(
            proxy.sides["durable"], "long ago", start=datetime(1960, 1, 1, tzinfo=UTC)
        ) as me:
            assert take(me, 1) == [b"0"]
        with DurableSubscriber(
            proxy.sides["durable"], "far off", start=datetime(2460, 1, 1, tzinfo=UTC)
        ) as me:
            feed(context, proxy, [b"t", b"5"])
            assert take(me, 1) == [b"5"]


def test_an_open_subscriber_seeks(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        began = datetime.now(UTC)
        feed(context, proxy, *([b"%d" % (i % 2), b"%d" % i] for i in range(100)))
        with DurableSubscriber(proxy.sides["durable"], "me", max_bytes=100) as me:
            assert take(me, 50) == [b"%d" % i for i in range(50)]
            for to, first in ((10, 10), ("earliest", 0), (90, 90), (began, 0), (99, 99)):
                me.seek(to)
                assert record(tmp_path, "me").next == first
                assert take(me, 1) == [b"%d" % first]
            me.seek("last")
            assert take(me, 2) == [b"98", b"99"]
            me.seek("latest")
            assert record(tmp_path, "me").next == 100
            assert me.receive(0.05) is None
            feed(context, proxy, [b"0", b"100"])
            assert take(me, 1) == [b"100"]
            with pytest.raises(OptionError):
                me.seek("somewhere")
            me.seek(95)
            assert take(me, 2) == [b"95", b"96"]
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            assert take(me, 4) == [b"97", b"98", b"99", b"100"]


# Subscribers that are away, and the command line.


def readers(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["log", "readers", *map(str, arguments)])


def test_a_client_whose_position_the_command_line_has_dropped_is_refused(
    context: zmq.Context[Socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program was busy for so long that it was away for the proxy."""
    keep_handlers(monkeypatch)
    with ProxyThreads(tmp_path, endpoints(*SIDES), names=NameBounds(present_seconds=1.5)) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(10)))
        wait_for(lambda: proxy.flow.journal.log.chunks >= 1, "sealed")
        me = DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False, max_bytes=1)
        with pytest.raises(SubscriptionError, match="removed"), me:
            take(me, 3)
            me.ack(1, wait=True)
            wait_for(lambda: readers("drop", tmp_path, "me").exit_code == 0, "dropped")
            while True:
                me.receive(30)
        with DurableSubscriber(proxy.sides["durable"], "me", start=4) as me:
            assert me.new
            assert take(me, 6) == [b"%d" % i for i in range(4, 10)]


def test_a_client_that_was_away_continues_without_an_open(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES), names=NameBounds(present_seconds=0.5)) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(30)))
        with DurableSubscriber(proxy.sides["durable"], "me", max_bytes=1) as me:
            for begin in (0, 10, 20):
                assert take(me, 10) == [b"%d" % i for i in range(begin, begin + 10)]
                wait_for(lambda: account(proxy, "me").get("connected") is False, "the subscriber to be away")
        assert record(tmp_path, "me").next == 30


# Bounds.


def test_a_thousand_names_are_the_most(context: zmq.Context[Socket], tmp_path: Path) -> None:
    assert (NAME_BOUNDS.names, NAME_BOUNDS.shown) == (1000, 100)
    with ProxyThreads(tmp_path, endpoints(*SIDES), names=NameBounds(names=50, shown=10)) as proxy:
        client = Client(context, proxy.sides["durable"])
        for at in range(60):  # all at once, more than there is room for
            client.send(Open(name=f"n{at}", session=at + 1, start="latest"))
        known = LeaseFiles(LogStorage(str(tmp_path))).entries
        wait_for(lambda: len(known()) >= 50, "all for which there is room")
        asking = Client(context, proxy.sides["durable"])
        codes = []
        for at in range(60):
            asking.send(Open(name=f"n{at}", session=at + 1, start="latest"))
            codes.append(getattr(asking.receive()[0], "code", "opened"))
        assert (codes.count("opened"), codes.count("full"), len(known())) == (50, 10, 50)
        # Known names can be opened again, and there is room when one ends.
        again = f"n{codes.index('opened')}"
        asking.open(again, 5000)
        asking.send(Forget(name=again, session=5000))
        asking.receive()
        asking.open("another", 5001)
        assert len(proxy.next_status()["durable"]) == 10, "the status shows those with the largest backlog"


def test_the_topics_of_all_durable_subscriptions_have_a_bound(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    assert NAME_BOUNDS.topic_bytes == 2 << 20
    large = [b"%03d" % i + bytes(29) for i in range(1000)]  # the most that one name may have
    with ProxyThreads(tmp_path, endpoints(*SIDES), names=NameBounds(topic_bytes=420_000)) as proxy:
        client = Client(context, proxy.sides["durable"])
        client.send(Open(name="too many", session=1), [*large, b""])
        assert client.refused().code == "protocol"
        client.send(Open(name="too long", session=1), [bytes(32_769)])
        assert client.refused().code == "protocol"
        for at in range(20):  # all at once, more than there is room for
            client.send(Open(name=f"{at}", session=at + 1, start="latest"), large)
        asking, answers = Client(context, proxy.sides["durable"]), []
        for at in range(20):
            asking.send(Open(name=f"{at}", session=at + 1, start="latest"), large)
            answers.append(asking.receive()[0])
        refused = [answer for answer in answers if isinstance(answer, Refused)]
        assert len(refused) == 10, "each name has 40 bytes for each of 1,000 topics"
        assert {answer.code for answer in refused} == {"full"}
        assert "subscribe to fewer topics, or to their common prefix, or end some" in refused[0].reason
        assert len(LeaseFiles(LogStorage(str(tmp_path))).entries()) == 10
        # Names that are known or have few topics are not refused; and there is room when a name has fewer topics.
        with DurableSubscriber(proxy.sides["durable"], "other", topics=["a"]) as other:
            assert other.new
        old = f"{next(at for at, answer in enumerate(answers) if isinstance(answer, Opened))}"
        for session, (name, topics) in enumerate(((old, large), (old, large[:10]), ("new", large[:900]))):
            asking.open(name, 1000 + session, topics)


def test_a_disk_that_is_slow_at_one_name_holds_up_no_messages_of_others(
    context: zmq.Context[Socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client opens its name again and again, and each time its record is forced to the disk."""
    put = DirectoryStore.put

    def slow(store: DirectoryStore, key: str, content: bytes) -> None:
        if key.endswith("subscriber.flaps.json"):
            time.sleep(0.2)
        put(store, key, content)

    monkeypatch.setattr(DirectoryStore, "put", slow)
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        flaps = Client(context, proxy.sides["durable"])
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            began = time.monotonic()
            for session in range(1, 41):
                topics = [b"%d.%d" % (session % 2, i) for i in range(100)]
                flaps.send(Open(name="flaps", session=session), topics)
                feed(context, proxy, [b"t", b"%d" % session])
                assert take(me, 1) == [b"%d" % session]
            assert time.monotonic() - began < 40 * 0.2
            me.ack(39, wait=True)  # it waits for few of these writes
            assert time.monotonic() - began < 40 * 0.2
        flaps.open("flaps", 41, topics)
    assert notes(tmp_path, "flaps").topics == topics
