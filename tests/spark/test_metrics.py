"""The metrics in a user's session. Their sums are right at any moment, also after faults."""

from __future__ import annotations

import ast
import io
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console

from tests.support import Consuming, Socket, as_text, bound, wait_for
from tests.support.streams import feed, idle_events, rows_read, wait_for_rows
from zmq_datasource import ZmqMetricsListener, live_view, metrics
from zmq_datasource.monitoring.accounts import TOTAL
from zmq_datasource.monitoring.source import SOURCE
from zmq_datasource.monitoring.view import LiveView
from zmq_datasource.spark.queries import records as live_records

pytestmark = pytest.mark.spark
Context = zmq.Context[Socket]


@contextmanager
def sinking(
    df: DataFrame, checkpoint: Path, endpoint: str, every: str | None = None, **options: Any
) -> Iterator[StreamingQuery]:
    writer = df.select("value").writeStream.format("zmq").options(**as_text({"connect": endpoint, **options}))
    if every is not None:
        writer = writer.trigger(processingTime=every)
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        yield query
    finally:
        query.stop()


def wait_for_total(query: StreamingQuery, rows: int) -> dict[str, Any]:
    def reached() -> dict[str, Any] | None:
        if (error := query.exception()) is not None:
            raise error
        last = metrics(query).last
        shown = last["sink"]["metrics"]
        return shown["total"] if shown["total"]["rows"] >= rows else None

    return wait_for(reached, f"a total of {rows} rows", 90)


def sums(spark: SparkSession, location: str) -> list[Row]:
    """The sums of all accounts, by the words of docs/metrics.md."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    words = page.partition('spark.sql("""')[2].partition('"""')[0]
    spark.read.json(location).createOrReplaceTempView("accounts")
    return spark.sql(words).collect()


def send_values(push: Socket, count: int, size: int = 1000) -> None:
    for number in range(count):
        push.send(b"%d" % number + b"x" * size)


def read_what_is_documented(query: StreamingQuery) -> dict[str, Any]:
    """README's and docs/metrics.md's own words; none of them may raise, whenever."""
    shown = metrics(query)
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
    assert "Nothing" in render(query) or source["source"] is not None
    return source


def render(query: StreamingQuery) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(LiveView().render(live_records(metrics(query).last)))
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
        assert read_what_is_documented(query)["messagesReceived"] in (None, 0)
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
            whole = wait_for_total(query, 300)
            last = metrics(query).last
        finally:
            query.stop()
    by_sink = {name: shown["total"]["rows"] for name, shown in last["sink"]["metrics"]["bySink"].items()}
    assert last["name"] == "fan out"
    assert by_sink == {f"PUSH {sink_a}": 200, f"PUSH {sink_b}": 100}
    assert whole["rows"] == whole["sent"] == 300
    assert {row.sink: row.rows for row in sums(spark, where)} == by_sink


def test_a_failing_location_is_reported_and_stops_nothing(
    spark: SparkSession, context: Context, tmp_path: Path, package_log: Callable[[], str]
) -> None:
    push, source = bound(context, zmq.PUSH)
    pull, sink = bound(context, zmq.PULL)
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    where = blocked / "metrics"
    with Consuming(pull) as consuming:
        df = feed(spark, connect=source, walLocation=tmp_path / "wal")
        with sinking(df, tmp_path / "checkpoint", sink, metricsLocation=where) as query:
            send_values(push, 100)
            whole = wait_for_total(query, 100)
            consuming.wait_for(100)
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


def test_a_write_outside_of_a_query_keeps_its_account_and_removes_old_days(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    pull, sink = bound(context, zmq.PULL)
    where = str(tmp_path / "metrics")
    for day in ("2026-01-01", "2026-01-09"):  # the newest stays, whatever the clock says
        (tmp_path / "metrics" / f"date={day}").mkdir(parents=True)
    kept = {"metricsLocation": where}
    with Consuming(pull):
        for rows in (3, 4):
            values = spark.range(rows).selectExpr("string(id) AS value")
            values.write.format("zmq").mode("append").options(connect=sink, **kept).save()
    days = sorted(path.name for path in (tmp_path / "metrics").glob("date=*"))
    assert (days[0], len(days)) == ("date=2026-01-09", 2)
    assert sorted((row.sink, row.rows, row.sent) for row in sums(spark, where)) == [
        (f"PUSH {sink}", 3, 3),
        (f"PUSH {sink}", 4, 4),
    ]


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
