"""``writeStream`` and ``df.write`` to real consumers: every row accounted for, in one line a batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.support import Consuming, Socket, as_text, bound, free_endpoint, take, wait_for
from tests.support.streams import feed

pytestmark = pytest.mark.spark
Context = zmq.Context[Socket]


def write(df: DataFrame, **options: Any) -> None:
    df.write.format("zmq").mode("append").options(**as_text(options)).save()


def numbers(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, 1, partitions).selectExpr("cast(id as string) as value")


class Log:
    """The sink's one line a batch."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text

    def total(self, rows: int) -> Counter[str]:
        """The sum of all lines, once they account for ``rows`` rows."""

        def added() -> Counter[str]:
            total: Counter[str] = Counter()
            for line in re.findall(r"write_commit: sink (.*)", self._text()):
                total.update({k: int(v) for k, v in re.findall(r"(\S+)=(\d+)(?= |$)", line)})
            return total if total["rows"] >= rows else Counter()

        return wait_for(added, f"log lines for {rows} rows")


@pytest.fixture
def log(package_log: Callable[[], str]) -> Log:
    return Log(package_log)


def test_a_batch_write_sends_every_row_once(spark: SparkSession, context: Context, log: Log) -> None:
    pull, endpoint = bound(context, zmq.PULL)
    with Consuming(pull) as consuming:
        write(numbers(spark, 5000), connect=endpoint)
        consuming.wait_for(5000)
    assert sorted(int(m[0]) for m in consuming.got) == list(range(5000))
    total = log.total(5000)
    assert (total["sent"], total["dropped"], total["tasks"]) == (5000, 0, 2)


def test_one_topic_for_all_rows(spark: SparkSession, context: Context) -> None:
    pull, endpoint = bound(context, zmq.PULL)
    rows = spark.createDataFrame([("t", "v"), (None, "w")], "topic STRING, value STRING").coalesce(1)
    write(rows, connect=endpoint, topic="orders")
    write(rows.select("value"), connect=endpoint, topic="orders")
    assert sorted(take(pull, 4)) == [[b"orders", b"v"]] * 2 + [[b"orders", b"w"]] * 2
    with pytest.raises(PySparkException, match="'frames' contains the topic"):
        write(rows.selectExpr("array(cast(value as binary)) as frames"), connect=endpoint, topic="orders")


def test_no_peer_fails_the_write_or_is_counted(spark: SparkSession, log: Log) -> None:
    endpoint = free_endpoint()
    with pytest.raises(PySparkException, match=f"no answer from {endpoint}"):
        write(numbers(spark, 10), connect=endpoint, connectTimeout="300ms")
    write(numbers(spark, 10), connect=endpoint, connectTimeout="300ms", noblock=True)
    assert log.total(10)["dropped.no_peer"] == 10


def test_binding_is_for_one_task(spark: SparkSession, context: Context) -> None:
    endpoint = free_endpoint()
    pull = context.socket(zmq.PULL)
    pull.connect(endpoint)
    write(numbers(spark, 100, partitions=1), bind=endpoint)
    assert len(take(pull, 100)) == 100
    with pytest.raises(PySparkException, match=r"only one task can bind.*coalesce\(1\)"):
        write(numbers(spark, 100, partitions=2), bind=endpoint, connectTimeout="1s")


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (["id as temperature", "'a' as value"], "'value' and optionally 'topic'"),
        (["'a' as topic"], "neither 'value' nor 'frames'"),
        (["id as value"], "'value': its type is bigint, it must be string or binary"),
        (["'a' as value", "id as topic"], "'topic': its type is bigint"),
        (["'a' as value", "array(cast('a' as binary)) as frames"], "both 'value' and 'frames'"),
        (["array('a') as frames"], "'frames': its type is array<string>"),
    ],
)
def test_a_dataframe_that_is_no_message_is_refused(
    spark: SparkSession, columns: list[str], says: str
) -> None:
    with pytest.raises(PySparkException) as refused:
        write(spark.range(1).selectExpr(*columns), connect="tcp://127.0.0.1:1")
    assert says in str(refused.value)


def test_frames_that_are_no_message_fail_the_task(spark: SparkSession, context: Context) -> None:
    _, endpoint = bound(context, zmq.PULL)
    with pytest.raises(PySparkException, match="empty"):
        write(spark.range(1).selectExpr("cast(array() as array<binary>) as frames"), connect=endpoint)


def test_a_strangers_message_stops_no_relay(
    spark: SparkSession, context: Context, log: Log, tmp_path: Path
) -> None:
    push, source = bound(context, zmq.PUSH)
    pull, sink = bound(context, zmq.PULL)
    relay = (  # with all columns of the source, of which the sink sends topic and value
        feed(spark, socketType="PULL", connect=source, framing="vllm", walLocation=tmp_path / "log")
        .writeStream.format("zmq")
        .options(connect=sink, checkpointLocation=str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        for number in range(10):
            push.send_multipart([b"t", number.to_bytes(8, "big"), b"%d" % number])
            if number in (0, 4):
                push.send(b"a stranger")
        assert take(pull, 10) == [[b"t", b"%d" % number] for number in range(10)]
        total = log.total(12)
    finally:
        relay.stop()
    assert (total["rows"], total["sent"], total["dropped"], total["dropped.null"]) == (12, 10, 2, 2)


def test_rows_that_cannot_be_sent_are_kept_once_and_sent_again(
    spark: SparkSession, context: Context, log: Log, tmp_path: Path
) -> None:
    """A streaming batch without a consumer, the same batch after a crash before its commit, and then a consumer."""
    source, checkpoint, kept = tmp_path / "source", tmp_path / "checkpoint", tmp_path / "letters"
    spark.range(0, 100, 1, 2).selectExpr(
        "concat('t', id % 2) as topic", "cast(id as string) as value"
    ).write.parquet(str(source))

    def send() -> None:
        query = (
            spark.readStream.schema("topic STRING, value STRING")
            .parquet(str(source))
            .writeStream.format("zmq")
            .option("connect", free_endpoint())
            .option("connectTimeout", "200ms")
            .option("deadLetterLocation", str(kept))
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)

    send()
    for name in (checkpoint / "commits").glob("*0*"):
        name.unlink()
    send()
    total = log.total(200)
    assert (total["deadLettered"], total["deadLettered.no_peer"], total["sent"]) == (200, 200, 0)
    letters = spark.read.parquet(str(kept))
    assert letters.count() == 100
    assert {row["reason"] for row in letters.collect()} == {"no_peer"}
    assert {"query", "batch", "partition", "topic", "value"} <= set(letters.columns)
    pull, endpoint = bound(context, zmq.PULL)
    with Consuming(pull) as consuming:
        letters.select("topic", "value").write.format("zmq").mode("append").option("connect", endpoint).save()
        consuming.wait_for(100)
    assert sorted(int(m[1]) for m in consuming.got) == list(range(100))
    assert {m[0] for m in consuming.got} == {b"t0", b"t1"}
