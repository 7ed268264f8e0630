"""Registers ``format("zmq")`` with a Spark session, and brings the accounts of its sinks to the driver."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pyspark.accumulators import Accumulator, AccumulatorParam

from zmq_datasource.monitoring.accounts import Account, BatchHistory
from zmq_datasource.spark.datasource import ZmqDataSource

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

_PROBE = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('zmq_datasource') else 3)"
_LACKING = 3
# The probe takes some hundredths of a second. If it takes longer than this, there is no warning.
_PROBE_TIMEOUT_SECONDS = 1.0

# For each Spark context, the accumulator that brings its sinks' accounts to this process. Its ``value`` is a
# ``BatchHistory``.
_accumulators: WeakKeyDictionary[SparkContext, Accumulator[Any]] = WeakKeyDictionary()


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


def register(spark: SparkSession) -> None:
    """Register ``format("zmq")`` with a Spark session, classic or Connect.

    In a classic session the sinks then report their accounts to this process, for ``metrics`` and
    ``ZmqMetricsListener``. With Spark Connect, and where Spark finds the source by itself, they cannot: read the files
    at ``metricsLocation`` there.

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
        _accumulators[context] = context.accumulator(BatchHistory(), _HistoryParam())
        _hide_replacement_warnings(context)
    shared = _accumulators[context]

    # A class that is defined in a function is pickled by value, and its accumulator with it.
    class RegisteredZmqDataSource(ZmqDataSource):
        accumulator = shared

    spark.dataSource.register(RegisteredZmqDataSource)


# Spark has found the same source by itself (pyspark_zmq), and registers it again for each query.
_REPLACEMENT = "The data source zmq replaced a .*"
_DATA_SOURCE_MANAGER = "org.apache.spark.sql.execution.datasources.DataSourceManager"


def _hide_replacement_warnings(context: SparkContext) -> None:
    """Hide Spark's warnings that ``zmq`` replaces ``zmq``, which it logs at ``register`` and when a query starts.

    Lines about other data sources, and all other lines, stay. If Spark does not log with Log4j, this does nothing.
    """
    from py4j.protocol import Py4JError  # noqa: PLC0415 - Spark Connect's thin client has none

    assert context._jvm is not None
    log4j = context._jvm.org.apache.logging.log4j
    try:
        results = log4j.core.Filter.Result
        deny = log4j.core.filter.RegexFilter.createFilter(
            _REPLACEMENT, None, False, results.DENY, results.NEUTRAL
        )
        configuration = log4j.LogManager.getContext(False).getConfiguration()
        # The filter goes to the logger's nearest configured parent, mostly the root. A new configuration for this
        # logger would bypass the threshold that Spark sets for shells.
        configuration.getLoggerConfig(_DATA_SOURCE_MANAGER).addFilter(deny)
    except (Py4JError, TypeError):  # a TypeError if the JVM has no such class
        _log.debug("Spark's warnings about replaced data sources are not hidden", exc_info=True)


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


def why_workers_lack_package(command: str, timeout: float = _PROBE_TIMEOUT_SECONDS) -> str | None:
    """Why the interpreter of Spark's workers cannot import this package; None if it can, or if that is not known.

    Args:
        command: The interpreter's name or path: ``PYSPARK_PYTHON``, else ``python3``.
        timeout: Seconds in which the interpreter must answer; otherwise it is not known.
    """
    path = shutil.which(command)
    way_out = f"activate the environment in {sys.prefix} before Spark starts, or set PYSPARK_PYTHON={sys.executable}"
    if path is None:
        return f"Spark's Python workers would be started with {command!r}, which is not here; {way_out}"
    if _environment(path) == _environment(sys.executable):
        return None
    try:
        done = subprocess.run(
            [path, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != _LACKING:
        return None
    return (
        f"Spark's Python workers are started with {path} (PYSPARK_PYTHON, or python3 on the PATH), which does not have "
        f"zmq_datasource: Spark will not find format('zmq') (DATA_SOURCE_NOT_FOUND, ModuleNotFoundError). To mend it, "
        f"{way_out}"
    )


def _environment(executable: str) -> tuple[str, str]:
    """The real path of an interpreter, and the directory of its link: in a venv this tells the environment."""
    return os.path.realpath(executable), os.path.dirname(os.path.abspath(executable))
