"""Sends a committed batch's account to the user's driver process, and writes it to ``metricsLocation``.

The rule: no outlet ever stops the data, nor holds a batch up for long. One that fails is logged with
the account, and counted in it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from pyspark.accumulators import Accumulator, AccumulatorParam

from zmq_datasource.errors import MetricsError
from zmq_datasource.monitoring.accounts import Account, BatchHistory
from zmq_datasource.monitoring.files import within
from zmq_datasource.monitoring.store import MetricsStore
from zmq_datasource.options import WriteOptions

if TYPE_CHECKING:
    from pyspark import SparkContext

__all__ = ["SinkAccumulator", "new_accumulator", "record"]

_log = logging.getLogger(__name__)

# How long a batch waits for its file. The process that commits may end right after, so the file is not written later.
_PATIENCE_SECONDS = 2.0


class _HistoryParam(AccumulatorParam[Any]):
    """The history in the driver; in the processes that add to it, a list of accounts on their way there."""

    def zero(self, value: Any) -> list[Account]:
        return []

    def addInPlace(self, value1: Any, value2: list[Account]) -> Any:
        if isinstance(value1, BatchHistory):
            for entry in value2:
                value1.add(entry)
            return value1
        return value1 + value2


SinkAccumulator = Accumulator[Any]


def new_accumulator(context: SparkContext) -> SinkAccumulator:
    """An accumulator whose ``value`` is a ``BatchHistory``."""
    return context.accumulator(BatchHistory(), _HistoryParam())


def record(options: WriteOptions, account: Account, accumulator: SinkAccumulator | None) -> None:
    """Report the account of a batch. If its file cannot be written, the account says so."""
    if options.metrics_location is not None:
        store = MetricsStore(options.metrics_location, options.metrics_retention)
        what = f"writing the account of batch {account.batch}"
        try:
            within(_PATIENCE_SECONDS, what, lambda given_up: store.write_batch(account, given_up))
        except MetricsError as e:
            account.figures["metricsFailures"] = 1
            _log.error(
                "%s; the account of %s, batch %d: %s", e, account.query, account.batch, account.figures
            )
        else:
            # The batch does not wait for this. If the process ends before it is done, a later batch does it.
            threading.Thread(target=store.tidy_batches, args=(account, time.time()), daemon=True).start()
    if accumulator is not None and account.in_query:
        accumulator.add([account])
