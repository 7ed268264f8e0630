"""Messages that a PUB drops because its subscriber is too slow: at default marks, beside a busy Spark."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from pyspark.sql import SparkSession

from benchmarks.measure import Measurement, Sample, Times, measured, temporary_directory, wait_for
from benchmarks.peers import Peer, peer
from benchmarks.queries import done, running, stream_of
from benchmarks.report import Section, Target

_BARE, _OURS = "a receiver in C", "zmq"
_RATE, _SIZE = 100_000, 100
_FOLD = 6  # a window is this many times as long as in other sections: 60 s
_SETTLE_SECONDS, _MOST_SECONDS = 2.0, 60.0
_BUSY_ROWS = 100_000_000  # a second or so
_CASE = f"{_RATE:,} messages/s"
SECTION = Section(
    "loss",
    "Loss at default high-water marks",
    "Messages of 100 bytes that a PUB in C drops because its subscriber is too slow: 100,000 a second, high-water "
    "marks of 1000 on both sides, while Spark computes on both cores. A publisher that was itself held up does not "
    f"catch up in a burst. *{_BARE}*: a loop that does nothing else. *{_OURS}*: a running query.",
    targets=(Target(_CASE, _OURS, 0, upper=True),),
)


def measure_loss(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Messages lost of 100,000 a second; a publisher that was late does not catch up in a burst."""
    seconds = times.seconds * _FOLD
    methods: Mapping[str, Callable[[], Sample]] = {
        _BARE: partial(_lost_by_receiver, spark, seconds),
        _OURS: partial(_lost_by_query, spark, seconds),
    }
    rounds = Times(times.seconds, times.warm_up, min(times.rounds, 2))
    yield from measured("loss", _CASE, f"lost in {seconds:.0f} s", methods, rounds)


def _lost_by_receiver(spark: SparkSession, seconds: float) -> Sample:
    with _publisher() as pub, peer("sub", connect=pub.endpoint) as sub, _busy(spark):
        sub.go()
        sent = _publish(pub, seconds)
        time.sleep(_SETTLE_SECONDS)
        return Sample(sent - sub.mark().messages)


def _lost_by_query(spark: SparkSession, seconds: float) -> Sample:
    with temporary_directory() as scratch, _publisher() as pub:
        options = {
            "socketType": "SUB",
            "connect": pub.endpoint,
            "walLocation": str(scratch / "log"),
            "framing": "custom",
            "sequenceAt": "0:0:u64be",
        }
        stream = stream_of(spark, "zmq", options)
        with running(stream.writeStream.format("noop"), scratch / "checkpoint") as query, _busy(spark):
            sent = _publish(pub, seconds)
            before = -1

            def settled() -> bool:
                nonlocal before
                previous, before = before, done(query).rows
                return before in (sent, previous)

            wait_for("the last micro-batch", settled, _MOST_SECONDS, _SETTLE_SECONDS)
            return Sample(sent - before)


def _publisher() -> AbstractContextManager[Peer]:
    return peer("pub", size=_SIZE, shape="numbered", rate=_RATE, nodrop=0)


def _publish(publisher: Peer, seconds: float) -> int:
    """Publish from the first subscription on, and return the number of messages."""
    publisher.go()
    time.sleep(seconds)
    return publisher.stop().messages


@contextmanager
def _busy(spark: SparkSession) -> Iterator[None]:
    """Keep both cores busy with Spark during the block."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            spark.range(0, _BUSY_ROWS, 1, 2).selectExpr("sum(hash(id))").collect()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        over.set()
        worker.join()
