"""The programs in examples/, run as they are but for ports and directories."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from tests.support import REPOSITORY, wait_for
from tests.support.ports import free_port
from tests.support.programs import environment
from zmq_datasource.log import LogStorage, read_index

pytestmark = [pytest.mark.spark, pytest.mark.long]
EXAMPLES = REPOSITORY / "examples"


def test_silent_sensors_are_told_and_their_return_too(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as feed, context.socket(zmq.PULL) as consumer:
        endpoints = [
            f"tcp://127.0.0.1:{sock.bind_to_random_port('tcp://127.0.0.1')}" for sock in (feed, consumer)
        ]
        program = subprocess.Popen([sys.executable, EXAMPLES / "silent_sensors.py", *endpoints, tmp_path])
        try:
            told: list[list[bytes]] = []

            def publish_until(known: str, silent: bytes = b"") -> None:
                """Both sensors send, but for the one that is silent, until the consumer has been told something."""

                def is_told() -> bool:
                    assert program.poll() is None
                    for sensor in {b"oslo", b"bergen"} - {silent}:
                        feed.send_multipart([sensor, b"7.5"])
                    if consumer.poll(100):
                        told.append(consumer.recv_multipart())
                    return any(re.fullmatch(known, b" ".join(message).decode()) for message in told)

                wait_for(is_told, known, 90)

            # A sensor that sends nothing at first is no sensor yet, so both must have been received once.
            wait_for(lambda: sending(feed, tmp_path), "the feed's first messages", 90)
            publish_until(r"oslo silent after \d+ messages", silent=b"oslo")
            publish_until(r"oslo back after \d+ messages")
            assert not [topic for topic, _ in told if topic == b"bergen"]
        finally:
            program.terminate()
            program.wait(30)


def sending(feed: zmq.Socket[bytes], directory: Path) -> bool:
    """Send a message of each sensor, and say whether two micro-batches are committed."""
    for sensor in (b"oslo", b"bergen"):
        feed.send_multipart([sensor, b"7.5"])
    return len(list(directory.glob("checkpoint/commits/[0-9]*"))) >= 2


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an environment with what declarative pipelines need beside PySpark."""
    return environment(tmp_path_factory.mktemp("pipelines") / "venv", "pyspark[pipelines]>=4.2")


def test_a_declarative_pipeline_reads_the_log_and_sends_to_a_consumer(
    pipelines: Path, tmp_path: Path
) -> None:
    shutil.copytree(EXAMPLES / "pipeline", tmp_path / "project")
    bind, alerts = free_port(), free_port()
    for file in (tmp_path / "project").rglob("*.*"):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("/tmp/weather", f"{tmp_path}/weather").replace(":5559", f":{alerts}"))
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHONPATH", "SPARK_", "PYSPARK_"))
    }
    own |= {
        "PYSPARK_PYTHON": str(pipelines / "bin" / "python"),
        "PATH": f"{pipelines}/bin:{os.environ['PATH']}",
    }
    receive = subprocess.Popen(
        [
            *(pipelines / "bin" / "zmq-datasource", "receive", "--socket-type", "PULL"),
            *("--bind", f"tcp://127.0.0.1:{bind}", "--wal-location", tmp_path / "weather" / "wal"),
        ],
        env=own,
    )
    try:
        with zmq.Context() as context, context.socket(zmq.PUSH) as feed, context.socket(zmq.PULL) as consumer:
            feed.connect(f"tcp://127.0.0.1:{bind}")
            consumer.bind(f"tcp://127.0.0.1:{alerts}")
            for run, temperatures in enumerate([(7.5, 31.0), (8.5, 32.0)]):
                for temperature in temperatures:
                    feed.send_json({"city": "Oslo", "temperature": temperature})
                sealed = 2 * (run + 1)
                log = LogStorage(f"{tmp_path}/weather/wal")
                wait_for(
                    lambda log=log, sealed=sealed: read_index(log).durable_end == sealed,  # type: ignore[misc]
                    "a chunk with them",
                    60,
                )
                done = subprocess.run(
                    [
                        *("spark-pipelines", "--conf", "spark.sql.catalogImplementation=hive", "run"),
                        *("--spec", tmp_path / "project" / "spark-pipeline.yml"),
                    ],
                    cwd=tmp_path,
                    env=own,
                    capture_output=True,
                    text=True,
                    timeout=240,
                    check=False,
                )
                assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
                assert consumer.poll(10_000)
                topic, value = consumer.recv_multipart()
                assert topic == b"heat"
                assert f'"temperature":{temperatures[1]}'.encode() in value
                assert not consumer.poll(200)  # the second run does not send the first one's again
    finally:
        receive.terminate()
        receive.wait(30)
