"""A stopping query drains its socket, or gives its port up at once; the next query on that port waits. No JVM."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import zmq
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.support import Socket, free_endpoint, keep_handlers, stop_sooner, wait_for
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.spark.stream_reader import ZmqStreamReader

Context = zmq.Context[Socket]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)
    stop_sooner(monkeypatch)


def test_a_query_that_binds_waits_for_the_stopped_one_that_still_drains(
    context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A notebook's cell that is run again, with another log, while the PUSH goes on."""
    endpoint, ended = free_endpoint(), threading.Event()

    def send() -> None:
        push = context.socket(zmq.PUSH)
        push.setsockopt(zmq.LINGER, 0)
        push.connect(endpoint)
        while not ended.wait(0.005):
            push.send(b"x", zmq.NOBLOCK)

    def query(name: str) -> ZmqStreamReader:
        options = {"socketType": "PULL", "bind": endpoint, "walLocation": str(tmp_path / name)}
        return ZmqStreamReader(parse(StreamReadOptions, options))

    def await_rows(reader: ZmqStreamReader) -> None:
        begin = reader.initialOffset()
        wait_for(lambda: reader.latestOffset(begin, ReadMaxRows(1)) != begin, "messages")

    sending = threading.Thread(target=send)
    sending.start()
    one, two = query("one"), query("two")
    try:
        await_rows(one)
        stopping = threading.Thread(target=one.stop)
        stopping.start()
        await_rows(two)
        stopping.join(30)
    finally:
        ended.set()
        sending.join(30)
        two.stop()
    assert f"{endpoint} is in use: waiting up to 8 s" in caplog.text


def test_a_query_without_a_connection_gives_its_port_up_at_once(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_sooner(monkeypatch, 30.0)
    options = {"socketType": "PULL", "bind": free_endpoint(), "walLocation": str(tmp_path)}
    reader = ZmqStreamReader(parse(StreamReadOptions, options))
    reader.latestOffset(reader.initialOffset(), ReadMaxRows(1))
    began = time.monotonic()
    reader.stop()
    assert time.monotonic() - began < 4  # a PULL that has a connection is drained for 5 s
