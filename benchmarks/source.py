"""Source throughput: rows a second of a query that runs, from a sender that never pauses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from benchmarks.measure import Measurement, Sample, Times, measured, size_name, temporary_directory, wait_for
from benchmarks.peers import log_end, peer, receiver
from benchmarks.processes import cpu_seconds, per_message
from benchmarks.queries import CHECKPOINTS, live_rate, next_batch, running, stream_of
from benchmarks.report import Section, Target

_TUTORIAL, _BACKLOG = "tutorial source", "the log alone"
_DURABLE, _TRIGGER = "zmq", "zmq, trigger of 1 s"
SECTION = Section(
    "source",
    "Source throughput",
    "Messages a second of a running query, from the end of one micro-batch to the end of another: PULL over tcp "
    "loopback into the `noop` sink, high-water marks of 1000, two cores for all processes. The sender is a loop in "
    f"C that never pauses. *{_TUTORIAL}*: a `SimpleDataSourceStreamReader` that drains the socket at each trigger, "
    "for at most a second (0.1 s above 100 B); each message is a tuple, and nothing is durable. "
    f"*{_DURABLE}*: this package with its defaults; each chunk is forced to the disk, and micro-batches follow each "
    f"other at once. *{_TRIGGER}*: a micro-batch each second. "
    f"*{_BACKLOG}*: a log that was filled before is read, without a socket. This is what the JVM and its workers "
    "allow. " + CHECKPOINTS,
    targets=(
        Target("100 B", _DURABLE, 4.5, times=_TUTORIAL),
        Target("1 kB", _DURABLE, 0.65, times=_BACKLOG),
        Target("100 kB", _DURABLE, 0.75, times=_BACKLOG),
        Target("1 MB", _DURABLE, 0.75, times=_BACKLOG),
    ),
)
_SIZES = (100, 1_000, 100_000, 1_000_000)
_BACKLOG_BYTES, _BACKLOG_BATCHES = 2_000_000_000, 8
_MOST_SECONDS = 180.0


def measure_source(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Messages a second for every size and method, the methods interleaved."""
    for size in _SIZES:
        count = max(_BACKLOG_BATCHES, round(_BACKLOG_BYTES * min(1.0, times.seconds / 10) / size))
        with _filled_log(size, count) as log:
            methods: Mapping[str, Callable[[], Sample]] = {
                _TUTORIAL: partial(live_rate, spark, "tutorial", _tutorial_options(size), times, size=size),
                _DURABLE: partial(live_rate, spark, "zmq", {}, times, size=size),
                _TRIGGER: partial(live_rate, spark, "zmq", {}, times, size=size, trigger="1 second"),
                _BACKLOG: partial(_backlog_rate, spark, log, count, times),
            }
            yield from measured("source", size_name(size), "messages/s", methods, times)


def _tutorial_options(size: int) -> Mapping[str, str]:
    """More of larger messages at once, and the JVM's heap is full: a batch passes through it in one piece."""
    return {"seconds": "0.1"} if size > 100 else {}


@contextmanager
def _filled_log(size: int, count: int) -> Iterator[Path]:
    """A log that a receiver has filled with ``count`` messages."""
    with temporary_directory() as scratch, peer("push", size=size, count=count) as push:
        with receiver(scratch / "log", "--socket-type", "PULL", "--connect", push.endpoint):
            push.go()
            wait_for(f"{count} messages in a log", lambda: log_end(scratch / "log") >= count, _MOST_SECONDS)
        yield scratch / "log"


def _backlog_rate(spark: SparkSession, log: Path, count: int, times: Times) -> Sample:
    """Of a query that reads a backlog of ``count``, all but its first micro-batch; as often as the time asks for."""
    options = {
        "walLocation": str(log),
        "startingOffsets": "earliest",
        "maxMessagesPerTrigger": str(-(-count // _BACKLOG_BATCHES)),
    }
    rows, seconds, cpu = 0, 0.0, Counter[str]()
    while seconds < times.seconds:
        stream = stream_of(spark, "zmq", {**options, "reader": f"reader{time.monotonic_ns()}"})
        with (
            temporary_directory() as checkpoint,
            running(stream.writeStream.format("noop"), checkpoint) as query,
        ):
            first = last = next_batch(query, -1)
            before = cpu_seconds()
            while last.rows < count:
                last = next_batch(query, last.batch)
            cpu.update(per_message(before, cpu_seconds(), 1))
        rows += last.rows - first.rows
        seconds += last.time - first.time
    return Sample(rows / seconds, {process: spent / rows for process, spent in cpu.items()})
