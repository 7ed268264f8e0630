"""The metrics in a user's session. Their sums are right at any moment, also after faults."""

from __future__ import annotations

import ast
import io
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console

from tests.spark.test_crash import Driver
from tests.support import Consuming, Socket, bound, metrics_driver, offer, wait_for
from tests.support.streams import feed, idle_events, rows_read, wait_for_rows
from zmq_datasource import MetricsError, ZmqMetricsListener, live_view, metrics, metrics_dataframe
from zmq_datasource.monitoring.accounts import TOTAL
from zmq_datasource.monitoring.source import SOURCE
from zmq_datasource.monitoring.store import MetricsStore
from zmq_datasource.monitoring.view import LiveView
from zmq_datasource.options.types import Location
from zmq_datasource.spark.queries import records as live_records

pytestmark = pytest.mark.spark
Context = zmq.Context[Socket]


class Slow:
    """A consumer that takes about one message in a millisecond."""

    def __init__(self, context: Context) -> None:
        self._sock, self.endpoint = bound(context, zmq.PULL, rcvhwm=5, rcvbuf=4096)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.count = 0

    def _run(self) -> None:
        while not self._end.is_set():
            if self._sock.poll(20):
                self._sock.recv()
                self.count += 1
                self._end.wait(0.001)

    def __enter__(self) -> Slow:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(10)


@contextmanager
def sinking(
    df: DataFrame, checkpoint: Path, endpoint: str, every: str | None = None, **options: Any
) -> Iterator[StreamingQuery]:
    writer = df.select("value").writeStream.format("zmq").option("connect", endpoint)
    for name, value in options.items():
        writer = writer.option(name.replace("zmq_", "zmq.", 1), str(value).lower())
    if every is not None:
        writer = writer.trigger(processingTime=every)
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        yield query
    finally:
        query.stop()


LOSSY = {"noblock": True, "sndhwm": 20, "zmq_sndbuf": 4096, "linger": "20s"}


def balanced(totals: dict[str, Any]) -> bool:
    return (
        totals["rows"] == totals["sent"] + totals["dropped"] + totals["deadLettered"]
        and totals["dropped"] == sum(totals["droppedByReason"].values())
        and totals["deadLettered"] == sum(totals["deadLetteredByReason"].values())
    )


def total(query: StreamingQuery, **more: Any) -> dict[str, Any]:
    last = metrics(query, **more).last
    return last["sink"]["metrics"]["total"]


def wait_for_total(query: StreamingQuery, rows: int, **more: Any) -> dict[str, Any]:
    def reached() -> dict[str, Any] | None:
        if (error := query.exception()) is not None:
            raise error
        last = metrics(query, **more).last
        shown = last["sink"]["metrics"]
        return shown["total"] if shown["total"]["rows"] >= rows else None

    return wait_for(reached, f"a total of {rows} rows", 90)


def send_values(push: Socket, count: int, size: int = 1000) -> None:
    for number in range(count):
        push.send(b"%d" % number + b"x" * size)


@pytest.mark.slow
def test_every_row_is_accounted_for_in_the_progress_under_a_stall(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    push, source = bound(context, zmq.PUSH)
    with Slow(context) as slow:
        df = feed(spark, connect=source, walLocation=tmp_path / "wal", maxMessagesPerTrigger=700)
        with sinking(df, tmp_path / "checkpoint", slow.endpoint, **LOSSY) as query:
            wait_for(lambda: query.status["message"] != "Initializing sources", "the source")
            send_values(push, 3000)
            whole = wait_for_total(query, 3000)
            events = metrics(query).recent
    assert whole["rows"] == 3000
    assert whole["dropped"] > 0
    assert whole["batches"] >= 5
    batches = [e["sink"]["metrics"] for e in events if "addBatch" in e["durationMs"]]
    assert all(balanced(totals) for totals in (whole, *batches))
    for name in ("rows", "sent", "dropped", "bytes", "tasks"):
        assert sum(totals[name] for totals in batches) == whole[name]
    assert [e["sink"]["metrics"]["rows"] for e in events] == [e["numInputRows"] for e in events]
    assert batches[-1]["sndhwm"] == 20
    assert batches[-1]["peers"] == 1
    shown = events[-1]["sources"][0]["metrics"]
    assert (shown["messagesReceived"], shown["rcvhwm"]) == (3000, 1000)


@pytest.mark.slow
def test_retried_rows_and_dead_letters_are_accounted_for(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    push, source = bound(context, zmq.PUSH)
    letters = {"deadLetterLocation": tmp_path / "letters", "maxRetries": 2, "retryInterval": "1ms"}
    with Slow(context) as slow:
        df = feed(spark, connect=source, walLocation=tmp_path / "wal")
        with sinking(df, tmp_path / "checkpoint", slow.endpoint, **LOSSY, **letters) as query:
            send_values(push, 1000)
            whole = wait_for_total(query, 1000)
    assert balanced(whole)
    assert whole["rows"] == 1000
    assert whole["deadLetteredByReason"]["hwm"] == whole["deadLettered"] > 0
    assert (whole["dropped"], whole["sent"]) == (0, 1000 - whole["deadLettered"])
    assert whole["retries"] > 0
    assert whole["blockedMs"] > 0
    assert spark.read.parquet(str(tmp_path / "letters")).count() == whole["deadLettered"]


def read_what_is_documented(query: StreamingQuery, **more: Any) -> dict[str, Any]:
    """README's and docs/metrics.md's own words; none of them may raise, whenever."""
    shown = metrics(query, **more)
    assert max(map(len, repr(shown.last).splitlines())) < 200
    assert ast.literal_eval(repr(shown.last)) == shown.last
    totals = shown.last["sink"]["metrics"]
    assert totals["rows"] == totals["sent"] + totals["dropped"] + totals["deadLettered"]
    source = shown.last["sources"][0]["metrics"]
    for metric in SOURCE:
        source[metric.name]
    for metric in TOTAL:
        totals["total"][metric.name]
    totals["droppedByReason"]["hwm"], totals["bySink"], source["receivePausesByCause"]["logFull"]
    assert "Nothing" in render(query, **more) or source["source"] is not None
    return source


def render(query: StreamingQuery, **more: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(LiveView().render(live_records(metrics(query, **more).last)))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_documented_figure_can_be_read_at_any_time(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    """Before the first event, for a query with another sink, and for a batch that is repeated after a restart."""
    push, endpoint = bound(context, zmq.PUSH)
    fail = threading.Event()

    def write(batch: DataFrame, _number: int) -> None:
        if fail.is_set() and batch.count():
            raise RuntimeError("on purpose")

    def start() -> StreamingQuery:
        writer = feed(spark, connect=endpoint, walLocation=tmp_path / "wal").writeStream.foreachBatch(write)
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    query = start()
    try:
        more: dict[str, Any]
        for more in ({}, {"location": str(tmp_path / "metrics")}):
            assert read_what_is_documented(query, **more)["messagesReceived"] in (None, 0)
        push.send(b"1")
        wait_for_rows(query, 1)
        assert read_what_is_documented(query)["messagesReceived"] == 1
        assert read_what_is_documented(query)["messagesLost"] is None  # they have no numbers
        fail.set()
        push.send(b"2")
        wait_for(query.exception, "the failure on purpose", 60)
        fail.clear()
        query = start()
        wait_for(lambda: query.recentProgress, "a first event", 60)
        for event in metrics(query).recent:
            assert "backlogAgeMs" in event["sources"][0]["metrics"]
        read_what_is_documented(query)
    finally:
        query.stop()


def test_two_queries_at_once_do_not_mix(spark: SparkSession, context: Context, tmp_path: Path) -> None:
    (push_a, source_a), (push_b, source_b) = bound(context, zmq.PUSH), bound(context, zmq.PUSH)
    (pull_a, sink_a), (pull_b, sink_b) = bound(context, zmq.PULL), bound(context, zmq.PULL)
    with (
        Consuming(pull_a),
        Consuming(pull_b),
        sinking(feed(spark, connect=source_a, walLocation=tmp_path / "wa"), tmp_path / "a", sink_a) as a,
        sinking(feed(spark, connect=source_b, walLocation=tmp_path / "wb"), tmp_path / "b", sink_b) as b,
    ):
        send_values(push_a, 111)
        send_values(push_b, 222)
        assert wait_for_total(a, 111)["sent"] == 111
        assert wait_for_total(b, 222)["sent"] == 222
        for query, endpoint, rows in ((a, sink_a, 111), (b, sink_b, 222)):
            last = metrics(query).last
            assert list(last["sink"]["metrics"]["bySink"]) == [f"PUSH {endpoint}"]
            assert last["sources"][0]["metrics"]["messagesReceived"] == rows


def test_a_repeated_batch_counts_once_and_totals_go_on_after_a_restart(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    """``foreachBatch`` writes to two sinks, and to one of them twice; then it fails before the batch is done."""
    push, source = bound(context, zmq.PUSH)
    (pull_a, sink_a), (pull_b, sink_b) = bound(context, zmq.PULL), bound(context, zmq.PULL)
    where = str(tmp_path / "metrics")
    fail = threading.Event()

    def write(batch: DataFrame, _number: int) -> None:
        batch.sparkSession.sparkContext.setJobGroup("mine", "which is the user's own affair")
        rows = batch.select("value")
        for endpoint in (sink_a, sink_a, sink_b):
            rows.write.format("zmq").mode("append").option("connect", endpoint).option(
                "metricsLocation", where
            ).save()
        if fail.is_set():
            raise RuntimeError("on purpose")

    def start() -> StreamingQuery:
        writer = df.writeStream.queryName("fan out").foreachBatch(write)
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    df = feed(spark, connect=source, walLocation=tmp_path / "wal")
    with Consuming(pull_a), Consuming(pull_b):
        query = start()
        send_values(push, 50)
        wait_for_total(query, 150)
        fail.set()
        send_values(push, 30)
        wait_for(lambda: query.exception() is not None, "the failure on purpose")
        fail.clear()
        query = start()
        try:
            send_values(push, 20)
            for more in ({}, {"location": where}):
                whole = wait_for_total(query, 300, **more)
                last = metrics(query, **more).last
                by_sink = {n: a["total"]["rows"] for n, a in last["sink"]["metrics"]["bySink"].items()}
                assert last["name"] == "fan out"
                assert by_sink == {f"PUSH {sink_a}": 200, f"PUSH {sink_b}": 100}
                assert whole["rows"] == whole["sent"] == 300
        finally:
            query.stop()


def test_a_failing_location_is_reported_and_stops_nothing(
    spark: SparkSession, context: Context, tmp_path: Path, package_log: Callable[[], str]
) -> None:
    push, source = bound(context, zmq.PUSH)
    pull, sink = bound(context, zmq.PULL)
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    where = blocked / "metrics"
    with Consuming(pull) as consuming:
        df = feed(
            spark,
            connect=source,
            walLocation=tmp_path / "wal",
            metricsLocation=where,
            metricsInterval="100ms",
        )
        with sinking(df, tmp_path / "checkpoint", sink, metricsLocation=where) as query:
            send_values(push, 100)
            whole = wait_for_total(query, 100)

            def reported() -> int:
                push.send(b"once more")  # an idle query tells nothing new for ten seconds
                last = metrics(query).last
                return int(last["sources"][0]["metrics"]["metricsFailures"])

            wait_for(reported, "a report that failed")
            consuming.wait_for(101)
    assert whole["metricsFailures"] == whole["batches"] >= 1
    wait_for(lambda: "writing the account of batch 0" in package_log(), "the warning in the log")


def test_a_listener_passes_on_every_event_and_prometheus_serves_the_newest(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    push, source = bound(context, zmq.PUSH)
    pull, sink = bound(context, zmq.PULL)
    heard: list[dict[str, Any]] = []

    def callback(event: dict[str, Any]) -> None:
        heard.append(event)
        if len(heard) == 1:
            raise RuntimeError("on purpose")

    listener = ZmqMetricsListener(callback, prometheusPort=0, prometheusAddress="127.0.0.1")
    spark.streams.addListener(listener)
    try:
        with Consuming(pull), idle_events(spark):
            df = feed(spark, connect=source, walLocation=tmp_path / "wal", maxMessagesPerTrigger=40)
            with sinking(df, tmp_path / "checkpoint", sink) as query:
                send_values(push, 100)
                wait_for_total(query, 100)
                mine = f'query_id="{query.id}"'

                def scraped() -> dict[str, float]:
                    with urllib.request.urlopen(
                        f"http://127.0.0.1:{listener.port}/metrics", timeout=10
                    ) as answer:
                        lines = answer.read().decode().splitlines()
                    return {line.split("{")[0]: float(line.split()[-1]) for line in lines if mine in line}

                def all_counted() -> bool:
                    found = scraped()
                    return (
                        found.get("zmq_sink_messages_sent_total") == 100
                        and found.get("zmq_source_messages_received_total") == 100
                    )

                wait_for(all_counted, "the totals to be scraped")
                assert scraped()["zmq_source_connections"] == 1
                push.close(linger=0)  # the query is idle from now on
                wait_for(lambda: scraped()["zmq_source_connections"] == 0, "the end of the connection")
                events = [event for event in heard if event["id"] == str(query.id)]
                rows = sum(event["sink"]["metrics"]["rows"] for event in events)
    finally:
        spark.streams.removeListener(listener)
        listener.close()
    assert rows == 100
    assert listener.failures == 1


@pytest.mark.slow
def test_the_history_is_a_dataframe_of_both_sides(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    push, source = bound(context, zmq.PUSH)
    where = str(tmp_path / "metrics")
    with pytest.raises(MetricsError, match="there are none"):
        metrics_dataframe(spark, where)
    with Slow(context) as slow:
        options = {"metricsLocation": where, "metricsInterval": "100ms", "maxMessagesPerTrigger": 300}
        df = feed(spark, connect=source, walLocation=tmp_path / "wal", **options)
        with sinking(df, tmp_path / "checkpoint", slow.endpoint, metricsLocation=where, **LOSSY) as query:
            send_values(push, 1000)
            whole = wait_for_total(query, 1000, location=where)
    history = metrics_dataframe(spark, where)
    totals = (
        history.where("kind = 'sink'")
        .selectExpr(
            "sum(sinkMetrics.rows)",
            "sum(sinkMetrics.sent + sinkMetrics.dropped)",
            "sum(sinkMetrics.droppedByReason['hwm'])",
            "count(distinct batch)",
            "count(timestamp)",
        )
        .first()
    )
    assert tuple(totals) == (1000, 1000, whole["dropped"], whole["batches"], whole["batches"])
    reports = history.where("kind = 'source'").selectExpr(
        "max(sourceMetrics.messagesReceived)", "max(sourceMetrics.backlogMessages) > 0", "max(next)"
    )
    assert tuple(reports.first()) == (1000, True, 1000)


def test_a_history_of_many_small_files_is_read_by_few_tasks(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's own reader makes a task of 32 files, which costs more than to read them."""
    store = MetricsStore(Location(str(tmp_path)))
    for number in range(1200):
        record = {"source": "PULL x", "next": number, "sourceMetrics": {"messagesReceived": number}}
        store.write_report("log-0", record, 1e9 + number)
    history = metrics_dataframe(spark, str(tmp_path))
    found = history.selectExpr("count(*)", "count(distinct timestamp)", "max(sourceMetrics.messagesReceived)")
    assert tuple(found.first() or ()) == (1200, 1200, 1199)
    assert history.rdd.getNumPartitions() <= max(3, spark.sparkContext.defaultParallelism)


def test_with_a_location_the_newest_report_shows_through_a_long_batch(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    push, source = bound(context, zmq.PUSH)
    where = str(tmp_path / "metrics")
    stalling, let_go = threading.Event(), threading.Event()

    def stall(batch: DataFrame, _: int) -> None:
        batch.collect()
        if stalling.is_set():  # not by its number: a first batch without rows counts too
            let_go.wait(60)

    df = feed(
        spark, connect=source, walLocation=tmp_path / "wal", metricsLocation=where, metricsInterval="100ms"
    )
    query = df.writeStream.foreachBatch(stall).option("checkpointLocation", str(tmp_path / "c")).start()
    try:
        send_values(push, 1)
        wait_for_rows(query, 1)
        stalling.set()
        send_values(push, 500)

        def seen() -> bool:
            last = metrics(query, where).last
            return bool(last["sources"][0]["metrics"]["messagesReceived"] == 501)

        wait_for(seen, "a report in the middle of a batch")
        last = metrics(query).last
        assert last["sources"][0]["metrics"]["messagesReceived"] < 501
    finally:
        let_go.set()
        query.stop()


def test_sequences_are_received_or_lost_by_the_metrics_alone(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    pub, source = bound(context, zmq.XPUB)
    pull, sink = bound(context, zmq.PULL)
    df = feed(
        spark,
        socketType="SUB",
        connect=source,
        framing="clone",
        deduplicate=True,
        walLocation=tmp_path / "wal",
    )
    numbers = [n for n in range(1, 501) if n % 7 and n != 500] + [3, 4, 500]  # gaps, repeats, and an end
    with Consuming(pull), sinking(df, tmp_path / "checkpoint", sink) as query:
        wait_for(lambda: pub.poll(100) and pub.recv() == b"\x01", "the subscription", 60)
        for number in numbers:
            pub.send_multipart([b"key", number.to_bytes(8, "big"), b"", b"", b"value"])
        whole = wait_for_total(query, len(set(numbers)))
        shown = wait_for(
            lambda: m if (m := metrics(query).last["sources"][0]["metrics"])["messagesLost"] else None,
            "losses",
        )
    assert shown["messagesReceived"] + shown["messagesLost"] == 500
    assert shown["messagesDuplicate"] == 2
    assert whole["rows"] == shown["messagesReceived"]


@pytest.mark.slow
def test_kills_lose_and_double_no_account(spark: SparkSession, context: Context, tmp_path: Path) -> None:
    """Drivers and workers die; what the metrics say is what Spark has committed, each batch once."""
    push, source = bound(context, zmq.PUSH, sndhwm=100)
    end, sent = threading.Event(), 0

    def send() -> None:
        nonlocal sent
        while not end.wait(0.004):  # a batch of it still drops, and the last run has little left to read
            sent += offer(push, b"%d" % sent + b"x" * 1000)

    def totals() -> list[dict[str, Any]]:
        found = sorted((tmp_path / "metrics" / "sinks").rglob("[!.]*.json"))
        return [json.loads(path.read_text()) for path in found]

    with Slow(context) as slow:
        sending = threading.Thread(target=send)
        sending.start()
        try:
            running = Driver(source, slow.endpoint, tmp_path, module="tests.support.metrics_driver")
            try:
                running.wait_until_receiving()
                wait_for(lambda: len(totals()) >= 3, "three batches", 90)
                for process in running.processes("daemon"):  # Spark's Python workers, in the middle of tasks
                    with suppress(psutil.NoSuchProcess):  # one may take another along
                        process.kill()
                killed = len(totals())

                def goes_on() -> bool:  # Spark repeats the tasks; if it was at a commit, the query ends
                    return len(totals()) >= killed + 2 or running.process.poll() is not None

                wait_for(goes_on, "batches after it, or the end of the query", 90)
                for process in running.processes("java"):
                    process.kill()
            finally:
                running.end()
        finally:
            end.set()
            sending.join(30)
        last = metrics_driver.begin(spark, source, slow.endpoint, tmp_path, "once")
        assert last.awaitTermination(120)
    found = totals()
    assert [totals["batch"] for totals in found] == list(range(len(found)))
    assert all(balanced(account["sinkMetrics"]) for account in found)
    (newest,) = (
        record
        for record in MetricsStore(Location(str(tmp_path / "metrics"))).newest()
        if record["kind"] == "sink"
    )
    whole = newest["sinkTotal"]
    assert balanced(whole)
    assert whole["batches"] == len(found)
    assert sum(totals["sinkMetrics"]["rows"] for totals in found) == whole["rows"]
    assert whole["dropped"] > 0
    reports = sorted((tmp_path / "metrics" / "sources").rglob("[!.]*.json"))
    received = json.loads(reports[-1].read_text())["sourceMetrics"]["messagesReceived"]
    assert received == whole["rows"] <= sent


def test_the_live_view_shows_a_query_until_it_ends(
    spark: SparkSession, context: Context, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push, source = bound(context, zmq.PUSH)
    pull, sink = bound(context, zmq.PULL)
    with Consuming(pull):
        df = feed(spark, connect=source, walLocation=tmp_path / "wal")
        with sinking(df, tmp_path / "checkpoint", sink) as query:
            send_values(push, 10)
            wait_for_rows(query, 10)
            live_view(query, seconds=0.2, interval=0.1)
        assert rows_read(query, raise_errors=False) == 10
        live_view(query)  # it has ended
    shown = capsys.readouterr().out
    assert "sndhwm" in shown
    assert "rcvhwm" in shown
