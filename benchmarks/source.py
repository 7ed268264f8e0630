"""Source throughput: from the first message sent to the last row counted by Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pyspark.sql import SparkSession

from benchmarks.measure import Measurement, interleaved, temporary_directory
from benchmarks.peers import consumer, sender
from benchmarks.queries import finished_at, noop_query

__all__ = ["DURABLE", "RAW", "SIZES", "TUTORIAL", "UNSYNCED", "measure_source", "raw_rate", "size_name"]

RAW, TUTORIAL, DURABLE, UNSYNCED = "raw pyzmq", "tutorial source", "zmq", "zmq, walSync=false"

# Messages a second to expect, rough: only to choose how many a run sends.
SIZES = {
    16: {RAW: 1_200_000, TUTORIAL: 50_000, DURABLE: 400_000, UNSYNCED: 400_000},
    100: {RAW: 1_000_000, TUTORIAL: 50_000, DURABLE: 400_000, UNSYNCED: 400_000},
    1_000: {RAW: 400_000, TUTORIAL: 40_000, DURABLE: 150_000, UNSYNCED: 150_000},
    100_000: {RAW: 8_000, TUTORIAL: 1_000, DURABLE: 2_000, UNSYNCED: 2_000},
    1_000_000: {RAW: 800, TUTORIAL: 100, DURABLE: 200, UNSYNCED: 200},
}
_RUN_SECONDS = 4.0
_MOST_SECONDS = 120.0


def size_name(size: int) -> str:
    """16 B, 100 kB, 1 MB."""
    for unit, name in ((1_000_000, "MB"), (1_000, "kB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def measure_source(spark: SparkSession, scale: float, rounds: int) -> Iterator[Measurement]:
    """Messages a second for every size and method, the methods interleaved."""
    methods: dict[str, Callable[[int, int], float]] = {
        RAW: raw_rate,
        TUTORIAL: lambda size, count: _query_rate(spark, TUTORIAL, size, count),
        DURABLE: lambda size, count: _query_rate(spark, DURABLE, size, count),
        UNSYNCED: lambda size, count: _query_rate(spark, UNSYNCED, size, count),
    }
    for measure in methods.values():
        measure(100, 1000)  # warm-up
    for size, expected in SIZES.items():
        rates: dict[str, list[float]] = {method: [] for method in methods}
        for method in interleaved(tuple(methods), rounds):
            count = max(10, round(expected[method] * _RUN_SECONDS * scale))
            rates[method].append(methods[method](size, count))
        for method, values in rates.items():
            yield Measurement("source", size_name(size), method, "messages/s", tuple(values))


def raw_rate(size: int, count: int) -> float:
    """Messages a second of a PUSH loop in one process into a PULL loop in another."""
    with consumer(count + 1) as pull, sender(size, count, pull.endpoint) as push:
        pull.answer(_MOST_SECONDS)  # the primer
        push.go()
        began = push.answer(_MOST_SECONDS)
        return float(count / (pull.answer(_MOST_SECONDS) - began))


def _query_rate(spark: SparkSession, method: str, size: int, count: int) -> float:
    with temporary_directory() as scratch, sender(size, count) as push:
        source, options = "tutorial", {"connect": push.endpoint}
        if method != TUTORIAL:
            source = "zmq"
            options |= {
                "socketType": "PULL",
                "walLocation": str(scratch / "log"),
                "walSync": str(method == DURABLE).lower(),
            }
        with noop_query(spark, source, options, scratch / "checkpoint") as query:
            finished_at(query, 1, _MOST_SECONDS)  # the primer
            push.go()
            ended = finished_at(query, count + 1, _MOST_SECONDS)
            return float(count / (ended - push.answer(_MOST_SECONDS)))
