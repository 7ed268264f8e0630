"""Memory of the source runner, Spark's process that receives, while a backlog builds up."""

from __future__ import annotations

import time
from collections.abc import Iterator

from pyspark.sql import SparkSession

from benchmarks.measure import MEGA, Measurement, Times, size_name, temporary_directory, wait_for
from benchmarks.peers import peer
from benchmarks.processes import source_runners
from benchmarks.queries import noop_query
from benchmarks.source import log_end

__all__ = ["measure_memory"]

_BYTES_A_SECOND = 200 * MEGA
_SIZES = (100, 1_000)
_SETTLE_SECONDS, _MOST_SECONDS = 2.0, 300.0


def measure_memory(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Peak resident memory, and that before the first message, for a backlog of 200 MB for each second."""
    for size in _SIZES:
        idle, peak = _backlog(spark, size, max(10, round(_BYTES_A_SECOND * times.seconds) // size))
        for method, value in (("before the backlog", idle), ("peak", peak)):
            yield Measurement("memory", size_name(size), method, "MB", (value / MEGA,))


def _backlog(spark: SparkSession, size: int, count: int) -> tuple[int, int]:
    peak = 0
    with temporary_directory() as scratch, peer("push", size=size, count=count) as push:
        log = scratch / "log"
        options = {"socketType": "PULL", "connect": push.endpoint, "walLocation": str(log)}

        # The first trigger starts the receiver; the next comes when all this is over.
        with noop_query(spark, "zmq", options, scratch / "checkpoint", every="1 hour"):
            wait_for("the log", (log / "log.json").exists, _MOST_SECONDS)
            time.sleep(_SETTLE_SECONDS)
            (runner,) = source_runners()
            idle = runner.memory_info().rss

            def logged() -> bool:
                nonlocal peak
                peak = max(peak, runner.memory_info().rss)
                return log_end(log) >= count

            push.go()
            wait_for(f"a backlog of {count} messages", logged, _MOST_SECONDS)
    return idle, peak
