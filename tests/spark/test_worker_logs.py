"""``spark.tvf.python_worker_logs()``: which of the package's warnings it shows, as docs/tuning.md says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from pyspark.sql import DataFrame, SparkSession

from tests.support import Socket, bound, free_endpoint, wait_for
from tests.support.streams import session_with
from zmq_datasource.spark.worker import LOGGING_VARIABLE

pytestmark = pytest.mark.spark
Context = zmq.Context[Socket]


@pytest.fixture
def logged(spark: SparkSession) -> Iterator[SparkSession]:
    """A session of its own, whose workers' logs Spark collects."""
    with session_with(spark, pyspark__worker__logging__enabled="true") as session:
        yield session


def warnings_of(session: SparkSession) -> str:
    """What the package has logged in the workers of this session, a line for each warning."""
    logs = session.tvf.python_worker_logs().where("logger LIKE 'zmq_datasource%'")
    return "\n".join(f"{row.level} {row.logger}: {row.msg}" for row in logs.collect())


def wait_for_warning(session: SparkSession, text: str) -> None:
    """Spark adds what a worker has logged a moment after the worker's task."""
    wait_for(lambda: f"WARNING {text}" in warnings_of(session), text)


def write_to_an_absent_peer(rows: DataFrame, **options: str) -> None:
    writer = rows.selectExpr("string(value) AS value").write.format("zmq").mode("append")
    for name, value in {"socketType": "PUSH", "connectTimeout": "100ms", **options}.items():
        writer = writer.option(name, value)
    writer.option("connect", free_endpoint()).save()


@pytest.mark.slow
def test_tasks_of_a_stream_are_in_the_worker_logs_of_its_own_session_only(
    logged: SparkSession, context: Context, tmp_path: Path, package_log: Callable[[], str]
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    seen: list[str] = []

    def write(batch: DataFrame, number: int) -> None:
        if not batch.isEmpty():
            write_to_an_absent_peer(batch, noblock="true")
            wait_for_warning(batch.sparkSession, "zmq_datasource.sink.sending_socket: no peer within")
            seen.append(warnings_of(batch.sparkSession))

    feed = logged.readStream.format("zmq").option("socketType", "PULL").option("connect", endpoint)
    feed = feed.option("walLocation", str(tmp_path / "wal")).option("framing", "custom")
    feed = feed.option("topicFrame", "0").option("valueFrame", "1")
    query = (
        feed.load().writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "c")).start()
    )
    try:
        push.send(b"one frame only")
        push.send_multipart([b"topic", b"value"])
        wait_for(lambda: query.exception() or seen, "a warning of a task", 60)
        assert query.exception() is None
    finally:
        query.stop()
    assert "no peer within" not in warnings_of(logged)
    # The source runner writes to the driver's log, and to no other place.
    wait_for(lambda: "does not fit" in package_log(), "the warning in the log")
    assert "does not fit" not in warnings_of(logged) + "".join(seen)


_WORKER = """
import logging
from pyspark.logger.worker_io import capture_outputs
from zmq_datasource.spark.worker import set_up_worker

with capture_outputs():
    set_up_worker()
    logging.getLogger("zmq_datasource.sink").warning("no peer")
"""


def test_what_spark_collects_is_in_the_log_of_the_executor_too() -> None:
    """Nothing is logged to a session that no user can reach, and to no other place."""
    environment = {name: value for name, value in os.environ.items() if name != LOGGING_VARIABLE}
    worker = subprocess.run(
        [sys.executable, "-c", _WORKER],
        env={**environment, "PYSPARK_SPARK_SESSION_UUID": "a session"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert worker.stdout.count('"msg": "no peer"') == 1
    assert worker.stderr.count("WARNING zmq_datasource.sink: no peer") == 1
