"""What it costs to read and tracker publishers' numbers: the same messages, with and without."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from pyspark.sql import SparkSession

from benchmarks.measure import Measurement, interleaved, temporary_directory
from benchmarks.peers import SHAPES, sender
from benchmarks.queries import finished_at, noop_query
from zmq_datasource.counters import SourceCounters
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.source.receiver import Receiver

__all__ = ["RECEIVER_JUDGED", "RECEIVER_PLAIN", "SPARK_JUDGED", "SPARK_PLAIN", "measure_sequences"]

SPARK_PLAIN, SPARK_JUDGED = "Spark, plain", "Spark, judged"
RECEIVER_PLAIN, RECEIVER_JUDGED = "receiver, plain", "receiver, judged"

_SIZE = 100
_MESSAGES = 1_200_000
_MOST_SECONDS = 120.0
_FRAMINGS: Mapping[str, Mapping[str, str]] = {
    "one frame": {"framing": "custom", "sequenceFrame": "0"},
    "vllm": {"framing": "vllm"},
    "sequenced": {"framing": "sequenced"},
}


def measure_sequences(spark: SparkSession, scale: float, rounds: int) -> Iterator[Measurement]:
    """Messages a second for every shape of message, judged and not, interleaved."""
    count = max(1000, round(_MESSAGES * scale))
    for shape in SHAPES:
        judged = {**_FRAMINGS[shape], "deduplicate": "true"}
        methods: dict[str, Callable[[], float]] = {
            SPARK_PLAIN: lambda shape=shape: _query_rate(spark, shape, {}, count),  # type: ignore[misc]
            SPARK_JUDGED: lambda shape=shape, judged=judged: _query_rate(spark, shape, judged, count),  # type: ignore[misc]
            RECEIVER_PLAIN: lambda shape=shape: _receiver_rate(shape, {}, count),  # type: ignore[misc]
            RECEIVER_JUDGED: lambda shape=shape, judged=judged: _receiver_rate(shape, judged, count),  # type: ignore[misc]
        }
        rates: dict[str, list[float]] = {method: [] for method in methods}
        for method in interleaved(tuple(methods), rounds):
            rates[method].append(methods[method]())
        for method, values in rates.items():
            yield Measurement("sequences", shape, method, "messages/s", tuple(values))


def _query_rate(spark: SparkSession, shape: str, framing: Mapping[str, str], count: int) -> float:
    with temporary_directory() as scratch, sender(_SIZE, count, shape=shape) as push:
        options = {
            "connect": push.endpoint,
            "socketType": "PULL",
            "walLocation": str(scratch / "log"),
            **framing,
        }
        with noop_query(spark, "zmq", options, scratch / "checkpoint") as query:
            finished_at(query, 1, _MOST_SECONDS)  # the primer
            push.go()
            ended = finished_at(query, count + 1, _MOST_SECONDS)
            return float(count / (ended - push.answer(_MOST_SECONDS)))


def _receiver_rate(shape: str, framing: Mapping[str, str], count: int) -> float:
    """Messages a second of the receiving thread's own time, waiting left out: the sender is no faster.

    Raises:
        RuntimeError: Not every message was the next.
    """
    counters = SourceCounters()
    with sender(_SIZE, count, shape=shape) as push:
        options = parse(StreamReadOptions, {"connect": push.endpoint, "socketType": "PULL", **framing})
        with Receiver(options, counters) as receiver:
            deadline = time.monotonic() + _MOST_SECONDS
            _receive(receiver, counters, 1, deadline)
            push.go()
            began = time.thread_time()
            _receive(receiver, counters, count + 1, deadline)
            spent = time.thread_time() - began
            tracker = receiver.intake.tracker
        if tracker is not None and (tracker.totals.lost or tracker.totals.duplicates):
            raise RuntimeError(f"tracked {tracker.totals} of messages that all came once")
        return count / spent


def _receive(receiver: Receiver, counters: SourceCounters, count: int, deadline: float) -> None:
    while counters.received < count:
        receiver.receive()
        if receiver.batch_ready or counters.received + receiver.pending >= count:
            receiver.take()
        if time.monotonic() > deadline:
            raise TimeoutError(f"received {counters.received} of {count} messages")
