"""Sink throughput: rows of a cached DataFrame, and of a stream of files, through PUSH to a PULL."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit

from benchmarks.measure import Measurement, interleaved, temporary_directory
from benchmarks.peers import consumer, payload
from benchmarks.source import RAW, raw_rate, size_name

__all__ = ["BATCH", "STREAM", "Rows", "measure_sink", "sink_rows", "stream_rates"]

BATCH, STREAM = "df.write", "writeStream"

# Messages a second to expect, rough: only to choose how many a run sends.
_SIZES = {16: 500_000, 100: 400_000, 1_000: 200_000, 100_000: 800}
_RUN_SECONDS = 4.0
_MOST_SECONDS = 120.0


@dataclass(frozen=True)
class Rows:
    """``count`` rows with one ``value`` of ``size`` bytes each, in one partition, made beforehand."""

    size: int
    count: int
    cached: DataFrame
    files: Path


def measure_sink(spark: SparkSession, scale: float, rounds: int) -> Iterator[Measurement]:
    """Messages a second between the first and the last received, and over the whole Spark job.

    There is one Spark partition: one sending task against one raw sending loop.
    """
    with sink_rows(spark, 100, 1000) as rows:  # warm-up
        _sink_rates(rows, _write_batch)
        _sink_rates(rows, _write_stream)
    for size, expected in _SIZES.items():
        rates: dict[str, list[float]] = defaultdict(list)
        count = max(10, round(expected * _RUN_SECONDS * scale))
        with sink_rows(spark, size, count) as rows:
            for method in interleaved((RAW, BATCH, STREAM), rounds):
                if method == RAW:
                    rates[RAW].append(raw_rate(size, count))
                    continue
                sending, whole = _sink_rates(rows, _write_batch if method == BATCH else _write_stream)
                rates[method].append(sending)
                rates[f"{method}, whole job"].append(whole)
        for method, values in rates.items():
            yield Measurement("sink", size_name(size), method, "messages/s", tuple(values))


@contextmanager
def sink_rows(spark: SparkSession, size: int, count: int) -> Iterator[Rows]:
    rows = spark.range(0, count, 1, 1).select(lit(payload(size)).alias("value"))
    with temporary_directory() as scratch:
        files = scratch / "rows"
        rows.write.parquet(str(files))
        cached = rows.cache()
        cached.count()
        try:
            yield Rows(size, count, cached, files)
        finally:
            cached.unpersist(blocking=True)


def _sink_rates(rows: Rows, write: Callable[[Rows, str], None]) -> tuple[float, float]:
    with consumer(rows.count) as pull:
        began = time.time()
        write(rows, pull.endpoint)
        whole = time.time() - began
        first, last = pull.answer(_MOST_SECONDS), pull.answer(_MOST_SECONDS)
    return (rows.count - 1) / (last - first), rows.count / whole


def _write_batch(rows: Rows, endpoint: str) -> None:
    rows.cached.write.format("zmq").mode("append").option("connect", endpoint).save()


def stream_rates(rows: Rows, name: str, options: Mapping[str, str]) -> tuple[float, float]:
    """Rows a second of a streaming query into the data source ``name``: while they are sent, and of the whole job."""
    return _sink_rates(rows, lambda rows, endpoint: _write_stream(rows, endpoint, name, options))


def _write_stream(
    rows: Rows, endpoint: str, name: str = "zmq", options: Mapping[str, str] = MappingProxyType({})
) -> None:
    stream = rows.cached.sparkSession.readStream.schema(rows.cached.schema).parquet(str(rows.files))
    with temporary_directory() as checkpoint:
        writer = stream.writeStream.format(name).options(**options).option("connect", endpoint)
        query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        try:
            if not query.awaitTermination(round(_MOST_SECONDS)):
                raise TimeoutError(f"waiting {_MOST_SECONDS:.0f} s for {rows.count} rows to be sent")
        finally:
            query.stop()
