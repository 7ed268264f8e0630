"""Receivers on the executors of a cluster, and a query beside them, until a file says that it is enough.

Usage: python -m tests.support.receivers_driver ENDPOINT LOG OUT STOP_FILE
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

from zmq_datasource import register, start_receivers


def main() -> None:
    endpoint, log, out, stop = sys.argv[1:]
    spark = (
        SparkSession.builder.master("local-cluster[3,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.executor.memory", "512m")
        .config("spark.executor.extraJavaOptions", os.environ["EXECUTOR_OPTS"])  # ``conftest`` sets it
        .config("spark.sql.warehouse.dir", f"{out}.warehouse")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    options = {"socketType": "PULL", "connect": endpoint, "walLocation": log, "walFlushInterval": "50ms"}
    with start_receivers(spark, {**options, "receivers": "2"}) as receivers:
        rows = spark.readStream.format("zmq").option("walLocation", log).load()
        query = (
            rows.writeStream.format("parquet")
            .option("path", out)
            .option("checkpointLocation", f"{out}.checkpoint")
            .start()
        )
        while not Path(stop).exists():
            assert query.isActive, query.exception()
            assert receivers.is_active
            time.sleep(0.2)
    query.processAllAvailable()
    query.stop()
    print(f"restarts={receivers.restarts}", flush=True)
    left = start_receivers(spark, {**options, "receivers": "2"})
    spark.stop()
    deadline = time.monotonic() + 60
    while left.is_active and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left.is_active, "it outlives its session"


if __name__ == "__main__":
    main()
