"""The Spark job of the demo: three streaming queries on one feed.

Each query is a reader of its own, with its own socket and its own log: an aggregation, a
sink whose consumer keeps up, and a sink whose consumer does not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import avg, col, count, from_json, length
from pyspark.sql.streaming.query import StreamingQuery

from zmq_datasource import metrics
from zmq_datasource.demo.counts import Tally
from zmq_datasource.demo.errors import DemoError, plain_reason

__all__ = ["SLOW_SINK", "RunningQuery", "TopicTable", "start_aggregation", "start_sink"]

# Each batch of a sink costs one start of a Python process, in which Spark commits it.
TRIGGER = "2 seconds"
SLOW_SINK = {
    "noblock": "true",
    # A short queue on every stage, or the kernel's buffers would hide how slow the consumer is.
    "sndhwm": "500",
    "zmq.sndbuf": "4096",
    "linger": "10s",
}
_IDLE_SECONDS = 10.0


@dataclass
class RunningQuery:
    """One running query and what its progress events say."""

    name: str
    query: StreamingQuery
    tally: Tally = field(default_factory=Tally)

    def update(self) -> None:
        """Take in new progress events.

        Raises:
            DemoError: The query has ended by itself.
        """
        for event in metrics(self.query).recent:
            self.tally.add(event)
        error = self.query.exception()
        if error is not None:
            raise DemoError(f"the {self.name} ended: {plain_reason(error)}")

    def stop(self) -> None:
        """Stop between two micro-batches, so that no batch is left half counted."""
        deadline = time.monotonic() + _IDLE_SECONDS
        while self.query.status["isTriggerActive"] and time.monotonic() < deadline:
            time.sleep(0.01)
        self.query.stop()


@dataclass
class TopicTable:
    """The aggregation's newest result: topic, messages, average."""

    measure: str
    rows: list[tuple[str | None, int, float | None]] = field(default_factory=list)

    def take(self, result: DataFrame, _batch_id: int) -> None:
        """Replace the rows; called by Spark for each micro-batch."""
        # Sorted here: an orderBy would add two Spark jobs to every micro-batch.
        rows = [(r["topic"], r["messages"], r["average"]) for r in result.collect()]
        self.rows = sorted(rows, key=lambda row: (-row[1], row[0] or ""))


def start_aggregation(
    spark: SparkSession, feed: Mapping[str, str], work: Path, name: str, *, own_feed: bool
) -> tuple[RunningQuery, TopicTable]:
    """Count the messages of each topic and average a measure: the temperature, or the size."""
    messages = _read(spark, feed, work, name)
    if own_feed:  # whose payload is not known
        messages, measure = messages.withColumn("measure", length("value")), "average bytes"
    else:
        report = from_json(col("value").cast("string"), "number BIGINT, celsius DOUBLE")
        messages, measure = messages.withColumn("measure", report["celsius"]), "average °C"
    topics = TopicTable(measure)
    query = (
        messages.groupBy("topic")
        .agg(count("*").alias("messages"), avg("measure").alias("average"))
        .writeStream.outputMode("complete")
        .foreachBatch(topics.take)
        .option("checkpointLocation", str(work / name / "checkpoint"))
        .trigger(processingTime=TRIGGER)
        .start()
    )
    return RunningQuery(name, query), topics


def start_sink(
    spark: SparkSession, feed: Mapping[str, str], work: Path, name: str, endpoint: str, *, slow: bool
) -> RunningQuery:
    """Send every message on to the consumer at ``endpoint``, topic and value as they came."""
    writer = (
        _read(spark, feed, work, name)
        .select("topic", "value")
        .writeStream.format("zmq")
        .option("connect", endpoint)
        .option("checkpointLocation", str(work / name / "checkpoint"))
        .trigger(processingTime=TRIGGER)
    )
    if slow:
        writer = writer.options(**SLOW_SINK)
    return RunningQuery(name, writer.start())


def _read(spark: SparkSession, feed: Mapping[str, str], work: Path, name: str) -> DataFrame:
    return (
        spark.readStream.format("zmq").options(**feed).option("walLocation", str(work / name / "log")).load()
    )
