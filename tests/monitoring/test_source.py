"""A source's metrics from real sockets and a real log: backlog, pauses, connections."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

import zmq_datasource.monitoring.source as source_module
from tests.support import (
    Offering,
    Socket,
    bound,
    free_endpoint,
    need,
    stop_sooner,
    stream_options,
    wait_for,
)
from zmq_datasource.counters import iso
from zmq_datasource.monitoring.prometheus import PrometheusOutlet
from zmq_datasource.monitoring.source import SOURCE, SourceMonitor
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.source.query_log import QueryLog
from zmq_datasource.spark.listener import QueryEvents
from zmq_datasource.transport import core

Context = zmq.Context[Socket]


@pytest.fixture(autouse=True)
def _stop_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_sooner(monkeypatch)


@contextmanager
def monitored(location: Path, endpoint: str, **options: Any) -> Iterator[tuple[FeedReceiver, SourceMonitor]]:
    parsed = stream_options(connect=endpoint, walLocation=location, **{"socketType": "PULL", **options})
    ingest = FeedReceiver(parsed)
    ingest.start()
    monitor = SourceMonitor(ingest, parsed)
    try:
        yield ingest, monitor
    finally:
        ingest.stop()


def test_the_backlog_is_what_is_in_no_finished_batch(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with monitored(tmp_path, endpoint) as (ingest, monitor):
        monitor.mark_finished(0)
        began = time.time()
        push.send(b"x" * 1000)
        wait_for(lambda: ingest.seal() == 1, "one message")
        for _ in range(99):
            push.send(b"x" * 1000)
        wait_for(lambda: ingest.seal() == 100, "100 messages")
        shown = wait_for(
            lambda: metrics if (metrics := monitor.metrics())["backlogAgeMs"] >= 20 else None, "an age"
        )
        assert shown["backlogMessages"] == shown["messagesReceived"] == 100
        assert shown["core"] == core.NAME
        assert 100_000 < shown["backlogBytes"] == shown["logBytes"] < 150_000
        assert shown["backlogAgeMs"] <= (time.time() - began) * 1000 + 1
        monitor.mark_finished(60)
        half = monitor.metrics()
        assert half["backlogMessages"] == 40
        assert half["backlogBytes"] < shown["backlogBytes"]
        monitor.mark_finished(100)
        done = monitor.metrics()
        assert (done["backlogMessages"], done["backlogBytes"], done["backlogAgeMs"]) == (0, 0, 0)
        assert done["logChunks"] == ingest.log.chunks > 0


def test_connections_high_water_mark_and_last_message_are_shown(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with monitored(tmp_path, endpoint, rcvhwm=123) as (ingest, monitor):
        wait_for(lambda: monitor.metrics()["connections"] == 1, "a connection")
        assert monitor.metrics()["lastReceived"] is None
        before = time.time()
        push.send(b"x")
        wait_for(lambda: ingest.seal() == 1, "a message")
        shown = monitor.metrics()
        assert shown["rcvhwm"] == 123
        assert shown["lastReceived"] >= iso(before)
        push.close(linger=0)
        lost = wait_for(
            lambda: m if (m := monitor.metrics())["connectionsLost"] else None, "a lost connection"
        )
        assert (lost["connections"], lost["connectionsMade"], lost["handshakeFailures"]) == (0, 1, 0)


def test_a_pause_is_shown_with_its_cause_while_it_lasts(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10, sndbuf=8192)
    with (
        Offering(push, 0.0, b"x" * 10_000) as sending,
        monitored(tmp_path, endpoint, walMaxBytes="200k", zmq_rcvbuf=8192) as (ingest, monitor),
    ):

        def seen() -> dict[str, Any] | None:
            shown = monitor.metrics()  # its figures are looked at one after the other
            return shown if shown["receivePausedBy"] == "logFull" and shown["receivePauses"] else None

        paused = wait_for(seen, "a pause")
        assert paused["receivePauses"] == sum(paused["receivePausesByCause"].values()) >= 1
        wait_for(lambda: monitor.metrics()["receivePausedMsByCause"]["logFull"] >= 50, "50 ms of it")
        sending.end()

        def goes_on() -> bool:
            need(ingest.storage, ingest.log.durable_end)  # what was under way fills it again
            return monitor.metrics()["receivePausedBy"] is None

        wait_for(goes_on, "the end of the pause")


def test_what_is_shown_is_declared(context: Context, tmp_path: Path) -> None:
    _, endpoint = bound(context, zmq.PUB)
    options = {"socketType": "SUB", "framing": "custom", "sequenceAt": "1:0:u64be", "deduplicate": True}
    with monitored(tmp_path, endpoint, **options) as (_, monitor):
        assert set(monitor.metrics()) == {metric.name for metric in SOURCE} - {"reader"}  # there is no query


def test_metrics_that_cannot_be_put_together_end_nothing(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with monitored(tmp_path, endpoint) as (ingest, monitor):
        push.send(b"x")
        wait_for(lambda: ingest.seal() == 1, "a message")
        monitor.mark_finished(0)

        def fail(*_: object, **__: object) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(source_module, "read_slices", fail)
        assert monitor.metrics() == {"source": f"PULL {endpoint}", "metricsFailures": 1}
        monkeypatch.undo()
        assert monitor.metrics()["backlogMessages"] == 1
    assert "Input/output error" in caplog.text


def summed(event_metrics: list[dict[str, Any]]) -> dict[str, list[float]]:
    """What Prometheus gets of each series, from queries with these metrics on one log."""
    events = QueryEvents()
    for number, metrics in enumerate(event_metrics):
        source = {"latestOffset": {"log": "l"}, "metrics": metrics}
        events.observe({"id": str(number), "name": None, "timestamp": None, "sources": [source], "sink": {}})
    outlet = PrometheusOutlet(events.shown)
    return {
        sample.name: [each.value for each in family.samples if each.name == sample.name]
        for family in outlet.collect()
        for sample in family.samples
    }


def test_a_query_that_follows_a_log_shows_what_its_receiver_counted_and_prometheus_has_it_once(
    context: Context, tmp_path: Path
) -> None:
    pub, endpoint = bound(context, zmq.XPUB)
    parsed = stream_options(walLocation=tmp_path, reader="mine")
    with monitored(tmp_path, endpoint, socketType="SUB", framing="custom", sequenceAt="1:0:u64be") as (
        ingest,
        receiver,
    ):
        assert pub.recv() == b"\x01"
        for number in (1, 2, 5):
            pub.send_multipart([b"key", number.to_bytes(8, "big"), b"", b"", b"value"])
        wait_for(lambda: ingest.seal() == 3, "three messages")
        follow = QueryLog(parsed)
        follow.open()
        follow.start()
        monitor = SourceMonitor(follow, parsed)
        monitor.mark_finished(1)
        shown = monitor.metrics()
        exported = summed([receiver.metrics(), shown])
        follow.stop()
    assert exported["zmq_source_messages_lost"] == [2]
    assert exported["zmq_source_messages_received_total"] == [3]
    assert sorted(exported["zmq_source_backlog_messages"]) == [2, 3]
    assert (shown["messagesReceived"], shown["messagesLost"], shown["backlogMessages"]) == (3, 2, 2)
    assert "rcvhwm" not in shown  # it has no socket
    assert (shown["source"], shown["reader"]) == (f"log {tmp_path} (mine)", "mine")


def test_a_query_without_a_name_has_the_same_source_in_each_run(tmp_path: Path) -> None:
    """It is a label in Prometheus, which begins other series for another text."""
    parsed = stream_options(socketType="PULL", connect=free_endpoint(), walLocation=tmp_path)
    shown = []
    for _ in range(2):
        feed = QueryLog(parsed)
        feed.open()
        shown.append(SourceMonitor(feed, parsed).metrics())
        feed.stop()
    assert shown[0]["reader"] != shown[1]["reader"]
    assert shown[0]["source"] == shown[1]["source"]
