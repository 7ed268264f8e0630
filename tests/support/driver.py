"""A Spark driver for tests to kill: one query, from any source to any sink.

Usage: python -m tests.support.driver SETTINGS, a JSON object with what ``begin`` takes, and

master, conf: Of the session. stop: A file; once it is there, the query reads all there is, and ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from zmq_datasource import register

Options = dict[str, str]


def command(master: str, **settings: Any) -> list[str]:
    """What starts such a driver."""
    return [sys.executable, "-m", "tests.support.driver", json.dumps({"master": master, **settings})]


def begin(
    spark: SparkSession,
    source: Options,
    sink: Options,
    select: Sequence[str] = ("*",),
    partitions: int = 0,
    **trigger: bool,
) -> StreamingQuery:
    """The query, in any session.

    Args:
        source: Its options, and as ``format`` another format than ``zmq``; so does the sink.
        partitions: To divide its rows into; 0 leaves them as they are.
    """
    read, written = {"format": "zmq", **source}, {"format": "zmq", **sink}
    rows = spark.readStream.format(read.pop("format")).options(**read).load().selectExpr(*select)
    rows = rows.repartition(partitions) if partitions else rows
    writer = rows.writeStream.format(written.pop("format")).options(**written)
    return (writer.trigger(**trigger) if trigger else writer).start()


def main() -> None:
    settings = json.loads(sys.argv[1])
    builder = SparkSession.builder.master(settings.pop("master")).config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.warehouse.dir", settings["sink"]["checkpointLocation"] + ".warehouse")
    for name, value in settings.pop("conf", {}).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    stop = settings.pop("stop", None)
    query = begin(spark, **settings)
    while stop is None or not Path(stop).exists():
        if query.awaitTermination(1):
            return
    query.processAllAvailable()
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
