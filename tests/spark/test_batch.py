"""``spark.read.format("zmq")``: bounded reads of a live socket, parallel reads of a log."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import zmq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.support import Socket, as_text, batch_of, bound, need, wait_for
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.options import BatchReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.spark.batch_reader import ZmqLiveReader

pytestmark = pytest.mark.spark
Context = zmq.Context[Socket]


def read(spark: SparkSession, **options: Any) -> DataFrame:
    return spark.read.format("zmq").options(**as_text(options)).load()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of 100 messages in 10 chunks, the first two of which are gone."""
    writer = LogWriter(LogStorage(str(tmp_path / "log")), chunk_bytes=1 << 20, max_bytes=1 << 30)
    writer.merge_seconds = 1e6
    writer.open()
    for first in range(0, 100, 10):
        writer.append(batch_of([b"%d" % i for i in range(first, first + 10)]))
        writer.cut()
    writer.cut().result(10)
    need(tmp_path / "log", 20)
    wait_for(lambda: writer.earliest == 20, "the deletion")
    writer.close()
    return tmp_path / "log"


@pytest.mark.parametrize(
    ("start", "end", "ids"),
    [
        ("earliest", "latest", range(20, 100)),
        ('{"next": 25}', '{"next": 31}', range(25, 31)),
        ("latest", "latest", range(0)),
        ('{"next": 99}', "latest", range(99, 100)),
    ],
)
def test_a_log_is_read_in_any_range(spark: SparkSession, log: Path, start: str, end: str, ids: range) -> None:
    df = read(spark, walLocation=log, startingOffsets=start, endingOffsets=end, minPartitions=4)
    assert df.rdd.getNumPartitions() == max(1, min(4, len(ids)))
    assert [(r["id"], int(r["value"])) for r in df.orderBy("id").collect()] == [(i, i) for i in ids]


@pytest.fixture
def timed(tmp_path: Path) -> Path:
    """A log of ten chunks of ten messages: the one of second 0, of second 1, ..."""
    writer = LogWriter(LogStorage(str(tmp_path / "timed")), chunk_bytes=1 << 20, max_bytes=1 << 30)
    writer.open()
    for second in range(10):
        writer.append(batch_of([b"%d" % second] * 10, second * 1_000_000))
        writer.cut().result(10)
    writer.close()
    return tmp_path / "timed"


def at(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat()


def test_a_log_is_read_between_two_times(spark: SparkSession, timed: Path) -> None:
    df = read(spark, walLocation=timed, startingOffsets=at(3), endingOffsets=at(5))
    assert [r["id"] for r in df.orderBy("id").collect()] == list(range(30, 50))
    assert read(spark, walLocation=timed, endingOffsets=at(100)).count() == 100
    assert (
        read(spark, walLocation=timed, startingOffsets=at(100)).count() == 0
    )  # no message was received since


def test_actions_on_one_dataframe_do_not_filter_one_another(spark: SparkSession, timed: Path) -> None:
    """As they would if filters were taken: Spark keeps what was planned with them for an action that has none."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        df = read(spark, walLocation=timed)
        assert (df.where("id = 25").count(), df.count()) == (1, 100)
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.parametrize(
    ("start", "why"),
    [
        ('{"next": 5}', "startingOffsets is 5, and log .*begins at id 20 and ends before id 100"),
        ('{"log": "another", "next": 500}', "the offset is of log another"),  # its ids mean nothing here
    ],
)
def test_a_start_that_the_log_does_not_have_is_data_loss(
    spark: SparkSession, log: Path, start: str, why: str
) -> None:
    with pytest.raises(PySparkException, match=why):
        read(spark, walLocation=log, startingOffsets=start).count()
    assert read(spark, walLocation=log, startingOffsets=start, failOnDataLoss=False).count() == 80


def test_a_damaged_chunk_fails_the_read_and_is_named(spark: SparkSession, log: Path) -> None:
    chunk = sorted((log / "chunks").glob("*.arrow"))[3]
    content = bytearray(chunk.read_bytes())
    position = content.index(b"5051525354")  # values of this chunk, side by side
    content[position] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(PySparkException, match=f"{chunk.name} .ids 50 to 59.: its checksum differs"):
        read(spark, walLocation=log).count()


def test_all_actions_on_one_live_read_have_the_same_messages(spark: SparkSession, context: Context) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    sending = threading.Thread(target=lambda: [push.send(b"%d" % i) for i in range(20)])
    sending.start()
    options = {"connect": endpoint, "socketType": "PULL", "maxMessages": 10, "timeout": "60s"}
    df = read(spark, **options)
    df.explain()  # receives nothing
    first = df.collect()
    assert len({row["value"] for row in first}) == 10
    assert df.repartitionByRange(2, "id").orderBy("id").collect() == first  # Spark evaluates it twice
    sending.join(30)
    context.socket(zmq.PULL).connect(endpoint)  # takes the rest


def test_a_live_read_ends_at_its_bound_of_memory_and_a_repeated_task_reads_the_same(context: Context) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    sending = threading.Thread(target=lambda: [push.send(bytes(1 << 20)) for _ in range(60)])
    sending.start()
    options = parse(
        BatchReadOptions, {"connect": endpoint, "socketType": "PULL", "timeout": "60s", "maxMessages": "60"}
    )
    reader = ZmqLiveReader(options, most_bytes=32 << 20)
    partitions = reader.partitions()
    assert len(partitions) > 1
    first, repeated = ([batch for part in partitions for batch in reader.read(part)] for _ in range(2))
    assert first == repeated  # as for a task that Spark repeats
    assert 32 <= sum(batch.num_rows for batch in first) < 60
    context.socket(zmq.PULL).connect(endpoint)  # takes the rest
    sending.join(30)
