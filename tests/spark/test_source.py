"""``spark.readStream.format("zmq")`` in a real session over real sockets."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import zmq
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.support import Socket, bound, wait_for
from tests.support.streams import (
    feed,
    ids_and_numbers,
    running,
    start,
    table,
    wait_for_rows,
)

pytestmark = pytest.mark.spark
Context = zmq.Context[Socket]


def send_numbers(sock: Socket, start: int, end: int) -> None:
    for i in range(start, end):
        sock.send(b"%d" % i)


def test_stopping_under_load_loses_nothing_that_was_sent(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    df = feed(spark, connect=endpoint, walLocation=tmp_path / "wal")
    sent = 100_000
    with running(df, tmp_path / "out") as query:
        send_numbers(push, 0, 1000)
        wait_for_rows(query, 1000)
        send_numbers(push, 1000, sent)  # as fast as they are taken: when it stops, the queues are full
    rest = feed(spark, connect=endpoint, walLocation=tmp_path / "wal", idleTimeout="1s")
    with running(rest, tmp_path / "out", availableNow=True) as query:
        assert query.awaitTermination(90)
    numbers = table(spark, tmp_path / "out").selectExpr("id", "cast(cast(value as string) as bigint) as n")
    told = numbers.selectExpr(
        "count(*)", "count(distinct id)", "min(id)", "max(id)", "count_if(id is distinct from n)"
    )
    assert tuple(told.first()) == (sent, sent, 0, sent - 1, 0)


@pytest.mark.parametrize(("trigger", "batches"), [("availableNow", [400, 400, 200]), ("once", [1000])])
def test_limits_cut_a_backlog_into_batches_but_for_once(
    spark: SparkSession, context: Context, tmp_path: Path, trigger: str, batches: list[int]
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    df = feed(
        spark, connect=endpoint, walLocation=tmp_path / "wal", maxMessagesPerTrigger=400, startingOffsets="earliest",
        timeout="30s", idleTimeout="1s",
    )  # fmt: skip
    query = start(df, tmp_path / "out", **{trigger: True})
    send_numbers(push, 0, 1000)
    assert query.awaitTermination(90)
    assert [p["numInputRows"] for p in query.recentProgress if p["numInputRows"]] == batches
    assert ids_and_numbers(tmp_path / "out") == [(i, i) for i in range(1000)]


def test_a_log_smaller_than_the_feed_never_stands_still(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    """The log fills again and again; Spark commits a batch only once there is data for the next."""
    push, endpoint = bound(context, zmq.PUSH)
    count, value = 3000, b" " * 2000
    df = feed(spark, connect=endpoint, walLocation=tmp_path / "wal", walMaxBytes="1m", rcvhwm=10)
    with running(df, tmp_path / "out") as query:
        sending = threading.Thread(
            target=lambda: [push.send(b"%d" % i + value) for i in range(count)], daemon=True
        )
        sending.start()
        wait_for_rows(query, count, 120)
        latest = json.loads(query.lastProgress["sources"][0]["latestOffset"])
        assert latest["receivePauses"] > 0
        assert latest["receivePausedMs"] > 0
    assert table(spark, tmp_path / "out").selectExpr("count(distinct id)").first()[0] == count


def test_spark_finds_the_format_without_register(spark: SparkSession, tmp_path: Path) -> None:
    """Through ``pyspark_zmq``; in a session that never called ``register``."""
    from pyspark.sql.datasource import DataSource  # noqa: PLC0415

    from pyspark_zmq import DefaultSource  # noqa: PLC0415

    assert issubclass(DefaultSource, DataSource)
    assert (
        spark.newSession().readStream.format("zmq").option("connect", "tcp://127.0.0.1:1").load().isStreaming
    )


def ends_of(query: StreamingQuery) -> list[int]:
    """How far each of its sources has come."""
    sources = query.lastProgress["sources"]
    return [json.loads(source["endOffset"])["next"] for source in sources]


def test_queries_on_one_feed_share_its_receiver(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    """Two of one DataFrame, and a union of two loads; the receiving one ends, and begins again from its checkpoint."""
    push, endpoint = bound(context, zmq.PUSH)
    # Without a retention the first query deletes what it has read before the others have begun.
    options = {
        "connect": endpoint,
        "walLocation": tmp_path / "wal",
        "startingOffsets": "earliest",
        "walRetention": "1h",
    }
    df = feed(spark, **options)
    both = feed(spark, **options).union(feed(spark, **options))
    outs = [tmp_path / "one", tmp_path / "two", tmp_path / "both"]
    with running(df, outs[1]) as two:
        send_numbers(push, 0, 100)
        with running(df, outs[0]) as one, running(both, outs[2]) as union:
            for query in (one, two, union):
                wait_for_rows(query, 100)
            two.stop()  # it receives
            send_numbers(push, 100, 200)
            for query in (one, union):
                wait_for_rows(query, 200)
            again = start(df, outs[1])
            wait_for_rows(again, 200)
            again.stop()
            wait_for(lambda: ends_of(union) == [200, 200], "both loads")
    expected = [(i, i) for i in range(200)]
    assert ids_and_numbers(outs[0]) == ids_and_numbers(outs[1]) == expected
    assert ids_and_numbers(outs[2]) == [row for row in expected for _ in range(2)]
