"""A log in a bucket, as a user of Spark sees it: received by one query, read by others without its directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
from pyspark.sql import SparkSession

from tests.support import Socket, bound, wait_for
from tests.support.streams import feed, ids_and_numbers, rows_read, running, wait_for_rows

pytestmark = pytest.mark.spark
Context = zmq.Context[Socket]


@pytest.mark.slow
def test_a_query_receives_and_others_read_what_is_in_the_storage(
    spark: SparkSession, context: Context, tmp_path: Path, bucket: str
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    received = feed(spark, connect=endpoint, walStore=bucket, walRetention="1h")
    elsewhere = spark.readStream.format("zmq").option("walStore", bucket)
    with running(received, tmp_path / "one") as query:
        for number in range(500):
            push.send(b"%d" % number)
        wait_for_rows(query, 500)
        with running(elsewhere.load(), tmp_path / "two") as other:
            wait_for_rows(other, 500)
            for number in range(500, 1000):
                push.send(b"%d" % number)
            wait_for_rows(query, 1000)
            wait_for_rows(other, 1000)
    wanted = [(i, i) for i in range(1000)]
    assert ids_and_numbers(tmp_path / "one") == wanted
    assert ids_and_numbers(tmp_path / "two") == wanted
    batch = spark.read.format("zmq").option("walStore", bucket)
    assert batch.load().count() == 1000
    assert batch.option("startingOffsets", '{"next": 990}').load().count() == 10
    assert spark.read.format("zmq").option("walStore", bucket).option("view", "gaps").load().count() == 0
    # Another machine goes on from the same checkpoint.
    moved = feed(spark, connect=endpoint, walStore=bucket, walRetention="1h")
    with running(moved, tmp_path / "one") as query:
        for number in range(1000, 1200):
            push.send(b"%d" % number)
        wait_for(lambda: rows_read(query) >= 1200, "the rows on the other machine", 90)
    assert ids_and_numbers(tmp_path / "one") == [(i, i) for i in range(1200)]
