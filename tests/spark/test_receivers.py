"""Receivers on executors."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from socket import create_server

import psutil
import pytest
import zmq
from pyspark.sql import SparkSession

from tests.support import Socket, bound, free_endpoint, log_rows, offer, wait_for
from tests.support.streams import ids_and_numbers, running, table, wait_for_rows
from zmq_datasource import OptionError, SocketError, register, start_receivers
from zmq_datasource.errors import DiskFaultError
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage

pytestmark = pytest.mark.spark
Context = zmq.Context[Socket]


def end_of(log: Path, partition: int = 0) -> int:
    with suppress(DiskFaultError):  # there is no log yet
        return read_index(LogStorage(str(log), partition)).end
    return 0


def test_a_receiver_on_an_executor_fills_a_log_until_it_is_stopped(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    log = tmp_path / "wal"
    options = {"socketType": "PULL", "connect": endpoint, "walLocation": str(log)}
    with start_receivers(spark, options) as receivers:
        rows = spark.readStream.format("zmq").option("walLocation", str(log)).load()
        with running(rows, tmp_path / "out") as query:
            for number in range(1000):
                push.send(b"%d" % number)
            wait_for_rows(query, 1000)
            for number in range(1000, 1500):  # what it has at its end is sealed
                push.send(b"%d" % number)
            receivers.stop()
            assert not receivers.is_active
            wait_for_rows(query, end_of(log))
        assert ids_and_numbers(tmp_path / "out") == [(i, i) for i in range(end_of(log))]
    assert not LogStorage(str(log)).is_written()
    assert (receivers.restarts, receivers.failure) == (0, None)
    assert [path.name for path in log.iterdir() if path.name.startswith(".")] == []


def test_a_receiver_that_fails_at_its_end_is_told(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    """Not by an error of the task: where tasks are repeated, that would be the last that is heard of it."""
    push, endpoint = bound(context, zmq.PUSH)
    log = tmp_path / "wal"
    options = {"socketType": "PULL", "connect": endpoint, "walLocation": str(log), "walFlushInterval": "1h"}
    receivers = start_receivers(spark, options)
    push.send(b"0")
    wait_for(lambda: LogStorage(str(log)).is_written(), "it receives", 60)
    shutil.rmtree(log / "0")
    with pytest.raises(SocketError, match="stopping the receiver of log"):
        receivers.stop()
    assert not receivers.is_active


def test_receivers_are_refused_where_spark_kills_silent_workers(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    log = tmp_path / "wal"
    options = {"socketType": "PULL", "connect": endpoint, "walLocation": str(log)}
    impatient = spark.newSession()
    register(impatient)
    impatient.conf.set("spark.sql.execution.pyspark.udf.idleTimeoutSeconds", "1")
    impatient.conf.set("spark.sql.execution.pyspark.udf.killOnIdleTimeout", "true")
    with pytest.raises(OptionError, match=r"killOnIdleTimeout=true: .* would kill it after 1 s"):
        start_receivers(impatient, options)
    # A query's own workers are not silent for long, and its source is no worker.
    rows = impatient.readStream.format("zmq").options(**options).load()
    with running(rows, tmp_path / "out") as query:
        push.send(b"0")
        wait_for_rows(query, 1)
        time.sleep(2.5)  # longer than Spark waits for a worker
        push.send(b"1")
        wait_for_rows(query, 2)
    impatient.conf.set("spark.sql.execution.pyspark.udf.killOnIdleTimeout", "false")
    with start_receivers(impatient, options) as receivers:
        push.send(b"2")
        wait_for(lambda: end_of(log) == 3, "a message received", 60)
        assert receivers.restarts == 0


def test_a_job_that_fails_is_started_again(spark: SparkSession, context: Context, tmp_path: Path) -> None:
    endpoint = free_endpoint()
    # No ZeroMQ socket, which would close in its own time: a PUSH that meets another PUSH never dials again.
    blocker = create_server(("127.0.0.1", int(endpoint.rpartition(":")[2])))
    options = {"socketType": "PULL", "bind": endpoint, "walLocation": str(tmp_path / "wal")}
    with start_receivers(spark, options) as receivers:
        wait_for(lambda: receivers.restarts, "a failure", 60)
        assert "in use" in str(receivers.failure)
        blocker.close()
        push = context.socket(zmq.PUSH)
        push.connect(endpoint)
        push.send(b"0")
        wait_for(lambda: end_of(tmp_path / "wal") == 1, "a message", 90)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"walLocation": "/tmp/x"}, "neither connect nor bind is set"),
        ({"connect": "tcp://a:1"}, "neither walLocation nor walStore is set"),
        (
            {"connect": "tcp://a:1", "walLocation": "/tmp/x", "receivers": "2"},
            "SUB sockets share the endpoints",
        ),
        (
            {"connect": "tcp://a:1", "walLocation": "/tmp/x", "metricsLocation": "here"},
            "metricsLocation='here': it must be an absolute path",
        ),
    ],
)
def test_wrong_options_are_told_before_anything_runs(
    spark: SparkSession, options: dict[str, str], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        start_receivers(spark, options)


def executors(driver: int) -> list[psutil.Process]:
    """The executors of a driver, by its process id."""
    found = []
    for child in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # includes zombies
            if "CoarseGrainedExecutorBackend" in " ".join(child.cmdline()):
                found.append(child)
    return found


def receives(executor: psutil.Process, log: Path) -> bool:
    """Whether a task of it holds the lock of one of two partitions."""
    workers: set[str] = set()
    with suppress(psutil.NoSuchProcess):
        workers = {str(child.pid) for child in executor.children(recursive=True)}
    holders = {(log / str(partition) / "writer.lock").read_text().split()[1] for partition in (0, 1)}
    return bool(workers & holders)


@pytest.mark.slow
def test_an_executor_that_is_killed_costs_nothing_that_was_sealed(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    """A real cluster of processes; its tasks go on elsewhere, in the same partitions."""
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10)
    log, out, stop = tmp_path / "wal", tmp_path / "out", tmp_path / "stop"
    command = [
        sys.executable,
        "-m",
        "tests.support.receivers_driver",
        endpoint,
        str(log),
        str(out),
        str(stop),
    ]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    end = threading.Event()
    sent = 0

    def send() -> None:
        nonlocal sent
        while not end.wait(0.001):
            sent += offer(push, b"%d" % sent)

    sending = threading.Thread(target=send)
    sending.start()
    try:
        wait_for(
            lambda: driver.poll() is not None or min(end_of(log, 0), end_of(log, 1)) > 100,
            "two receivers",
            120,
        )
        assert driver.poll() is None
        victim = wait_for(
            lambda: [e for e in executors(driver.pid) if receives(e, log)], "an executor that receives"
        )[0]
        victim.kill()
        before = end_of(log, 0), end_of(log, 1)
        wait_for(
            lambda: end_of(log, 0) > before[0] + 300 and end_of(log, 1) > before[1] + 300, "both go on", 120
        )
    finally:
        end.set()
        sending.join(30)
        stop.touch()
        try:
            output, _ = driver.communicate(timeout=120)
        finally:
            driver.kill()
            driver.wait(30)
    assert driver.returncode == 0, output
    got = table(spark, out).selectExpr("partition", "id", "cast(cast(value as string) as bigint) as n")
    rows = [(row["partition"], row["id"], row["n"]) for row in got.collect()]
    for partition in (0, 1):
        kept = log_rows(log, partition)["value"].to_pylist()
        mine = sorted((i, n) for p, i, n in rows if p == partition)
        assert mine[-len(kept) :] == [
            (i, int(v))
            for i, v in zip(range(mine[-1][0] + 1 - len(kept), mine[-1][0] + 1), kept, strict=True)
        ]
        assert [i for i, _ in mine] == list(range(len(mine)))
    numbers = [n for _, _, n in rows]
    assert len(numbers) == len(set(numbers)), "a message was taken twice"
    # What the killed one had received and not sealed, and what was on its way there.
    assert sent - len(numbers) < 1000
