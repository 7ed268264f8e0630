"""A receiver that is stopped (SIGSTOP), and continues when another one has taken its place. Real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import zmq

from tests.support import REPOSITORY, Socket, bound, log_at, log_rows, wait_for
from zmq_datasource.errors import DataLossError
from zmq_datasource.log.leases import Reader

Context = zmq.Context[Socket]

# ``zmq-datasource receive`` that stops at a failpoint as soon as there is a certain file.
RECEIVER = """
import os, signal, sys
from zmq_datasource.cli import main
from zmq_datasource.host import failpoints
from zmq_datasource.log.bucket_store import BucketStore
from zmq_datasource.log.storage import LogStorage

point, file = sys.argv[1:3]
BucketStore.silent_seconds = 1.5
LogStorage.request_interval = 0.0

def reach(name):
    if name == point and os.path.exists(file):
        os.unlink(file)
        os.kill(os.getpid(), signal.SIGSTOP)

failpoints.reach = reach
main(["receive", *sys.argv[3:]])
"""
FENCED = re.compile(
    r"Error: writing to log .*: (another process has put |this process has lost the lock, which is held by)"
)


class Feed:
    """Sends numbers to the running receivers, and reads the log again and again.

    Args:
        location: Of the log.
    """

    def __init__(self, context: Context, location: str, directory: Path) -> None:
        self.location = location
        log_at(location).open_log()
        self._directory = directory
        self._push, self.endpoint = bound(context, zmq.PUSH, sndhwm=100)
        self._sent = 0
        self._seen: dict[int, bytes] = {}
        self._open = ExitStack()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def receiver(self, point: str = "") -> Receiver:
        """Start a receiver that can stop at a failpoint: see ``Receiver.stop_at_the_point``."""
        file = self._directory / uuid.uuid4().hex
        where = "--wal-store" if "://" in self.location else "--wal-location"
        command = [sys.executable, "-c", RECEIVER, point, str(file)]
        command += ["--socket-type", "PULL", "--connect", self.endpoint, where, self.location]
        command += ["--wal-retention", "0s", "-o", "walFlushInterval=20ms"]
        return self._open.enter_context(Receiver(command, file))

    def reader(self) -> Reader:
        """A reader at the beginning of the log."""
        made = Reader(log_at(self.location), "far", 1e9)
        self._open.callback(made.close)
        made.open()
        return made

    def flows(self) -> bool:
        """Send some numbers, and check that each id has the same row as before.

        Returns False if the log could not be read.
        """
        for _ in range(10):
            try:
                self._push.send(b"%d" % self._sent, zmq.DONTWAIT)
            except zmq.Again:
                break
            self._sent += 1
        try:
            rows = log_rows(self.location)
        except DataLossError:  # deleted meanwhile
            return False
        found = dict(zip(rows["id"].to_pylist(), rows["value"].to_pylist(), strict=True))
        assert all(self._seen.get(id_, value) == value for id_, value in found.items())
        assert list(found) == list(range(min(found, default=0), max(found, default=-1) + 1))
        assert max(found, default=-1) >= max(self._seen, default=-1)
        self._seen |= found
        return True

    def flow_until(self, condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        wait_for(lambda: self.flows() and condition(), what, seconds)

    def flow_on(self, count: int = 50) -> None:
        """Send and read until ``count`` more rows were read."""
        there = len(self._seen)
        self.flow_until(lambda: len(self._seen) >= there + count, "more rows")

    @property
    def has_no_message_twice(self) -> bool:
        return len(set(self._seen.values())) == len(self._seen)


class Receiver:
    """A receiving process; use it in a ``with`` block."""

    def __init__(self, command: list[str], file: Path) -> None:
        self._command, self._file = command, file

    def __enter__(self) -> Receiver:
        environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        with self._file.with_suffix(".log").open("w") as said:
            self._process = subprocess.Popen(self._command, stderr=said, env=environment)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def stop_at_the_point(self) -> None:
        self._file.touch()

    @property
    def is_stopped(self) -> bool:
        return psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    @property
    def said(self) -> str:
        return self._file.with_suffix(".log").read_text()

    @property
    def code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()


def stalled(feed: Feed, point: str, lose: Callable[[], None]) -> None:
    """Stop a receiver at a failpoint until a second one has received, and all the chunks of the first are deleted.

    Args:
        lose: Lets the second one have the lock.
    """
    one = feed.receiver(point)
    feed.flow_on()
    storage = log_at(feed.location)
    reader = feed.reader()
    one.stop_at_the_point()
    feed.flow_until(lambda: one.is_stopped, "a stop")
    lose()
    two = feed.receiver()
    feed.flow_on(100)
    newest = storage.chunks()[-1].first
    feed.flow_on()
    reader.move(newest)
    feed.flow_until(lambda: storage.chunks()[0].first >= newest, "a deletion")
    one.go_on()
    feed.flow_until(lambda: one.code is not None, "the end of the first")
    feed.flow_on()
    feed.flow_until(lambda: True, "rows")
    assert feed.has_no_message_twice
    assert (one.code, two.code) == (1, None)
    assert FENCED.search(one.said), one.said


def test_a_stalled_receiver_reuses_no_id_in_a_directory_whose_lock_is_lost(
    context: Context, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with Feed(context, str(log), tmp_path) as feed:
        # As on a shared file system that gives the locks of a host to another one.
        stalled(feed, "log.store.before_link", (log / "writer.lock").unlink)


@pytest.mark.slow
def test_a_stalled_receiver_reuses_no_id_in_a_bucket(context: Context, tmp_path: Path, bucket: str) -> None:
    """A holder that is silent loses its lock."""
    with Feed(context, bucket, tmp_path) as feed:
        stalled(feed, "log.store.before_put", lambda: None)
