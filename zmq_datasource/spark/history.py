"""What ``metricsLocation`` holds, as a DataFrame."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from zmq_datasource.monitoring.catalogue import SINK, SOURCE, TOTAL
from zmq_datasource.monitoring.metric import Metric
from zmq_datasource.monitoring.store import MetricsStore
from zmq_datasource.options.types import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["HISTORY_DDL", "metrics_dataframe"]


def _struct(metrics: Iterable[Metric]) -> str:
    return f"STRUCT<{', '.join(f'{metric.name}: {metric.type}' for metric in metrics)}>"


HISTORY_DDL = (
    "timestamp TIMESTAMP, kind STRING, "
    f"source STRING, log STRING, walLocation STRING, next BIGINT, sourceMetrics {_struct(SOURCE)}, "
    "query STRING, name STRING, execution STRING, batch BIGINT, sink STRING, "
    f"sinkMetrics {_struct(SINK)}, sinkTotal {_struct(TOTAL)}"
)


def metrics_dataframe(spark: SparkSession, location: str) -> DataFrame:
    """The history of sources and sinks that write to ``location`` (their option ``metricsLocation``).

    A row is either a source's report (``kind`` is ``source``: ``source``, ``log``, ``walLocation``, ``next``,
    ``sourceMetrics``) or a sink's committed batch (``sink``: ``query``, ``name``, ``execution``, ``batch``, ``sink``,
    ``sinkMetrics`` of the batch, ``sinkTotal`` up to it). docs/metrics.md has the fields and their units.

    Raises:
        MetricsError: There are no metrics.
    """
    MetricsStore(Location(location)).newest(required=True)  # says clearly if there is nothing
    reader = spark.read.schema(HISTORY_DDL).option("recursiveFileLookup", True)
    reader = reader.option("ignoreMissingFiles", True)  # which their writers remove once they are old
    return reader.option("pathGlobFilter", "*.json").json(_for_spark(location))


def _for_spark(location: str) -> str:
    """The location as Spark names it: whose default file system may not be the local one."""
    if "://" in location:
        # Hadoop's S3 file system has another scheme than pyarrow's.
        return location.replace("s3://", "s3a://", 1)
    return f"file://{os.path.abspath(location)}"
