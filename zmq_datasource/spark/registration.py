"""Makes ``format("zmq")`` known to a Spark session, with a way for its sinks to tell the driver what they did."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from zmq_datasource.monitoring.accounts import BatchHistory
from zmq_datasource.spark.accounting import SinkAccumulator, new_accumulator
from zmq_datasource.spark.datasource import ZmqDataSource
from zmq_datasource.spark.interpreter import why_workers_lack_package

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

__all__ = ["active_history", "register"]

_log = logging.getLogger(__name__)

_accumulators: WeakKeyDictionary[SparkContext, SinkAccumulator] = WeakKeyDictionary()


def register(spark: SparkSession) -> None:
    """Make ``format("zmq")`` known to a Spark session, classic or Connect.

    In a classic session its sinks then tell this process what they did, for ``metrics`` and
    ``ZmqMetricsListener``. With Spark Connect, and where Spark finds the source by itself, nothing can
    tell; set ``metricsLocation`` there.

    Logs a warning if the Python that Spark starts its workers with does not have this package.
    """
    context = _active_context()
    if context is None or type(spark).__module__.startswith("pyspark.sql.connect"):
        spark.dataSource.register(ZmqDataSource)
        return
    # What was handed to Spark with --py-files is found by the workers in another way.
    lacking = None if context._python_includes else why_workers_lack_package(context.pythonExec)
    if lacking is not None:
        _log.warning("%s", lacking)
    if context not in _accumulators:
        _accumulators[context] = new_accumulator(context)
    shared = _accumulators[context]

    # A class of this function's own is pickled by value, and the accumulator with it.
    class RegisteredZmqDataSource(ZmqDataSource):
        accumulator = shared

    spark.dataSource.register(RegisteredZmqDataSource)


def active_history() -> BatchHistory | None:
    """What the sinks of the running Spark have counted; None without a Spark context, or if nothing is registered."""
    context = _active_context()
    accumulator = None if context is None else _accumulators.get(context)
    return None if accumulator is None else accumulator.value


def _active_context() -> SparkContext | None:
    try:
        from pyspark import SparkContext  # noqa: PLC0415
    except ImportError:  # Spark Connect's thin client, pyspark-client, has none
        return None
    return SparkContext._active_spark_context
