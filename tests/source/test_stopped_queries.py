"""A stopped query gets its unread messages when it comes back, whatever other queries do. No JVM."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.support import Socket, bound, free_endpoint, keep_handlers, stop_sooner, wait_for
from tests.weather.engine import Source, read_output
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.spark.stream_reader import ZmqStreamReader

Context = zmq.Context[Socket]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)
    stop_sooner(monkeypatch)


class Feed:
    """A PUSH, and queries on one log, of which one receives at a time."""

    def __init__(self, context: Context, directory: Path) -> None:
        self._push, endpoint = bound(context, zmq.PUSH)
        self._directory = directory
        self._sent = 0
        self.log = directory / "log"
        self._options = {
            "socketType": "PULL",
            "connect": endpoint,
            "walLocation": str(self.log),
            "walFlushInterval": "20ms",
            "startingOffsets": "latest",
        }

    def run(self, name: str, until: Callable[[list[str]], bool], send: int = 0) -> list[str]:
        """Run a query until it has these values, and stop it. Sends ``send`` messages meanwhile, for many batches."""
        sending = threading.Thread(target=self._send, args=(send,))
        sending.start()
        Source(self._directory / name, self._options).run(lambda: until(self.values(name)))
        sending.join(30)
        assert not sending.is_alive()
        return self.values(name)

    def reader(self) -> ZmqStreamReader:
        """A reader of one more query, whose calls the test makes itself."""
        return ZmqStreamReader(parse(StreamReadOptions, self._options))

    def _send(self, count: int) -> None:
        for _ in range(count):
            self._push.send(b"%d" % self._sent)
            self._sent += 1
            time.sleep(0.001)

    def values(self, name: str) -> list[str]:
        directory = self._directory / name
        return [row[3] for row in read_output(directory)] if (directory / "out").exists() else []

    def copy(self, name: str, other: str) -> None:
        shutil.copytree(self._directory / name, self._directory / other)


@pytest.fixture
def feed(context: Context, tmp_path: Path) -> Feed:
    return Feed(context, tmp_path)


def test_a_new_query_does_not_take_the_place_of_a_stopped_one(feed: Feed) -> None:
    """Its first batch had no rows, and it was stopped before its next trigger."""
    reader = feed.reader()
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, ReadMaxRows(1))
    assert (list(reader.partitions(begin, end)), end) == ([], begin)
    reader.stop()
    feed.run("two", lambda values: values[-1:] == ["299"], send=300)
    reader = feed.reader()
    try:
        reader.latestOffset(end, ReadMaxRows(1))
    finally:
        reader.stop()


def test_a_query_with_a_copied_checkpoint_loses_no_messages_of_the_original(feed: Feed) -> None:
    feed.run("original", lambda values: values[-1:] == ["49"], send=50)
    feed.copy("original", "copy")
    copied = feed.run("copy", lambda values: values[-1:] == ["349"], send=300)
    assert copied == [str(n) for n in range(350)]
    original = feed.run("original", lambda values: values[-1:] == ["349"])
    assert original == [str(n) for n in range(350)]


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
