"""Sink throughput: rows with a topic into a receiver in C, beside a loop in C that sends the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit

from benchmarks.measure import Measurement, Sample, Times, measured, size_name, wait_for
from benchmarks.peers import peer, window
from benchmarks.processes import cpu_seconds, per_message
from benchmarks.report import Section, Target

_LOOP, _NOTHING, _OURS = "a loop in C", "df.write into nothing", "df.write"
SECTION = Section(
    "sink",
    "Sink throughput",
    "Messages a second by PUSH, each with a topic and a value, into a loop in C. One Spark partition, and a socket "
    f"that waits when the queue of its peer is full. *{_LOOP}* sends the same without Spark. *{_NOTHING}*: a sink in "
    f"Python that takes Arrow batches and does nothing. This is what Spark allows. *{_OURS}*: one write, from the "
    "call until the last message is received.",
    targets=(Target("100 B", _OURS, 0.75, times=_NOTHING),),
)
# By size: rows of one write at scale 1, some ten seconds' worth.
_ROWS = {100: 12_000_000, 100_000: 50_000}
_MOST_SECONDS = 180.0


def measure_sink(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Messages a second. There is one Spark partition: one sending task against one loop."""
    for size, rows in _ROWS.items():
        count = max(10, round(rows * times.seconds / 10))
        df = spark.range(0, count, 1, 1).select(lit("topic").alias("topic"), lit(b"x" * size).alias("value"))
        methods: Mapping[str, Callable[[], Sample]] = {
            _LOOP: partial(_loop_rate, size, times),
            _NOTHING: partial(_nothing_rate, df, count),
            _OURS: partial(_write_rate, df, count),
        }
        yield from measured("sink", size_name(size), "messages/s", methods, times)


def _loop_rate(size: int, times: Times) -> Sample:
    with (
        peer("pull", shape="topic") as receiver,
        peer("push", connect=receiver.endpoint, shape="topic", size=size) as sender,
    ):
        receiver.go()
        sender.go()
        return window(receiver, times, {"sender": sender.pid, "receiver": receiver.pid})


def _nothing_rate(df: DataFrame, count: int) -> Sample:
    before, began = cpu_seconds(), time.monotonic()
    df.write.format("nothing").mode("append").save()
    return Sample(count / (time.monotonic() - began), per_message(before, cpu_seconds(), count))


def _write_rate(df: DataFrame, count: int) -> Sample:
    """Rows a second from the call until the last is received."""
    with peer("pull", shape="topic") as receiver:
        receiver.go()
        peers = {"receiver": receiver.pid}
        before, began = cpu_seconds(peers), time.monotonic()
        df.write.format("zmq").mode("append").options(socketType="PUSH", connect=receiver.endpoint).save()
        wait_for(f"{count} messages", lambda: receiver.mark().messages >= count, _MOST_SECONDS)
        seconds = time.monotonic() - began
        return Sample(count / seconds, per_message(before, cpu_seconds(peers), count))
