"""A committed batch's account on its way out: to the user's driver process, and to ``metricsLocation``.

The rule: no outlet ever stops the data, nor holds a batch up for long. One that fails is logged with
the account, and counted in it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from pyspark.accumulators import Accumulator, AccumulatorParam

from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import MetricsError
from zmq_datasource.monitoring.batches import BatchHistory, BatchWrite
from zmq_datasource.monitoring.patience import within
from zmq_datasource.monitoring.store import MetricsStore
from zmq_datasource.options import WriteOptions

if TYPE_CHECKING:
    from pyspark import SparkContext

__all__ = ["SinkAccumulator", "new_accumulator", "record"]

_log = logging.getLogger(__name__)

# How long a batch waits for its file. Nobody knows how long a process that commits lives, so it is
# not written later.
_PATIENCE_SECONDS = 2.0


class _HistoryParam(AccumulatorParam[Any]):
    """The history in the driver; in the processes that add to it, a list of entries on their way there."""

    def zero(self, value: Any) -> list[BatchWrite]:
        return []

    def addInPlace(self, value1: Any, value2: list[BatchWrite]) -> Any:
        if isinstance(value1, BatchHistory):
            for entry in value2:
                value1.add(entry)
            return value1
        return value1 + value2


SinkAccumulator = Accumulator[Any]


def new_accumulator(context: SparkContext) -> SinkAccumulator:
    """An accumulator whose ``value`` is a ``BatchHistory``."""
    return context.accumulator(BatchHistory(), _HistoryParam())


def record(options: WriteOptions, entry: BatchWrite, accumulator: SinkAccumulator | None) -> SinkCounters:
    """Let out what a batch came to.

    Returns:
        The account, with failures of the outlets counted.
    """
    if options.metrics_location is not None:
        store = MetricsStore(options.metrics_location, options.metrics_retention)
        what = f"writing the account of batch {entry.batch}"
        try:
            within(_PATIENCE_SECONDS, what, lambda given_up: store.write_batch(entry, time.time(), given_up))
        except MetricsError as e:
            entry.counters.metrics_failures += 1
            _log.error("%s; the account of %s, batch %d: %s", e, entry.query, entry.batch, entry.counters)
        else:
            # Nobody waits for it; what it does not get to, the next one does.
            threading.Thread(target=store.expire_batches, args=(entry, time.time()), daemon=True).start()
    if accumulator is not None and entry.in_query:
        accumulator.add([entry])
    return entry.counters
