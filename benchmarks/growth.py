"""What grows with a feed: a message's cost by its topics and publishers, and by how many wait in the log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial

import zmq
from pyspark.sql import SparkSession

from benchmarks.measure import MEGA, Measurement, Sample, Times, measured
from benchmarks.source import backlog_rate, filled_log, log_options
from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages.columns import binary_of
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.source.intake import Arrival, Intake
from zmq_datasource.transport.core import Column, FrameColumn, Inbox, Outbox, SameColumn

__all__ = ["BACKLOGS", "PUBLISHERS", "TOPICS", "measure_backlog", "measure_growth"]

TOPICS, PUBLISHERS, BACKLOGS = (1, 10, 100, 1_000), (1, 10, 100), (1_000_000, 3_000_000, 10_000_000)
_MESSAGES, _BATCH, _SIZE = 500_000, 16_384, 100


def measure_growth(times: Times) -> Iterator[Measurement]:
    """Microseconds of the receiving thread a message, from libzmq's queue to rows, without a network."""
    for kind, counts in (("topics", TOPICS), ("publishers", PUBLISHERS)):
        for count in counts:
            sample = partial(_cost, kind, count)
            yield from measured("growth", f"{count:,} {kind}", "µs", {"cost of a message": sample}, times)


def measure_backlog(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Messages a second of a query that reads what has gathered, by how many there are."""
    for count in BACKLOGS:
        with filled_log(_SIZE, count) as log:
            sample = partial(backlog_rate, spark, "zmq", log_options(log, count), count, times)
            yield from measured(
                "backlog", f"{count / MEGA:g} million messages", "messages/s", {"zmq": sample}, times
            )


def _cost(kind: str, count: int) -> Sample:
    """Of messages that come in turn from so many topics or publishers, each with numbers of its own."""
    options, columns = _feed(kind, count)
    intake = Intake(parse(ReadOptions, {"connect": "tcp://feed:1", **options}), SourceCounters())
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        push.sndhwm = pull.rcvhwm = 0
        push.bind("inproc://growth")
        pull.connect("inproc://growth")
        Outbox(columns, _MESSAGES).give(push, 0, _MESSAGES)
        inbox, spent, rows = Inbox(), 0.0, 0
        while rows < _MESSAGES:
            began = time.perf_counter()
            taken = inbox.take(pull, min(_BATCH, _MESSAGES - rows), 1 << 30).messages
            batch, _ = intake.read(inbox.hand_over(), [Arrival(0, taken, "tcp://feed:1")])
            spent += time.perf_counter() - began
            assert batch.num_rows == taken
            rows += taken
        assert intake.tracker is not None
        assert (intake.tracker.totals.lost, len(intake.tracker.expected)) == (0, count)
    return Sample(spent / _MESSAGES * MEGA)


def _feed(kind: str, count: int) -> tuple[Mapping[str, str], list[Column]]:
    names = [b"%s %d" % (kind.encode(), at % count) for at in range(_MESSAGES)]
    numbers = [at // count for at in range(_MESSAGES)]
    name, value = FrameColumn(binary_of(names)), SameColumn(b"." * _SIZE)
    if kind == "topics":  # counted each by itself, as Bitcoin Core does
        little = binary_of([number.to_bytes(4, "little") for number in numbers])
        return {"framing": "bitcoin"}, [name, value, FrameColumn(little)]
    big = binary_of([number.to_bytes(8, "big") for number in numbers])
    return {"framing": "sequenced"}, [SameColumn(b"topic"), name, FrameColumn(big), value]
