"""Spark Connect: the thin client, which has no SparkContext, against a server with the whole of Spark."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest

from tests.support import REPOSITORY, wait_for
from tests.support.ports import free_port
from tests.support.programs import environment

pytestmark = [pytest.mark.spark, pytest.mark.long]

PROGRAM = """
import json, sys, time
import zmq
from pyspark.sql import SparkSession
from zmq_datasource import metrics, register

assert "py4j" not in sys.modules
server, directory = sys.argv[1:]
spark = SparkSession.builder.remote(server).getOrCreate()
register(spark)
with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
    source = push.bind_to_random_port("tcp://127.0.0.1")
    sink = pull.bind_to_random_port("tcp://127.0.0.1")
    feed = spark.readStream.format("zmq").option("socketType", "PULL")
    feed = feed.option("connect", f"tcp://127.0.0.1:{source}").option("walLocation", f"{directory}/log").load()
    writer = feed.writeStream.format("parquet").option("path", f"{directory}/out")
    query = writer.option("checkpointLocation", f"{directory}/checkpoint").start()
    for number in range(100):
        push.send(b"%d" % number)
    deadline = time.monotonic() + 60
    read = 0
    while read < 100:
        assert time.monotonic() < deadline, query.exception()
        time.sleep(0.1)
        if query.lastProgress and query.lastProgress["sources"][0]["endOffset"]:
            read = json.loads(query.lastProgress["sources"][0]["endOffset"])["next"]
    received = metrics(query).last["sources"][0]["metrics"]["messagesReceived"]
    query.stop()
    rows = spark.read.parquet(f"{directory}/out").selectExpr("cast(value as string) as value")
    rows.write.format("zmq").option("connect", f"tcp://127.0.0.1:{sink}").mode("append").save()
    got = {pull.recv() for _ in range(100)}
print(json.dumps({"received": received, "rows": rows.count(), "got": len(got)}))
"""


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the package and pyspark-client, and without pyspark."""
    made = environment(tmp_path_factory.mktemp("thin") / "venv", "pyspark-client>=4.2", "pandas<3")
    return made / "bin" / "python"


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    home, port, log = Path(pyspark.__file__).parent, free_port(), directory / "server.log"
    environment = os.environ | {"SPARK_HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
    command = [
        *(
            home / "bin" / "spark-submit",
            "--class",
            "org.apache.spark.sql.connect.service.SparkConnectServer",
        ),
        *("--master", "local[2]", "--conf", f"spark.connect.grpc.binding.port={port}"),
        *("--conf", "spark.ui.enabled=false", "--conf", f"spark.local.dir={directory}/scratch"),
        *("--conf", f"spark.sql.warehouse.dir={directory}/warehouse", "spark-internal"),
    ]
    with log.open("w") as file:
        server = subprocess.Popen(command, cwd=directory, env=environment, stdout=file, stderr=file)
        try:
            wait_for(lambda: "Spark Connect server started" in log.read_text(), "the server", 120)
            yield f"sc://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def test_the_thin_client_reads_writes_and_sees_the_metrics(thin: Path, tmp_path: Path) -> None:
    program = (
        tmp_path / "program.py"
    )  # a main program without a file is taken by PySpark for a doctest of its own
    program.write_text(PROGRAM)
    with serving(tmp_path) as server:
        done = subprocess.run(
            [thin, "-W", "ignore", program, server, tmp_path],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.stdout.strip() == '{"received": 100, "rows": 100, "got": 100}', done.stderr
