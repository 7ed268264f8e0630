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
from benchmarks.report import Section, Target

__all__ = ["SECTION", "measure_sink"]

_LOOP, _NOTHING, _BATCH, _STREAM = "a loop in C", "df.write into nothing", "df.write", "writeStream"
_KINDS = {"PUSH": "pull", "PUB": "sub"}
SECTION = Section(
    "sink",
    "Sink throughput",
    "Messages a second, each with a topic and a value, into a loop in C. One Spark partition, and a socket that "
    f"waits when the queue of its peer is full (PUB with NODROP). *{_LOOP}* sends the same without Spark. "
    f"*{_NOTHING}*: a sink in Python that takes Arrow batches and does nothing. This is what Spark allows. "
    f"*{_BATCH}*: one write, from the call until the last message is received. *{_STREAM}*: a query with "
    "micro-batches of 100 MB and more, from the end of one to the end of another.",
    targets=tuple(Target(f"{kind}, 100 B", _BATCH, 0.75, times=_NOTHING) for kind in _KINDS),
)

# Rows a second to begin with; how many a run writes follows from the run before.
_EXPECTED = {100: 500_000, 1_000: 200_000, 100_000: 2_000}
_BATCH_ROWS = {100: 1_000_000, 1_000: 300_000, 100_000: 3_000}
_MOST_SECONDS = 180.0


def measure_sink(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Messages a second. There is one Spark partition: one sending task against one loop."""
    for kind, receiver in _KINDS.items():
        for size, expected in _EXPECTED.items():
            methods: Mapping[str, Callable[[], Sample]] = {
                _LOOP: partial(_loop_rate, kind, size, times),
                _NOTHING: _BatchWrites(partial(_write_nothing, spark, size), expected, times, None),
                _BATCH: _BatchWrites(partial(_write, spark, kind, size), expected, times, receiver),
                _STREAM: partial(_stream_rate, spark, kind, size, times),
            }
            yield from measured("sink", f"{kind}, {size_name(size)}", "messages/s", methods, times)


def _stream_rate(spark: SparkSession, kind: str, size: int, times: Times) -> Sample:
    """Rows a second of a streaming query with micro-batches of 100 MB and more."""
    stream = spark.readStream.format("rate-micro-batch")
    stream = stream.option("rowsPerBatch", _BATCH_ROWS[size]).option("numPartitions", 1)
    with temporary_directory() as checkpoint, peer(_KINDS[kind], shape="topic") as receiver:
        receiver.go()
        writer = _rows(stream.load(), size).writeStream.format("zmq")
        writer = writer.option("socketType", kind).option("connect", receiver.endpoint)
        query = writer.option("checkpointLocation", str(checkpoint)).start()
        try:
            return steady_rate(query, times, {"receiver": receiver.pid})
        finally:
            query.stop()


class _BatchWrites:
    """Batch writes of about ``times.seconds``: rows a second from the call until the last is received.

    Args:
        write: Writes this many rows to this endpoint; when it returns, they have left.
        expected: Rows a second to begin with.
        kind: Of the peer that receives; None if none does.
    """

    def __init__(
        self, write: Callable[[int, str], None], expected: float, times: Times, kind: str | None
    ) -> None:
        self._write, self._rate, self._times, self._kind = write, expected, times, kind

    def __call__(self) -> Sample:
        count = max(10, round(self._rate * self._times.seconds))
        if self._kind is None:
            return self._timed(count, "", {}, lambda: True)
        with peer(self._kind, shape="topic") as receiver:
            receiver.go()
            peers = {"receiver": receiver.pid}
            return self._timed(count, receiver.endpoint, peers, lambda: receiver.mark().messages >= count)

    def _timed(
        self, count: int, endpoint: str, peers: Mapping[str, int], received: Callable[[], bool]
    ) -> Sample:
        before, began = cpu_seconds(peers), time.time()
        self._write(count, endpoint)
        wait_for(f"{count} messages", received, _MOST_SECONDS)
        seconds, after = time.time() - began, cpu_seconds(peers)
        self._rate = count / seconds
        return Sample(self._rate, per_message(before, after, count))


def _write_nothing(spark: SparkSession, size: int, count: int, endpoint: str) -> None:
    _rows(spark.range(0, count, 1, 1).toDF("n"), size).write.format("nothing").mode("append").save()


def _write(spark: SparkSession, kind: str, size: int, count: int, endpoint: str) -> None:
    writer = _rows(spark.range(0, count, 1, 1).toDF("n"), size).write.format("zmq").mode("append")
    writer.option("socketType", kind).option("connect", endpoint).save()


def _rows(df: DataFrame, size: int) -> DataFrame:
    return df.select(lit("topic").alias("topic"), lit(b"x" * size).alias("value"))


def _loop_rate(kind: str, size: int, times: Times) -> Sample:
    with (
        peer(_KINDS[kind], shape="topic") as receiver,
        peer(kind.lower(), connect=receiver.endpoint, shape="topic", size=size) as sender,
    ):
        receiver.go()
        sender.go()
        return window(receiver, times, {"sender": sender.pid, "receiver": receiver.pid})
