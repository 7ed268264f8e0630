"""After kills of any process the output has each message of the log once."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from pyspark.sql import SparkSession

from tests.support import Offering, Socket, bound, log_rows, wait_for
from tests.support.driver import Driver, begin
from tests.support.streams import ids_and_numbers, wait_until_released
from zmq_datasource.errors import DiskFaultError
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage

pytestmark = pytest.mark.spark
Context = zmq.Context[Socket]
SEED = 20_261_120


def query(endpoint: str, log: Path, out: Path) -> dict[str, Any]:
    """From a PULL to Parquet."""
    source = {"socketType": "PULL", "connect": endpoint, "walLocation": str(log), "walRetention": "1h"}
    sink = {"format": "parquet", "path": str(out), "checkpointLocation": f"{out}.checkpoint"}
    return {"source": {**source, "idleTimeout": "2s", "timeout": "30s"}, "sink": sink}


@pytest.mark.slow
@pytest.mark.parametrize(
    "victims",
    [
        ["source_runner", "java"],
        pytest.param(
            ["java", "source_runner", "java"] * 4, marks=[pytest.mark.long, pytest.mark.timeout(900)]
        ),
    ],
    ids=len,
)
def test_kills_lose_and_double_no_message_of_the_log(
    spark: SparkSession, context: Context, tmp_path: Path, victims: list[str]
) -> None:
    log, out = tmp_path / "wal", tmp_path / "out"
    push, endpoint = bound(context, zmq.PUSH, sndhwm=100)
    choice = random.Random(SEED)
    before = 0
    with Offering(push, 0.0005) as sending:
        for left, victim in reversed(list(enumerate(reversed(victims)))):
            running = Driver(tmp_path / "driver.log", master="local[2]", **query(endpoint, log, out))
            try:
                before = durable(log)
                running.wait_until_receiving()
                process = running.find(victim)
                goal = before + choice.randint(200, 3000)
                wait_for(lambda goal=goal: durable(log) >= goal, f"{goal} durable messages", 90)
                if not left:
                    sending.end()
                process.kill()
                process.wait(30)
            finally:
                running.end()
    if victims[-1] == "java":  # the sender had stopped, so all its messages are in the log, without stop()
        values = [int(v) for v in log_rows(log)["value"].to_pylist()]
        assert values[before:] == list(range(values[before], sending.sent))
    last = begin(spark, **query(endpoint, log, out), availableNow=True)
    assert last.awaitTermination(120)
    wait_until_released(log)
    kept = log_rows(log)
    in_log = list(zip(kept["id"].to_pylist(), (int(v) for v in kept["value"].to_pylist()), strict=True))
    assert [i for i, _ in in_log] == list(range(len(in_log)))
    assert ids_and_numbers(out) == in_log
    sent = [n for _, n in in_log]
    assert sent == sorted(set(sent)), "a message was taken twice"


def durable(log: Path) -> int:
    with suppress(DiskFaultError):  # there is no log yet
        return read_index(LogStorage(str(log))).durable_end
    return 0
