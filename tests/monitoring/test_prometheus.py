"""The Prometheus outlet: what is scraped is what the events say; a port that fails is told, not felt."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socketserver import BaseServer
from typing import Any

import pytest
import zmq
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from tests.support import free_endpoint, wait_for
from tests.support.ports import free_port
from tests.support.programs import page, program
from zmq_datasource import DurableSubscriber
from zmq_datasource.cli import main
from zmq_datasource.counters import SinkCounters, SourceCounters, figures
from zmq_datasource.monitoring.accounts import SinkTotals
from zmq_datasource.monitoring.http import HttpAddress
from zmq_datasource.monitoring.prometheus import PrometheusOutlet
from zmq_datasource.spark.listener import QueryEvents, ZmqMetricsListener


@pytest.fixture(autouse=True)
def _stop_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    # A server looks every half second whether it is to end.
    monkeypatch.setattr(BaseServer.serve_forever, "__defaults__", (0.02,))


def event(name: str | None = "orders", query: str = "q1", rows: int = 10, dropped: int = 2) -> dict[str, Any]:
    """A progress event with its metrics."""
    counters = SourceCounters(
        received=rows, bytes=rows * 100, rcvhwm=1000, connections=1, paused_by="logFull"
    )
    counters.pauses["logFull"] = 3
    counters.paused_seconds["logFull"] = 1.5
    source = figures(counters, lambda metric: not metric.numbered) | {
        "source": "PULL tcp://f:1",
        "core": "compiled",
        "lastReceived": "2026-11-21T00:00:00.500Z",
        "backlogAgeMs": 2500,
    }
    sink = SinkCounters(rows=rows, sent=rows - dropped, blocked_seconds=0.25, sndhwm=50)
    sink.dropped["hwm"] = dropped
    after = SinkTotals.none().then(figures(sink))
    totals = {**after.batch, "total": after.total}
    return {
        "id": query,
        "name": name,
        "timestamp": "2026-11-21T00:00:01.000Z",
        "sources": [
            {"latestOffset": {"log": "abc", "next": rows}, "metrics": source},
            {"description": "other"},
        ],
        "sink": {"description": "x", "metrics": {**totals, "bySink": {"PUSH tcp://a:1": totals}}},
    }


def scrape(port: int | None) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (
            sample.name,
            frozenset((k, v) for k, v in sample.labels.items() if k not in ("query_id", "log")),
        ): sample.value
        for family in text_string_to_metric_families(page(port)[1])
        for sample in family.samples
    }


@contextmanager
def served() -> Iterator[tuple[QueryEvents, PrometheusOutlet]]:
    """Events, and an outlet that serves them."""
    events = QueryEvents()
    outlet = PrometheusOutlet(events.shown)
    outlet.serve(HttpAddress(0))
    try:
        yield events, outlet
    finally:
        outlet.close()


def test_a_source_of_another_kind_with_metrics_of_its_own_is_left_alone() -> None:
    """As Kafka's, in the query itself or in one beside it."""
    kafka = {
        "description": "KafkaV2[Subscribe[orders]]",
        "latestOffset": {"orders": {"0": 5}},
        "metrics": {"avgOffsetsBehindLatest": "0.0"},
    }
    ours, other = event(), event(name="kafka", query="q2")
    ours["sources"].append(kafka)
    other["sources"], other["sink"] = [kafka], {"description": "x"}
    with served() as (events, outlet):
        events.observe(other)
        events.observe(ours)
        found = scrape(outlet.port)
        assert outlet.failures == 0
    rows = {
        labels: value
        for (name, labels), value in found.items()
        if name == "zmq_source_messages_received_total"
    }
    assert rows == {frozenset({("query", "orders"), ("source", "PULL tcp://f:1")}): 10}


def test_what_is_scraped_is_what_the_newest_event_says() -> None:
    with served() as (events, outlet):
        events.observe(event(rows=4))
        events.observe(event())
        events.observe(event(name=None, query="q2", rows=7, dropped=0))
        found = scrape(outlet.port)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    source, sink = (
        {"query": "orders", "source": "PULL tcp://f:1"},
        {"query": "orders", "sink": "PUSH tcp://a:1"},
    )
    assert value("zmq_source_messages_received_total", **source) == 10
    assert value("zmq_source_received_bytes_total", **source) == 1000
    assert value("zmq_source_backlog_age_seconds", **source) == 2.5
    assert value("zmq_source_receive_pauses_total", cause="logFull", **source) == 3
    assert value("zmq_source_receive_paused_seconds_total", cause="logFull", **source) == 1.5
    assert value("zmq_source_receive_paused", cause="logFull", **source) == 1
    assert value("zmq_source_receive_paused", cause="slowDisk", **source) == 0
    assert value("zmq_source_last_received_timestamp_seconds", **source) == 1_795_219_200.5
    assert value("zmq_sink_rows_total", **sink) == 10
    assert value("zmq_sink_messages_sent_total", **sink) == 8
    assert value("zmq_sink_messages_dropped_total", reason="hwm", **sink) == 2
    assert (
        value("zmq_sink_messages_dropped_total", reason="no_peer", **sink) == 0
    )  # so that a first drop is a rise
    assert value("zmq_sink_blocked_seconds_total", **sink) == 0.25
    assert value("zmq_sink_rows_total", query="q2", sink="PUSH tcp://a:1") == 7  # without a name, its id
    assert value("zmq_query_active", query="orders") == 1
    assert not [name for name, _ in found if name == "zmq_source_messages_lost"]  # not numbered


def test_what_a_query_does_not_have_is_not_served_as_zero() -> None:
    """One that only follows a log has no receiver, and so no pauses."""
    follows = event()
    metrics = follows["sources"][0]["metrics"]
    for name in [name for name in metrics if name.startswith("receivePause") or name == "core"]:
        del metrics[name]
    with served() as (events, outlet):
        events.observe(follows)
        found = {name for name, _ in scrape(outlet.port)}
    assert "zmq_source_backlog_age_seconds" in found
    assert not {name for name in found if "pause" in name or "core" in name}


def test_an_ended_query_is_shown_a_while_and_then_gone() -> None:
    now = [0.0]
    events = QueryEvents(lambda: now[0])
    events.observe(event())
    events.ended("q1")

    def active() -> list[bool]:
        return [query["active"] for shown in events.shown() for _, query in shown.things if "active" in query]

    assert active() == [False]
    now[0] = 601.0
    assert active() == []


def test_a_port_in_use_is_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    port = free_port()
    outlet = PrometheusOutlet(lambda: (), clock=lambda: now[0])
    with socket.create_server(("127.0.0.1", port)):
        for _ in range(2):  # the second time it is too early
            outlet.serve_if_possible(HttpAddress(port))
        assert outlet.port is None
    assert f"serving metrics on 127.0.0.1:{port}: Address already in use" in caplog.text
    now[0] = 11.0
    outlet.serve_if_possible(HttpAddress(port))
    try:
        assert outlet.port == port
        assert scrape(port)["zmq_metrics_outlet_failures_total", frozenset({("outlet", "http")})] == 1
    finally:
        outlet.close()


def test_half_requests_keep_no_scrape_out_and_hold_no_thread() -> None:
    with ExitStack() as stack:
        _, outlet = stack.enter_context(served())
        before = threading.active_count()
        for _ in range(100):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", outlet.port or 0)))
            slow.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
        assert scrape(outlet.port)
        wait_for(lambda: threading.active_count() <= before + 8, "a bound of threads")
        wait_for(lambda: threading.active_count() <= before, "the end of the last ones")


def answers(host: str, port: int | None) -> bool:
    try:
        socket.create_connection((host, port or 0), 10).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_listener_serves_the_drivers_machine_alone_unless_told_otherwise() -> None:
    listener = ZmqMetricsListener(prometheusPort=0)
    open_to_all = ZmqMetricsListener(prometheusPort=0, prometheusAddress="0.0.0.0")
    try:
        assert answers("127.0.0.1", listener.port)
        assert not answers("127.0.0.2", listener.port)
        assert answers("127.0.0.2", open_to_all.port)
    finally:
        listener.close()
        open_to_all.close()


def test_an_address_is_a_port_of_this_machine_or_names_its_host() -> None:
    read = [HttpAddress.read(text) for text in ("9400", "0.0.0.0:9400", "[::1]:0")]
    assert [(one.host, one.port) for one in read] == [("127.0.0.1", 9400), ("0.0.0.0", 9400), ("::1", 0)]


@pytest.mark.parametrize("text", ["", "-1", "65536", "http", "host:", ":9400", "²"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write a port, as in 9400, or 0\.0\.0\.0:9400"):
        HttpAddress.read(text)


# Programs without Spark.


def series_at(port: int, series: str) -> dict[tuple[str, ...], float]:
    """The samples of a series, with the values of their labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page(port)[1])
        for sample in family.samples
        if sample.name == series
    }


def test_a_program_without_spark_serves_the_figures_of_source_proxy_and_subscribers(tmp_path: Path) -> None:
    port, pull, durable, publish = free_port(), free_endpoint(), free_endpoint(), free_endpoint()
    options = ["--pull", pull, "--durable", durable, "--publish", publish]
    options += ["--wal-location", str(tmp_path / "log")]
    with (
        program("proxy", *options, "--prometheus", str(port)),
        zmq.Context() as context,
        context.socket(zmq.PUSH) as push,
    ):
        push.connect(pull)
        for _ in range(3):
            push.send(b"1234")
        with DurableSubscriber(durable, "me", auto_ack=False) as me:
            assert me.receive(30) is not None
            wait_for(
                lambda: series_at(port, "zmq_proxy_messages_published_total") == {(): 3.0}, "three messages"
            )
            assert not answers("127.0.0.2", port)  # only programs on this machine
            assert [*series_at(port, "zmq_source_messages_received_total").values()] == [3.0]
            assert [*series_at(port, "zmq_source_received_bytes_total").values()] == [12.0]
            wait_for(lambda: series_at(port, "zmq_durable_backlog_messages") == {("me",): 3.0}, "a backlog")
            assert series_at(port, "zmq_durable_away_seconds") == {("me",): 0.0}
            me.ack(0)
            wait_for(
                lambda: (me.receive(0), series_at(port, "zmq_durable_backlog_messages"))[1] == {("me",): 2.0},
                "less of it",
            )


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["proxy", "--pull", free_endpoint(), "--publish", free_endpoint()]
        arguments += ["--wal-location", str(tmp_path), "--prometheus", port]
        ended = CliRunner().invoke(main, arguments)
    assert ended.exit_code == 2
    assert f"127.0.0.1:{port}: Address already in use" in ended.output
    assert "choose another port" in ended.output
