"""What is done on the driver once all tasks of a sink's batch are: commit, or abort."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from pyspark.sql.datasource import WriterCommitMessage

from zmq_datasource.acknowledged.uplink import Uplink
from zmq_datasource.counters import SinkCounters, figures, iso
from zmq_datasource.errors import SocketError
from zmq_datasource.host import failpoints
from zmq_datasource.monitoring.accounts import Account
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.dead_letters import abort_dead_letters, commit_dead_letters
from zmq_datasource.spark.accounting import SinkAccumulator, record
from zmq_datasource.spark.job import TaskReport
from zmq_datasource.spark.worker import set_up_worker

__all__ = ["abort_batch", "commit_batch"]

_log = logging.getLogger(__name__)


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
    failpoints.reach("spark.commit.before_commit")
    total = sum((r.counters for r in reports), SinkCounters.none())
    job = reports[0].job if reports else None
    if options.dead_letter_location is not None and job is not None:
        names = [r.dead_letters for r in reports if r.dead_letters is not None]
        commit_dead_letters(options.dead_letter_location, job.query, job.batch, names)
    attempts = [r.attempt for r in reports if r.attempt is not None]
    again = ""
    if options.socket_type == "DEALER" and job is not None and total.rows:
        # All rows, also of tasks that heard that the transaction is committed: if it is not, or is
        # another one, the receiver refuses, and the batch is repeated.
        digest = sum(r.digest for r in reports)
        with Uplink(options, job.query, job.batch) as uplink:
            again = " again=true" if uplink.commit(attempts, total.rows, digest) else ""
    if job is not None:
        query, batch = job.counted
        account = Account(
            query=query,
            name=job.query_name,
            execution=job.execution,
            batch=batch,
            sink=f"{options.socket_type} {options.endpoints}",
            writes=(job.query,),
            figures=figures(total),
            timestamp=iso(time.time()),
            in_query=job.of_query,
        )
        record(options, account, accumulator)
    failpoints.reach("spark.commit.after_commit")
    if job is not None and job.streaming:
        _log.info("sink query=%s batch=%d %s%s", job.query, job.batch, total, again)
    else:
        _log.info("sink write %s%s", total, again)
    return total


def abort_batch(options: WriteOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """A task has failed for good: its batch may be repeated. Remove the dead letters of the others."""
    set_up_worker()
    reports = [m for m in messages if isinstance(m, TaskReport)]
    _log.warning("sink aborted: %d of %d tasks had sent their rows", len(reports), len(messages))
    if options.dead_letter_location is not None and reports:
        abort_dead_letters(options.dead_letter_location, reports[0].job.query, reports[0].job.batch)
    attempts = [r.attempt for r in reports if r.attempt is not None]
    if attempts:
        # What is not aborted now, the receiver discards after its transactionTimeout.
        with suppress(SocketError), Uplink(options, reports[0].job.query, reports[0].job.batch) as uplink:
            uplink.abort(attempts)
