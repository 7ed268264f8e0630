"""A Spark driver for the crash tests to kill: one query from a PULL feed to Parquet.

Usage: python -m tests.support.crash_driver ENDPOINT LOG OUTPUT [once]
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession

from tests.support.streams import feed, start
from zmq_datasource import register


def main(endpoint: str, log: str, out: str, mode: str = "forever") -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.warehouse.dir", f"{out}.warehouse")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    df = feed(spark, connect=endpoint, walLocation=log, walRetention="1h", idleTimeout="2s", timeout="30s")
    query = start(df, Path(out), **({"availableNow": True} if mode == "once" else {}))
    print("started", flush=True)
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
