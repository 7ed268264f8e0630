"""Registers ``format("zmq")`` with a Spark session, and brings the accounts of its sinks to the driver."""

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
    """Register ``format("zmq")`` with a Spark session, classic or Connect.

    In a classic session the sinks then report their accounts to this process, for ``metrics`` and
    ``ZmqMetricsListener``. With Spark Connect, and where Spark finds the source by itself, they cannot: set
    ``metricsLocation`` there.

    Logs a warning if the Python of Spark's workers does not have this package.
    """
    context = _active_context()
    if context is None or type(spark).__module__.startswith("pyspark.sql.connect"):
        spark.dataSource.register(ZmqDataSource)
        return
    # With --py-files the workers find the package elsewhere.
    lacking = None if context._python_includes else why_workers_lack_package(context.pythonExec)
    if lacking is not None:
        _log.warning("%s", lacking)
    if context not in _accumulators:
        _accumulators[context] = new_accumulator(context)
    shared = _accumulators[context]

    # A class that is defined in a function is pickled by value, and its accumulator with it.
    class RegisteredZmqDataSource(ZmqDataSource):
        accumulator = shared

    spark.dataSource.register(RegisteredZmqDataSource)


def active_history() -> BatchHistory | None:
    """The accounts of the sinks in this Spark context; None without a context, or if ``register`` was not called."""
    context = _active_context()
    accumulator = None if context is None else _accumulators.get(context)
    return None if accumulator is None else accumulator.value


def _active_context() -> SparkContext | None:
    try:
        from pyspark import SparkContext  # noqa: PLC0415
    except ImportError:  # Spark Connect's thin client, pyspark-client, has none
        return None
    return SparkContext._active_spark_context
