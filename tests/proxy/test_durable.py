"""proxy.server: what a durable subscriber missed, in order, then what comes; and any range again."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
import zmq

from tests.support import Socket, stream_options, wait_for
from tests.support.middlebox import Middlebox
from tests.support.proxies import ProxyThreads, drain, endpoints, receive, receive_until, subscriber
from zmq_datasource import (
    DataLossError,
    DurableSubscriber,
    NoPeerError,
    OptionError,
    SubscriptionError,
)
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.log.layout import SUBSCRIPTIONS_NAME
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.proxy import durable_session, replays
from zmq_datasource.proxy.durable import DurableServer
from zmq_datasource.proxy.durable_protocol import session_number
from zmq_datasource.proxy.pipes import start_line
from zmq_datasource.proxy.router import Request, Router
from zmq_datasource.proxy.subscriptions import Subscription, Subscriptions
from zmq_datasource.proxy.view import Progress
from zmq_datasource.source.ingest import Ingest

SIDES = ("pull", "durable", "replay")

pytestmark = pytest.mark.spark  # they are many, and each has sockets to connect and to close


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def feed(context: zmq.Context[Socket], proxy: ProxyThreads, *messages: list[bytes]) -> None:
    """Send these, and wait until they are in the log."""
    push = context.socket(zmq.PUSH)
    push.connect(proxy.sides["pull"])
    before = proxy.flow.journal.next_id
    for message in messages:
        push.send_multipart(message)
    wait_for(lambda: proxy.flow.journal.next_id == before + len(messages), "journaled")
    push.close(1000)


def take(subscriber: DurableSubscriber, count: int) -> list[bytes]:
    values = []
    for _ in range(count):
        message = subscriber.receive(30)
        assert message is not None, values
        values.append(message.value)
    return values


def positions(proxy: ProxyThreads) -> dict[str, int]:
    """Where each durable subscriber is, as of the newest status."""
    return {account["name"]: account["nextId"] for account in proxy.status.get("durable", ())}


def test_who_was_away_gets_what_it_missed_and_then_the_live_flow(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES), walFlushInterval="100ms") as proxy:
        feed(context, proxy, [b"a", b"0"], [b"b", b"1"])
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            assert me.new
            assert take(me, 2) == [b"0", b"1"]
        feed(context, proxy, [b"c", b"2"])
        proxy.flow.journal.log.commit(0)
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
        wait_for(lambda: positions(proxy) == {"me": 10}, "all acknowledged")


def test_topics_are_prefixes_and_others_do_not_count_as_backlog(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with (
        ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy,
        DurableSubscriber(proxy.sides["durable"], "me", topics=["a.", b"b"]) as me,
    ):
        feed(context, proxy, [b"a.1", b"0"], [b"c", b"1"], [b"b", b"2"], [b"a", b"3"], [b"4"])
        assert take(me, 2) == [b"0", b"2"]
        assert me.receive(0.05) is None
        wait_for(lambda: positions(proxy) == {"me": 5}, "others stepped over")
        account = proxy.status["durable"][0]
        assert (account["backlog"], account["sent"]) == (0, 2)


def test_where_a_new_subscription_begins(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(4)))
        wait_for(lambda: proxy.server.view.end == 4, "the server has seen it")
        for name, start, first in (("e", "earliest", b"0"), ("i", 2, b"2"), ("l", "latest", b"4")):
            with DurableSubscriber(proxy.sides["durable"], name, start=start) as me:
                if name == "l":
                    feed(context, proxy, [b"t", b"4"])
                assert take(me, 1) == [first]


def test_a_name_is_taken_over_and_the_one_before_is_told(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, [b"t", b"0"], [b"t", b"1"])
        first = DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False)
        with pytest.raises(SubscriptionError, match="another client has subscribed as 'me'"), first:
            assert take(first, 1) == [b"0"]
            with DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False) as second:
                assert take(second, 2) == [b"0", b"1"]
                while True:
                    first.receive(30)


def test_credit_bounds_what_is_on_the_way(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(50)))
        dealer = context.socket(zmq.DEALER)
        dealer.connect(proxy.sides["durable"])
        dealer.send_multipart([b"SUBSCRIBE", b"1", b"raw", number(0), b"earliest", b"", number(3)])
        assert receive(dealer, 1)[0][0] == b"READY"

        def messages(count: int) -> list[bytes]:
            """So many, and those that come within a moment more."""
            got = receive_until(dealer, lambda m: m[0] == b"MESSAGE", count)
            return [m[3] for m in [*got, *drain(dealer, 100)] if m[0] == b"MESSAGE"]

        assert messages(3) == [b"0", b"1", b"2"]
        dealer.send_multipart([b"CREDIT", number(2)])
        assert messages(2) == [b"3", b"4"]
        dealer.send_multipart([b"ACK", number(49)])
        receive_until(dealer, lambda m: m[:2] == [b"REFUSED", b"protocol"])
        dealer.send_multipart([b"ACK", number(4)])
        assert receive_until(dealer, lambda m: m[0] == b"ACKED") == [[b"ACKED", number(5)]]


def test_what_was_deleted_is_told_not_skipped(
    context: zmq.Context[Socket], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES), walMaxBytes="1m", walFlushInterval="100ms") as proxy:
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            feed(context, proxy, [b"t", b"first"])
            take(me, 1)
        feed(context, proxy, *([b"t", b"." * 10_000] for _ in range(300)))
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            message = me.receive(30)
            assert message is not None
            assert message.id > 1
            assert me.lost == message.id - 1
    assert "were deleted before" in caplog.text


def test_a_proxy_that_starts_again_knows_everybody(context: zmq.Context[Socket], tmp_path: Path) -> None:
    sides = endpoints(*SIDES)
    with ProxyThreads(tmp_path, sides) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(10)))
        with DurableSubscriber(sides["durable"], "me") as me:
            take(me, 4)
    with ProxyThreads(tmp_path, sides) as proxy, DurableSubscriber(sides["durable"], "me") as me:
        assert not me.new
        assert take(me, 6) == [b"%d" % i for i in range(4, 10)]


def test_a_client_goes_on_by_itself_when_the_proxy_comes_back(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints(*SIDES)
    me = DurableSubscriber(sides["durable"], "me", auto_ack=False)
    with ProxyThreads(tmp_path, sides) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(5)))
        me.__enter__()
        assert take(me, 3) == [b"0", b"1", b"2"]
        me.ack(1)
    with ProxyThreads(tmp_path, sides) as proxy:
        feed(context, proxy, [b"t", b"5"])
        assert take(me, 3) == [b"3", b"4", b"5"]  # what this client has is not sent to it again
        me.ack(5, wait=True)
        me.__exit__(None, None, None)
        wait_for(lambda: positions(proxy) == {"me": 6}, "acknowledged")


def test_a_client_is_told_that_the_log_was_replaced(context: zmq.Context[Socket], tmp_path: Path) -> None:
    """What it has received and acknowledged are other messages there."""
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


def test_nobody_there_is_an_error_in_time() -> None:
    me = DurableSubscriber(endpoints("durable")["durable"], "me", timeout=0.2)
    with pytest.raises(NoPeerError, match="no proxy has answered within"), me:
        pass


def test_a_proxy_that_goes_silent_is_an_error_in_time(tmp_path: Path) -> None:
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
        ({"credit": 0}, "nothing would ever come"),
        ({"name": ""}, "1 to 200 bytes"),
        ({"start": "now"}, "earliest, latest, or an id"),
        ({"endpoint": "here:1"}, "tcp://"),
        ({"endpoint": "tcp://a:1,tcp://b:1"}, "at one proxy"),
        ({"options": {"rcvhwm": "1"}}, "only libzmq's own"),
    ],
)
def test_arguments_that_cannot_be_honoured(arguments: dict[str, object], problem: str) -> None:
    given: dict[str, object] = {"endpoint": "tcp://127.0.0.1:1", "name": "me", **arguments}
    with pytest.raises(OptionError, match=problem):
        DurableSubscriber(**given)  # type: ignore[arg-type]


def test_ids_that_a_subscriber_has_acknowledged_are_not_given_again(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    """The machine has lost the newest chunk (walSync=false), or the log is an older copy."""
    with ProxyThreads(tmp_path, endpoints(*SIDES), walFlushInterval="10ms") as proxy:
        for i in range(3):
            feed(context, proxy, [b"t", b"%d" % i])
            wait_for(lambda i=i: proxy.flow.journal.log.durable_end == i + 1, "a chunk of its own")  # type: ignore[misc]
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            assert take(me, 3) == [b"0", b"1", b"2"]
    storage = LogStorage(str(tmp_path))
    storage.delete_chunk(max(storage.chunks()).first)
    sides = endpoints(*SIDES)
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.IMMEDIATE, 1)
    push.connect(sides["pull"])
    with (
        pytest.raises(DataLossError, match="'me' has acknowledged the ids below 3"),
        ProxyThreads(tmp_path, sides),
    ):
        pass
    assert not push.poll(100, zmq.POLLOUT), "it has received before it looked"


def test_nothing_is_deleted_between_a_subscribers_beginning_and_its_first_message(
    context: zmq.Context[Socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES), walFlushInterval="10ms") as proxy:
        log = proxy.flow.journal.log
        for i in range(3):
            feed(context, proxy, [b"t", b"%d" % i])
            wait_for(lambda i=i: log.durable_end == i + 1, "a chunk of its own")  # type: ignore[misc]
        wait_for(lambda: log.retention.committed == 3, "nobody needs them")
        add = Subscriptions.add

        def expiring(known: Subscriptions, new: Subscription) -> int:
            log.retention._clock = lambda: time.time() + 7 * 86_400
            log.retention.remove_expired()
            return add(known, new)

        monkeypatch.setattr(Subscriptions, "add", expiring)
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            assert take(me, 3) == [b"0", b"1", b"2"]
            assert me.lost == 0
        wait_for(lambda: log.earliest == 2, "what is acknowledged is deleted")
    assert not list((tmp_path / "readers").glob("*.json"))


# Replay.


def ask(context: zmq.Context[Socket], proxy: ProxyThreads, request: bytes, name: bytes = b"") -> Socket:
    dealer = context.socket(zmq.DEALER)
    if name:
        dealer.setsockopt(zmq.ROUTING_ID, name)
    dealer.connect(proxy.sides["replay"])
    dealer.send_multipart([b"", request])
    return dealer


END = b"\xff" * 8


def test_any_range_comes_again_to_several_at_once(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES), walFlushInterval="100ms") as proxy:
        feed(context, proxy, *([b"t%d" % (i % 3), b"%d" % i] for i in range(1000)))
        wait_for(lambda: proxy.server.view.end == 1000, "the server has seen it")
        all_of_it = ask(context, proxy, number(0))
        some = ask(context, proxy, number(400) + number(600), b"topic:1")
        late = ask(context, proxy, number(5000))
        assert receive(all_of_it, 1001) == [
            *([b"", number(i), b"%d" % i] for i in range(1000)),
            [b"", END, b""],
        ]
        assert receive(some, 201) == [
            *([b"", b"t%d" % (i % 3), number(i), b"%d" % i] for i in range(400, 600)),
            [b"", b"", END, b""],
        ]
        assert receive(late, 1) == [[b"", END, b""]]


def test_a_client_that_takes_nothing_costs_the_others_nothing(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES), **{"zmq.sndbuf": 4096}) as proxy:
        feed(context, proxy, *([b"t", b"." * 1000] for i in range(3000)))
        wait_for(lambda: proxy.server.view.end == 3000, "the server has seen it")
        stalled = context.socket(zmq.DEALER)
        stalled.setsockopt(zmq.RCVHWM, 10)
        stalled.setsockopt(zmq.RCVBUF, 4096)
        stalled.connect(proxy.sides["replay"])
        stalled.send_multipart([b"", number(0)])
        wait_for(lambda: proxy.status.get("replays", {}).get("clients") == 1, "it is being served")
        assert len(receive(ask(context, proxy, number(0)), 3001)) == 3001
        assert proxy.next_status()["replays"]["sent"] <= 6000
        assert len(receive(stalled, 3001)) == 3001


def test_requests_that_make_no_sense_are_named_and_harm_nobody(
    context: zmq.Context[Socket], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, [b"t", b"0"])
        wait_for(lambda: proxy.server.view.end == 1, "the server has seen it")
        for frames in ([b"x"], [b"", b"1"], [b"", number(1), b""]):
            ask(context, proxy, b"").send_multipart(frames)
        dealer = context.socket(zmq.DEALER)
        dealer.connect(proxy.sides["durable"])
        for frames in ([b"x"], [b"ACK", number(0)]):
            dealer.send_multipart(frames)
        refused = receive(dealer, 2)
        assert [m[:2] for m in refused] == [[b"REFUSED", b"protocol"], [b"REFUSED", b"unknown"]]
        assert len(receive(ask(context, proxy, number(0)), 2)) == 2
    assert "a request for a replay makes no sense" in caplog.text


def test_our_own_source_heals_from_it(context: zmq.Context[Socket], tmp_path: Path) -> None:
    sides = endpoints("pull", "publish", "replay")
    with ProxyThreads(tmp_path / "proxy", sides) as proxy:
        feed(context, proxy, *([b"topic %d" % i, b"%d" % i] for i in range(50)))
        ingest = Ingest(
            stream_options(
                connect=sides["publish"],
                framing="vllm",
                replayEndpoint=sides["replay"],
                replayFrom="earliest",
                walLocation=tmp_path / "source",
            )
        )
        ingest.start()
        try:
            wait_for(lambda: ingest.counters.received == 50, "history")
            feed(context, proxy, *([b"topic %d" % i, b"%d" % i] for i in range(50, 60)))
            wait_for(lambda: ingest.counters.received == 60, "the live flow")
            ingest.seal()
        finally:
            ingest.stop()
    from tests.support import log_rows  # noqa: PLC0415

    rows = log_rows(tmp_path / "source")
    assert rows.column("sequence").to_pylist() == list(range(60))
    assert rows.column("topic").to_pylist() == [f"topic {i}" for i in range(60)]
    assert rows.column("value").to_pylist() == [b"%d" % i for i in range(60)]
    logging.getLogger().info("healed")


# What a review found.


def test_large_messages_come_through_a_window_that_only_acknowledgements_open(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    value = b"." * 200_000
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, *([b"t", value] for _ in range(150)))  # 30 MB, less than half of the credit
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            assert take(me, 150) == [value] * 150
        with DurableSubscriber(proxy.sides["durable"], "hoarder", auto_ack=False) as hoarder:
            assert len(take(hoarder, 150)) == 150  # credit alone does, too


def test_a_connection_that_is_cut_leaves_no_gap(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy, Middlebox(proxy.sides["durable"]) as between:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(5000)))
        with DurableSubscriber(between.endpoint, "me") as me:
            got = take(me, 700)
            between.reset()
            got += take(me, 1300)
            between.reset()
            got += take(me, 3000)
        assert got == [b"%d" % i for i in range(5000)]
        assert between.connections >= 3


def test_messages_that_come_while_an_acknowledgement_is_waited_for_keep_their_order(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(300)))
        got = []
        with DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False, credit=20) as me:
            for _ in range(300):
                message = me.receive(30)
                assert message is not None
                got.append(message.value)
                if message.id % 10 == 0:
                    me.ack(message, wait=True)
        assert got == [b"%d" % i for i in range(300)]


def test_an_acknowledgement_that_gets_no_answer_loses_nothing(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints(*SIDES)
    me = DurableSubscriber(sides["durable"], "me", auto_ack=False, timeout=0.5)
    with ProxyThreads(tmp_path, sides) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(6)))
        me.__enter__()
        assert take(me, 2) == [b"0", b"1"]
    with pytest.raises(NoPeerError, match="acknowledging id 1"):
        me.ack(1, wait=True)
    with ProxyThreads(tmp_path, sides):
        assert take(me, 4) == [b"2", b"3", b"4", b"5"]
        me.ack(5, wait=True)
        me.__exit__(None, None, None)


def test_who_was_displaced_leaves_its_successor_alone(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(10)))
        with DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False, credit=2) as first:
            assert take(first, 2) == [b"0", b"1"]
            first.ack(0, wait=True)
            with DurableSubscriber(proxy.sides["durable"], "me") as second:
                with pytest.raises(SubscriptionError, match="another client"):
                    while True:  # some were on their way
                        first.receive(30)
                first.__exit__(SubscriptionError, None, None)
                assert take(second, 9) == [b"%d" % i for i in range(1, 10)]


def test_what_was_lost_is_told_again_to_who_died_before_it_went_on(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    options = {"walMaxBytes": "1m", "walFlushInterval": "100ms"}
    with ProxyThreads(tmp_path, endpoints(*SIDES), **options) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(20)))
        with DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False) as me:
            take(me, 20)
            me.ack(9, wait=True)
        feed(context, proxy, *([b"t", b"." * 10_000] for _ in range(300)))
        log = proxy.flow.journal.log
        wait_for(lambda: not log.unsealed and log.size <= (1 << 20) - 5 * (1 << 16), "deleted what is to be")
        wait_for(lambda: proxy.server.view.earliest == log.earliest, "and that the server knows")
        told = []
        for _ in range(2):
            with (
                pytest.raises(ZeroDivisionError),
                DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False) as me,
            ):
                message = me.receive(30)
                assert message is not None
                told.append((me.lost, message.id))
                raise ZeroDivisionError
        assert told == [(message.id - 10, message.id)] * 2
        # The status shown may be the one of a moment ago, with the position but not yet the loss.
        wait_for(lambda: account(proxy, "me").get("lost") == message.id - 10, "counted once")
        assert positions(proxy) == {"me": 10}


def test_what_is_lost_is_kept_before_it_is_told(context: zmq.Context[Socket], tmp_path: Path) -> None:
    """Who was told comes back behind it, so a server that was killed meanwhile would never count it."""
    with ProxyThreads(tmp_path, endpoints(*SIDES), walMaxBytes="1m", walFlushInterval="100ms") as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(20)))
        with DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False) as me:
            take(me, 20)
            me.ack(9, wait=True)
        feed(context, proxy, *([b"t", b"." * 10_000] for _ in range(300)))
        log = proxy.flow.journal.log
        wait_for(lambda: not log.unsealed and log.size <= (1 << 20) - 5 * (1 << 16), "deleted what is to be")
        wait_for(lambda: proxy.server.view.earliest == log.earliest, "and that the server knows")
        with DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False) as me:
            message = me.receive(30)
            assert message is not None
            # What a kill would leave now.
            (kept,) = json.loads((tmp_path / "0" / "subscriptions.json").read_text())["subscriptions"]
            assert kept["lost"] == me.lost == message.id - 10


def test_topics_that_are_no_text_are_prefixes_too(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, [b"\xff\xfe\x01", b"0"], [b"ok", b"1"], [b"\xff\xfe\x02", b"x", b"2"])
        with DurableSubscriber(proxy.sides["durable"], "me", topics=[b"\xff\xfe"]) as me:
            assert take(me, 2) == [b"0", b"2"]
        with DurableSubscriber(proxy.sides["durable"], "other", topics=["\ufffd"]) as other:
            assert other.receive(0.1) is None


def test_with_wait_who_comes_late_still_holds_what_it_needs(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    options = {"walMaxBytes": "1m", "whenFull": "wait", "walFlushInterval": "50ms"}
    with ProxyThreads(tmp_path, endpoints(*SIDES), **options) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(50)))
        wait_for(lambda: proxy.status.get("hold") == 50, "nobody needs them")
        with DurableSubscriber(proxy.sides["durable"], "me", auto_ack=False) as me:
            wait_for(lambda: proxy.flow.journal.log.retention.committed == 0, "somebody does")
            push = context.socket(zmq.PUSH)
            push.setsockopt(zmq.SNDHWM, 10)
            push.connect(proxy.sides["pull"])
            assert push.poll(30_000, zmq.POLLOUT)  # connected
            while push.poll(500, zmq.POLLOUT):
                push.send(b"." * 10_000)
            assert proxy.flow.journal.log.earliest == 0
            assert take(me, 50) == [b"%d" % i for i in range(50)]
            assert me.lost == 0


def test_one_message_as_large_as_the_log_does_not_end_the_feed(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES), walMaxBytes="1m", walFlushInterval="50ms") as proxy:
        with DurableSubscriber(proxy.sides["durable"], "away"):
            pass
        feed(context, proxy, [b"t", b"." * (2 << 20)])
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(10)))


def test_what_was_just_published_can_be_asked_for(context: zmq.Context[Socket], tmp_path: Path) -> None:
    sides = endpoints("pull", "publish", "replay")
    with ProxyThreads(tmp_path, sides) as proxy:
        sub = subscriber(context, proxy, b"")
        push = context.socket(zmq.PUSH)
        push.connect(sides["pull"])
        asking = context.socket(zmq.DEALER)
        asking.connect(sides["replay"])
        for i in range(100):
            push.send(b"%d" % i)
            receive(sub, 1)
            asking.send_multipart([b"", number(i) + number(i + 1)])
            assert receive(asking, 2) == [[b"", number(i), b"%d" % i], [b"", END, b""]]


def test_an_unexpected_error_at_one_subscriber_leaves_the_others_alone(
    context: zmq.Context[Socket],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    known, read = Subscriptions.get, durable_session.raw_messages

    def get(self: Subscriptions, name: str) -> Subscription | None:
        return known(self, name) if name != "unlucky" else 1 // 0  # type: ignore[return-value]

    def raw_messages(batch: pa.RecordBatch) -> RawMessages:
        if b"bad" in batch.column("value").to_pylist():
            raise ZeroDivisionError("nobody has thought of this")
        return read(batch)

    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy, caplog.at_level(logging.ERROR):
        with DurableSubscriber(proxy.sides["durable"], "me", topics=["a"]) as me:
            monkeypatch.setattr(Subscriptions, "get", get)
            with (
                pytest.raises(SubscriptionError, match="ZeroDivisionError"),
                DurableSubscriber(proxy.sides["durable"], "unlucky"),
            ):
                pass
            with DurableSubscriber(proxy.sides["durable"], "other", topics=["b"]) as other:
                monkeypatch.setattr(durable_session, "raw_messages", raw_messages)
                feed(context, proxy, [b"b", b"bad"], [b"a", b"good"])
                with pytest.raises(SubscriptionError, match="an unexpected error of the proxy"):
                    other.receive(30)
                assert take(me, 1) == [b"good"]
                monkeypatch.setattr(durable_session, "raw_messages", read)
            with DurableSubscriber(proxy.sides["durable"], "other", topics=["b"]) as other:
                assert take(other, 1) == [b"bad"]  # its position has not moved
        assert proxy.failure is None
    assert "Traceback" in caplog.text


def test_an_unexpected_error_in_one_replay_ends_only_that_one(
    context: zmq.Context[Socket],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    read = replays.columns_of

    def columns_of(raw: RawMessages, number: int | None = None) -> None:
        raise ZeroDivisionError("nobody has thought of this")

    monkeypatch.setattr(replays, "columns_of", columns_of)
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy, caplog.at_level(logging.ERROR):
        feed(context, proxy, [b"a", b"good"])
        feed(context, proxy, [b"a", b"bad"])
        wait_for(lambda: proxy.server.view.end == 2, "the server has seen it")
        asking = context.socket(zmq.DEALER)
        asking.connect(proxy.sides["replay"])
        asking.send_multipart([b"", number(0) + number(2)])
        wait_for(lambda: "nobody has thought of this" in caplog.text, "the error to be told")
        monkeypatch.setattr(replays, "columns_of", read)
        asking.send_multipart([b"", number(0) + number(2)])
        got: list[bytes] = []
        while b"" not in got:  # the value of the last reply
            assert asking.poll(10_000)
            got.append(asking.recv_multipart()[-1])
        assert got[-3:] == [b"good", b"bad", b""]
        assert proxy.failure is None
    assert "Traceback" in caplog.text


def test_a_message_that_takes_long_to_transfer_arrives_once(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy, Middlebox(proxy.sides["durable"]) as slow:
        slow.bytes_per_second = 4_000_000
        feed(context, proxy, [b"t", b"small"], [b"t", bytes(28_000_000)], [b"t", b"after"])
        with DurableSubscriber(slow.endpoint, "me") as me:
            values = take(me, 3)
        assert [len(value) for value in values] == [5, 28_000_000, 5]
        assert slow.bytes < 40_000_000, "it was sent again"


def test_a_client_without_a_look_at_the_kernel_gets_a_long_message_too(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    """As docs/proxy.md has it: after three seconds of silence the same SUBSCRIBE again."""
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy, Middlebox(proxy.sides["durable"]) as slow:
        slow.bytes_per_second = 4_000_000
        feed(context, proxy, [b"t", bytes(4_000_000)])
        dealer = context.socket(zmq.DEALER)
        dealer.connect(slow.endpoint)
        subscribe = [b"SUBSCRIBE", b"1", b"raw", number(7), b"earliest", b"", number(3)]
        dealer.send_multipart(subscribe)
        assert receive(dealer, 1)[0][:2] == [b"READY", number(7)]
        for _ in range(3):
            dealer.send_multipart(subscribe)
        words: list[bytes] = []
        while (
            words.count(b"READY") < 3 or words[-2:] != [b"HEARTBEAT"] * 2
        ):  # the first comes late, behind the rest
            words += [frames[0] for frames in receive(dealer, 1, 5_000)]
        assert (words.count(b"MESSAGE"), words.count(b"READY")) == (1, 3)
        assert slow.bytes < 6_000_000, "it was sent again"


def raw_subscribe(session: int) -> list[bytes]:
    return [b"SUBSCRIBE", b"1", b"raw", number(session), b"earliest", b"", number(100_000)]


def with_full_queue(context: zmq.Context[Socket], proxy: ProxyThreads) -> Socket:
    """A subscriber that takes nothing, until there is no room for one message more."""
    feed(context, proxy, *([b"t", bytes(20_000)] for _ in range(1000)))
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.setsockopt(zmq.RCVBUF, 32 << 10)
    dealer.connect(proxy.sides["durable"])
    dealer.send_multipart(raw_subscribe(1))
    assert receive(dealer, 1)[0][:2] == [b"READY", number(1)]
    sent, since = 0, time.monotonic()

    def stands_still() -> bool:
        nonlocal sent, since
        if sent < (now := sum(account["sent"] for account in proxy.status["durable"])):
            sent, since = now, time.monotonic()
        return 0 < sent < 1000 and time.monotonic() - since > 1

    wait_for(stands_still, "nothing more fits into the queue")
    return dealer


def test_who_subscribes_anew_while_its_queue_is_full_hears_that_it_is_ready(
    context: zmq.Context[Socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose connection was made anew twice: the messages of the first time leave no room for the answer."""
    send, is_full, refused = Router.send, threading.Event(), list[bytes]()

    def refuse(router: Router, frames: list[bytes]) -> bool:
        if not is_full.is_set():
            return send(router, frames)
        refused.append(frames[1])
        return False

    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, *([b"t", b"%d" % number] for number in range(300)))
        dealer = context.socket(zmq.DEALER)
        dealer.connect(proxy.sides["durable"])
        dealer.send_multipart(raw_subscribe(1))
        receive_until(dealer, lambda frames: frames[0] == b"MESSAGE", 300)
        # When a real queue has room again is up to the kernel.
        monkeypatch.setattr(Router, "send", refuse)
        is_full.set()
        for _ in range(2):  # the second one repeats it
            dealer.send_multipart(raw_subscribe(2))
        wait_for(lambda: refused.count(b"READY") > 1, "there is no room for the answer")
        is_full.clear()
        receive_until(dealer, lambda frames: frames[:2] == [b"READY", number(2)])
        again = receive_until(dealer, lambda frames: frames[0] == b"MESSAGE", 300)
        assert [frames[1] for frames in again] == [number(i) for i in range(300)]


def test_an_answer_for_which_there_was_no_room_is_given_later(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    """Heartbeats would keep a client from asking again. First of an acknowledgement, then of the loss of the name."""
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        dealer, other = with_full_queue(context, proxy), context.socket(zmq.DEALER)
        dealer.send_multipart([b"ACK", number(0)])
        wait_for(lambda: proxy.status["durable"][0]["nextId"] == 1, "the acknowledgement")
        assert receive_until(dealer, lambda frames: frames[0] == b"ACKED")[-1][1] == number(1)
    with ProxyThreads(tmp_path / "other", endpoints(*SIDES)) as proxy:
        dealer = with_full_queue(context, proxy)
        other.connect(proxy.sides["durable"])
        other.send_multipart(raw_subscribe(7))
        assert receive(other, 1)[0][0] == b"READY"
        receive_until(dealer, lambda frames: frames[:2] == [b"REFUSED", b"taken"])
        dealer.send_multipart([b"CREDIT", number(1)])
        receive_until(dealer, lambda frames: frames[:2] == [b"REFUSED", b"taken"])


def test_an_acknowledgement_is_answered_though_another_subscriber_begins_at_that_moment(
    context: zmq.Context[Socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other one has saved is what this one waits for."""
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        feed(context, proxy, [b"t", b"0"])
        dealer, other = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for each in (dealer, other):
            each.connect(proxy.sides["durable"])
        dealer.send_multipart(raw_subscribe(1))
        receive_until(dealer, lambda frames: frames[0] == b"MESSAGE")
        inbox, held = Router.inbox, list[Request]()

        def both_at_once(router: Router) -> list[Request]:
            held.extend(inbox(router))
            if len(held) < 2:
                return []
            requests, held[:] = list(held), []
            return requests

        monkeypatch.setattr(Router, "inbox", both_at_once)
        dealer.send_multipart([b"ACK", number(0)])
        wait_for(lambda: len(held) == 1, "the acknowledgement has come")
        other.send_multipart([b"SUBSCRIBE", b"1", b"other", number(2), b"latest", b"", number(1)])
        assert receive_until(dealer, lambda frames: frames[0] == b"ACKED")[-1][1] == number(1)


def test_who_was_displaced_and_says_the_same_again_is_told_so(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        first, second = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for dealer, session in ((first, 1), (second, 2)):
            dealer.connect(proxy.sides["durable"])
            dealer.send_multipart([b"SUBSCRIBE", b"1", b"raw", number(session), b"earliest", b"", number(3)])
            assert receive(dealer, 1)[0][0] == b"READY"
        receive_until(first, lambda frames: frames[:2] == [b"REFUSED", b"taken"])
        first.send_multipart([b"SUBSCRIBE", b"1", b"raw", number(1), b"earliest", b"", number(3)])
        receive_until(first, lambda frames: frames[:2] == [b"REFUSED", b"taken"])
        assert b"REFUSED" not in [frames[0] for frames in drain(second, 50)]


def test_a_late_request_of_a_connection_that_was_given_up_takes_no_name_back(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    """The disk stalls, the client redials, and the proxy hears the new connection before the old one."""
    mine, others = session_number(7, 0), session_number(8, 0)
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        old, new, third = (context.socket(zmq.DEALER) for _ in range(3))
        for dealer in (old, new, third):
            dealer.connect(proxy.sides["durable"])
        new.send_multipart(raw_subscribe(mine + 2))
        receive_until(new, lambda frames: frames[0] == b"READY")
        old.send_multipart(raw_subscribe(mine + 1))
        old.send_multipart([b"ACK", number(0)])
        receive_until(old, lambda frames: frames[:2] == [b"REFUSED", b"unknown"])
        assert b"REFUSED" not in [frames[0] for frames in drain(new, 50)]
        # Nor after another client has taken the name over.
        third.send_multipart(raw_subscribe(others + 1))
        receive_until(third, lambda frames: frames[0] == b"READY")
        receive_until(new, lambda frames: frames[:2] == [b"REFUSED", b"taken"])
        old.send_multipart(raw_subscribe(mine + 1))
        old.send_multipart([b"ACK", number(0)])
        receive_until(old, lambda frames: frames[:2] == [b"REFUSED", b"unknown"])
        assert b"REFUSED" not in [frames[0] for frames in drain(third, 50)]
        # A later session takes it over, whatever its connection.
        old.send_multipart(raw_subscribe(mine + 3))
        receive_until(old, lambda frames: frames[0] == b"READY")
        receive_until(third, lambda frames: frames[:2] == [b"REFUSED", b"taken"])


def test_a_connection_that_flaps_subscriptions_writes_positions_once_a_second(
    context: zmq.Context[Socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write is of all positions, and the messages of all other subscribers wait for it."""
    written: list[int] = []
    put = DirectoryStore.put

    def counting(store: DirectoryStore, key: str, content: bytes) -> None:
        if key.endswith(SUBSCRIPTIONS_NAME):
            written.append(len(content))
        put(store, key, content)

    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        flapping = context.socket(zmq.DEALER)
        flapping.connect(proxy.sides["durable"])
        flapping.send_multipart(raw_subscribe(1))
        receive_until(flapping, lambda frames: frames[0] == b"READY")
        monkeypatch.setattr(DirectoryStore, "put", counting)
        began = time.monotonic()
        for session in range(2, 200):
            topics = [b"%d.%d" % (session % 2, i) for i in range(100)]
            flapping.send_multipart(raw_subscribe(session) + topics)
            receive_until(flapping, lambda frames: frames[0] == b"READY")
        assert len(written) <= 2 + (time.monotonic() - began)
        proxy.next_status()
        assert account(proxy, "raw")["topics"] == [f"1.{i}" for i in range(10)]
    # The last ones are kept, though no client has waited for that.
    assert [s.topics for s in Subscriptions(LogStorage(str(tmp_path)), 0, 1000.0)] == [tuple(topics)]


def test_the_topics_of_all_durable_subscriptions_have_a_bound(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    large = [b"%03d" % i + bytes(29) for i in range(1000)]  # the most that one may have
    with ProxyThreads(tmp_path, endpoints(*SIDES)) as proxy:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(proxy.sides["durable"])
        for count in range(1, 100):
            dealer.send_multipart(
                [b"SUBSCRIBE", b"1", b"%d" % count, number(count), b"latest", b"", number(0), *large]
            )
            (answer,) = receive_until(dealer, lambda frames: frames[0] in (b"READY", b"REFUSED"))
            if answer[0] == b"REFUSED":
                break
        assert 20 < count < 80
        assert answer[1] == b"full"
        assert b"subscribe to fewer topics, or to their common prefix, or end some" in answer[2]
        # What is known, and what has few topics, is not concerned; and there is room once one ends.
        with DurableSubscriber(proxy.sides["durable"], "other", topics=["a"]) as other:
            assert other.new
        for name, topics in ((b"1", large), (b"1", large[:10]), (b"%d" % count, large[:900])):
            count += 1
            dealer.send_multipart(
                [b"SUBSCRIBE", b"1", name, number(count), b"latest", b"", number(0), *topics]
            )
            (ready,) = receive_until(dealer, lambda frames: frames[0] == b"READY")
            assert ready[1] == number(count)


def test_subscribers_that_take_nothing_cost_bounded_memory_though_they_say_they_do(
    context: zmq.Context[Socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DurableServer, "window", 2 << 20)
    size = 256 << 10
    with ProxyThreads(tmp_path, endpoints(*SIDES), **{"zmq.sndbuf": 64 << 10}) as proxy:
        feed(context, proxy, *([b"t", bytes(size)] for _ in range(100)))
        liar = context.socket(zmq.DEALER)
        liar.setsockopt(zmq.RCVHWM, 1)
        liar.setsockopt(zmq.RCVBUF, 64 << 10)
        liar.connect(proxy.sides["durable"])
        liar.send_multipart([b"SUBSCRIBE", b"1", b"liar", number(0), b"earliest", b"", number(1000)])
        wait_for(lambda: account(proxy, "liar").get("sent", 0) >= 4, "it is being sent to")
        other = context.socket(zmq.DEALER)
        other.connect(proxy.sides["durable"])
        other.send_multipart([b"SUBSCRIBE", b"1", b"other", number(0), b"latest", b"", number(0)])
        for _ in range(3):
            liar.send_multipart([b"CREDIT", number(1000)])
            receive_until(other, lambda frames: frames[0] == b"HEARTBEAT")  # which a second brings
        sent = account(proxy, "liar")["sent"]
        assert sent <= 16, "2 MB, what the kernel holds, and one message"
        taken = 0
        while taken < 60:  # who begins to take gets more
            (frames,) = receive(liar, 1)
            if frames[0] == b"MESSAGE":
                taken += 1
                liar.send_multipart([b"CREDIT", number(1)])


def test_a_subscriber_that_takes_nothing_is_tried_ever_more_seldom(
    context: zmq.Context[Socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else fifty of them keep a processor busy."""
    with ProxyThreads(tmp_path, endpoints(*SIDES), **{"zmq.sndbuf": 64 << 10}) as proxy:
        feed(context, proxy, *([b"t", bytes(1000)] for _ in range(2000)))
        silent = context.socket(zmq.DEALER)
        silent.setsockopt(zmq.RCVHWM, 1)
        silent.setsockopt(zmq.RCVBUF, 4096)
        silent.connect(proxy.sides["durable"])
        silent.send_multipart([b"SUBSCRIBE", b"1", b"silent", number(0), b"earliest", b"", number(100_000)])
        wait_for(lambda: account(proxy, "silent").get("sent", 0), "it is being sent to")
        sent: list[object] = [None]

        def stands() -> bool:
            proxy.next_status()
            sent.append(account(proxy, "silent")["sent"])
            return sent[-1] == sent[-2]

        wait_for(stands, "its queue to be full")
        tries = []
        send = Router.send
        monkeypatch.setattr(Router, "send", lambda *given: tries.append(0) or send(*given))
        for _ in range(4):
            proxy.next_status()  # a quarter of a second, or two
        assert len(tries) < 60
        monkeypatch.undo()
        taken = 0
        while taken < 1000:  # it begins to take, and is served again
            (frames,) = receive(silent, 1)
            taken += frames[0] == b"MESSAGE"
        silent.close(0)


def account(proxy: ProxyThreads, name: str) -> dict[str, object]:
    """What the proxy tells of one durable subscriber."""
    return next((a for a in proxy.status.get("durable", ()) if a["name"] == name), {})


def test_a_proxy_without_durable_subscribers_keeps_what_they_need(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    options = {"walRetention": "0s", "walFlushInterval": "50ms"}
    with ProxyThreads(tmp_path, endpoints(*SIDES), **options) as proxy:
        feed(context, proxy, *([b"t", b"%d" % i] for i in range(10)))
        with DurableSubscriber(proxy.sides["durable"], "me") as me:
            assert take(me, 4) == [b"0", b"1", b"2", b"3"]
    with ProxyThreads(tmp_path, endpoints("pull", "replay"), **options) as proxy:
        for i in range(10, 15):
            feed(context, proxy, [b"t", b"%d" % i])
        wait_for(lambda: proxy.status.get("hold") == 4, "what it needs is held")
        chunks = proxy.flow.journal.log.chunks
        proxy.flow.journal.log.retention.remove_expired()
        assert proxy.flow.journal.log.earliest <= 4, chunks
    with (
        ProxyThreads(tmp_path, endpoints(*SIDES), **options) as proxy,
        DurableSubscriber(proxy.sides["durable"], "me") as me,
    ):
        assert take(me, 11) == [b"%d" % i for i in range(4, 15)]
        assert me.lost == 0


def test_a_live_process_that_does_not_listen_stops_no_subscriber(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    """What the server process tells of its subscribers would fill the pipe in a second."""
    log = LogWriter(LogStorage(str(tmp_path)), chunk_bytes=1 << 20, max_bytes=1 << 30)
    log.open()
    sides = endpoints("durable")
    given = {"walLocation": str(tmp_path), "pull": endpoints("pull")["pull"], **sides}
    progress = Progress(log.earliest, log.durable_end, None)
    server = subprocess.Popen(
        [sys.executable, "-c", "from zmq_datasource.proxy.server import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        for line in (start_line(given, logging.WARNING), progress):
            server.stdin.write(json.dumps(line).encode() + b"\n")
        server.stdin.flush()
        assert json.loads(server.stdout.readline()) == {"ready": True}
        dealer = context.socket(zmq.DEALER)
        dealer.connect(sides["durable"])
        for at in range(150):
            name = b"%03d" % at + b"x" * 190
            dealer.send_multipart(
                [b"SUBSCRIBE", b"1", name, number(at), b"earliest", b"", number(3), *([b"t" * 60] * 10)]
            )
        waits = zmq.Poller()
        waits.register(dealer, zmq.POLLIN)
        beats = 0
        while beats < 4:
            assert waits.poll(10_000), f"silent after {beats} heartbeats"
            beats += dealer.recv_multipart()[0] == b"HEARTBEAT"
    finally:
        server.kill()
        server.wait()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.close()
        server.stdout.close()
        log.close()
