"""Each batch a transaction: Spark to DEALER to ROUTER to Spark, repeated, retried, and killed."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.acknowledged.test_acknowledged import receiving
from tests.spark.test_sink import write
from tests.support import free_endpoint, log_rows, wait_for
from tests.support.driver import Driver
from tests.support.streams import committed_rows, feed, running, table, wait_for_rows

pytestmark = pytest.mark.spark


def send_files(spark: SparkSession, source: Path, checkpoint: Path, endpoint: str, **options: Any) -> None:
    """Every file in ``source`` a batch, each a transaction."""
    writer = (
        spark.readStream.option("maxFilesPerTrigger", 1)
        .text(str(source))
        .writeStream.format("zmq")
        .option("socketType", "DEALER")
        .option("connect", endpoint)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
    )
    for name, value in options.items():
        writer = writer.option(name, value)
    query = writer.start()
    assert query.awaitTermination(120)


def files(directory: Path, count: int, lines: int) -> list[str]:
    directory.mkdir()
    written = []
    for number in range(count):
        text = [f"{number} {line}" for line in range(lines)]
        (directory / f"{number:04}.txt").write_text("\n".join(text) + "\n")
        written += text
    return written


def test_repeated_batches_arrive_whole_and_once(spark: SparkSession, tmp_path: Path) -> None:
    endpoint, source, checkpoint = free_endpoint(), tmp_path / "source", tmp_path / "sent"
    written = files(source, 3, 100)
    df = feed(spark, socketType="ROUTER", bind=endpoint, walLocation=tmp_path / "wal")
    with running(df, tmp_path / "out") as query:
        send_files(spark, source, checkpoint, endpoint)
        wait_for_rows(query, 300)
        # As after a crash before the last batch was committed: Spark executes it again.
        for name in (checkpoint / "commits").glob("*2*"):
            name.unlink()
        (source / "0003.txt").write_text("3 0\n")
        send_files(spark, source, checkpoint, endpoint)
        wait_for_rows(query, 301)
    rows = table(spark, tmp_path / "out").selectExpr("*", "cast(value as string) as text").collect()
    assert sorted(row["text"] for row in rows) == sorted([*written, "3 0"])
    assert Counter(row["sequence"] for row in rows) == {0: 100, 1: 100, 2: 100, 3: 1}
    assert len({row["publisher"] for row in rows}) == 1


def test_a_query_with_a_restored_checkpoint_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    endpoint, source, checkpoint = free_endpoint(), tmp_path / "source", tmp_path / "sent"
    written = files(source, 2, 10)
    with receiving(tmp_path / "log", endpoint):
        send_files(spark, source, checkpoint, endpoint)
        shutil.copytree(checkpoint, tmp_path / "copy")
        (source / "0002.txt").write_text("2 0\n")
        send_files(spark, source, checkpoint, endpoint)
        # The copy goes on from before that, with other rows under the same number, and then under an older one.
        (source / "0002.txt").rename(source / "_hidden.txt")
        (source / "0003.txt").write_text("3 0\n")
        with pytest.raises(PySparkException, match=r"transaction 2 of \S+ it is in the log with 1 rows"):
            send_files(spark, source, tmp_path / "copy", endpoint)
        send_files(spark, source, checkpoint, endpoint)
        with pytest.raises(PySparkException, match=r"already has transaction 3.*a restored checkpoint"):
            send_files(spark, source, tmp_path / "copy", endpoint)
    got = [value.decode() for value in log_rows(tmp_path / "log").column("value").to_pylist()]
    assert sorted(got) == sorted([*written, "2 0", "3 0"])


def test_a_batch_write_is_a_transaction_that_may_be_named(spark: SparkSession, tmp_path: Path) -> None:
    endpoint = free_endpoint()
    df = spark.range(0, 100, 1, 2).selectExpr("concat('t', id % 2) as topic", "cast(id as string) as value")
    with receiving(tmp_path, endpoint):
        write(df, socketType="DEALER", connect=endpoint, transactionId="orders-2026-11-20")
        write(df, socketType="DEALER", connect=endpoint, transactionId="orders-2026-11-20")
        write(df, socketType="DEALER", connect=endpoint)
        frames = spark.createDataFrame([([b"a", b"", b"c"],)], "frames ARRAY<BINARY>")
        write(frames, socketType="DEALER", connect=endpoint)
        write(spark.range(0).selectExpr("'x' as value"), socketType="DEALER", connect=endpoint)
        rows = log_rows(tmp_path)
        # A row without a value is dropped, also in a transaction that is repeated.
        for _ in range(2):
            holed = df.selectExpr("if(value = '7', null, value) as value")
            write(holed, socketType="DEALER", connect=endpoint, transactionId="holed")
        write(spark.range(1).selectExpr("string(null) as value"), socketType="DEALER", connect=endpoint)
    assert log_rows(tmp_path).num_rows == 201 + 99
    assert Counter(rows.column("publisher").to_pylist())["write-orders-2026-11-20"] == 100
    assert rows.num_rows == 201
    assert rows.column("frames").to_pylist()[-1] == [b"a", b"", b"c"]
    assert set(rows.column("topic").to_pylist()[:100]) == {"t0", "t1"}


def test_a_stream_takes_no_transaction_id(spark: SparkSession, tmp_path: Path) -> None:
    files(tmp_path / "source", 1, 1)
    with pytest.raises(PySparkException, match="each batch of a stream is a transaction"):
        send_files(spark, tmp_path / "source", tmp_path / "sent", "tcp://127.0.0.1:1", transactionId="x")


RETRIED = """
import sys
from pyspark import TaskContext
from pyspark.sql import SparkSession
from zmq_datasource import register

spark = SparkSession.builder.master("local[2,3]").config("spark.ui.enabled", "false").getOrCreate()
register(spark)

def failing(batches):
    for batch in batches:
        yield batch
    if TaskContext.get().attemptNumber() == 0:
        raise RuntimeError("the first attempt fails at its end")

df = spark.range(0, 100, 1, 2).selectExpr("cast(id as string) as value").mapInArrow(failing, "value string")
df.write.format("zmq").mode("append").option("socketType", "DEALER").option("connect", sys.argv[1]).save()
writer = df.write.format("zmq").mode("append").option("connect", sys.argv[2])
writer.option("connectTimeout", "200ms").option("deadLetterLocation", sys.argv[3]).save()
letters = spark.read.parquet(sys.argv[3])
print(letters.count(), letters.select("value").distinct().count())
spark.stop()
"""


@pytest.mark.slow
def test_a_task_that_fails_at_first_leaves_no_trace(tmp_path: Path) -> None:
    """Neither staged rows nor dead letters. In a session that tries tasks again."""
    endpoint, script = free_endpoint(), tmp_path / "retried.py"
    script.write_text(RETRIED)
    with receiving(tmp_path / "log", endpoint):
        done = subprocess.run(
            [sys.executable, str(script), endpoint, free_endpoint(), str(tmp_path / "letters")],
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-2:] == ["100", "100"], done.stdout
    assert sorted(int(v) for v in log_rows(tmp_path / "log").column("value").to_pylist()) == list(range(100))


# Chaos.


def driver(role: str, directory: Path, **query: Any) -> Driver:
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": f"{directory}/{role}-scratch",
    }
    query["sink"]["checkpointLocation"] = f"{directory}/{role}-checkpoint"
    return Driver(directory / f"{role}.log", master="local[2,4]", conf=conf, **query)


def sending(directory: Path, endpoint: str) -> Driver:
    """One that sends each file as a transaction, and ends when it is through."""
    source = {"format": "text", "path": f"{directory}/input", "maxFilesPerTrigger": "1"}
    sink = {"socketType": "DEALER", "connect": endpoint, "zmq.reconnect_ivl": "20"}
    sink |= {"connectTimeout": "60s", "sendTimeout": "60s"}
    return driver("sender", directory, source=source, sink=sink, partitions=2, availableNow=True)


def committing(directory: Path, endpoint: str) -> Driver:
    """One that receives transactions into Parquet, until it is killed."""
    source = {"socketType": "ROUTER", "bind": endpoint, "walLocation": f"{directory}/wal"}
    select = ["id", "publisher", "sequence", "cast(value as string) as value"]
    sink = {"format": "parquet", "path": f"{directory}/output"}
    return driver("receiver", directory, source=source, select=select, sink=sink)


def chaos(directory: Path, seed: int, rounds: int, count: int, lines: int) -> None:
    chance = random.Random(seed)
    written = files(directory / "input", count, lines)
    endpoint = free_endpoint()
    receiver, sender = committing(directory, endpoint), sending(directory, endpoint)
    killed: Counter[str] = Counter()
    try:
        # Spark refuses a checkpoint that it had only begun to make.
        first = directory / "receiver-checkpoint" / "commits" / "0"
        wait_for(first.exists, "the first batch to arrive", 120)
        for _ in range(rounds):
            time.sleep(chance.uniform(4, 9))  # any moment is right
            what = chance.choice(["sender", "receiver", "worker"])
            if what == "worker" and sender.process.poll() is None:
                if workers := sender.processes("pyspark.daemon"):
                    with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                        chance.choice(workers).kill()
                        killed[what] += 1
            elif what == "receiver":
                receiver.kill()
                receiver.start()
                killed[what] += 1
            elif sender.process.poll() is None:
                sender.kill()
                sender.start()
                killed["sender"] += 1

        def is_through() -> bool:
            code = sender.process.poll()
            if code:  # a batch that failed too often; the next run repeats it
                sender.start()
            return code == 0

        wait_for(is_through, "all transactions sent", 240)
        assert receiver.process.poll() is None, receiver.said()
        wait_for(
            lambda: committed_rows(directory / "output").num_rows >= len(written),
            "all rows in the output",
            120,
        )
    finally:
        sender.kill()
        receiver.kill()
    rows = committed_rows(directory / "output").to_pylist()
    assert Counter(row["value"] for row in rows) == Counter(written), killed
    assert sorted(row["id"] for row in rows) == list(range(len(written)))
    by_batch = Counter(row["sequence"] for row in rows)
    # A file a batch; Spark's file source, killed between its own log and the query's, gives a batch two.
    assert all(size % lines == 0 for size in by_batch.values()), by_batch


@pytest.mark.parametrize(
    ("seed", "rounds", "count"),
    [
        pytest.param(1, 2, 8, marks=pytest.mark.slow),  # kills a sender and a receiver
        *(
            pytest.param(seed, 36, 150, marks=[pytest.mark.long, pytest.mark.timeout(1800)])
            for seed in range(3)
        ),
    ],
)
def test_kills_lose_and_double_no_row(seed: int, rounds: int, count: int, tmp_path: Path) -> None:
    chaos(tmp_path, seed=seed, rounds=rounds, count=count, lines=200)
