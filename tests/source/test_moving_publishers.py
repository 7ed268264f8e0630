"""A publisher's numbers are remembered when another partition of the log receives it. No JVM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.source.test_feeds import Several, several
from tests.support import Socket, bound, free_endpoint, keep_handlers, stop_sooner, wait_for
from tests.support.publishers import Publisher
from zmq_datasource.log.state import read_saved_state
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.source.facts import read_gaps, states_of_other_partitions

pytestmark = pytest.mark.spark  # no Spark, but a process or two for each test
Context = zmq.Context[Socket]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)
    stop_sooner(monkeypatch)


@contextmanager
def ranks(count: int, replay: bool) -> Iterator[tuple[list[Publisher], dict[str, Any]]]:
    """Start so many vLLM ranks. Returns them with the options to receive from them."""
    replays = [free_endpoint() for _ in range(count if replay else 0)]
    publishers = [
        Publisher("vllm", values_from=1000 * n, **({"replay": replays[n]} if replay else {}))
        for n in range(count)
    ]
    options: dict[str, Any] = {
        "socketType": "SUB",
        "framing": "vllm",
        "connect": ",".join(publisher.endpoint for publisher in publishers),
        "zmq_reconnect_ivl": 20,
    }
    if replay:
        options |= {"replayEndpoint": ",".join(replays)}
    try:
        yield publishers, options
    finally:
        for publisher in publishers:
            publisher.kill()


def told(query: Several) -> dict[str, Any]:
    figures = query.reader.reportLatestOffset()
    assert figures is not None
    return figures


def receive(query: Several, publishers: list[Publisher], each: int, expected: int) -> None:
    """Let each rank send ``each`` messages once it has a subscriber, and wait until the query has all rows."""
    query.step()
    for publisher in publishers:
        publisher.ask("wait-subscriber")
        publisher.ask(f"send {each}")
    query.until(expected)


def leave(publishers: list[Publisher]) -> None:
    for publisher in publishers:
        wait_for(lambda p=publisher: not p.ask("subscriptions")["subscriptions"], "the subscriber to leave")


RECEIVERS = (2, 1, 2)


def test_with_a_replay_another_number_of_receivers_gets_each_missed_message_once(tmp_path: Path) -> None:
    checkpoint, values = None, []
    with ranks(2, replay=True) as (publishers, options):
        for number in RECEIVERS:
            with several(tmp_path, checkpoint, receivers=number, **options) as query:
                due = 20 if checkpoint is None else 40
                receive(query, publishers, 10, due)
                checkpoint = query.checkpoint
                values += query.values
                figures = told(query)
            leave(publishers)
            for publisher in publishers:
                publisher.ask("skip 10")  # it sends while the query is away
    sent = [[*range(1000 * n, 1000 * n + 20 * len(RECEIVERS) - 10)] for n in range(2)]
    assert sorted(values) == sorted([*sent[0], *sent[1]])
    assert (figures["messagesLost"], figures["messagesDuplicate"]) == (0, 0)


def test_without_a_replay_another_number_of_receivers_counts_losses_exactly(tmp_path: Path) -> None:
    checkpoint = None
    with ranks(2, replay=False) as (publishers, options):
        for number in RECEIVERS:
            with several(tmp_path, checkpoint, receivers=number, **options) as query:
                receive(query, publishers, 10, 20)
                checkpoint = query.checkpoint
                figures = told(query)
            leave(publishers)
            for publisher in publishers:
                publisher.ask("skip 10")
    away = 20 * (len(RECEIVERS) - 1)
    assert (figures["messagesReceived"], figures["messagesLost"]) == (20 * len(RECEIVERS), away)
    assert lost_in_tables(tmp_path) == away


def lost_in_tables(log: Path) -> int:
    """The missing messages in all gap tables of a log."""
    missing = 0
    for partition in LogStorage(str(log)).partitions():
        storage = LogStorage(str(log), partition)
        missing += sum(
            gap["messages"]
            for gap in read_gaps(read_saved_state(storage), states_of_other_partitions(storage))
            if gap["healed"] is None
        )
    return missing


def send(pubs: list[tuple[Socket, str]], *numbers: int) -> None:
    for name, (pub, _) in enumerate(pubs):
        for number in numbers:
            pub.send_multipart(
                [b"t", b"p%d" % name, number.to_bytes(8, "big"), b"%d" % (name * 1000 + number)]
            )


def subscribed(query: Several, pubs: list[tuple[Socket, str]]) -> None:
    query.step()
    for pub, _ in pubs:
        while pub.recv() != b"\x01":
            pass


def test_two_publishers_with_one_name_in_two_partitions_stay_distinct(
    context: Context, tmp_path: Path
) -> None:
    """Each receiver continues with its own publisher, however often the query is restarted."""
    pubs = [bound(context, zmq.XPUB, xpub_verboser=1) for _ in range(2)]
    options: dict[str, Any] = {
        "socketType": "SUB",
        "framing": "sequenced",
        "sequenceBy": "topic",
        "connect": ",".join(endpoint for _, endpoint in pubs),
    }
    checkpoint = None
    for run in range(3):
        with several(tmp_path, checkpoint, receivers=2, **options) as query:
            subscribed(query, pubs)
            send(pubs[:1], *range(100 * run, 100 * run + 100))
            send(pubs[1:], *range(5 * run, 5 * run + 5))
            query.until(105)
            checkpoint = query.checkpoint
            figures = told(query)
            assert (figures["messagesLost"], figures["messagesDuplicate"]) == (0, 0)
