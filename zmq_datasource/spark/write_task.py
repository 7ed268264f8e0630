"""What one task of a sink does with its rows, and what it reports; for streams and batches."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, StringType, StructType

from zmq_datasource.acknowledged.uplink import Uplink
from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import OptionError, RowError, SocketError, ZmqDataSourceError
from zmq_datasource.messages.schemas import LOG_SCHEMA
from zmq_datasource.monitoring.ledger import Entry
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.dead_letters import StagedLetters, abort_letters, commit_letters
from zmq_datasource.sink.sender import Sender
from zmq_datasource.spark.accounting import SinkAccumulator, record
from zmq_datasource.spark.worker import set_up_worker

__all__ = ["Job", "SinkColumns", "TaskReport", "abort_batch", "commit_batch", "run_task"]

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
    """A task's account on its way to the driver.

    Attributes:
        job: The write that the task belongs to: a query and batch.
        letters: The task's staged dead letters, if it has any.
        attempt: Its staged rows at the receiver of a transaction, if it has any.
        digest: Of its rows, if they are part of a transaction.
    """

    job: Job
    counters: SinkCounters = field(default_factory=SinkCounters)
    letters: str | None = None
    attempt: str | None = None
    digest: int = 0


@dataclass(frozen=True)
class Job:
    """One write: a batch of a streaming query, or a batch write with a name of its own.

    Attributes:
        counted: The query and batch that the account belongs to: those of ``foreachBatch`` for a batch
            write in it.
        execution: Spark's name for what the batch runs in: the same for all writes of a batch, another one
            when it is repeated.
        query_name: What the user calls the query.
    """

    query: str
    batch: int
    streaming: bool
    counted: tuple[str, int]
    execution: str = ""
    query_name: str | None = None

    @classmethod
    def of(cls, name: str | None, context: TaskContext | None) -> Job:
        """The job of a task. A batch write has its own name, also in foreachBatch, where there may be two.

        Raises:
            ZmqDataSourceError: Spark does not say which batch of which query this is. A batch under another name
                or number would be taken for one that is done.
        """
        if context is None:
            return cls._named(name, None, None)
        execution = "/".join(
            context.getLocalProperty(key) or "" for key in ("spark.app.id", "spark.sql.execution.root.id")
        )
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if query is None or batch is None:
            return cls._named(name, query, batch, execution)
        # Spark's description of a batch begins with the query's name, if it has one.
        called = (context.getLocalProperty("spark.job.description") or "").partition("\nid = ")
        query_name = called[0] if called[1] and called[0] else None
        streaming = name is None
        counted = query, int(batch)
        own, number = counted if name is None else (name, 0)
        return cls(own, number, streaming, counted, execution, query_name)

    @classmethod
    def _named(cls, name: str | None, query: str | None, batch: str | None, execution: str = "") -> Job:
        """A batch write of its own: it has a name, which no batch of a query has."""
        if name is None:
            raise ZmqDataSourceError(
                f"writing a batch of a query: Spark's task has sql.streaming.queryId={query} and "
                f"streaming.sql.batchId={batch}, and both are needed to know the batch when it is repeated; write it "
                "with writeStream on classic Spark, or with df.write in foreachBatch"
            )
        return cls(name, 0, streaming=False, counted=(name, 0), execution=execution)

    @property
    def of_query(self) -> bool:
        """Whether it is a batch of a streaming query, or a write in its ``foreachBatch``."""
        return self.streaming or self.counted[0] != self.query

    def publisher(self, partition: int) -> str:
        """Who numbers the rows of a task: the same for each attempt at it, and for a batch that is repeated."""
        return f"{self.query}/{self.batch}/{partition}" if self.streaming else f"{self.query}/{partition}"


def run_task(
    options: WriteOptions, columns: SinkColumns, name: str | None, batches: Iterator[pa.RecordBatch]
) -> TaskReport:
    """Send every row of one Spark partition.

    Args:
        name: Of a batch write; None for a streaming query's batch.

    Raises:
        SocketError: Nobody there, too slow, or not flushed (without ``noblock``).
        DeadLetterError: A row could neither be sent nor set aside.
        RowError: A row that is no message.
    """
    set_up_worker()
    context = TaskContext.get()
    partition = context.partitionId() if context is not None else 0
    if options.bind and partition > 0:
        raise OptionError(
            f"bind={options.bind}: only one task can bind, and this is task {partition} of the batch; "
            "write df.coalesce(1), or let the consumer bind and the sink connect"
        )
    job = Job.of(name, context)
    report = TaskReport(job)
    rows = (batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is not None and options.socket_type == "DEALER":
        _stage(options, columns, report, partition, itertools.chain((first,), rows))
    elif first is not None:  # an empty partition needs no peer
        with ExitStack() as stack:
            letters = None
            if options.dead_letter_location is not None:
                letters = StagedLetters(options.dead_letter_location, job.query, job.batch, partition)
                stack.enter_context(letters)
            sender = stack.enter_context(Sender(options, letters, job.publisher(partition)))
            for batch in itertools.chain((first,), rows):
                _send(sender, columns, batch)
            report.counters = sender.finish()
        report.letters = letters.name if letters is not None else None
    if not report.counters.balanced:
        raise ZmqDataSourceError(
            f"accounting for a task: {report.counters}; rows must be sent, dropped or dead-lettered"
        )
    return report


def _stage(
    options: WriteOptions,
    columns: SinkColumns,
    report: TaskReport,
    partition: int,
    batches: Iterator[pa.RecordBatch],
) -> None:
    """Send a partition's rows to be staged; only count them if their transaction is committed already."""
    names = ["frames"] if columns.frames else ["topic", "value"] if columns.topic else ["value"]
    counters = report.counters
    with Uplink(options, report.job.query, report.job.batch, partition) as uplink:
        committed = uplink.greet()
        for batch in batches:
            _check_rows(columns, batch)
            (uplink.count if committed else uplink.send)(batch.select(names))
            counters.rows += batch.num_rows
        if not committed:
            uplink.finish()
            report.attempt = uplink.attempt
        report.digest = uplink.digest
        counters.peers, counters.sndhwm = uplink.peers, uplink.sndhwm
    counters.sent, counters.bytes = counters.rows, uplink.bytes
    counters.blocked_seconds = uplink.blocked_seconds


def _check_rows(columns: SinkColumns, batch: pa.RecordBatch) -> None:
    if columns.frames:
        lists = batch.column("frames")
        lengths = pc.list_value_length(lists)
        if lists.null_count or pc.any(pc.equal(lengths, 0)).as_py() or lists.flatten().null_count:
            raise RowError("sending rows whose 'frames' is null, empty or has a null frame; filter them out")
    elif batch.column("value").null_count:
        raise RowError(
            f"sending {batch.column('value').null_count} rows whose 'value' is null: ZeroMQ has no null; filter them "
            "out, or coalesce them to an empty value"
        )


def _send(sender: Sender, columns: SinkColumns, batch: pa.RecordBatch) -> None:
    _check_rows(columns, batch)
    if columns.frames:
        sender.send_frames(batch.column("frames"))
        return
    value = batch.column("value")
    topics = _bytes(batch.column("topic")) if columns.topic else None
    sender.send_values(_bytes(value), topics)


def _bytes(column: pa.Array) -> pa.Array:
    if pa.types.is_large_string(column.type):
        column = pc.cast(column, pa.large_binary())
    elif pa.types.is_string(column.type):
        column = pc.cast(column, pa.binary())
    return column


def commit_batch(
    options: WriteOptions,
    messages: Sequence[WriterCommitMessage | None],
    accumulator: SinkAccumulator | None = None,
) -> SinkCounters:
    """The tasks are done: publish what they have staged, add their accounts up, let out what it came to.

    Raises:
        DeadLetterError: The dead letters could not be published.
        SocketError: The transaction could not be committed; the batch is to be repeated.
    """
    set_up_worker()
    reports = [m for m in messages if isinstance(m, TaskReport)]
    total = sum((r.counters for r in reports), SinkCounters.none())
    job = reports[0].job if reports else None
    if options.dead_letter_location is not None and job is not None:
        names = [r.letters for r in reports if r.letters is not None]
        commit_letters(options.dead_letter_location, job.query, job.batch, names)
    attempts = [r.attempt for r in reports if r.attempt is not None]
    again = ""
    if options.socket_type == "DEALER" and job is not None and total.rows:
        # All rows, also of tasks that were told that the transaction is committed: if it is not, or is
        # another one, the receiver refuses, and the batch is repeated.
        digest = sum(r.digest for r in reports)
        with Uplink(options, job.query, job.batch) as uplink:
            again = " again=true" if uplink.commit(attempts, total.rows, digest) else ""
    if job is not None:
        query, batch = job.counted
        entry = Entry(
            query, job.execution, batch, describe_sink(options), total, job.query_name, in_query=job.of_query
        )
        total = record(options, entry, accumulator)
    if job is not None and job.streaming:
        _log.info("sink query=%s batch=%d %s%s", job.query, job.batch, total, again)
    else:
        _log.info("sink write %s%s", total, again)
    return total


def describe_sink(options: WriteOptions) -> str:
    """A sink's name among a query's sinks: socket type and endpoints."""
    return f"{options.socket_type} {options.endpoints}"


def abort_batch(options: WriteOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """A task has failed for good: its batch may be repeated. Remove the dead letters of the others."""
    set_up_worker()
    reports = [m for m in messages if isinstance(m, TaskReport)]
    _log.warning("sink aborted: %d of %d tasks had sent their rows", len(reports), len(messages))
    if options.dead_letter_location is not None and reports:
        abort_letters(options.dead_letter_location, reports[0].job.query, reports[0].job.batch)
    attempts = [r.attempt for r in reports if r.attempt is not None]
    if attempts:
        # What is not aborted now, the receiver discards after its transactionTimeout.
        with suppress(SocketError), Uplink(options, reports[0].job.query, reports[0].job.batch) as uplink:
            uplink.abort(attempts)
