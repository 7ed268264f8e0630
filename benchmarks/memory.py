"""Memory of the source runner, Spark's process that receives, while a backlog builds up."""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql import SparkSession

from benchmarks.measure import MEGA, Measurement, temporary_directory, wait_for
from benchmarks.peers import sender
from benchmarks.queries import noop_query, source_runners
from benchmarks.source import size_name
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage

__all__ = ["measure_memory"]

_BACKLOG_BYTES = 2_000 * MEGA
_SIZES = (100, 1_000)
_MOST_SECONDS = 300.0


def measure_memory(spark: SparkSession, scale: float) -> Iterator[Measurement]:
    """Peak resident memory, and that before the first message, for a backlog of 2 GB times ``scale``."""
    for size in _SIZES:
        idle, peak = _backlog(spark, size, max(10, round(_BACKLOG_BYTES * scale) // size))
        for method, value in (("before the backlog", idle), ("peak", peak)):
            yield Measurement("memory", size_name(size), method, "MB", (value / MEGA,))


def _backlog(spark: SparkSession, size: int, count: int) -> tuple[int, int]:
    peak = 0
    with temporary_directory() as scratch, sender(size, count) as push:
        storage = LogStorage(str(scratch / "log"))
        options = {"socketType": "PULL", "connect": push.endpoint, "walLocation": storage.root}

        def logged(messages: int) -> bool:
            nonlocal peak
            peak = max(peak, runner.memory_info().rss)
            return read_index(storage).end >= messages

        # The first trigger starts the receiver; the next comes when all this is over.
        with noop_query(spark, "zmq", options, scratch / "checkpoint", every="1 hour"):
            wait_for("the source runner", lambda: bool(source_runners()), _MOST_SECONDS)
            (runner,) = source_runners()
            wait_for("the primer", lambda: logged(1), _MOST_SECONDS)
            idle, peak = peak, 0
            push.go()
            wait_for(f"a backlog of {count} messages", lambda: logged(count + 1), _MOST_SECONDS)
    return idle, peak
