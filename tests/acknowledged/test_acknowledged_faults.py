"""Messages and faults that must not end the receiver."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from tests.acknowledged.test_acknowledged import receiving, values
from tests.support import RawSender, Socket, free_endpoint, stop_sooner, wait_for
from zmq_datasource import Producer, RowError
from zmq_datasource.acknowledged.acceptor import Acceptor
from zmq_datasource.acknowledged.sender_session import SenderSession
from zmq_datasource.errors import ZmqDataSourceError
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.spark.job import Job

Context = zmq.Context[Socket]


@pytest.fixture(autouse=True)
def _stop_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_sooner(monkeypatch)


def sessions_of(ingest: FeedReceiver) -> int:
    """How many attempts are being received."""
    assert isinstance(ingest.filler, Acceptor)
    return ingest.filler.reception.receiving


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


def test_a_new_attempt_aborts_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SenderSession, "most_frame_bytes", 2_000_000)
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint) as ingest, Producer(endpoint) as producer:
        for size in (1_500_000, 3_000_000):
            producer.send(b"x" * size)
        with pytest.raises(RowError, match="2000000 at most"):
            producer.flush()
        wait_for(lambda: sessions_of(ingest), "what was sent before to arrive")
        assert producer.last_committed is None
        assert not sessions_of(ingest)
        producer.close()


# No message of a peer ends the receiver.


@pytest.mark.parametrize(
    "where",
    [
        "acts.rows_of",
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
                part = {"attempt": attempt, "producer": "q", "number": 0, "partition": 0}
                answer = sender.ask("E", "S", **part, messages=1, rows=1)
            assert (answer["kind"], answer["code"]) == ("X", "internal")
            assert "ZeroDivisionError" in answer["reason"]
        assert ingest.counters.internal_errors == 1
        assert "an unexpected fault" in caplog.text
        assert "Traceback" in caplog.text
        assert not sessions_of(ingest)
        assert sender.commit("q", 0, [sender.stage("q", 0, b"a")], 1)["kind"] == "K"
    assert values(tmp_path) == ["a"]
