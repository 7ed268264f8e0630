"""``spark.tvf.python_worker_logs()``: what a worker logs is in Spark's collection and in the executor's log."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from zmq_datasource.spark.worker import LOGGING_VARIABLE

pytestmark = pytest.mark.spark


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
