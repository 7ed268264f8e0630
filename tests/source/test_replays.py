"""Messages lost at the end of a burst, or without a subscriber, are requested, from the same publisher only.

``test_replay_session`` tries orders of faults, and when a session asks, without sockets.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.source.test_losses import (
    ingesting,
    sequences,
    totals,
    vllm,
    wait_for_rows,
    wait_for_silence,
)
from tests.support import free_endpoint, log_rows, wait_for
from tests.support.programs import receiving
from tests.support.publishers import Publisher
from zmq_datasource.options import BatchReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.spark.batch_reader import ZmqLiveReader

pytestmark = pytest.mark.spark  # no Spark, but a process or two for each test


def values(location: Path) -> list[int]:
    return [int(value) for value in log_rows(location).column("value").to_pylist()]


# A feed that has gone silent.


def test_losses_at_the_end_of_a_burst_are_fetched_once_the_feed_is_silent(tmp_path: Path) -> None:
    with vllm(tmp_path, {}) as (publisher, ingest):
        publisher.ask("send 5")
        publisher.ask("skip 100")
        wait_for_rows(ingest, 105)
        publisher.ask("send 5")
        wait_for_rows(ingest, 110)
        assert (totals(ingest).lost, totals(ingest).restarts) == (0, 0)
        assert ingest.counters.replayed == 100
    assert sequences(tmp_path / "log") == list(range(110))


@pytest.mark.parametrize("heard_by", ["a running query", "a query that was stopped"])
def test_after_a_restart_during_silence_the_first_live_message_brings_those_before_it(
    heard_by: str, tmp_path: Path
) -> None:
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
                    finish(second, ingest)
        if heard_by == "a query that was stopped":
            first.kill()
            with (
                Publisher("vllm", endpoint, replay=replay, values_from=1000) as second,
                ingesting(tmp_path, replay_timeout=1.0, **options) as ingest,
            ):
                finish(second, ingest)
    finally:
        first.kill()
    assert sorted(values(tmp_path)) == [*range(10), *range(1000, 1007)]
    assert sorted(sequences(tmp_path)[10:]) == list(range(7))


def finish(second: Publisher, ingest: Any) -> None:
    second.ask("skip 5")
    second.ask("wait-subscriber")
    second.ask("send 2")
    wait_for_rows(ingest, 17)
    assert (totals(ingest).lost, totals(ingest).restarts) == (0, 1)


def test_history_is_fetched_though_the_first_answer_had_none(tmp_path: Path) -> None:
    with vllm(tmp_path, {"replayFrom": "earliest"}) as (publisher, ingest):
        wait_for(lambda: publisher.ask("requests")["count"], "the first question")
        publisher.ask("skip 20")
        wait_for_rows(ingest, 20)
        publisher.ask("send 5")
        wait_for_rows(ingest, 25)
    assert sequences(tmp_path / "log") == list(range(25))


def test_a_receiver_killed_during_a_replay_has_each_message_once(tmp_path: Path) -> None:
    endpoint, replay, log = free_endpoint(), free_endpoint(), tmp_path / "log"
    options = {"connect": endpoint, "framing": "vllm", "replayEndpoint": replay}
    with Publisher("vllm", endpoint, replay=replay, buffer=50_000) as publisher:
        for _ in range(3):
            with receiving(log, **options):
                publisher.ask("wait-subscriber")
                publisher.ask("send 1")
                publisher.ask("skip 5000")
                before = publisher.ask("requests")["count"]
                wait_for(lambda: publisher.ask("requests")["count"] > before, "a question")  # noqa: B023
            wait_for_silence(publisher)
        sent = publisher.ask("send 0")["next"]
        with ingesting(log, **options) as ingest:
            wait_for(lambda: ingest.seal() >= sent - sequences(log)[0], "all of it")
            assert totals(ingest).lost == 0
    told = sorted(sequences(log))
    assert told == list(range(told[0], sent))


# Reads that end.


def test_a_batch_read_that_is_silent_for_more_than_a_second_asks_for_later_messages(tmp_path: Path) -> None:
    endpoint, replay = free_endpoint(), free_endpoint()
    read = ["connect", endpoint, "framing", "vllm", "replayEndpoint", replay, "socketType", "SUB"]
    read += ["timeout", "20s", "idleTimeout", "3s", "replayFrom", "earliest"]
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
