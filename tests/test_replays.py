"""What was lost at the end of a burst, or while nobody listened, is asked for; from the same publisher only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.publishers import Publisher
from tests.support import free_endpoint, log_rows, wait_for
from tests.test_losses import ingesting, sequences, totals, vllm, wait_for_rows, wait_for_silence

pytestmark = pytest.mark.spark  # no Spark, but a process or two for each test


def values(location: Path) -> list[int]:
    return [int(value) for value in log_rows(location).column("value").to_pylist()]


# A feed that has gone silent.


@pytest.mark.parametrize("deduplicate", [False, True])
def test_what_was_lost_at_the_end_of_a_burst_is_fetched_once_the_feed_is_silent(
    deduplicate: bool, tmp_path: Path
) -> None:
    with vllm(tmp_path, {"deduplicate": deduplicate}) as (publisher, ingest):
        publisher.ask("send 5")
        publisher.ask("skip 100")
        wait_for_rows(ingest, 105)
        publisher.ask("send 5")
        wait_for_rows(ingest, 110)
        judged = totals(ingest)
        assert (judged.lost, judged.duplicates, judged.restarts) == (0, 0, 0)
        assert ingest.counters.replayed == 100
    assert sequences(tmp_path / "log") == list(range(110))


def test_bursts_over_a_small_high_water_mark_arrive_whole(tmp_path: Path) -> None:
    with vllm(tmp_path, {"rcvhwm": 10, "zmq_rcvbuf": 4096}, sndhwm=10, buffer=50_000) as (publisher, ingest):
        for _ in range(3):
            sent = publisher.ask("send 4000 200")["next"]
        sent = publisher.ask("skip 3000")[
            "next"
        ]  # more than the publisher's ROUTER holds: it drops replies too
        wait_for(lambda: ingest.seal() >= sent and totals(ingest).lost == 0, "all of it", 60)
        assert ingest.log.durable_end == sent
    assert sorted(sequences(tmp_path / "log")) == list(range(sent))


@pytest.mark.parametrize("heard_by", ["a running query", "a query that was stopped"])
@pytest.mark.parametrize("second_has", [5, 30])
def test_a_publisher_that_has_restarted_in_silence_is_no_continuation(
    second_has: int, heard_by: str, tmp_path: Path
) -> None:
    """Its messages have numbers that were seen, or that are expected; they are others."""
    endpoint, replay = free_endpoint(), free_endpoint()
    options = {"connect": endpoint, "framing": "vllm", "replayEndpoint": replay, "zmq_reconnect_ivl": 20}
    options |= {"replayTimeout": "1s"}
    first = Publisher("vllm", endpoint, replay=replay)
    try:
        with ingesting(tmp_path, **options) as ingest:
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
                with ingesting(tmp_path, **options) as ingest:
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
    judged = totals(ingest)
    assert (judged.lost, judged.duplicates, judged.restarts) == (0, 0, 1)


def test_after_a_restart_a_query_still_catches_up_when_it_comes_back(tmp_path: Path) -> None:
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
            judged = totals(ingest)
            assert (judged.lost, judged.duplicates, judged.restarts) == (0, 0, 1)
            assert ingest.counters.replayed == 100
    assert values(tmp_path) == list(range(300))
