"""A Spark driver for the crash tests to kill: one query from a PULL feed to Parquet.

Usage: python -m tests.support.crash_driver ENDPOINT LOG OUTPUT
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.support.streams import feed, start
from zmq_datasource import register


def begin(
    spark: SparkSession, endpoint: str, log: str | Path, out: str | Path, mode: str = "forever"
) -> StreamingQuery:
    """The query, in any session."""
    df = feed(spark, connect=endpoint, walLocation=log, walRetention="1h", idleTimeout="2s", timeout="30s")
    return start(df, Path(out), **({"availableNow": True} if mode == "once" else {}))


def main(endpoint: str, log: str, out: str) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.warehouse.dir", f"{out}.warehouse")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    query = begin(spark, endpoint, log, out)
    print("started", flush=True)
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
