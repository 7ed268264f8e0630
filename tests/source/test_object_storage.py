"""A log in a real S3 server: the server is killed and comes back, and so are receivers, on other machines."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from tests.source.test_feed import Context, Query, _in_this_process, querying  # noqa: F401 - a fixture
from tests.support import bound, log_at, wait_for
from tests.support.middlebox import Middlebox
from tests.support.s3 import S3Server
from zmq_datasource.log.layout import LOG_NAME

pytestmark = pytest.mark.long
# The server takes a second for a listing where the machine is busy.
_SECONDS = 120.0


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    with S3Server(tmp_path / "s3") as running:
        yield running


def until(query: Query, count: int) -> None:
    wait_for(lambda: log_at(query.location).store.find(LOG_NAME), "the log", _SECONDS)
    wait_for(lambda: query.step() >= count, f"{count} rows", _SECONDS)


class Sender:
    """Sends numbers through a PUSH, a hundred at a time, until ``end``."""

    def __init__(self, context: Context) -> None:
        self._push, self.endpoint = bound(context, zmq.PUSH, sndhwm=1000)
        self._push.setsockopt(zmq.SNDTIMEO, 100)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent = 0

    def __enter__(self) -> Sender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(0.01):
            for _ in range(100):
                try:
                    self._push.send(b"%d" % self.sent)
                except zmq.Again:
                    break
                self.sent += 1


@contextmanager
def receiving(name: Path, endpoint: str, store: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "zmq_datasource", "receive", "--socket-type", "PULL"]
    with open(name.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(
            [*command, "--connect", endpoint, "--wal-store", store, "-o", "walFlushInterval=200ms"],
            text=True,
            stderr=log,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def test_nothing_is_lost_while_the_server_is_away(context: Context, tmp_path: Path, server: S3Server) -> None:
    store = server.location("away")
    with Sender(context) as sender, receiving(tmp_path / "a", sender.endpoint, store) as receiver:
        with querying(store) as query:
            until(query, 2000)
            server.kill()
            time.sleep(8)  # longer than a request is repeated by obstore itself
            assert receiver.poll() is None
            server.start()
            until(query, len(query.rows) + 2000)
            sender.end()
            until(query, sender.sent)
        assert query.rows == [(i, b"%d" % i) for i in range(sender.sent)]


def test_nothing_is_lost_while_the_way_to_the_server_is_cut(
    context: Context, tmp_path: Path, server: S3Server
) -> None:
    """No packet arrives, and no error either: for a receiver, and for a query on another machine."""
    with Sender(context) as sender, Middlebox(server.endpoint) as way:
        store = server.location("cut", way.endpoint)
        with (
            receiving(tmp_path / "a", sender.endpoint, store) as receiver,
            querying(store) as query,
        ):
            until(query, 2000)
            way.black_hole = True
            time.sleep(30)
            assert receiver.poll() is None
            way.black_hole = False
            until(query, len(query.rows) + 2000)
            sender.end()
            until(query, sender.sent)
        assert query.rows == [(i, b"%d" % i) for i in range(sender.sent)]
