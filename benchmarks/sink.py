"""Sink throughput: rows with a topic into a receiver in C, beside a loop in C that sends the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit

from benchmarks.measure import Measurement, Sample, Times, measured, size_name, temporary_directory, wait_for
from benchmarks.peers import peer, window
from benchmarks.processes import cpu_seconds, per_message
from benchmarks.queries import steady_rate

__all__ = ["BATCH", "KINDS", "LOOP", "STREAM", "BatchWrites", "measure_sink", "stream_rate"]

LOOP, BATCH, STREAM = "a loop in C", "df.write", "writeStream"
KINDS = {"PUSH": "pull", "PUB": "sub"}

# Rows a second to begin with; how many a run writes follows from the run before.
_EXPECTED = {100: 500_000, 1_000: 200_000, 100_000: 2_000}
_MOST_SECONDS = 180.0


def measure_sink(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Messages a second. There is one Spark partition: one sending task against one loop."""
    for kind, receiver in KINDS.items():
        for size, expected in _EXPECTED.items():
            methods: Mapping[str, Callable[[], Sample]] = {
                LOOP: partial(_loop_rate, kind, size, times),
                BATCH: BatchWrites(partial(_write, spark, kind, size), expected, times, receiver),
                STREAM: partial(stream_rate, spark, kind, size, times),
            }
            yield from measured("sink", f"{kind}, {size_name(size)}", "messages/s", methods, times)


def stream_rate(
    spark: SparkSession,
    kind: str,
    size: int,
    times: Times,
    name: str = "zmq",
    options: Mapping[str, str] | None = None,
) -> Sample:
    """Rows a second of a streaming query into the data source ``name``, micro-batches of about a second."""
    stream = spark.readStream.format("rate-micro-batch")
    stream = stream.option("rowsPerBatch", _EXPECTED[size]).option("numPartitions", 1)
    with temporary_directory() as checkpoint, peer(KINDS[kind], shape="topic") as receiver:
        receiver.go()
        writer = _rows(stream.load(), size).writeStream.format(name).options(**(options or {}))
        writer = writer.option("socketType", kind).option("connect", receiver.endpoint)
        query = writer.option("checkpointLocation", str(checkpoint)).start()
        try:
            return steady_rate(query, times, {"receiver": receiver.pid})
        finally:
            query.stop()


class BatchWrites:
    """Batch writes that take about as long as is asked for: rows a second from the call until the last is received.

    Args:
        write: Writes this many rows to this endpoint; when it returns, they have left.
        expected: Rows a second to begin with.
        kind: Of the peer that receives.
    """

    def __init__(self, write: Callable[[int, str], None], expected: float, times: Times, kind: str) -> None:
        self._write, self._rate, self._times, self._kind = write, expected, times, kind

    def __call__(self) -> Sample:
        count = max(10, round(self._rate * self._times.seconds))
        with peer(self._kind, shape="topic") as receiver:
            receiver.go()
            before, began = cpu_seconds({"receiver": receiver.pid}), time.time()
            self._write(count, receiver.endpoint)
            wait_for(f"{count} messages", lambda: receiver.mark().messages >= count, _MOST_SECONDS)
            seconds, after = time.time() - began, cpu_seconds({"receiver": receiver.pid})
        self._rate = count / seconds
        return Sample(self._rate, per_message(before, after, count))


def _write(spark: SparkSession, kind: str, size: int, count: int, endpoint: str) -> None:
    writer = _rows(spark.range(0, count, 1, 1).toDF("n"), size).write.format("zmq").mode("append")
    writer.option("socketType", kind).option("connect", endpoint).save()


def _rows(df: DataFrame, size: int) -> DataFrame:
    return df.select(lit("topic").alias("topic"), lit(b"x" * size).alias("value"))


def _loop_rate(kind: str, size: int, times: Times) -> Sample:
    with (
        peer(KINDS[kind], shape="topic") as receiver,
        peer(kind.lower(), connect=receiver.endpoint, shape="topic", size=size) as sender,
    ):
        receiver.go()
        sender.go()
        return window(receiver, times, {"sender": sender.pid, "receiver": receiver.pid})
