"""What a stop has lost is counted and logged. No JVM."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from tests.support import Socket, bound, offer, stop_sooner, stream_options, wait_for
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.ingest import Ingest
from zmq_datasource.source.receiver import LogReceiver

Context = zmq.Context[Socket]


def brief(options: StreamReadOptions) -> Ingest:
    """A receiver that drains its socket for a shorter time."""
    ingest = Ingest(options)
    assert isinstance(ingest.filler, LogReceiver)
    ingest.filler.drain_seconds = 0.5
    return ingest


@contextmanager
def sending(push: Socket, seconds: float) -> Iterator[list[int]]:
    """A PUSH that sends a message every ``seconds``; the list has the sent numbers."""
    sent: list[int] = []
    end = threading.Event()

    def send() -> None:
        while not end.wait(seconds):
            if offer(push, b"%d" % len(sent)):
                sent.append(len(sent))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        end.set()
        thread.join(30)


def end_of(log: Path) -> int:
    return read_index(LogStorage(str(log))).end


@pytest.mark.spark  # no Spark, but a process that drains for five seconds
def test_receive_reports_losses_when_it_is_stopped_while_a_push_sends(
    context: Context, tmp_path: Path
) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=1)
    command = [sys.executable, "-m", "zmq_datasource", "receive", "--socket-type", "PULL"]
    command += ["--connect", endpoint, "--wal-location", str(tmp_path)]
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        with sending(push, 0.01) as sent:
            wait_for(lambda: len(sent) > 100, "messages")
            program.send_signal(signal.SIGTERM)
            _, said = program.communicate(timeout=60)
    finally:
        program.kill()
        program.wait(30)
    assert "messages still came 5 s after the stop" in said


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.05])
def test_each_stop_reports_a_push_that_still_sends(
    pause: float,
    context: Context,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Even if the socket is empty at the moment of the stop."""
    stop_sooner(monkeypatch, 5.0)  # later, in fact: on a loaded machine the sender may pause for long
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10)
    with sending(push, pause):
        for run in range(1, 4):
            ingest = brief(stream_options(walLocation=tmp_path, socketType="PULL", connect=endpoint))
            ingest.start()
            before = ingest.log.durable_end
            wait_for(lambda i=ingest, b=before: i.seal() > b, "a message")
            ingest.stop()
            assert caplog.text.count("their number is unknown: messages still came") == run


def test_a_stop_that_loses_nothing_reports_nothing(
    context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    ingest = Ingest(stream_options(walLocation=tmp_path, socketType="PULL", connect=endpoint))
    ingest.start()
    for number in range(100):
        push.send(b"%d" % number)
    wait_for(lambda: ingest.received_end == 100, "all of it")
    ingest.stop()
    assert end_of(tmp_path) == 100
    assert "stopping to receive" not in caplog.text
    assert ingest.counters.lost_at_stop == 0
