"""A fast feed with ZeroMQ's default high-water marks, while Spark reads and chunks are sealed."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support import free_endpoint, wait_for
from tests.support.streams import feed, rows_read, running, table

pytestmark = [pytest.mark.spark, pytest.mark.alone]

# A publisher that tells what it drops: with XPUB_NODROP a full queue refuses a message that a
# default PUB would have dropped without a word.
PUBLISHER = """
    import json, os, sys, time, zmq
    endpoint, rate, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    try:
        os.nice(-10)  # it stands for another machine, which Spark does not slow down
    except PermissionError:
        pass
    context = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.XPUB_NODROP, 1)
    publisher.bind(endpoint)
    publisher.recv()  # the subscription
    began = time.perf_counter()
    number, total, refused = 0, int(rate * seconds), []
    while number < total:
        due = min(total, number + 100, int((time.perf_counter() - began) * rate))
        if number == due:
            time.sleep(0.0005)
        while number < due:
            message = b"%020d" % number + b"x" * 80
            try:
                publisher.send(message, zmq.NOBLOCK)
            except zmq.Again:
                publisher.getsockopt(zmq.EVENTS)  # the refusal may be an old view of the queue
                try:
                    publisher.send(message, zmq.NOBLOCK)
                except zmq.Again:
                    refused.append(number)
            number += 1
    print(json.dumps({"total": total, "refused": refused, "seconds": time.perf_counter() - began}))
    publisher.close()
    context.term()
"""


@pytest.mark.parametrize(
    "seconds", [pytest.param(5, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.long)]
)
def test_everything_a_publisher_got_rid_of_is_a_row_at_100_000_a_second(
    spark: SparkSession, tmp_path: Path, seconds: int, record_property: pytest.RecordProperty
) -> None:
    """Exactly so; and what it could not get rid of is the exception.

    With Spark on the same two cores a thread of libzmq may have to wait for 10 ms, in which a
    queue of 1000 fills; then a default PUB would have dropped. Without Spark: 0 to 0.04 %.
    """
    endpoint, rate = free_endpoint(), 100_000
    command = [sys.executable, "-c", textwrap.dedent(PUBLISHER), endpoint, str(rate), str(seconds)]
    publisher = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        df = feed(spark, socketType="SUB", connect=endpoint, walLocation=tmp_path / "wal")
        numbers = df.selectExpr("id", "cast(cast(substring(value, 1, 20) as string) as bigint) as n")
        with running(numbers, tmp_path / "out") as query:
            output, _ = publisher.communicate(timeout=seconds + 120)
            told = json.loads(output)
            accepted = told["total"] - len(told["refused"])
            wait_for(lambda: rows_read(query) >= accepted, f"{accepted} rows", 120)
    finally:
        publisher.kill()
        publisher.wait()
    assert told["total"] / told["seconds"] > 0.9 * rate, "the publisher was too slow for this test"
    got = table(spark, tmp_path / "out").selectExpr("count(*)", "count(distinct n)", "max(n)")
    assert tuple(got.first())[:2] == (accepted, accepted)
    record_property("refused", len(told["refused"]))
    print(f"{seconds} s: {len(told['refused'])} of {told['total']} refused")
    assert len(told["refused"]) < told["total"] / 20
