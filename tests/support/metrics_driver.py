"""A Spark driver for the tests of metrics to kill: one query from a PULL feed to a slow consumer, drops and all.

Usage: python -m tests.support.metrics_driver SOURCE SINK DIRECTORY

Spark finds the data source by itself: nothing is registered.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.support.streams import feed


def main(source: str, sink: str, directory: str) -> None:
    spark = (
        SparkSession.builder.master("local[2,3]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.warehouse.dir", f"{directory}/warehouse")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    query = begin(spark, source, sink, directory)
    print("started", flush=True)
    query.awaitTermination()


def begin(
    spark: SparkSession, source: str, sink: str, directory: str | Path, mode: str = "forever"
) -> StreamingQuery:
    """The query, in any session."""
    metrics = f"{directory}/metrics"
    df = feed(
        spark,
        connect=source,
        walLocation=f"{directory}/wal",
        idleTimeout="2s",
        timeout="30s",
        maxMessagesPerTrigger=4000,
        minPartitions=2,
    )
    writer = (
        df.select("value")
        .writeStream.format("zmq")
        .options(connect=sink, noblock="true", sndhwm="20", linger="20s", metricsLocation=metrics)
        .option("zmq.sndbuf", "4096")
        .option("checkpointLocation", f"{directory}/checkpoint")
    )
    return (writer.trigger(availableNow=True) if mode == "once" else writer).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
