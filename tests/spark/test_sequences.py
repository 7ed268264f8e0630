"""Sequences in Spark: our sink numbers, our source judges; gaps and messages that do not fit as DataFrames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zmq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming import StreamingQuery

from tests.spark.test_sink import write
from tests.support import Socket, free_endpoint, wait_for
from tests.support.publishers import Publisher
from tests.support.streams import (
    feed,
    idle_events,
    running,
    table,
    wait_for_rows,
    wait_until_released,
)
from zmq_datasource import LogFormatError
from zmq_datasource.options import BatchReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.spark.batch_reader import ZmqGapReader

pytestmark = pytest.mark.spark
Context = zmq.Context[Socket]


def metrics(query: StreamingQuery) -> dict[str, Any]:
    progress = query.lastProgress
    assert progress is not None
    latest = progress["sources"][0]["latestOffset"]
    return dict(json.loads(latest)) if isinstance(latest, str) else dict(latest)


def gaps(spark: SparkSession, log: Path) -> DataFrame:
    return spark.read.format("zmq").option("walLocation", str(log)).option("view", "gaps").load()


def test_gaps_and_messages_that_do_not_fit_are_dataframes(spark: SparkSession, tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    with Publisher("vllm", topic="kv@pod") as publisher:
        df = feed(
            spark,
            socketType="SUB",
            connect=publisher.endpoint,
            walLocation=log,
            framing="vllm",
            includeFrames=True,
        )
        with running(df, out) as query:
            publisher.ask("wait-subscriber")
            for command in ("send 5", "skip 3", "raw 00", "repeat 1", "send 5"):
                publisher.ask(command)
            wait_for_rows(query, 12)
            wait_for(lambda: metrics(query)["messagesReceived"] == 12, "the metrics")
            told = metrics(query)
    assert {name: told[name] for name in ("messagesLost", "messagesDuplicate", "messagesMalformed")} == {
        "messagesLost": 3,
        "messagesDuplicate": 1,
        "messagesMalformed": 1,
    }
    wait_until_released(log)
    (gap,) = gaps(spark, log).collect()
    assert (gap["endpoint"], gap["topic"], gap["publisher"]) == (publisher.endpoint, "kv@pod", None)
    assert (gap["first"], gap["last"], gap["messages"]) == (5, 7, 3)
    assert gap["noticed"] is not None
    stranger = table(spark, out).where("value IS NULL").collect()
    assert [(row["id"], row["topic"], row["publisher"], row["sequence"]) for row in stranger] == [
        (5, None, None, None)
    ]
    assert [bytes(frame) for frame in stranger[0]["frames"]] == [b"\0"]
    rows = table(spark, out).where("value IS NOT NULL").orderBy("id").collect()
    assert [row["sequence"] for row in rows] == [0, 1, 2, 3, 4, 4, 8, 9, 10, 11, 12]
    assert [bytes(f) for f in rows[0]["frames"]] == [b"kv@pod", bytes(8), rows[0]["value"]]


# Our sink numbers.


def test_the_source_counts_the_rows_that_the_sink_has_dropped(spark: SparkSession, tmp_path: Path) -> None:
    """A source that is held back, a sink that drops: as many are lost as were dropped."""
    log, endpoint = tmp_path / "log", free_endpoint()
    options = {
        "bind": endpoint,
        "walLocation": log,
        "framing": "sequenced",
        "rcvhwm": 10,
        "zmq_rcvbuf": 4096,
        "walMaxBytes": "64k",
    }
    rows = 5000
    df = spark.range(0, rows, 1, 1).selectExpr("concat(cast(id as string), repeat('x', 1000)) as value")
    with running(feed(spark, **options), tmp_path / "out") as query:
        wait_for((log / "writer.lock").exists, "the source")
        write(df, connect=endpoint, framing="sequenced", noblock=True, sndhwm=10, zmq_sndbuf=4096)
        wait_for(
            lambda: (
                query.lastProgress
                and metrics(query).get("messagesReceived", 0) + metrics(query).get("messagesLost", 0) == rows
            ),
            "every row received or lost",
            60,
        )
        told = metrics(query)
    assert told["messagesLost"] > 0
    assert told["messagesDuplicate"] == 0


def test_the_rows_of_a_repeated_task_are_recognised(spark: SparkSession, tmp_path: Path) -> None:
    """A batch that is written again under the same name comes twice, and is read once."""
    log, endpoint, source = tmp_path / "log", free_endpoint(), tmp_path / "source"
    spark.range(0, 500, 1, 2).selectExpr("cast(id as string) as value").write.parquet(str(source))
    options = {"bind": endpoint, "walLocation": log, "framing": "sequenced", "deduplicate": True}

    def send(checkpoint: Path) -> None:
        sink = (
            spark.readStream.schema("value STRING")
            .parquet(str(source))
            .writeStream.format("zmq")
            .option("connect", endpoint)
            .option("framing", "sequenced")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert sink.awaitTermination(60)

    with idle_events(spark), running(feed(spark, **options), tmp_path / "out") as query:
        wait_for((log / "writer.lock").exists, "the source")
        send(tmp_path / "checkpoint")
        wait_for_rows(query, 500)
        # As after a crash before the batch was committed: the same batch, once more.
        for name in (tmp_path / "checkpoint" / "commits").glob("*0*"):
            name.unlink()
        send(tmp_path / "checkpoint")
        wait_for(
            lambda: query.lastProgress and metrics(query)["messagesDuplicate"] == 500, "the duplicates", 60
        )
        assert metrics(query)["messagesReceived"] == 500


def test_the_gaps_of_a_log_that_is_not_there_are_an_error(tmp_path: Path) -> None:
    """An executor that does not see the directory must not say that there are no gaps."""
    reader = ZmqGapReader(parse(BatchReadOptions, {"walLocation": str(tmp_path / "log"), "view": "gaps"}))
    with pytest.raises(LogFormatError, match="which all machines that read it must share"):
        list(reader.read(InputPartition(0)))
