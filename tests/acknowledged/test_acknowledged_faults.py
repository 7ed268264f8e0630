"""Messages and faults that must not end the receiver."""

from __future__ import annotations

import json
import logging
import struct
import uuid
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import zmq
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.acknowledged.test_acknowledged import receiving, values
from tests.acknowledged.test_producer import program
from tests.support import RawSender, Socket, free_endpoint, log_rows, stop_sooner, stream_options
from zmq_datasource import Producer
from zmq_datasource.errors import ZmqDataSourceError
from zmq_datasource.spark.job import Job
from zmq_datasource.spark.stream_reader import ZmqStreamReader

Context = zmq.Context[Socket]


@pytest.fixture(autouse=True)
def _stop_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_sooner(monkeypatch)


@pytest.mark.parametrize(
    "properties",
    [{}, {"sql.streaming.queryId": "q"}, {"streaming.sql.batchId": "7"}],
    ids=["neither", "no batch", "no query"],
)
def test_a_batch_without_a_query_id_or_number_is_refused(properties: dict[str, str]) -> None:
    class Task:
        def getLocalProperty(self, key: str) -> str | None:
            return properties.get(key)

    task = cast("Any", Task())
    with pytest.raises(ZmqDataSourceError, match=r"both are needed"):
        Job.of(None, task)
    with pytest.raises(ZmqDataSourceError, match=r"both are needed"):
        Job.of(None, None)
    assert Job.of("write-x", task).publisher(3) == "write-x/3"


# No message of a peer ends the receiver.


@pytest.mark.parametrize(
    "where",
    [
        "reception.rows_of",
        "reception.decode",
        "attempt_files.AttemptFiles.finish",
    ],
)
def test_an_unexpected_error_refuses_one_message_and_is_logged(
    where: str,
    context: Context,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint, attempt = free_endpoint(), uuid.uuid4().hex

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("an unexpected fault")

    with receiving(tmp_path, endpoint) as ingest:
        sender = RawSender(context, endpoint)
        with monkeypatch.context() as broke, caplog.at_level(logging.ERROR):
            broke.setattr(f"zmq_datasource.acknowledged.{where}", broken)
            answer = sender.ask("H", "W", attempt=attempt, producer="q")
            if answer["kind"] == "W":
                answer = sender.data("q", 0, b"a", attempt=attempt)
            if answer["kind"] == "T":
                answer = sender.ask("E", "S", attempt=attempt, messages=1, rows=1)
            assert (answer["kind"], answer["code"]) == ("X", "refused")
            assert "ZeroDivisionError" in answer["reason"]
        assert ingest.counters.internal_errors == 1
        assert "an unexpected fault" in caplog.text
        assert "Traceback" in caplog.text
        assert sender.commit("q", 0, [sender.stage("q", 0, b"a")], 1)["kind"] == "K"
    assert values(tmp_path) == ["a"]


@pytest.mark.spark  # no Spark, but a process and its memory
def test_a_sender_that_ignores_the_bounds_takes_little_memory(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    endpoint = free_endpoint()
    value = bytes(16 << 20)
    with program(tmp_path, endpoint, "-o", "walMaxBytes=100k") as process, Producer(endpoint) as producer:
        for _ in range(2):
            producer.send("x" * 60_000)
            producer.flush()
        memory = psutil.Process(process.pid)
        before = most = memory.memory_info().rss
        attempt = uuid.uuid4().hex
        with context.socket(zmq.DEALER) as sock:
            sock.setsockopt(zmq.SNDHWM, 1)
            sock.setsockopt(zmq.LINGER, 0)
            sock.connect(endpoint)
            for index in range(40):
                header = {"attempt": attempt, "producer": "greedy", "number": 0, "partition": 0}
                header |= {"index": index, "rows": 1, "columns": ["value"]}
                frames = [b"ZDS\x02D", json.dumps(header).encode(), struct.pack("<2i", 0, len(value)), value]
                assert sock.poll(20_000, zmq.POLLOUT)
                sock.send_multipart(frames, copy=False)
                most = max(most, memory.memory_info().rss)
        assert most - before < 300 << 20
        reader = ZmqStreamReader(stream_options(walLocation=tmp_path, startingOffsets="earliest"))
        end = reader.latestOffset(reader.initialOffset(), ReadMaxRows(1))
        reader.latestOffset(end, ReadMaxRows(1))  # gives the log its room back
        producer.send("honest")
        producer.flush()
        reader.stop()
    assert log_rows(tmp_path).column("value").to_pylist()[-1] == b"honest"
