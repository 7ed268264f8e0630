"""Real-time mode: what Spark says of this source and sink, as docs/spark.md quotes it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter

from tests.support import REPOSITORY, free_endpoint
from tests.support.streams import feed
from zmq_datasource import reason

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(
        "realTime" not in inspect.signature(DataStreamWriter.trigger).parameters,
        reason="this PySpark has no trigger(realTime=...)",
    ),
]


def in_real_time(rows: DataFrame, sink: str, checkpoint: Path) -> str:
    """Run a query in real-time mode, and return Spark's refusal."""
    writer = rows.writeStream.format(sink).outputMode("update").option("connect", free_endpoint())
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(realTime="5 seconds")
    with pytest.raises(PySparkException) as refused:
        query = writer.start()
        try:
            query.awaitTermination(60)
        finally:
            query.stop()
    return reason(refused.value) or ""


def test_spark_refuses_the_source_and_the_sink_in_real_time_mode(spark: SparkSession, tmp_path: Path) -> None:
    ours = feed(spark, connect=free_endpoint(), walLocation=tmp_path / "wal")
    rate = spark.readStream.format("rate").load().selectExpr("string(value) AS value")
    page = (REPOSITORY / "docs" / "spark.md").read_text(encoding="utf-8")
    for rows, sink, named in ((ours, "console", "PythonMicroBatchStream"), (rate, "zmq", "sink allowlist")):
        said = in_real_time(rows, sink, tmp_path / sink)
        assert named in said
        error = re.search(r"STREAMING_REAL_TIME_MODE\.\w+", said)
        assert error is not None
        assert error[0] in page
