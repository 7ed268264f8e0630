"""A wall clock that is days wrong for a while: nothing that is needed is deleted, and nothing is kept for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from tests.source.test_feed import Context, numbered, querying, send
from tests.support import bound, keep_handlers, stop_sooner, wait_for
from zmq_datasource.log import LogStorage, read_index

DAY = 86_400.0
# A program whose wall clock is wrong from its first moment on; the times of files are right.
PROGRAM = """
import sys, time
ahead, right = float(sys.argv.pop(1)), time.time
time.time = lambda: right() + ahead
from zmq_datasource.cli import main
main()
"""


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)
    stop_sooner(monkeypatch)


@contextmanager
def running(ahead: float, *arguments: str) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(ahead), *arguments]) as process:
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def ids(location: Path) -> range:
    index = read_index(LogStorage(str(location)))
    return range(index.earliest, index.durable_end)


@pytest.mark.spark  # processes of its own
def test_a_receiver_whose_clock_is_wrong_keeps_what_a_stopped_query_needs(
    context: Context, tmp_path: Path
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    receive = ("receive", "--socket-type", "PULL", "--connect", endpoint)
    receive += ("--wal-location", str(tmp_path), "--wal-retention", "0s", "-o", "walFlushInterval=20ms")
    with running(0.0, *receive):
        send(push, 0, 5)
        wait_for(lambda: tmp_path.joinpath("log.json").exists() and ids(tmp_path).stop == 5, "messages")
        with querying(tmp_path, reader="desk", startingOffsets="earliest") as desk:
            desk.until(5)
    with querying(tmp_path, reader="other", startingOffsets="earliest") as other:
        sent = 5
        for ahead in (8 * DAY, -365 * DAY, 365 * DAY, 0.0):
            with running(ahead, *receive):
                send(push, sent, sent + 5)
                sent += 5
                other.until(sent)
        assert ids(tmp_path).start <= 5
        with querying(tmp_path, desk.checkpoint, reader="desk") as desk:
            desk.until(sent - 5)
        assert desk.rows == numbered(sent, start=5)
        with running(-8 * DAY, *receive):
            send(push, sent, sent + 1)
            with querying(tmp_path, desk.checkpoint, reader="desk") as desk:
                wait_for(
                    lambda: (desk.step(), other.step(), ids(tmp_path).start == sent)[-1],
                    "what was read to go",
                )
