"""What one task of a sink does with its rows, and what it reports; for streams and batches."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, StringType, StructType

from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import OptionError, RowError, ZmqDataSourceError
from zmq_datasource.messages import LOG_SCHEMA
from zmq_datasource.options import WriteOptions
from zmq_datasource.sender import Sender
from zmq_datasource.spark.worker import set_up_worker

__all__ = ["SinkColumns", "TaskReport", "report_batch", "run_task"]

_log = logging.getLogger(__name__)

_FRAMES_TYPES = (ArrayType(BinaryType()), ArrayType(BinaryType(), containsNull=False))


@dataclass(frozen=True)
class SinkColumns:
    """Which columns make the message: ``frames``, or ``value`` with or without ``topic``."""

    frames: bool
    topic: bool

    @classmethod
    def of(cls, schema: StructType, options: WriteOptions) -> SinkColumns:
        """Judge the schema of what is written.

        Raises:
            OptionError: A column that is no part of a message, a wrong type, or none at all.
        """
        names = set(schema.names)
        unknown = sorted(names - set(LOG_SCHEMA.names))
        if unknown:
            raise OptionError(
                f"writing columns {unknown}: a message has 'value' and optionally 'topic', or 'frames'; put the others "
                "into value, as in select(to_json(struct('*')).alias('value'))"
            )
        if "frames" in names and "value" in names:
            raise OptionError("writing both 'value' and 'frames': drop the one that is not meant")
        if "frames" not in names and "value" not in names:
            raise OptionError(f"writing columns {sorted(names)}: there is neither 'value' nor 'frames'")
        if "frames" in names and options.framing != "plain":
            raise OptionError(
                f"writing 'frames' with framing={options.framing}: it makes the frames itself; write 'value' and "
                "'topic'"
            )
        allowed = {"value": (StringType(), BinaryType()), "topic": (StringType(), BinaryType())}
        for name, types in {**allowed, "frames": _FRAMES_TYPES}.items():
            if name in names and schema[name].dataType not in types:
                raise OptionError(
                    f"writing column {name!r}: its type is {schema[name].dataType.simpleString()}, it must be "
                    f"{' or '.join(dict.fromkeys(t.simpleString() for t in types))}"
                )
        return cls(frames="frames" in names, topic="topic" in names and "frames" not in names)


@dataclass
class TaskReport(WriterCommitMessage):
    """A task's account on its way to the driver."""

    counters: SinkCounters = field(default_factory=SinkCounters)
    query: str | None = None


def run_task(
    options: WriteOptions, columns: SinkColumns, job: str | None, batches: Iterator[pa.RecordBatch]
) -> TaskReport:
    """Send every row of one Spark partition.

    Args:
        job: Names a batch write among others; None for a streaming query's.

    Raises:
        SocketError: Nobody there, too slow, or not flushed (without ``noblock``).
        RowError: A row that is no message.
    """
    set_up_worker()
    context = TaskContext.get()
    if options.bind and context is not None and context.partitionId() > 0:
        raise OptionError(
            f"bind={options.bind}: only one task can bind, and this is task {context.partitionId()} of the batch; "
            "write df.coalesce(1), or let the consumer bind and the sink connect"
        )
    publisher = _publisher(job, context)
    counters = SinkCounters()
    rows = (batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is not None:  # an empty partition needs no peer
        with Sender(options, publisher) as sender:
            for batch in itertools.chain((first,), rows):
                _send(sender, columns, batch)
            counters = sender.finish()
    if not counters.balanced:
        raise ZmqDataSourceError(f"accounting for a task: {counters}; rows must be sent or dropped")
    return TaskReport(counters, context.getLocalProperty("sql.streaming.queryId") if context else None)


def _publisher(job: str | None, context: TaskContext | None) -> str:
    """Who numbers the rows of a task: the same for each attempt at it, and for a batch that is repeated.

    A batch write has a name of its own; also in foreachBatch, where there may be two in a batch.
    """
    if context is None:
        return job or "nobody"
    if job is None:
        query = context.getLocalProperty("sql.streaming.queryId")
        job = f"{query}/{context.getLocalProperty('streaming.sql.batchId')}"
    return f"{job}/{context.partitionId()}"


def _send(sender: Sender, columns: SinkColumns, batch: pa.RecordBatch) -> None:
    if columns.frames:
        messages = batch.column("frames").to_pylist()
        bad = sum(1 for m in messages if not m or None in m)
        if bad:
            raise RowError(
                f"sending {bad} rows whose 'frames' is null, empty or has a null frame; filter them out"
            )
        sender.send_frames(messages)
        return
    value = batch.column("value")
    if value.null_count:
        raise RowError(
            f"sending {value.null_count} rows whose 'value' is null: ZeroMQ has no null; filter them out, or coalesce "
            "them to an empty value"
        )
    topics = _bytes(batch.column("topic")) if columns.topic else None
    sender.send_values(_bytes(value), topics)


def _bytes(column: pa.Array) -> list[bytes]:
    if pa.types.is_large_string(column.type):
        column = pc.cast(column, pa.large_binary())
    elif pa.types.is_string(column.type):
        column = pc.cast(column, pa.binary())
    return column.to_pylist()  # type: ignore[no-any-return]


def report_batch(messages: Sequence[WriterCommitMessage | None], batch: str) -> SinkCounters:
    """Add the tasks' accounts up and write the batch's one log line."""
    set_up_worker()
    reports = [m for m in messages if isinstance(m, TaskReport)]
    total = sum((r.counters for r in reports), SinkCounters.none())
    query = next((r.query for r in reports if r.query), None)
    _log.info("sink %s%s %s", f"query={query} " if query else "", batch, total)
    return total
