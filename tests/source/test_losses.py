"""Losses that are found, counted and healed: publishers in other processes, real sockets and logs, no Spark."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support import Socket, free_endpoint, log_rows, need, stream_options, wait_for
from tests.support.programs import receiving
from tests.support.publishers import Publisher
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import MalformedMessageError, MessageLossError, ZmqDataSourceError
from zmq_datasource.log.state import read_saved_state
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.sequences import Totals
from zmq_datasource.source.facts import read_gaps
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.source.filling import filling_of
from zmq_datasource.source.receiver import REPLAY_SECONDS, Receiver

pytestmark = pytest.mark.spark  # no Spark, but a process or two for each test
Context = zmq.Context[Socket]


@contextmanager
def ingesting(
    location: Path,
    fails: type[ZmqDataSourceError] | None = None,
    replay_timeout: float = REPLAY_SECONDS,
    **options: Any,
) -> Iterator[FeedReceiver]:
    """A running ingest, stopped at the end. If it has failed, ``stop`` must raise ``fails``."""
    ingest = FeedReceiver(
        stream_options(walLocation=location, **options),
        fill=partial(filling_of, replay_timeout=replay_timeout),
    )
    ingest.start()
    try:
        yield ingest
    finally:
        with nullcontext() if fails is None else pytest.raises(fails):
            ingest.stop()


def wait_for_silence(publisher: Publisher) -> None:
    """Wait until the publisher knows that its subscriber has gone, so that it waits for the next one."""
    wait_for(lambda: not publisher.ask("subscriptions")["subscriptions"], "the subscriber to be gone")


def totals(ingest: FeedReceiver) -> Totals:
    """The sums of the tracker for all messages that have arrived."""
    ingest.seal()
    found = ingest.facts().totals
    assert found is not None
    return found


def wait_for_rows(ingest: FeedReceiver, rows: int) -> None:
    wait_for(lambda: ingest.seal() >= rows, f"{rows} rows")


def sequences(location: Path) -> list[int]:
    return [int(n) for n in log_rows(location).column("sequence").to_pylist()]


def gaps(location: Path) -> list[tuple[int, int]]:
    saved = read_saved_state(LogStorage(str(location)))
    return [(row["first"], row["last"]) for row in read_gaps(saved)]


@pytest.mark.parametrize("name", ["sequenced", "vllm"])
def test_each_framing_shows_losses_and_duplicates(name: str, tmp_path: Path) -> None:
    with (
        Publisher(name) as publisher,
        ingesting(tmp_path, connect=publisher.endpoint, framing=name, deduplicate=True) as ingest,
    ):
        publisher.ask("wait-subscriber")
        for command in ("send 5", "skip 3", "send 4", "repeat 2", "control", "send 1"):
            publisher.ask(command)
        wait_for_rows(ingest, 10)
        tracked = totals(ingest)
        assert (tracked.lost, tracked.duplicates, tracked.restarts) == (3, 2, 0)
        assert ingest.counters.malformed == 0
    told = sequences(tmp_path)
    assert told == [n for n in range(told[0], told[0] + 13) if n - told[0] not in (5, 6, 7)]
    assert gaps(tmp_path) == [(told[0] + 5, told[0] + 7)]


def test_the_losses_of_a_stalled_reader_are_counted_exactly() -> None:
    counters = SourceCounters()
    with Publisher("vllm", sndhwm=10) as publisher:
        options = stream_options(connect=publisher.endpoint, framing="vllm", rcvhwm=10)
        with Receiver(options, counters) as receiver:
            tracker = receiver.intake.tracker
            assert tracker is not None

            def received(count: int) -> bool:
                receiver.receive()
                return receiver.pending + counters.received >= count

            wait_for(
                lambda: received(0) and publisher.ask("subscriptions")["subscriptions"], "the subscriber"
            )
            publisher.ask("send 1")
            wait_for(lambda: received(1), "the first message")
            sent = publisher.ask("send 20000 1000")["next"]  # the reader does not read
            while receiver.receive():
                pass
            receiver.take()
            got = counters.received
            assert got < sent

            def heard_the_newest() -> bool:
                nonlocal sent
                sent = publisher.ask("send 1")["next"]  # it shows how many there were
                while receiver.receive():
                    pass
                receiver.take()
                return sent in tracker.expected.values()

            wait_for(heard_the_newest, "the newest message")
            assert tracker.totals.lost == sent - counters.received
            assert tracker.totals.lost > 1000


# Healing.


@contextmanager
def vllm(
    tmp_path: Path, options: dict[str, Any], **publisher_options: Any
) -> Iterator[tuple[Publisher, FeedReceiver]]:
    with (
        Publisher("vllm", replay=free_endpoint_for(options), **publisher_options) as publisher,
        ingesting(
            tmp_path / "log", connect=publisher.endpoint, framing="vllm", replay_timeout=1.0, **options
        ) as ingest,
    ):
        publisher.ask("wait-subscriber")
        yield publisher, ingest


def free_endpoint_for(options: dict[str, Any]) -> str:
    return str(options.setdefault("replayEndpoint", free_endpoint()))


@pytest.mark.parametrize("topic_in_replay", [True, False])
def test_a_gap_is_fetched_from_the_publisher(topic_in_replay: bool, tmp_path: Path) -> None:
    with vllm(tmp_path, {}, topic="kv@pod@model", topic_in_replay=topic_in_replay) as (publisher, ingest):
        publisher.ask("send 5")
        publisher.ask("skip 100")
        publisher.ask("send 5")
        wait_for(lambda: totals(ingest).healed == 100, "the gap healed")
        assert totals(ingest).lost == 0
        assert publisher.ask("requests")["starts"] == [5]
    rows = log_rows(tmp_path / "log")
    assert sorted(sequences(tmp_path / "log")) == list(range(110))
    assert rows.column("id").to_pylist() == list(range(110))
    assert set(rows.column("topic").to_pylist()) == {"kv@pod@model"}
    assert [int(v) for v in rows.column("value").to_pylist()] == sequences(tmp_path / "log")
    assert gaps(tmp_path / "log") == []


def test_with_replay_a_stalled_reader_loses_nothing(tmp_path: Path) -> None:
    """The log is full, receiving pauses, the publisher's queue of 10 overflows, and then there is room again."""
    options = {"walMaxBytes": "256k", "rcvhwm": 10, "zmq_rcvbuf": 4096}
    with vllm(tmp_path, options, sndhwm=10, buffer=50_000) as (publisher, ingest):
        sent = 0
        while not ingest.counters.pauses.total():
            sent = publisher.ask("send 200 1000")["next"]
        sent = publisher.ask("send 6000 1000")["next"]

        def all_there() -> bool:
            need(ingest.storage, ingest.seal())
            publisher.ask("send 1")
            return ingest.counters.received > sent and totals(ingest).lost == 0

        wait_for(all_there, "everything healed", 60)
        assert totals(ingest).healed > 1000
        sent = publisher.ask("send 1")["next"]
        wait_for(
            lambda: (need(ingest.storage, ingest.seal()), ingest.counters.received >= sent)[1], "the rest"
        )
        assert ingest.seal() == ingest.counters.received == sent


def test_history_comes_before_the_live_flow(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with Publisher("vllm", replay=endpoint) as publisher:
        publisher.ask("send 20")
        with ingesting(
            tmp_path,
            connect=publisher.endpoint,
            framing="vllm",
            replayEndpoint=endpoint,
            replayFrom="earliest",
        ) as ingest:
            publisher.ask("wait-subscriber")
            publisher.ask("send 20")
            wait_for_rows(ingest, 40)
            assert totals(ingest).lost == 0
    assert sequences(tmp_path) == list(range(40))


def test_a_replay_endpoint_without_a_server_delays_the_feed_only_by_the_timeout(tmp_path: Path) -> None:
    with (
        Publisher("vllm") as publisher,
        ingesting(
            tmp_path,
            connect=publisher.endpoint,
            framing="vllm",
            replayEndpoint=free_endpoint(),
            replayFrom="earliest",
            replay_timeout=0.2,
            onLoss="fail",
            fails=MessageLossError,
        ) as ingest,
    ):
        publisher.ask("wait-subscriber")
        publisher.ask("send 5")
        wait_for_rows(ingest, 5)
        publisher.ask("skip 2")
        publisher.ask("send 5")
        wait_for_rows(ingest, 10)
        with pytest.raises(MessageLossError, match=r"2 messages of endpoint .* sequences 5 to 6"):
            wait_for(lambda: ingest.seal() > 10, "the failure")


def test_each_publisher_is_asked_for_its_own_messages(tmp_path: Path) -> None:
    replays = [free_endpoint(), free_endpoint()]
    with ExitStack() as stack:
        publishers = [stack.enter_context(Publisher("vllm", replay=replay)) for replay in replays]
        ingest = stack.enter_context(
            ingesting(
                tmp_path,
                connect=",".join(p.endpoint for p in publishers),
                framing="vllm",
                replayEndpoint=",".join(replays),
            )
        )
        for number, publisher in enumerate(publishers):
            publisher.ask("wait-subscriber")
            publisher.ask("send 3")
            publisher.ask(f"skip {5 + number}")
            publisher.ask("send 3")
        wait_for_rows(ingest, 6 + 5 + 6 + 6)
        assert totals(ingest).lost == 0
        assert [p.ask("requests")["starts"] for p in publishers] == [[3], [3]]
        names = [p.endpoint for p in publishers]
    # Also what was replayed: both have sent the same topic and numbers.
    assert Counter(log_rows(tmp_path).column("publisher").to_pylist()) == {names[0]: 11, names[1]: 12}


def test_only_messages_missed_at_a_restart_are_lost(tmp_path: Path) -> None:
    """The subscriber reconnects a moment too late for the first messages, as usual."""
    options = {"framing": "vllm", "deduplicate": True, "zmq_reconnect_ivl": 20}
    first = Publisher("vllm")
    try:
        with ingesting(tmp_path, connect=first.endpoint, **options) as ingest:
            first.ask("wait-subscriber")
            first.ask("send 300")
            wait_for_rows(ingest, 300)
            first.kill()
            with Publisher("vllm", endpoint=first.endpoint) as second:
                second.ask("wait-subscriber")
                second.ask("skip 3")
                second.ask("send 200")
                wait_for_rows(ingest, 500)
                assert (totals(ingest).restarts, totals(ingest).lost) == (1, 3)
    finally:
        first.kill()


def test_a_loss_that_cannot_be_healed_fails_the_query(tmp_path: Path) -> None:
    """Once: the next run continues after the gap."""
    endpoint = free_endpoint()
    options = {"framing": "vllm", "replayEndpoint": endpoint, "onLoss": "fail", "walFlushInterval": "1h"}
    with Publisher("vllm", replay=endpoint, buffer=1) as publisher:
        with ingesting(tmp_path, MessageLossError, connect=publisher.endpoint, **options) as ingest:
            publisher.ask("wait-subscriber")
            publisher.ask("send 2")
            publisher.ask("skip 3")
            publisher.ask("send 1")
            with pytest.raises(MessageLossError, match="sequences 2 to 4"):
                wait_for(ingest.check, "the failure")
        wait_for_silence(publisher)
        with ingesting(tmp_path, connect=publisher.endpoint, **options) as ingest:
            publisher.ask("wait-subscriber")
            asked = publisher.ask("requests")["count"]
            publisher.ask("send 3")
            wait_for_rows(ingest, 6)
            assert totals(ingest).lost == 3
            # Not for the gap, but for what comes next.
            assert min(publisher.ask("requests")["starts"][asked:], default=6) >= 6


# What does not fit, and what fails.


@pytest.mark.parametrize(
    ("option", "error"), [("onLoss", MessageLossError), ("onMalformed", MalformedMessageError)]
)
def test_what_a_pull_has_taken_is_in_the_log_when_receiving_fails(
    context: Context, option: str, error: type[ZmqDataSourceError], tmp_path: Path
) -> None:
    """Otherwise the next run would find a loss, too, and fail again."""
    endpoint = free_endpoint()
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.SNDHWM, 0)
    push.connect(endpoint)
    sent = [number for number in range(100_000) if number != 10 or option == "onMalformed"]
    for number in sent:
        push.send_multipart([number.to_bytes(8, "big"), b"v"])
        if number == 10:
            push.send(b"number")
    options = {"bind": endpoint, "socketType": "PULL", "framing": "custom", "sequenceAt": "0:0:u64be"}
    options |= {"sequenceBy": "endpoint", "rcvhwm": 1_000_000, option: "fail"}
    with ingesting(tmp_path, error, **options) as ingest, pytest.raises(error):
        wait_for(lambda: ingest.seal() < 0, "the failure")
    assert sequences(tmp_path) == sent
    with ingesting(tmp_path, **options) as ingest:
        push.send_multipart([(100_000).to_bytes(8, "big"), b"v"])
        wait_for_rows(ingest, len(sent) + 1)


def test_with_another_numbering_tracking_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher("sequenced") as publisher:
        layout = {"framing": "custom", "sequenceAt": "2:0:u64be", "topicFrame": 0}
        for by in ("endpoint", "topic"):
            wait_for_silence(publisher)
            with ingesting(tmp_path, connect=publisher.endpoint, sequenceBy=by, **layout) as ingest:
                publisher.ask("wait-subscriber")
                publisher.ask("send 1")
                wait_for_rows(ingest, ingest.resumed_at + 1)
                publisher.ask("skip 3")
                publisher.ask("send 1")
                wait_for(lambda: totals(ingest).lost == 3, "the gap")
            assert len(gaps(tmp_path)) == 1
    assert "sequenceBy=topic (before: endpoint)" in caplog.text


# Kills.


def test_a_receiver_killed_at_any_moment_keeps_gaps_and_counts_each_loss_once(tmp_path: Path) -> None:
    chance = random.Random(7)
    log = tmp_path / "log"
    with Publisher("sequenced", publisher="p") as publisher:
        options = {
            "connect": publisher.endpoint,
            "framing": "sequenced",
            "deduplicate": "true",
            "walFlushInterval": "20ms",
            "zmq.reconnect_ivl": "20",
        }
        sent = 0
        for _ in range(5):
            wait_for_silence(publisher)
            with receiving(log, **options):
                publisher.ask("wait-subscriber")
                for _ in range(chance.randint(1, 40)):
                    publisher.ask(f"send {chance.randint(1, 200)}")
                    publisher.ask(f"repeat {chance.randint(1, 3)}")
                    publisher.ask(f"skip {chance.choice([0, 0, 1, 7])}")
        with ingesting(
            log, **{name.replace("zmq.", "zmq_"): value for name, value in options.items()}
        ) as ingest:
            publisher.ask("wait-subscriber")
            sent = publisher.ask("send 1")["next"]
            wait_for(
                lambda: sequences(log)[-1:] == [sent - 1] if ingest.seal() else False, "the last message"
            )
            lost = totals(ingest).lost
    rows = log_rows(log)
    told = rows.column("sequence").to_pylist()
    assert rows.column("id").to_pylist() == list(range(len(told)))
    assert told == sorted(set(told)), "a duplicate has an id"
    assert lost == sent - len(told)  # also what preceded the first: it numbers from 0
    missing = {n for low, high in gaps(log) for n in range(low, high + 1)}
    assert missing == set(range(sent)) - set(told)
