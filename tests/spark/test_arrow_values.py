"""Tables as messages: from one Spark job to another, and to and from programs without Spark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
import zmq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.support import REPOSITORY, Socket, batch_of, bound, free_endpoint, wait_for
from tests.support.pages import run, snippets
from tests.support.streams import running, wait_for_rows
from zmq_datasource.errors import OptionError
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter

pytestmark = pytest.mark.spark
Context = zmq.Context[Socket]

SCHEMA = "n BIGINT, half DOUBLE, name STRING, at TIMESTAMP, tags ARRAY<STRING>, place STRUCT<x: INT, y: DECIMAL(10, 2)>"


def stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def sent(df: DataFrame, endpoint: str, **options: Any) -> None:
    writer = df.write.format("zmq").mode("append").option("connect", endpoint)
    for name, value in {"valueFormat": "arrow", **options}.items():
        writer = writer.option(name, value)
    writer.save()


def test_one_job_reads_the_tables_of_another(spark: SparkSession, tmp_path: Path) -> None:
    endpoint = free_endpoint()
    df = spark.range(0, 2500, 1, 2).selectExpr(
        "id AS n",
        "if(id % 7 = 0, NULL, id * 0.5D) AS half",
        "concat('ü', id) AS name",
        "timestamp_micros(id * 1000) AS at",
        "array('a', string(id)) AS tags",
        "named_struct('x', int(id), 'y', cast(id AS DECIMAL(10, 2))) AS place",
    )
    reader = spark.readStream.format("zmq").schema(f"{SCHEMA}, _id BIGINT, _topic STRING")
    options = {"socketType": "PULL", "bind": endpoint, "walLocation": str(tmp_path / "wal")}
    received = reader.options(valueFormat="arrow", **options).load()
    with running(received, tmp_path / "out") as query:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
        try:
            sent(df, endpoint, topic="t")
        finally:
            spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
        wait_for_rows(query, 26)
        progress = [p for p in query.recentProgress if p["numInputRows"]]
    out = spark.read.parquet(str(tmp_path / "out"))
    assert sum(p["numInputRows"] for p in progress) == 2500
    assert (
        out.drop("_id", "_topic").exceptAll(df).count()
        == df.exceptAll(out.drop("_id", "_topic")).count()
        == 0
    )
    assert out.select("_topic").distinct().collect() == [("t",)]
    # 1250 rows of each Spark partition, in messages of 100.
    sizes = sorted(row["count"] for row in out.groupBy("_id").count().collect())
    assert sizes == [50, 50] + [100] * 24


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log with a good value, two others, and a good one."""
    tables = [{"x": [1, 2]}, {"x": ["text"]}, {"x": pa.array([3], pa.int8()), "other": [0]}]
    good, text, other = (stream(pa.table(table)) for table in tables)
    writer = LogWriter(LogStorage(str(tmp_path / "wal")), chunk_bytes=1 << 20, max_bytes=1 << 30)
    writer.open()
    writer.append(batch_of([good, b"no Arrow", text, other]))
    writer.close()
    return tmp_path / "wal"


def test_mode_decides_about_values_that_do_not_fit(
    spark: SparkSession, log: Path, package_log: Callable[[], str]
) -> None:
    def read(schema: str, **options: str) -> list[tuple[Any, ...]]:
        reader = spark.read.format("zmq").schema(schema).option("valueFormat", "arrow")
        return [tuple(row) for row in reader.options(walLocation=str(log), **options).load().collect()]

    assert read("x INT, _id BIGINT") == [(1, 0), (2, 0), (None, 1), (None, 2), (3, 3)]
    text = stream(pa.table({"x": ["text"]}))
    corrupt = [(row[0], row[1] and bytes(row[1])) for row in read("x INT, _corrupt_record BINARY")]
    assert corrupt == [(1, None), (2, None), (None, b"no Arrow"), (None, text), (3, None)]
    assert read("x INT NOT NULL", mode="dropMalformed") == [(1,), (2,), (3,)]
    logged = package_log()
    assert "reading the value of message 1 as Arrow: it is not an Arrow IPC stream" in logged
    assert "message 2 as Arrow: column 'x' is string, and does not fit int32: Failed to parse" in logged
    with pytest.raises(PySparkException, match=r"message 1.*Correct the schema, or set mode"):
        read("x INT", mode="FAILFAST")
    # Another schema, the same log.
    assert read("x STRING", mode="DROPMALFORMED") == [("1",), ("2",), ("text",), ("3",)]


@pytest.mark.parametrize(
    ("schema", "options", "why"),
    [
        (None, {}, "valueFormat=arrow needs the schema"),
        ("x INT", {"includeFrames": "true"}, "includeFrames is for valueFormat=bytes"),
        ("x INT", {"view": "gaps"}, "valueFormat"),
        ("x INT", {"valueFormat": "bytes"}, "set valueFormat=arrow if the values are Arrow IPC streams"),
        ("x INT", {"valueFormat": "bytes", "mode": "FAILFAST"}, "mode needs valueFormat=arrow"),
        ("x INT NOT NULL", {}, "leave out NOT NULL, or set mode"),
        ("_id STRING", {}, "column '_id' has type string"),
        ("x INTERVAL YEAR TO MONTH", {}, "the schema of valueFormat=arrow"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused(
    spark: SparkSession, tmp_path: Path, schema: str | None, options: dict[str, str], why: str
) -> None:
    reader = spark.read.format("zmq").options(
        **{"valueFormat": "arrow", "walLocation": str(tmp_path), **options}
    )
    with pytest.raises(PySparkException, match=re.escape(why)):
        (reader if schema is None else reader.schema(schema)).load().collect()


def test_each_snippet_about_tables_runs_as_printed(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    page = list(snippets(REPOSITORY / "docs" / "arrow.md", tmp_path))
    with ExitStack() as stack:
        names = run(iter([snippet for snippet in page if snippet.kind == "python"]), stack, tmp_path)
        wait_for(lambda: sum(p["numInputRows"] for p in names["keeping"].recentProgress) >= 1000, "rows", 90)
    assert names["latest"].first()["sensor"] is not None
    push, endpoint = bound(context, zmq.PUSH)
    pull = context.socket(zmq.PULL)
    pull.connect(endpoint)
    pull.rcvtimeo = 10_000
    known: dict[str, Any] = {"push": push, "pull": pull}
    for snippet in page:
        if snippet.kind in ("pyarrow", "pandas", "polars"):
            known["frame"] = _frame(snippet.kind)
            before = None if known["frame"] is None else known["frame"].to_dict()
            if snippet.kind == "polars" and known["frame"] is None:
                continue
            exec(snippet.code, known)
            if before is not None:
                assert json.dumps(known["frame"].to_dict(), default=list) == json.dumps(before, default=list)
    assert known["table"].to_pydict() == {"sensor": [1, 2], "celsius": [19.5, 21.0]}


def _frame(kind: str) -> Any:
    columns = {"sensor": [1, 2], "city": ["Bern", None]}
    if kind == "pandas":
        import pandas as pd  # noqa: PLC0415

        return pd.DataFrame(columns)
    if kind == "polars":
        try:
            import polars as pl  # noqa: PLC0415 - where it is installed
        except ImportError:
            return None
        return pl.DataFrame(columns)
    return None


@pytest.mark.parametrize(
    ("columns", "options", "why"),
    [
        ([], {}, "nothing to send"),
        (["id AS a", "id AS a"], {}, "columns ['a'] twice"),
        (["id"], {"socketType": "DEALER"}, "valueFormat is not for socketType=DEALER"),
    ],
)
def test_a_dataframe_that_cannot_be_sent_is_refused(
    spark: SparkSession, columns: list[str], options: dict[str, str], why: str
) -> None:
    with pytest.raises((PySparkException, OptionError), match=re.escape(why)):
        sent(spark.range(1).selectExpr(*columns), free_endpoint(), **options)
