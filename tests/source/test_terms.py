"""Queries that receive one feed on different terms: retention, replay, and what a loss means. No JVM."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.source.test_feed import Query, send
from tests.support import (
    Socket,
    bound,
    free_endpoint,
    keep_handlers,
    stop_sooner,
    stream_options,
    take_over,
    wait_for,
)
from tests.support.publishers import Publisher
from zmq_datasource.errors import LogLockedError, MessageLossError
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.source.feed import Feed
from zmq_datasource.source.ingest import Ingest

Context = zmq.Context[Socket]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)
    stop_sooner(monkeypatch)
    take_over(monkeypatch, standby=0.01)
    monkeypatch.setattr(Ingest, "replaying_seconds", 0.1)


@contextmanager
def query(location: Path, checkpoint: Any = None, **options: Any) -> Iterator[Query]:
    made = Query(location, checkpoint, **options)
    try:
        yield made
    finally:
        made.reader.stop()


def earliest(location: Path) -> int:
    return read_index(LogStorage(str(location))).earliest


# Retention.


def receive_some(made: Query, push: Socket, begin: int, end: int) -> None:
    """Send messages into many small chunks, and commit all of them."""
    made.step()
    rows = len(made.rows)
    for number in range(begin, end, 10):
        send(push, number, number + 10)
        rows += 10
        made.until(rows)
    made.step()


def test_the_retention_of_a_query_survives_another_one_that_receives_first(
    context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with query(tmp_path, connect=endpoint, walRetention="1d") as job:
        receive_some(job, push, 0, 100)
    with query(tmp_path, connect=endpoint, reader="notebook") as notebook:
        notebook.step()
        assert "stay for 86400s, because a query that reads it has this walRetention" in caplog.text
        assert "walRetention=0s (before: 86400s)" in caplog.text
        receive_some(notebook, push, 100, 200)
    with query(tmp_path, job.checkpoint, connect=endpoint, walRetention="1d") as job:
        job.until(100)
        assert earliest(tmp_path) == 0


def test_a_receiver_logs_the_options_that_differ_from_the_last_receivers(
    context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, endpoint = bound(context, zmq.PUSH)
    common: dict[str, Any] = {"walLocation": tmp_path, "socketType": "PULL", "connect": endpoint}
    for options, warnings in (
        ({"walRetention": "1d", "walMaxBytes": "1g"}, 0),
        ({"walRetention": "1d", "walMaxBytes": "1g"}, 0),
        ({"walMaxBytes": "1g"}, 1),
        ({"walMaxBytes": "1g"}, 0),
    ):
        caplog.clear()
        ingest = Ingest(stream_options(**common, **options))
        ingest.start()
        ingest.stop()
        said = [r.message for r in caplog.records if "was last received with other" in r.message]
        assert len(said) == warnings
        if said:
            assert said[0].endswith("those of this process apply: walRetention=600s (before: 86400s)")


def test_a_query_that_follows_logs_its_options_that_have_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = {"zmq.curve_secretkey": "a" * 40, "zmq.curve_publickey": "b" * 40, "zmq.curve_server": "1"}
    common: dict[str, Any] = {"walLocation": tmp_path, "socketType": "PULL", "bind": free_endpoint()}
    ingest = Ingest(stream_options(**common, **secret, walRetention="1d"))
    ingest.open()
    try:
        followers: tuple[tuple[dict[str, Any], str], ...] = (
            (
                secret | {"walMaxBytes": "1g", "rcvhwm": 7},
                "walMaxBytes=1 GiB (there: 4 GiB), rcvhwm=7 (there: 1000)",
            ),
            (secret | {"walRetention": "1h"}, ""),  # both retentions have an effect
            ({}, "zmq.*={} (there: {'curve_publickey': "),
        )
        for options, differences in followers:
            caplog.clear()
            feed = Feed(stream_options(**common, **options))
            feed.open()
            feed.stop()
            said = [r.getMessage() for r in caplog.records if "and those apply: " in r.getMessage()]
            assert len(said) == bool(differences)
            assert differences in "".join(said)
            assert "a" * 40 not in caplog.text
    finally:
        ingest.stop()
    assert "a" * 40 not in (tmp_path / "terms.json").read_text()


def test_a_query_of_another_feed_is_refused_with_the_options_that_differ(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Ingest, "lock_wait_seconds", 0.1)
    monkeypatch.setattr(Ingest, "warn_seconds", 0.0)
    _, endpoint = bound(context, zmq.XPUB)
    common: dict[str, Any] = {"walLocation": tmp_path, "connect": endpoint}
    other = stream_options(**common, topics="b,c", topicDelimiter="+")
    ingest = Ingest(stream_options(**common, topics="a"))
    ingest.open()
    try:
        with pytest.raises(LogLockedError) as refused:
            Feed(other).open()
    finally:
        ingest.stop()
    differences = "It receives another feed: topics=b,c (there: a), topicDelimiter=+ (there: not set)"
    assert str(refused.value).endswith(differences)
    assert f"{differences}; waiting up to 0 s more for that process to end" in caplog.text
    # Afterwards it may receive into this log, and says so.
    Ingest(other).open()
    assert "those of this process apply: topics=b,c (before: a)" in caplog.text


# Replay.


@pytest.fixture
def replay() -> str:
    return free_endpoint()


@pytest.mark.spark  # no Spark, but a process
def test_a_query_with_a_replay_receives_though_another_query_received_first(
    replay: str, tmp_path: Path
) -> None:
    with Publisher("vllm", replay=replay) as publisher:
        options = vllm(publisher)
        with query(
            tmp_path, walRetention="1h", **options
        ) as notebook:  # what it has read stays for the other one
            notebook.step()
            publisher.ask("wait-subscriber")
            publisher.ask("send 10")
            publisher.ask("skip 5")
            publisher.ask("send 10")
            notebook.until(20)
            with query(tmp_path, startingOffsets="earliest", replayEndpoint=replay, **options) as job:
                wait_for(lambda: (notebook.step(), job.step())[1] == 25, "the messages that were missing")
                assert job.receives
                notebook.until(25)
            # Without it the other query receives again.
            wait_for(lambda: notebook.receives, "the other one")
            publisher.ask("wait-subscriber")
            publisher.ask("send 5")
            notebook.until(30)
    assert sorted(int(value) for _, value in notebook.rows) == list(range(30))


def vllm(publisher: Publisher) -> dict[str, Any]:
    return {
        "connect": publisher.endpoint,
        "socketType": "SUB",
        "framing": "vllm",
        "zmq_reconnect_ivl": 20,
    }


# What a loss means.


def numbered(pub: Socket, *numbers: int) -> None:
    for number in numbers:
        pub.send_multipart([b"t", b"p", number.to_bytes(8, "big"), b"%d" % number])


def sequenced(endpoint: str) -> dict[str, Any]:
    return {"connect": endpoint, "socketType": "SUB", "framing": "sequenced"}


def test_a_query_that_follows_fails_at_a_loss_with_onLoss_fail(context: Context, tmp_path: Path) -> None:
    """The receiving query does not fail. The failed query, restarted, continues after the loss."""
    pub, endpoint = bound(context, zmq.XPUB)
    # With a name, because the log keeps nothing for an unnamed query that does not run.
    failing = sequenced(endpoint) | {"onLoss": "fail", "reader": "job"}
    with query(tmp_path, **sequenced(endpoint)) as notebook:
        notebook.step()
        assert pub.recv() == b"\x01"
        numbered(pub, 0, 1, 5)  # lost before the query begins
        notebook.until(3)
        with query(tmp_path, **failing) as job:
            job.step()
            numbered(pub, 6)
            job.until(1)
            numbered(pub, 10)
            with pytest.raises(
                MessageLossError, match="3 messages of publisher 'p' never came: sequences 7 to 9"
            ):
                wait_for(lambda: job.step() and False, "the failure")
        notebook.until(5)
        with query(tmp_path, job.checkpoint, **failing) as job:
            numbered(pub, 11)
            wait_for(lambda: job.step() and job.rows[-1][1] == b"11", "the next one")
        notebook.until(6)


def test_a_loss_that_the_last_receiver_noticed_during_a_batch_fails_the_query_that_takes_over(
    context: Context, tmp_path: Path
) -> None:
    pub, endpoint = bound(context, zmq.XPUB)
    failing = sequenced(endpoint) | {"onLoss": "fail", "reader": "job"}
    with query(tmp_path, **sequenced(endpoint)) as notebook:
        notebook.step()
        assert pub.recv() == b"\x01"
        numbered(pub, 0)
        notebook.until(1)
        with query(tmp_path, **failing) as job:
            job.step()
            numbered(pub, 1)
            job.until(1)
            numbered(pub, 5)  # job is busy, and asks for no offset
            notebook.until(3)
            notebook.reader.stop()
            wait_for(lambda: not is_there("zmq-standby"), "the end of standing by")
            with pytest.raises(MessageLossError, match="sequences 2 to 4"):
                job.step()
        with query(tmp_path, job.checkpoint, **failing) as job:
            job.until(1)
            assert job.receives


def is_there(thread: str) -> bool:
    return thread in {each.name for each in threading.enumerate()}


@pytest.mark.spark  # no Spark, but a process
def test_a_gap_for_which_the_receiver_still_asks_is_no_loss(replay: str, tmp_path: Path) -> None:
    with Publisher("vllm", replay=replay, buffer=3) as publisher:
        options = vllm(publisher) | {"replayEndpoint": replay}
        with query(tmp_path, **options) as first:
            first.step()
            publisher.ask("wait-subscriber")
            with query(tmp_path, onLoss="fail", **options) as second:
                second.step()
                publisher.ask("send 2")
                publisher.ask("skip 1")
                publisher.ask("send 1")
                second.until(4)
                assert not second.receives
                publisher.ask("skip 5")  # more than it has to replay
                publisher.ask("send 1")

                def fails() -> bool:
                    publisher.ask("send 1")  # the log hears of the loss with the next row
                    return bool((first.step(), second.step())[1]) and False

                with pytest.raises(MessageLossError, match="sequences 4 to"):
                    wait_for(fails, "the failure")
