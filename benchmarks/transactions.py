"""Rows a second into another process's log, on disk: transactions, plain messages, and Spark's own Parquet."""

from __future__ import annotations

import signal
import socket as stdlib_socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from benchmarks.measure import Measurement, interleaved, temporary_directory, wait_for
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage

__all__ = ["ACKNOWLEDGED", "PARQUET", "PLAIN", "measure_transactions"]

ACKNOWLEDGED, PLAIN, PARQUET = "DEALER → ROUTER", "PUSH → PULL", "Parquet files"

_ROWS = 2_000_000
_PARTITIONS = 2
_MOST_SECONDS = 180.0


def measure_transactions(spark: SparkSession, scale: float, rounds: int) -> Iterator[Measurement]:
    """Rows of 100 bytes a second, from the call of ``df.write`` until all are on disk, for every method."""
    rows = max(1000, round(_ROWS * scale))
    df = (
        spark.range(0, rows, 1, _PARTITIONS).selectExpr("cast(lpad(id, 100, 'x') as binary) as value").cache()
    )
    df.count()
    methods: dict[str, Callable[[], float]] = {
        ACKNOWLEDGED: lambda: rows / _seconds_to_receiver(df, rows, "DEALER", "ROUTER"),
        PLAIN: lambda: rows / _seconds_to_receiver(df, rows, "PUSH", "PULL"),
        PARQUET: lambda: rows / _seconds_to_parquet(df),
    }
    rates: dict[str, list[float]] = {method: [] for method in methods}
    for measure in methods.values():
        measure()  # warm-up
    for method in interleaved(tuple(methods), rounds):
        rates[method].append(methods[method]())
    df.unpersist()
    for method, values in rates.items():
        yield Measurement("transactions", "100 B", method, "rows/s", tuple(values))


def _seconds_to_receiver(df: DataFrame, rows: int, sink: str, source: str) -> float:
    with temporary_directory() as scratch, _receiver(scratch / "log", source) as endpoint:
        began = time.monotonic()
        writer = df.write.format("zmq").mode("append").option("socketType", sink)
        writer.option("connect", endpoint).save()
        wait_for("all rows in the log", lambda: _durable(scratch / "log") >= rows, _MOST_SECONDS)
        return time.monotonic() - began


def _durable(location: Path) -> int:
    return read_index(LogStorage(str(location))).end


@contextmanager
def _receiver(location: Path, source: str) -> Iterator[str]:
    """``zmq-datasource receive`` in a process of its own."""
    with stdlib_socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "zmq_datasource.cli", "receive", "--socket-type", source]
    command += ["--bind", endpoint, "--wal-location", str(location)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for("the receiver", lambda: _listens(endpoint), _MOST_SECONDS)
        yield endpoint
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _listens(endpoint: str) -> bool:
    host, port = endpoint.removeprefix("tcp://").split(":")
    with stdlib_socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def _seconds_to_parquet(df: DataFrame) -> float:
    with temporary_directory() as scratch:
        began = time.monotonic()
        df.write.parquet(str(scratch / "rows"))
        return time.monotonic() - began
