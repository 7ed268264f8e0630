"""Messages lost at the end of a burst, or without a subscriber, are requested, from the same publisher only."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.source.test_losses import (
    RouterOnItsOwnTerms,
    ingesting,
    sequences,
    totals,
    vllm,
    wait_for_rows,
    wait_for_silence,
)
from tests.support import Socket, channel_of, free_endpoint, log_rows, wait_for
from tests.support.middlebox import Middlebox
from tests.support.publishers import Publisher
from zmq_datasource.options import BatchReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.source.ingest import Ingest
from zmq_datasource.source.replay_session import ReplaySession
from zmq_datasource.spark.batch_reader import ZmqLiveReader

pytestmark = pytest.mark.spark  # no Spark, but a process or two for each test
Context = zmq.Context[Socket]


def values(location: Path) -> list[int]:
    return [int(value) for value in log_rows(location).column("value").to_pylist()]


# A feed that has gone silent.


@pytest.mark.parametrize("deduplicate", [False, True])
def test_losses_at_the_end_of_a_burst_are_fetched_once_the_feed_is_silent(
    deduplicate: bool, tmp_path: Path
) -> None:
    with vllm(tmp_path, {"deduplicate": deduplicate}) as (publisher, ingest):
        publisher.ask("send 5")
        publisher.ask("skip 100")
        wait_for_rows(ingest, 105)
        publisher.ask("send 5")
        wait_for_rows(ingest, 110)
        tracked = totals(ingest)
        assert (tracked.lost, tracked.duplicates, tracked.restarts) == (0, 0, 0)
        assert ingest.counters.replayed == 100
    assert sequences(tmp_path / "log") == list(range(110))


@pytest.mark.parametrize("heard_by", ["a running query", "a query that was stopped"])
@pytest.mark.parametrize("second_has", [5, 30])
def test_a_restart_during_silence_is_found(second_has: int, heard_by: str, tmp_path: Path) -> None:
    """Its new messages have numbers that were received before, or that are expected."""
    endpoint, replay = free_endpoint(), free_endpoint()
    options = {"connect": endpoint, "framing": "vllm", "replayEndpoint": replay, "zmq_reconnect_ivl": 20}
    first = Publisher("vllm", endpoint, replay=replay)
    try:
        with ingesting(tmp_path, replay_timeout=1.0, **options) as ingest:
            first.ask("wait-subscriber")
            first.ask("send 10")
            wait_for_rows(ingest, 10)
            if heard_by == "a running query":
                first.kill()
                with Publisher("vllm", endpoint, replay=replay, values_from=1000) as second:
                    second.ask(f"skip {second_has}")
                    finish(second, ingest, second_has)
        if heard_by == "a query that was stopped":
            first.kill()
            with Publisher("vllm", endpoint, replay=replay, values_from=1000) as second:
                second.ask(f"skip {second_has}")
                with ingesting(tmp_path, replay_timeout=1.0, **options) as ingest:
                    finish(second, ingest, second_has)
    finally:
        first.kill()
    assert values(tmp_path) == [*range(10), *range(1000, 1005 + second_has)]
    assert sequences(tmp_path) == [*range(10), *range(5 + second_has)]


def finish(second: Publisher, ingest: Any, had: int) -> None:
    wait_for_rows(ingest, 10 + had)
    second.ask("wait-subscriber")
    second.ask("send 5")
    wait_for_rows(ingest, 15 + had)
    tracked = totals(ingest)
    assert (tracked.lost, tracked.duplicates, tracked.restarts) == (0, 0, 1)


def test_a_connection_cut_during_silence_is_no_restart(tmp_path: Path) -> None:
    endpoint, replay = free_endpoint(), free_endpoint()
    with Publisher("vllm", endpoint, replay=replay) as publisher, Middlebox(endpoint) as between:
        options = {"connect": between.endpoint, "framing": "vllm", "replayEndpoint": replay}
        with ingesting(tmp_path, zmq_reconnect_ivl=20, **options) as ingest:
            publisher.ask("wait-subscriber")
            publisher.ask("send 5")
            wait_for_rows(ingest, 5)
            between.reset()
            publisher.ask("skip 10")
            wait_for_rows(ingest, 15)
            publisher.ask("wait-subscriber")
            publisher.ask("send 5")
            wait_for_rows(ingest, 20)
            tracked = totals(ingest)
            assert (tracked.lost, tracked.duplicates, tracked.restarts) == (0, 0, 0)
    assert sequences(tmp_path) == list(range(20))


def test_a_restarted_query_catches_up_after_the_publisher_has_restarted(tmp_path: Path) -> None:
    endpoint, replay = free_endpoint(), free_endpoint()
    options = {"connect": endpoint, "framing": "vllm", "replayEndpoint": replay, "zmq_reconnect_ivl": 20}
    with ingesting(tmp_path, **options) as ingest:
        with Publisher("vllm", endpoint, replay=replay) as first:
            first.ask("wait-subscriber")
            first.ask("send 100")
            wait_for_rows(ingest, 100)
        second = Publisher("vllm", endpoint, replay=replay, values_from=100)
        second.ask("wait-subscriber")
        second.ask("send 100")
        wait_for_rows(ingest, 200)
    with second:
        wait_for_silence(second)
        second.ask("send 100")
        with ingesting(tmp_path, **options) as ingest:
            wait_for_rows(ingest, 300)
            tracked = totals(ingest)
            assert (tracked.lost, tracked.duplicates, tracked.restarts) == (0, 0, 1)
            assert ingest.counters.replayed == 100
    assert values(tmp_path) == list(range(300))


def test_a_late_subscriber_asks_for_no_history(tmp_path: Path) -> None:
    with vllm(tmp_path, {}) as (publisher, ingest):
        publisher.ask("skip 20")  # nothing was received, so the next number is not known
        assert not asked_while_silent(ingest)
        publisher.ask("send 1")
        wait_for_rows(ingest, 1)
        wait_for(lambda: publisher.ask("requests")["starts"], "a question for what follows")
        assert publisher.ask("requests")["starts"] == [20]
    assert sequences(tmp_path / "log") == [20]


def asked_while_silent(ingest: Ingest) -> bool:
    """Wait for the end of the silence. Returns whether a request is open."""
    session = session_of(ingest)
    wait_for(lambda: session.silence.caught_up, "the end of the silence")
    return session.is_asking


def session_of(ingest: Ingest) -> ReplaySession:
    replayer = channel_of(ingest).replayer
    assert replayer is not None
    return replayer.session


def test_history_is_fetched_though_the_first_answer_had_none(tmp_path: Path) -> None:
    with vllm(tmp_path, {"replayFrom": "earliest"}) as (publisher, ingest):
        wait_for(lambda: publisher.ask("requests")["count"], "the first question")
        publisher.ask("skip 20")
        wait_for_rows(ingest, 20)
        publisher.ask("send 5")
        wait_for_rows(ingest, 25)
        assert totals(ingest).duplicates == 0
    assert sequences(tmp_path / "log") == list(range(25))


def test_gaps_of_a_publisher_are_not_filled_after_its_restart(tmp_path: Path) -> None:
    """The restarted publisher has other messages under these numbers."""
    endpoint, replay = free_endpoint(), free_endpoint()
    options = {"connect": endpoint, "framing": "vllm", "replayEndpoint": replay, "zmq_reconnect_ivl": 20}
    with ingesting(tmp_path, replay_timeout=60.0, **options) as ingest:
        with Publisher("vllm", endpoint) as first:  # no publisher answers the request for the gap
            first.ask("wait-subscriber")
            first.ask("send 2")
            first.ask("skip 3")
            first.ask("send 2")
            wait_for_rows(ingest, 4)
        with Publisher("vllm", endpoint, replay=replay, values_from=1000) as second:
            second.ask("skip 10")
            second.ask("wait-subscriber")
            wait_for_rows(ingest, 14)
            tracked = totals(ingest)
            assert (tracked.lost, tracked.healed, tracked.restarts) == (3, 0, 1)
    assert values(tmp_path) == [0, 1, 5, 6, *range(1000, 1010)]


def test_a_receiver_killed_during_a_replay_has_each_message_once(tmp_path: Path) -> None:
    endpoint, replay, log = free_endpoint(), free_endpoint(), tmp_path / "log"
    options = {"connect": endpoint, "framing": "vllm", "replayEndpoint": replay}
    arguments = [f"{name}={value}" for name, value in options.items()]
    arguments += [f"walLocation={log}", "walFlushInterval=20ms"]
    with Publisher("vllm", endpoint, replay=replay, buffer=50_000) as publisher:
        for _ in range(3):
            driver = subprocess.Popen([sys.executable, "-m", "tests.support.ingest_driver", *arguments])
            try:
                publisher.ask("wait-subscriber")
                publisher.ask("send 1")
                publisher.ask("skip 5000")
                before = publisher.ask("requests")["count"]
                wait_for(lambda: publisher.ask("requests")["count"] > before, "a question")  # noqa: B023
            finally:
                driver.kill()
                driver.wait(30)
            wait_for_silence(publisher)
        sent = publisher.ask("send 0")["next"]
        with ingesting(log, **options) as ingest:
            wait_for(lambda: ingest.seal() >= sent - sequences(log)[0], "all of it")
            assert totals(ingest).lost == 0
    told = sorted(sequences(log))
    assert told == list(range(told[0], sent))


# Reads that end.


def test_a_batch_read_asks_for_later_messages_before_silence_ends_it(tmp_path: Path) -> None:
    endpoint, replay = free_endpoint(), free_endpoint()
    read = ["connect", endpoint, "framing", "vllm", "replayEndpoint", replay, "socketType", "SUB"]
    read += ["timeout", "20s", "idleTimeout", "300ms", "replayFrom", "earliest"]
    with Publisher("vllm", endpoint, replay=replay) as publisher, ThreadPoolExecutor(1) as thread:
        publisher.ask("send 3")
        reader = ZmqLiveReader(parse(BatchReadOptions, dict(zip(read[::2], read[1::2], strict=True))))
        rows = thread.submit(
            lambda: [
                n
                for part in reader.partitions()
                for b in reader.read(part)
                for n in b["sequence"].to_pylist()
            ]
        )
        publisher.ask("wait-subscriber")
        publisher.ask("send 2")
        publisher.ask("skip 100")
        assert rows.result(30) == list(range(105))


def test_available_now_asks_for_later_messages_before_silence_ends_it(tmp_path: Path) -> None:
    with vllm(tmp_path, {}) as (publisher, ingest):
        publisher.ask("send 5")
        publisher.ask("skip 100")
        assert ingest.receive_for(20, 0.2) == 105
        publisher.ask("skip 20000")
        before = time.monotonic()
        ingest.receive_for(20, 0.2)
        assert time.monotonic() - before < 15


def test_a_read_does_not_wait_for_a_replay_endpoint_without_a_server(tmp_path: Path) -> None:
    with (
        Publisher("vllm") as publisher,
        ingesting(
            tmp_path, connect=publisher.endpoint, framing="vllm", replayEndpoint=free_endpoint()
        ) as ingest,
    ):
        publisher.ask("wait-subscriber")
        publisher.ask("send 5")
        wait_for_rows(ingest, 5)
        before = time.monotonic()
        assert ingest.receive_for(20, 0.2) == 5
        assert time.monotonic() - before < 5


# When it asks (test_replay_session tries it by a clock).


def test_a_full_log_asks_for_nothing(tmp_path: Path) -> None:
    """While nothing is received, the publisher does not count as silent."""
    with vllm(tmp_path, {"walMaxBytes": "64k"}) as (publisher, ingest):
        publisher.ask("send 200 1000")
        wait_for(lambda: ingest.log.full, "the full log")
        asked = publisher.ask("requests")["count"]
        over_at = session_of(ingest).silence.over_at
        wait_for(lambda: session_of(ingest).silence.over_at > over_at + 1.5, "a pause")
        assert publisher.ask("requests")["count"] == asked
        wait_for(lambda: (ingest.log.commit(ingest.seal()), ingest.counters.received >= 200)[1], "the others")
        assert totals(ingest).lost == 0


# The proxy as the publisher.


def test_a_replay_with_other_values_than_were_published_is_dropped(
    context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On the same connection no publisher can have restarted. Perhaps the endpoint is that of another publisher."""
    with (
        RouterOnItsOwnTerms(context, [[2, 3, 4, None]]) as router,
        Publisher("vllm") as publisher,
        ingesting(
            tmp_path, connect=publisher.endpoint, framing="vllm", replayEndpoint=router.endpoint
        ) as ingest,
    ):
        publisher.ask("wait-subscriber")
        publisher.ask("send 3")
        wait_for(lambda: ingest.seal() and "another value" in caplog.text, "the warning")
        publisher.ask("send 2")
        wait_for_rows(ingest, 5)
        tracked = totals(ingest)
        assert (tracked.lost, tracked.duplicates, tracked.restarts) == (0, 0, 0)
    assert values(tmp_path) == list(range(5))
