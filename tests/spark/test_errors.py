"""What is wrong is said when the DataFrame is made or the query starts, with the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.support import Socket, free_endpoint
from tests.support.streams import feed, start
from zmq_datasource import reason, register
from zmq_datasource.spark import registration

pytestmark = pytest.mark.spark
Context = zmq.Context[Socket]
FEED = "tcp://127.0.0.1:5556"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"conect": FEED}, "did you mean 'connect'"),
        ({"connect": FEED, "zmq_conflate": "1"}, "zmq.conflate"),
        ({"connect": FEED, "zmq_handshake_ivl": "-1"}, "libzmq refuses it"),
        ({}, "as a streaming read: neither connect nor bind is set; name the feed"),
        ({"connect": FEED, "maxMessages": 5, "walRetention": "1h"}, "as a batch read: option walRetention"),
    ],
)
def test_wrong_options_are_refused_when_the_dataframe_is_made(
    spark: SparkSession, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(PySparkException) as refused:
        feed(spark, **options)
    assert says in str(refused.value)


def test_a_table_is_refused_with_what_to_use_instead(spark: SparkSession) -> None:
    for columns in ("", "(value BINARY)"):
        with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
            spark.sql(f"CREATE TABLE zmq_feed {columns} USING zmq OPTIONS (connect '{FEED}')")
            try:
                spark.table("zmq_feed").collect()
            finally:
                spark.sql("DROP TABLE zmq_feed")
    spark.sql(f"CREATE TEMPORARY VIEW zmq_view USING zmq OPTIONS (connect '{FEED}')")
    assert spark.table("zmq_view").columns[0] == "id"
    spark.catalog.dropTempView("zmq_view")


def test_overwriting_is_refused(spark: SparkSession) -> None:
    rows = spark.sql("SELECT 'x' AS value")
    with pytest.raises(PySparkException, match="use mode\\('append'\\)"):
        rows.write.format("zmq").mode("overwrite").option("connect", FEED).save()


_PROGRAM = """
import sys
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from zmq_datasource import register

class Another(DataSource):
    @classmethod
    def name(cls):
        return "another"

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
register(spark)
register(spark)
spark.dataSource.register(Another)
spark.dataSource.register(Another)
feed = spark.readStream.format("zmq").option("connect", sys.argv[1]).option("walLocation", sys.argv[2] + "/wal")
query = feed.load().writeStream.format("noop").option("checkpointLocation", sys.argv[2] + "/checkpoint").start()
query.stop()
spark.stop()
"""


@pytest.mark.slow
def test_spark_does_not_warn_that_the_source_replaces_itself(tmp_path: Path) -> None:
    program = subprocess.run(
        [sys.executable, "-c", _PROGRAM, free_endpoint(), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "data source zmq" not in program.stderr
    # Nothing else is hidden.
    assert "WARN DataSourceManager: The data source another replaced" in program.stderr
    assert "INFO DataSourceManager" not in program.stderr


def test_registration_warns_of_workers_without_the_package(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "why_workers_lack_package", lambda python: f"{python} lacks it")
    register(spark)
    assert f"{spark.sparkContext.pythonExec} lacks it" in caplog.text


def test_the_reason_of_a_failure_is_one_sentence_without_a_stack(spark: SparkSession) -> None:
    with pytest.raises(PySparkException) as refused:
        feed(spark, conect=FEED)
    assert reason(refused.value) == "OptionError: unknown read option 'conect'; did you mean 'connect'?"
    silent = free_endpoint()
    rows = spark.sql("SELECT 'x' AS value").write.format("zmq").mode("append")
    with pytest.raises(PySparkException) as failed:
        rows.options(connect=silent, socketType="PUSH", connectTimeout="100ms").save()
    assert str(reason(failed.value)).startswith("NoPeerError: waiting 0.1 seconds for a peer")
    assert str(reason(failed.value)).endswith("or raise connectTimeout")
    assert reason(ValueError("another error\nand its stack")) == "another error"


def test_a_schema_of_the_users(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.readStream.format("zmq").option("connect", FEED).schema("price DOUBLE").load()
    with pytest.raises(PySparkException, match=r"remove \.schema\(\.\.\.\).*from_json") as refused:
        start(df, tmp_path / "out").awaitTermination(60)
    assert "UnboundLocalError" not in str(refused.value)
