"""A committed batch's account on its way out: to the user's driver process, and to ``metricsLocation``.

The rule: no outlet ever stops the data, nor holds a batch up for long. One that fails is logged with
the account, and counted in it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.accumulators import Accumulator, AccumulatorParam

from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import MetricsError
from zmq_datasource.monitoring.ledger import Entry, Ledger
from zmq_datasource.monitoring.states import SinkStates
from zmq_datasource.monitoring.store import MetricsStore
from zmq_datasource.options import WriteOptions

if TYPE_CHECKING:
    from pyspark import SparkContext

__all__ = ["SinkAccumulator", "new_accumulator", "record"]

_log = logging.getLogger(__name__)
_states = SinkStates()  # of this process

# How long a batch waits for its file. A process that commits lives for a batch, so it cannot be written later.
_PATIENCE_SECONDS = 2.0


class _LedgerParam(AccumulatorParam[Any]):
    """A ledger in the driver; in the processes that add to it, a list of entries on their way there."""

    def zero(self, value: Any) -> list[Entry]:
        return []

    def addInPlace(self, value1: Any, value2: list[Entry]) -> Any:
        if isinstance(value1, Ledger):
            for entry in value2:
                value1.add(entry)
            return value1
        return value1 + value2


SinkAccumulator = Accumulator[Any]


def new_accumulator(context: SparkContext) -> SinkAccumulator:
    """An accumulator whose ``value`` is a ``Ledger``."""
    return context.accumulator(Ledger(), _LedgerParam())


def record(options: WriteOptions, entry: Entry, accumulator: SinkAccumulator | None) -> SinkCounters:
    """Let out what a batch came to.

    Returns:
        The account, with failures of the outlets counted.
    """
    if options.metrics_location is not None:
        store = MetricsStore(options.metrics_location, options.metrics_retention)
        try:
            _within(_PATIENCE_SECONDS, lambda: store.write_account(entry, time.time()))
        except MetricsError as e:
            entry.counters.metrics_failures += 1
            _log.error("%s; the account of %s, batch %d: %s", e, entry.query, entry.batch, entry.counters)
    _states.note(entry)
    if accumulator is not None:
        accumulator.add([entry])
    return entry.counters


def _within(seconds: float, act: Callable[[], None]) -> None:
    """Do something, or give it up: it then goes on in vain.

    Raises:
        MetricsError: It did not end in time, or raised this itself.
    """
    failure: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as e:
            failure.append(e)

    thread = threading.Thread(target=run, name="zmq-metrics", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise MetricsError(f"writing metrics: the file system has not answered for {seconds:g} s")
    if failure:
        error = failure[0]
        raise (
            error if isinstance(error, MetricsError) else MetricsError(f"writing metrics: {error!r}")
        ) from error
