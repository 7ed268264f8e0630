"""How long a message takes from its sender to the user's function, by the rate of messages."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from benchmarks.idle import EMPTY, FIRST_ROWS, IDLE, MANY_CHUNKS, ZMQ, measure_idle
from benchmarks.measure import Measurement, Sample, Times, measured, temporary_directory, wait_for
from benchmarks.peers import peer
from benchmarks.queries import CHECKPOINTS
from benchmarks.section import Section, Target, at_most

__all__ = ["SECTION", "latencies_of", "measure_latency", "our_latencies"]

_RATES = (100, 1_000, 10_000, 100_000)
_MEDIAN, _TAIL = "p50", "p99"
_SIZE, _MOST_SECONDS = 100, 60.0
# Of each micro-batch about this many rows are sampled. All rows are collected all the same: a limit would end Spark's
# Python workers early, and to start others takes most of a second.
_SAMPLED = 1000
SECTION = Section(
    "latency",
    "Latency",
    "Milliseconds from the sender's `zmq_send` until the user's function (`foreachBatch`) has the row: messages of "
    "100 bytes at a fixed rate, PULL, each chunk forced to the disk, no trigger interval. *First row*: from "
    "`start()` until the user's function has a row, of a feed that sends 1,000 messages a second. "
    f"*{EMPTY}* has a row as soon as it is asked. *Idle query*: CPU of the JVM and all of Spark's Python processes "
    "while no message arrives. " + CHECKPOINTS,
    targets=(
        *(
            Target(
                case,
                ZMQ,
                f"at most 1,000 ms more than {EMPTY}",
                lambda found, case=case: found[case, EMPTY].median + 1000,  # type: ignore[misc]
                upper=True,
            )
            for case in FIRST_ROWS
        ),
        at_most(IDLE, ZMQ, 1.0),
        at_most(IDLE, MANY_CHUNKS, 1.0),
    ),
)


def measure_latency(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Milliseconds, the median and the 99th of a hundred, for every rate; then the first row, and an idle query."""
    yield from measure_idle(spark, times)
    for rate in _RATES:
        found: dict[str, list[float]] = {}
        methods = {
            name: partial(_one, spark, rate, times, found, name, quantile)
            for name, quantile in ((_MEDIAN, 0.5), (_TAIL, 0.99))
        }
        yield from measured("latency", f"{rate:,} messages/s", "ms", methods, times)


def _one(
    spark: SparkSession, rate: int, times: Times, found: dict[str, list[float]], name: str, quantile: float
) -> Sample:
    """One quantile of a run; the tail is from the run of the median."""
    if name == _MEDIAN:
        found["run"] = sorted(our_latencies(spark, rate, times))
    values = found["run"]
    return Sample(values[min(len(values) - 1, int(len(values) * quantile))])


def our_latencies(spark: SparkSession, rate: int, times: Times) -> list[float]:
    """Milliseconds of messages at this rate through the source."""
    with temporary_directory() as scratch, peer("push", size=_SIZE, rate=rate, shape="stamped") as push:
        push.go()
        stream = spark.readStream.format("zmq").option("socketType", "PULL")
        stream = stream.option("connect", push.endpoint).option("walLocation", str(scratch / "log"))
        found = latencies_of(stream.load().select("value"), times, _sent)
        push.stop()
        return found


def _sent(values: pa.Array) -> list[float]:
    """The stamps of the messages (monotonic clock of this machine), in seconds since the epoch."""
    since = time.time() - time.monotonic()
    return [since + struct.unpack_from("=Q", value)[0] / 1e9 for value in values.to_pylist()]


def latencies_of(stream: DataFrame, times: Times, sent: Callable[[pa.Array], list[float]]) -> list[float]:
    """Milliseconds from sending until the user's function has the row, for a sample of each micro-batch.

    Args:
        stream: Has one column.
        sent: Values of that column to times of sending, in seconds since the epoch.
    """
    latencies: list[float] = []
    begin = time.monotonic() + times.warm_up

    def sample(batch: DataFrame, _: int) -> None:
        rows = batch.toArrow().column(0).combine_chunks()
        now = time.time()
        if time.monotonic() >= begin and len(rows):
            some = rows.take(pa.array(range(0, len(rows), max(1, len(rows) // _SAMPLED))))
            latencies.extend((now - when) * 1000 for when in sent(some))

    with temporary_directory() as checkpoint:
        query = stream.writeStream.option("checkpointLocation", str(checkpoint)).foreachBatch(sample).start()
        try:
            time.sleep(times.warm_up + times.seconds)
            wait_for("the first rows", lambda: bool(latencies), _MOST_SECONDS)
        finally:
            query.stop()
    return latencies
