"""Rows a second into another process's log, on disk: transactions, plain messages, and Spark's own Parquet."""

from __future__ import annotations

import signal
import socket as stdlib_socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from benchmarks.measure import Measurement, Sample, Times, measured, temporary_directory, wait_for
from benchmarks.processes import cpu_seconds, per_message
from benchmarks.source import log_end

__all__ = ["ACKNOWLEDGED", "PARQUET", "PLAIN", "free_endpoint", "measure_transactions", "written_to_log"]

ACKNOWLEDGED, PLAIN, PARQUET = "DEALER → ROUTER", "PUSH → PULL", "Parquet files"

_ROWS_A_SECOND = 1_000_000
_PARTITIONS = 2
_MOST_SECONDS = 180.0


def measure_transactions(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Rows of 100 bytes a second, from the call of ``df.write`` until all are on disk, for every method."""
    rows = max(1000, round(_ROWS_A_SECOND * times.seconds))
    df = spark.range(0, rows, 1, _PARTITIONS)
    df = df.selectExpr("cast(lpad(id, 100, 'x') as binary) as value").cache()
    df.count()
    methods: Mapping[str, Callable[[], Sample]] = {
        ACKNOWLEDGED: partial(written_to_log, df, rows, "DEALER", "ROUTER"),
        PLAIN: partial(written_to_log, df, rows, "PUSH", "PULL"),
        PARQUET: partial(_written_to_parquet, df, rows),
    }
    yield from measured("transactions", "100 B", "rows/s", methods, times)
    df.unpersist(blocking=True)


def written_to_log(df: DataFrame, rows: int, sink: str, source: str) -> Sample:
    """Rows a second of one ``df.write`` until all are in the log of a receiver process."""
    with temporary_directory() as scratch, _receiver(scratch / "log", source) as (endpoint, pid):
        before, began = cpu_seconds({"receiver": pid}), time.monotonic()
        writer = df.write.format("zmq").mode("append").option("socketType", sink)
        writer.option("connect", endpoint).save()
        wait_for("all rows in the log", lambda: log_end(scratch / "log") >= rows, _MOST_SECONDS)
        seconds, after = time.monotonic() - began, cpu_seconds({"receiver": pid})
        return Sample(rows / seconds, per_message(before, after, rows))


def free_endpoint() -> str:
    """An endpoint that nobody has bound."""
    with stdlib_socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def _receiver(location: Path, source: str) -> Iterator[tuple[str, int]]:
    """``zmq-datasource receive`` in a process of its own: its endpoint and process id."""
    endpoint = free_endpoint()
    command = [sys.executable, "-m", "zmq_datasource", "receive", "--socket-type", source]
    command += ["--bind", endpoint, "--wal-location", str(location), "-o", "walMaxBytes=1t"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for("the receiver", lambda: _listens(endpoint), _MOST_SECONDS)
        yield endpoint, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _listens(endpoint: str) -> bool:
    host, port = endpoint.removeprefix("tcp://").split(":")
    with stdlib_socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def _written_to_parquet(df: DataFrame, rows: int) -> Sample:
    with temporary_directory() as scratch:
        before, began = cpu_seconds({}), time.monotonic()
        df.write.parquet(str(scratch / "rows"))
        seconds = time.monotonic() - began
        return Sample(rows / seconds, per_message(before, cpu_seconds({}), rows))
