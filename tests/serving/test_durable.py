"""Durable subscribers of a receiver: real sockets, files and threads."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner

from tests.support import Socket, free_endpoint, keep_handlers, wait_for
from tests.support.bucket_server import BucketServer
from tests.support.middlebox import Middlebox
from tests.support.serving import Client, Serving, take
from zmq_datasource import (
    AsyncDurableSubscriber,
    DurableSubscriber,
    NoPeerError,
    OptionError,
    SubscriptionError,
)
from zmq_datasource.cli import main as cli
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.serving import durable as durable_module
from zmq_datasource.serving import server as server_module
from zmq_datasource.serving.protocol import Fetch, Open, pack_rows

pytestmark = pytest.mark.spark  # there are many tests, and each one waits for sockets to connect and close
Context = zmq.Context[Socket]


def numbers(first: int, end: int) -> list[list[bytes]]:
    return [[b"t", b"%d" % i] for i in range(first, end)]


def test_a_subscriber_that_was_away_gets_missed_messages_and_then_live_ones(
    context: Context, tmp_path: Path
) -> None:
    with Serving(tmp_path) as it:
        it.feed(context, [b"a", b"0"], [b"b", b"1"])
        with DurableSubscriber(it.durable, "me") as me:
            assert me.new
            assert me.log == it.receiver.log.log_id
            assert take(me, 2) == [b"0", b"1"]
        it.feed(context, [b"c", b"2"])
        it.feed(context, [b"x", b"y", b"3"])
        with DurableSubscriber(it.durable, "me", log=me.log) as me:
            assert not me.new
            missed = [me.receive(30), me.receive(30)]
            assert [(m.id, m.topic, m.value, m.frames) for m in missed if m] == [
                (2, b"c", b"2", (b"c", b"2")),
                (3, b"x", b"3", (b"x", b"y", b"3")),
            ]
            push = context.socket(zmq.PUSH)
            push.connect(it.pull)
            push.send(b"live")  # sealed because it is awaited
            assert take(me, 1) == [b"live"]
            assert me.receive(0.05) is None


def test_a_batch_has_the_messages_of_an_answer_in_columns_and_is_acknowledged_as_a_whole(
    context: Context, tmp_path: Path
) -> None:
    with Serving(tmp_path) as it:
        it.feed(context, [b"a", b"0"], [b"1"], [b"\xff", b"2"], [b"x", b"y", b"3"], [b"x", b"", b"", b"4"])
        with DurableSubscriber(it.durable, "me", topics=["x"]) as me:
            batch = me.receive_batch(30)
            assert batch is not None
            assert batch.to_pylist() == [
                {"id": 3, "topic": b"x", "value": b"3", "frames": [b"x", b"y", b"3"]},
                {"id": 4, "topic": b"x", "value": b"4", "frames": [b"x", b"", b"", b"4"]},
            ]
        with pytest.raises(ZeroDivisionError), DurableSubscriber(it.durable, "all") as me:
            assert take(me, 1) == [b"0"]
            batch = me.receive_batch(30)  # acknowledges 0
            assert batch is not None
            assert batch.column("topic").to_pylist() == [b"", b"\xff", b"x", b"x"]
            assert batch.column("value").to_pylist() == [b"1", b"2", b"3", b"4"]
            raise ZeroDivisionError
        with DurableSubscriber(it.durable, "all") as me:
            assert take(me, 2) == [b"1", b"2"]
            batch = me.receive_batch(30)
            assert batch is not None
            assert batch.column("value").to_pylist() == [b"3", b"4"]
            assert me.receive_batch(0.05) is None
        assert (it.lease("me").next, it.lease("all").next) == (5, 5)


def test_only_what_was_acknowledged_does_not_come_again(context: Context, tmp_path: Path) -> None:
    with Serving(tmp_path) as it:
        it.feed(context, *numbers(0, 10))
        with DurableSubscriber(it.durable, "me", auto_ack=False) as me:
            take(me, 8)
            me.ack(4)
            with pytest.raises(OptionError, match="has not come yet"):
                me.ack(9)
        assert it.lease("me").next == 5, "the end of the block waits for the disk"
        with pytest.raises(ZeroDivisionError), DurableSubscriber(it.durable, "me") as me:
            assert take(me, 2) == [b"5", b"6"]  # asking for the second acknowledges the first
            raise ZeroDivisionError
        with DurableSubscriber(it.durable, "me") as me:
            assert take(me, 4) == [b"6", b"7", b"8", b"9"]
        assert it.lease("me").next == 10


def test_topics_are_prefixes_and_other_topics_are_no_backlog(context: Context, tmp_path: Path) -> None:
    with Serving(tmp_path) as it, DurableSubscriber(it.durable, "me", topics=["a.", b"b"]) as me:
        it.feed(context, [b"a.1", b"0"], [b"c", b"1"], [b"b", b"2"], [b"a", b"3"], [b"4"])
        assert take(me, 2) == [b"0", b"2"]
        wait_for(
            lambda: me.receive(0.05) is None and it.account("me").get("nextId") == 5,
            "a position behind the other topics",
        )
        assert it.account("me")["backlog"] == 0


def test_a_log_in_a_bucket_is_served(context: Context) -> None:
    with BucketServer() as bucket, Serving(bucket.location("log")) as it:
        it.feed(context, *numbers(0, 3))
        with DurableSubscriber(it.durable, "me") as me:
            assert take(me, 3) == [b"0", b"1", b"2"]
            push = context.socket(zmq.PUSH)
            push.connect(it.pull)
            push.send_multipart([b"t", b"3"])  # sealed because it is awaited
            assert take(me, 1) == [b"3"]
        assert it.lease("me").next == 4


def test_a_writer_with_ten_thousand_publishers_in_its_state_seals_for_a_subscriber(
    context: Context, tmp_path: Path
) -> None:
    """The state is whole in each chunk, so that a message waits for others, or for walFlushInterval."""
    numbered = {
        "framing": "custom",
        "sequenceAt": "1:0:u64be",
        "publisherFrame": 0,
        "walFlushInterval": "200ms",
    }

    def sent(topic: int, number: int) -> list[bytes]:
        return [b"%d" % topic, number.to_bytes(8, "big"), b"%d" % number]

    with Serving(tmp_path, **numbered) as it:
        it.feed(context, *(sent(topic, 0) for topic in range(10_000)))
        assert it.receiver.log.state_bytes > 100_000
        push = context.socket(zmq.PUSH)
        push.connect(it.pull)
        with DurableSubscriber(it.durable, "me", start="latest") as me:
            for number in range(1, 5):
                push.send_multipart(sent(7, number))
                assert take(me, 1) == [b"%d" % number]


def test_where_a_new_subscription_begins(context: Context, tmp_path: Path) -> None:
    with Serving(tmp_path) as it:
        it.feed(context, *numbers(0, 4))
        for name, start, first in (("e", "earliest", b"0"), ("i", 3, b"3"), ("l", "latest", b"4")):
            with DurableSubscriber(it.durable, name, start=start) as me:
                if name == "l":
                    it.feed(context, *numbers(4, 5))
                assert take(me, 1) == [first]


def test_the_newest_message_of_each_topic_comes_first_also_after_a_restart(
    context: Context, tmp_path: Path
) -> None:
    with Serving(tmp_path) as it:
        it.feed(context, *([b"%d" % (i % 10), b"%d" % i] for i in range(100)), [b"no topic"], [b"\xff", b"x"])
        it.feed(context, [b"0", b"100"], [b"\xff", b"y", b"x1"])
        with DurableSubscriber(it.durable, "me", start="last", max_bytes=1, auto_ack=False) as me:
            assert take(me, 3) == [b"91", b"92", b"93"]
            me.ack(92)
    with Serving(tmp_path, durable=it.durable) as it:
        it.feed(context, [b"0", b"101"])
        last = [b"94", b"95", b"96", b"97", b"98", b"99", b"no topic", b"100", b"x1", b"101"]
        with DurableSubscriber(it.durable, "me") as again:  # from its lease
            assert take(again, 11) == [b"93", *last]


def test_ids_of_another_log_are_refused(context: Context, tmp_path: Path) -> None:
    """In the new log, the acknowledged ids are those of other messages."""
    with Serving(tmp_path / "old") as it:
        it.feed(context, *numbers(0, 5))
        me = DurableSubscriber(it.durable, "me", auto_ack=False).__enter__()
        take(me, 5)
    me.ack(4)
    with Serving(tmp_path / "new", durable=it.durable) as it:
        it.feed(context, *numbers(10, 20))
        try:
            with pytest.raises(SubscriptionError, match="its log was replaced"):
                me.receive(30)
        finally:
            me.__exit__(RuntimeError, None, None)
        saved = DurableSubscriber(it.durable, "me", log=me.log)
        with pytest.raises(SubscriptionError, match=f"are of log {me.log}, and this is log"), saved:
            pass
        with DurableSubscriber(it.durable, "me") as again:
            assert take(again, 10) == [b"%d" % i for i in range(10, 20)]


def test_without_a_server_subscribing_fails_after_the_timeout() -> None:
    me = DurableSubscriber(free_endpoint(), "me", timeout=0.2)
    with pytest.raises(NoPeerError, match=r"has been silent for 0\.2 s; check that"), me:
        pass


def test_receiving_fails_when_the_server_is_silent_for_the_timeout(tmp_path: Path) -> None:
    with Serving(tmp_path) as it:
        me = DurableSubscriber(it.durable, "me", timeout=0.3).__enter__()
    with pytest.raises(NoPeerError, match="has been silent"):
        me.receive(30)
    me.__exit__(RuntimeError, None, None)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"topics": "orders"}, "a list of prefixes"),
        ({"max_bytes": 0}, "no message would ever come"),
        ({"name": ""}, "1 to 200 bytes"),
        ({"start": "now"}, "earliest, latest, last, or an id"),
        ({"start": True}, "earliest, latest, last, or an id"),
        ({"endpoint": "here:1"}, "tcp://"),
        ({"endpoint": "tcp://a:1,tcp://b:1"}, "has one endpoint"),
        ({"options": {"rcvhwm": "1"}}, "only libzmq's options"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], problem: str) -> None:
    given: dict[str, object] = {"endpoint": "tcp://127.0.0.1:1", "name": "me", **arguments}
    with pytest.raises(OptionError, match=problem):
        DurableSubscriber(**given)  # type: ignore[arg-type]


def test_a_subscriber_outside_of_its_block_is_an_error_that_says_so() -> None:
    me = DurableSubscriber(free_endpoint(), "me")
    for act in (me.receive, me.receive_batch, lambda: me.ack(0)):
        with pytest.raises(OptionError, match="outside of its block"):
            act()


def test_a_connection_that_is_cut_leaves_no_gap(context: Context, tmp_path: Path) -> None:
    with Serving(tmp_path) as it, Middlebox(it.durable) as between:
        it.feed(context, *numbers(0, 5000))
        with DurableSubscriber(between.endpoint, "me", max_bytes=2000) as me:
            got = take(me, 700)
            between.reset()
            got += take(me, 1300)
            between.reset()
            got += take(me, 3000)
        assert got == [b"%d" % i for i in range(5000)]
        assert between.connections >= 3


def test_a_displaced_client_does_not_disturb_its_successor(context: Context, tmp_path: Path) -> None:
    with Serving(tmp_path) as it:
        it.feed(context, *numbers(0, 10))
        with DurableSubscriber(it.durable, "me", max_bytes=1) as before:
            assert take(before, 1) == [b"0"]
        with DurableSubscriber(it.durable, "me", auto_ack=False, max_bytes=1) as first:
            assert take(first, 1) == [b"1"]
            with DurableSubscriber(it.durable, "me") as second:
                with pytest.raises(SubscriptionError, match="another client"):
                    while True:  # the first ones were on the way already
                        first.receive(30)
                first.__exit__(SubscriptionError, None, None)
                assert take(second, 9) == [b"%d" % i for i in range(1, 10)]


def test_a_slow_subscriber_sends_its_position_and_gets_no_answer_twice(
    context: Context, tmp_path: Path
) -> None:
    with Serving(tmp_path) as it:
        it.feed(context, *([b"t", bytes(100)] for _ in range(2000)))
        with DurableSubscriber(it.durable, "slow", max_bytes=150_000) as slow:
            wait_for(lambda: slow.receive(30) and it.account("slow").get("nextId"), "its position")


def test_a_displaced_client_with_messages_in_memory_ends_with_an_error(
    context: Context, tmp_path: Path
) -> None:
    with Serving(tmp_path) as it:
        it.feed(context, *numbers(0, 1000))
        with (
            pytest.raises(SubscriptionError, match="another client"),
            DurableSubscriber(it.durable, "me") as first,
        ):
            take(first, 1)
            with DurableSubscriber(it.durable, "me"):
                later = time.monotonic() + 1.2  # two turns of the connection
                wait_for(lambda: first.receive(30) and time.monotonic() > later, "a refusal")


def test_messages_that_a_full_log_has_deleted_are_counted(context: Context, tmp_path: Path) -> None:
    with Serving(tmp_path, walMaxBytes="1m", whenFull="discard") as it:
        it.feed(context, *numbers(0, 20))
        with DurableSubscriber(it.durable, "me") as me:
            take(me, 10)
        for _ in range(6):
            it.feed(context, *([b"t", bytes(10_000)] for _ in range(50)))
        log = it.receiver.log
        wait_for(lambda: log.earliest > 20, "the oldest messages to be deleted")
        wait_for(lambda: it.account("me")["lost"] == log.earliest - 10, "the server to count them")
        with DurableSubscriber(it.durable, "me") as me:
            message = me.receive(30)
            assert message is not None
            assert (me.lost, message.id) == (log.earliest - 10, log.earliest)


def test_an_error_of_one_answer_refuses_one_subscriber(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pack(batch: object) -> object:
        if b"bad" in batch.column("value").to_pylist():  # type: ignore[attr-defined]
            raise ZeroDivisionError("an error without a name")
        return pack_rows(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(durable_module, "pack_rows", pack)
    with Serving(tmp_path) as it, caplog.at_level(logging.ERROR):
        with (
            DurableSubscriber(it.durable, "me", topics=["a"]) as me,
            DurableSubscriber(it.durable, "other", topics=["b"]) as other,
        ):
            it.feed(context, [b"b", b"bad"], [b"a", b"good"])
            with pytest.raises(SubscriptionError, match="an unexpected error of the server"):
                other.receive(30)
            assert take(me, 1) == [b"good"]
        assert "Traceback" in caplog.text


def test_a_disk_that_stalls_holds_up_no_messages(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, answers = DirectoryStore.put, threading.Event()

    def stall(store: DirectoryStore, key: str, content: bytes) -> None:
        if key.endswith("subscriber.me.json"):
            assert answers.wait(30)
        put(store, key, content)

    with Serving(tmp_path) as it:
        it.feed(context, *numbers(0, 200))
        with DurableSubscriber(it.durable, "me", max_bytes=1) as me:
            monkeypatch.setattr(DirectoryStore, "put", stall)
            take(me, 200)
            answers.set()
        assert it.lease("me").next == 200


def test_the_end_does_not_wait_for_a_disk_that_never_answers(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_module, "_END_SECONDS", 0.2)
    put, asked, answers = DirectoryStore.put, threading.Event(), threading.Event()

    def hang(store: DirectoryStore, key: str, content: bytes) -> None:
        if key.endswith("subscriber.me.json"):
            asked.set()
            assert answers.wait(30)
        put(store, key, content)

    monkeypatch.setattr(DirectoryStore, "put", hang)
    with Serving(tmp_path) as it:
        client = Client(context, it.durable)
        client.send(Open(name="me", session=1))
        assert asked.wait(30)
    with Serving(tmp_path, durable=it.durable) as again:  # its log and its socket are free
        answers.set()
        Client(context, again.durable).open("me", session=2)


def test_repeated_fetches_during_a_long_transfer_have_few_answers(context: Context, tmp_path: Path) -> None:
    """The protocol says: after three seconds of silence, send the same FETCH again."""
    with Serving(tmp_path, **{"zmq.sndbuf": 64 << 10}) as it, Middlebox(it.durable) as slow:
        slow.bytes_per_second = 10_000_000
        it.feed(context, [b"t", bytes(10_000_000)])
        client = Client(context, slow.endpoint)
        client.open("me")
        client.send(Fetch(name="me", session=1, first=0, done=0))
        wait_for(lambda: slow.bytes > 100_000, "the answer on its way")
        for _ in range(9):
            client.send(Fetch(name="me", session=1, first=0, done=0))
        answers = 0
        while client.socket.poll(30_000 if answers < 2 else 1500):
            batch, values = client.batch()
            assert (batch.next, [len(value) for value in values]) == (1, [10_000_000])
            answers += 1
        assert answers in (2, 3), "of the requests that wait, only the newest is answered"


def test_requests_that_are_not_of_the_protocol_are_refused(context: Context, tmp_path: Path) -> None:
    with Serving(tmp_path) as it:
        client = Client(context, it.durable)
        client.socket.send_multipart([b"x"])
        assert client.refused().code == "protocol"
        client.socket.send_multipart([bytes(60_000)] * 3)  # more than an honest client sends
        assert client.refused().code == "protocol"
        client.open("me")


def test_a_client_whose_position_the_command_line_has_dropped_is_refused(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program was busy for so long that it was away for the server."""
    keep_handlers(monkeypatch)
    monkeypatch.setattr(server_module, "PRESENT_SECONDS", 0.5)
    with Serving(tmp_path) as it:
        it.feed(context, *numbers(0, 10))
        me = DurableSubscriber(it.durable, "me", auto_ack=False, max_bytes=1)
        with pytest.raises(SubscriptionError, match="it was removed or has expired"), me:
            take(me, 3)
            wait_for(lambda: it.receiver.log.leases, "the writer to see its lease")
            os.utime(tmp_path / "readers" / "subscriber.me.json", (0, 0))
            assert CliRunner().invoke(cli, ["log", "readers", "drop", str(tmp_path), "me"]).exit_code == 0
            wait_for(lambda: it.account("me") == {}, "forgotten")
            while True:
                me.receive(30)
        with DurableSubscriber(it.durable, "me", start=4) as me:
            assert me.new
            assert take(me, 6) == [b"%d" % i for i in range(4, 10)]


def test_asyncio_gets_messages_and_other_tasks_go_on(context: Context, tmp_path: Path) -> None:
    async def run(it: Serving) -> None:
        steps = 0

        async def other() -> None:
            nonlocal steps
            while True:
                steps += 1
                await asyncio.sleep(0.001)

        task = asyncio.create_task(other())
        async with AsyncDurableSubscriber(it.durable, "me", auto_ack=False) as me:
            got = []
            async for message in me:
                got.append(message.value)
                if len(got) == 2000:
                    break
            assert got == [b"%d" % i for i in range(2000)]
            me.ack(1999)
            before = steps
            assert await me.receive(0.3) is None
            assert steps - before > 20, "an idle subscriber stalls the loop"
            waiting = asyncio.create_task(me.receive())
            await asyncio.sleep(0)
            waiting.cancel()  # takes no message
            with pytest.raises(asyncio.CancelledError):
                await waiting
            push = context.socket(zmq.PUSH)
            push.connect(it.pull)
            push.send_multipart([b"t", b"live"])
            live = await me.receive(30)
            assert live is not None
            assert live.value == b"live"
        assert it.lease("me").next == 2000
        task.cancel()

    with Serving(tmp_path) as it:
        it.feed(context, *numbers(0, 2000))
        asyncio.run(run(it))
