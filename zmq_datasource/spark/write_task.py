"""Sends the rows of one task of a sink, for streams and batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import pyarrow as pa
from pyspark import TaskContext

from zmq_datasource.acknowledged.uplink import Uplink
from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import OptionError, ZmqDataSourceError
from zmq_datasource.host import failpoints
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.dead_letters import StagedDeadLetters
from zmq_datasource.sink.sender import Sender
from zmq_datasource.spark.columns import SinkColumns
from zmq_datasource.spark.job import Job, TaskReport
from zmq_datasource.spark.worker import set_up_worker


def run_task(
    options: WriteOptions, columns: SinkColumns, name: str | None, batches: Iterator[pa.RecordBatch]
) -> TaskReport:
    """Send every row of one Spark partition.

    Args:
        columns: The columns that make a message.
        name: The name of a batch write; None for a streaming query.

    Returns:
        The report for ``commit``.

    Raises:
        OptionError: The sink binds, and this is not the first task.
        SocketError: There is no peer, or it is too slow, or rows were not flushed (without ``noblock``).
        DeadLetterError: A row could neither be sent nor kept as a dead letter.
        RowError: A row's ``frames`` cannot be a message.
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
            dead_letters = None
            if options.dead_letter_location is not None:
                dead_letters = StagedDeadLetters(
                    options.dead_letter_location, job.query, job.batch, partition
                )
                stack.enter_context(dead_letters)
            sender = stack.enter_context(Sender(options, dead_letters, job.publisher(partition)))
            for batch in map(columns.messages, itertools.chain((first,), rows)):
                sender.send(**dict(zip(batch.schema.names, batch.columns, strict=True)))
            report.counters = sender.finish()
        report.dead_letters = () if dead_letters is None else dead_letters.names
    failpoints.reach("spark.task.before_report")
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
    """Stage rows at the receiver. If their transaction is committed already, only count them."""
    counters = report.counters
    with_value = (_drop_nulls(columns.messages(batch), counters) for batch in batches)
    messages = (batch for batch in with_value if batch.num_rows)
    first = next(messages, None)
    if first is None:
        return
    with Uplink(options, report.job.query, report.job.batch, partition) as uplink:
        committed = uplink.greet()
        for batch in itertools.chain((first,), messages):
            (uplink.count if committed else uplink.send)(batch)
            counters.rows += batch.num_rows
            counters.sent += batch.num_rows
        if not committed:
            uplink.finish()
            report.attempt = uplink.session.attempt
        report.digest = uplink.digest
        counters.peers = 1
    counters.bytes, counters.blocked_seconds = uplink.session.bytes, uplink.blocked_seconds


def _drop_nulls(batch: pa.RecordBatch, counters: SinkCounters) -> pa.RecordBatch:
    """The rows that are messages. The others, whose value is null, are counted as dropped."""
    if "value" not in batch.schema.names or not batch.column("value").null_count:
        return batch
    kept = batch.filter(batch.column("value").is_valid())
    counters.rows += batch.num_rows - kept.num_rows
    counters.dropped["null"] += batch.num_rows - kept.num_rows
    return kept
