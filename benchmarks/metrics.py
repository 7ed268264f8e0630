"""What metrics cost: the same query bare, and with all of them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.types import StructType

from benchmarks.measure import Measurement, interleaved, temporary_directory
from benchmarks.peers import sender
from benchmarks.queries import finished_at, noop_query
from benchmarks.sink import sink_rows, stream_rates
from zmq_datasource import ZmqDataSource, ZmqMetricsListener
from zmq_datasource.spark.stream_reader import ZmqStreamReader

__all__ = ["BARE", "EMPTY_LISTENER", "LISTENER", "METERED", "measure_metrics"]

BARE, METERED = "bare", "metered"
# PySpark's own work for any listener in Python is not ours, so it is on both sides.
EMPTY_LISTENER, LISTENER = "bare, empty listener", "metered, our listener"
_METHODS = (BARE, METERED, EMPTY_LISTENER, LISTENER)

_SIZE = 100
_MESSAGES = 2_400_000
_MOST_SECONDS = 120.0
# The difference that is looked for is smaller than what two runs differ by.
_ROUNDS = 3


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


def measure_metrics(spark: SparkSession, scale: float, rounds: int) -> Iterator[Measurement]:
    """Messages a second of a source and of a sink, bare and metered, interleaved."""
    spark.dataSource.register(BareDataSource)
    count = max(1000, round(_MESSAGES * scale))
    yield from _interleaved("source", rounds, lambda method: _source_rate(spark, method, count))
    with sink_rows(spark, _SIZE, count) as rows:

        def rate(method: str) -> float:
            with _options(spark, method) as (name, more):
                return stream_rates(rows, name, more)[1]

        yield from _interleaved("sink", rounds, rate)


def _interleaved(case: str, rounds: int, rate: Callable[[str], float]) -> Iterator[Measurement]:
    for method in _METHODS:
        rate(method)  # warm-up
    rates: dict[str, list[float]] = {method: [] for method in _METHODS}
    for method in interleaved(_METHODS, rounds * _ROUNDS):
        rates[method].append(rate(method))
    for method, values in rates.items():
        yield Measurement("metrics", f"{case}, {_SIZE} B", method, "messages/s", tuple(values))


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


def _source_rate(spark: SparkSession, method: str, count: int) -> float:
    with (
        temporary_directory() as scratch,
        sender(_SIZE, count) as push,
        _options(spark, method) as (name, more),
    ):
        options = {
            "connect": push.endpoint,
            "socketType": "PULL",
            "walLocation": str(scratch / "log"),
            **more,
        }
        with noop_query(spark, name, options, scratch / "checkpoint") as query:
            finished_at(query, 1, _MOST_SECONDS)  # the primer
            push.go()
            ended = finished_at(query, count + 1, _MOST_SECONDS)
            return float(count / (ended - push.answer(_MOST_SECONDS)))
