"""A query on a cluster, until a file says that it is enough.

Usage: python -m tests.support.cluster_driver MASTER HOST ENDPOINT LOG OUT STOP_FILE [STORE]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

from zmq_datasource import register


def main() -> None:
    master, host, endpoint, log, out, stop, *store = sys.argv[1:]
    spark = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", host)
        .config("spark.driver.bindAddress", host)
        .config("spark.executor.memory", "512m")
        .config("spark.executor.extraJavaOptions", os.environ["EXECUTOR_OPTS"])  # ``conftest`` sets it
        .config("spark.executor.heartbeatInterval", "5s")
        .config("spark.network.timeout", "60s")
        .config("spark.task.maxFailures", "8")
        .config("spark.sql.warehouse.dir", f"{out}.warehouse")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    rows = (
        spark.readStream.format("zmq")
        .option("socketType", "PULL")
        .option("connect", endpoint)
        .option("walRetention", "1h")
        .option("walFlushInterval", "50ms")
        .option("minPartitions", 2)
        .options(**({"walStore": store[0]} if store else {"walLocation": log}))
        .load()
    )
    query = (
        rows.writeStream.format("parquet")
        .option("path", out)
        .option("checkpointLocation", f"{out}.checkpoint")
        .start()
    )
    while not Path(stop).exists():
        assert query.isActive, query.exception()
        time.sleep(0.2)
    query.processAllAvailable()
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
