"""One end of a transactional pipeline as a driver of its own, to be killed at any moment; for the chaos test.

Usage: python -m tests.support.transaction_driver sender|receiver DIRECTORY ENDPOINT

``sender`` reads the text files in DIRECTORY/input, one a batch, into a DEALER sink, and ends when it is
through. ``receiver`` reads a ROUTER source into Parquet in DIRECTORY/output until it is killed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession

from zmq_datasource import register


def main() -> None:
    role, directory, endpoint = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.local.dir", str(directory / f"{role}-scratch"))
        .config("spark.sql.warehouse.dir", str(directory / f"{role}-warehouse"))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    checkpoint = str(directory / f"{role}-checkpoint")
    if role == "sender":
        lines = spark.readStream.option("maxFilesPerTrigger", 1).text(str(directory / "input"))
        query = (
            lines.repartition(2)
            .writeStream.format("zmq")
            .option("socketType", "DEALER")
            .option("connect", endpoint)
            .option("connectTimeout", "60s")
            .option("sendTimeout", "60s")
            .option("zmq.reconnect_ivl", "20")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
    else:
        rows = (
            spark.readStream.format("zmq")
            .option("socketType", "ROUTER")
            .option("bind", endpoint)
            .option("walLocation", str(directory / "wal"))
            .load()
        )
        query = (
            rows.selectExpr("id", "publisher", "sequence", "cast(value as string) as value")
            .writeStream.format("parquet")
            .option("path", str(directory / "output"))
            .option("checkpointLocation", checkpoint)
            .start()
        )
    query.awaitTermination()


if __name__ == "__main__":
    main()
