"""What metrics cost: the same query bare, and with all of them on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.types import StructType

from benchmarks.measure import Measurement, Sample, Times, measured, temporary_directory
from benchmarks.queries import live_rate
from benchmarks.sink import stream_rate
from zmq_datasource import ZmqDataSource, ZmqMetricsListener
from zmq_datasource.spark.stream_reader import ZmqStreamReader

__all__ = ["BARE", "EMPTY_LISTENER", "LISTENER", "METERED", "measure_metrics"]

BARE, METERED = "bare", "metered"
# PySpark's own work for any listener in Python is not ours, so it is on both sides.
EMPTY_LISTENER, LISTENER = "bare, empty listener", "metered, our listener"
_METHODS = (BARE, METERED, EMPTY_LISTENER, LISTENER)

_SIZE = 100


class _BareReader(ZmqStreamReader):
    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Nothing is put together, and nothing shown."""
        return None


class _EmptyListener(StreamingQueryListener):
    def onQueryStarted(self, event: object) -> None: ...
    def onQueryProgress(self, event: object) -> None: ...
    def onQueryIdle(self, event: object) -> None: ...
    def onQueryTerminated(self, event: object) -> None: ...


class BareDataSource(ZmqDataSource):
    """The same source and sink that tell nothing."""

    @classmethod
    def name(cls) -> str:
        return "zmq-bare"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        reader = super().streamReader(schema)
        reader.__class__ = _BareReader
        return reader


def measure_metrics(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Messages a second of a source and of a sink, bare and metered, interleaved."""
    spark.dataSource.register(BareDataSource)

    def source(method: str) -> Sample:
        with _options(spark, method) as (name, more):
            return live_rate(spark, name, more, times, size=_SIZE)

    def sink(method: str) -> Sample:
        with _options(spark, method) as (name, more):
            return stream_rate(spark, "PUSH", _SIZE, times, name, more)

    for case, rate in (("source", source), ("sink", sink)):
        methods = {method: partial(rate, method) for method in _METHODS}
        yield from measured("metrics", f"{case}, {_SIZE} B", "messages/s", methods, times)


@contextmanager
def _options(spark: SparkSession, method: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The data source's name and the options that turn metrics on; with a listener meanwhile."""
    with ExitStack() as stack:
        if method == LISTENER:
            ours = ZmqMetricsListener(lambda event: None, prometheusPort=0, prometheusAddress="127.0.0.1")
            stack.callback(ours.close)
            _listen(spark, ours, stack)
        elif method == EMPTY_LISTENER:
            _listen(spark, _EmptyListener(), stack)
        if method in (BARE, EMPTY_LISTENER):
            yield "zmq-bare", {}
        else:
            yield "zmq", {"metricsLocation": str(stack.enter_context(temporary_directory()))}


def _listen(spark: SparkSession, listener: StreamingQueryListener, stack: ExitStack) -> None:
    spark.streams.addListener(listener)
    stack.callback(spark.streams.removeListener, listener)
