"""Commits a sink's batch, on the driver, after its tasks, and reports the account of the batch.

Reporting never stops the data, and never holds a batch up for long. If the account's file cannot be written, the
account counts the failure and is logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import WriterCommitMessage

from zmq_datasource.acknowledged.protocol import is_anonymous
from zmq_datasource.acknowledged.uplink import Uplink
from zmq_datasource.counters import SinkCounters, figures
from zmq_datasource.errors import MetricsError
from zmq_datasource.host import failpoints
from zmq_datasource.monitoring.accounts import Account
from zmq_datasource.monitoring.files import keep
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.dead_letters import commit_dead_letters
from zmq_datasource.spark.job import TaskReport
from zmq_datasource.spark.worker import set_up_worker

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator

_log = logging.getLogger(__name__)

# How long a batch waits for its file. The process that commits may end right after, so the file is not written later.
_FILE_TIMEOUT_SECONDS = 2.0
# How long accounts stay at metricsLocation.
_RETENTION_SECONDS = 7 * 86_400.0


def commit_batch(
    options: WriteOptions,
    messages: Sequence[WriterCommitMessage | None],
    accumulator: Accumulator[Any] | None = None,
) -> SinkCounters:
    """Commit a batch whose tasks have succeeded: its dead letters, its transaction and its account.

    Returns:
        The account of the batch.

    Raises:
        DeadLetterError: The dead letters could not be committed.
        SocketError: The transaction could not be committed. Spark repeats the batch.
    """
    set_up_worker()
    reports = [m for m in messages if isinstance(m, TaskReport)]
    failpoints.reach("spark.commit.before_commit")
    total = sum((r.counters for r in reports), SinkCounters.none())
    job = reports[0].job if reports else None
    if options.dead_letter_location is not None and job is not None:
        names = [name for report in reports for name in report.dead_letters]
        commit_dead_letters(options.dead_letter_location, job.query, job.batch, names)
    attempts = [r.attempt for r in reports if r.attempt is not None]
    again = ""
    if options.socket_type == "DEALER" and job is not None and (total.sent or not is_anonymous(job.query)):
        # The sums include tasks that have sent nothing because the transaction was committed already. If it was
        # committed with other rows, the receiver refuses this commit; also if there are no rows now.
        digest = sum(r.digest for r in reports)
        with Uplink(options, job.query, job.batch) as uplink:
            if total.sent or uplink.greet():
                again = " again=true" if uplink.commit(attempts, total.sent, digest) else ""
    if job is not None:
        query, batch = job.counted
        account = Account(
            query=query,
            name=job.query_name,
            batch=batch,
            execution=job.execution,
            write=job.write,
            sink=f"{options.socket_type} {options.endpoints}",
            seconds=time.time(),
            figures=figures(total),
        )
        _report(options, account, accumulator if job.of_query else None)
    failpoints.reach("spark.commit.after_commit")
    if job is not None and job.streaming:
        _log.info("sink query=%s batch=%d %s%s", job.query, job.batch, total, again)
    else:
        _log.info("sink write %s%s", total, again)
    return total


def _report(options: WriteOptions, account: Account, accumulator: Accumulator[Any] | None) -> None:
    """Write an account to ``metricsLocation``, and send it to the process of the user's driver."""
    if (location := options.metrics_location) is not None:
        try:
            keep(location, account, _RETENTION_SECONDS, _FILE_TIMEOUT_SECONDS)
        except MetricsError as e:
            account.figures["metricsFailures"] = 1
            _log.error(
                "%s; the account of %s, batch %d: %s", e, account.query, account.batch, account.figures
            )
    if accumulator is not None:
        accumulator.add([account])
