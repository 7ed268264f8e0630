"""What ``metricsLocation`` holds, as a DataFrame."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.functions import from_json

from zmq_datasource.counters import Metric
from zmq_datasource.monitoring.accounts import SINK
from zmq_datasource.monitoring.source import SOURCE
from zmq_datasource.monitoring.store import MetricsStore
from zmq_datasource.options.types import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["HISTORY_DDL", "metrics_dataframe"]

# Of a day's reports about a hundred shares; a share is what a task holds at a time.
_SHARE_FILES = 500


def _struct(metrics: Iterable[Metric]) -> str:
    return f"STRUCT<{', '.join(f'{metric.name}: {metric.type}' for metric in metrics)}>"


HISTORY_DDL = (
    "timestamp TIMESTAMP, kind STRING, "
    f"source STRING, log STRING, walLocation STRING, next BIGINT, sourceMetrics {_struct(SOURCE)}, "
    "query STRING, name STRING, execution STRING, batch BIGINT, sink STRING, "
    f"sinkMetrics {_struct(SINK)}"
)


def metrics_dataframe(spark: SparkSession, location: str) -> DataFrame:
    """The history of sources and sinks that write to ``location`` (their option ``metricsLocation``).

    A row is either a source's report (``kind`` is ``source``: ``source``, ``log``, ``walLocation``, ``next``,
    ``sourceMetrics``) or a sink's account of a committed batch (``sink``: ``query``, ``name``, ``execution``,
    ``batch``, ``sink``, ``sinkMetrics``); accounts add up to totals. docs/metrics.md has the fields and their units.

    The files there are now are read whenever rows are asked for, by executors; those removed meanwhile are left out.

    Raises:
        MetricsError: There are no metrics. If a file is of another format, the query on the DataFrame fails and names
            it.
    """
    store = MetricsStore(Location(location if "://" in location else os.path.abspath(location)))
    files = store.paths()
    # Files this small cost Spark's own reader, which takes few of them for a task, most of its time.
    shares = [files[at : at + _SHARE_FILES] for at in range(0, len(files), _SHARE_FILES)]
    records = spark.createDataFrame(pa.table({"files": shares})).mapInArrow(_reading(store), "record STRING")
    return records.select(from_json("record", HISTORY_DDL).alias("record")).select("record.*")


def _reading(store: MetricsStore) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What reads shares of the files, on an executor."""

    def read(shares: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in shares:
            for files in batch.column("files"):
                records = pa.array(store.read(files.as_py()), pa.string())
                yield pa.RecordBatch.from_arrays([records], ["record"])

    return read
