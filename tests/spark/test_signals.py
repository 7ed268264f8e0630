"""SIGTERM to a source runner at the worst moments: it ends soon, and keeps what it has received."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support import REPOSITORY, free_endpoint, log_rows
from zmq_datasource.host.signals import StopFlag
from zmq_datasource.log.layout import LOCK_WAIT_SECONDS
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.receive import receive_until_stopped

# Makes the calls that Spark's main loop makes, and ends each time as that does.
_RUNNER = """
import os, signal, sys, threading, time
import concurrent.futures._base as futures
import zmq
from pyspark.sql.streaming.datasource import ReadMaxRows
from tests.support import stream_options, wait_for
from zmq_datasource.source import receive_loop
from zmq_datasource.spark.stream_reader import ZmqStreamReader

receive_loop.ReceiveLoop.quiet_seconds = 0.02  # no publisher sends at the stop
context = zmq.Context()


def run(location, call, **options):
    # A new one, because a PUSH may still send to its last peer, which has gone.
    push = context.socket(zmq.PUSH)
    endpoint = f"tcp://127.0.0.1:{push.bind_to_random_port('tcp://127.0.0.1')}"
    reader = ZmqStreamReader(
        stream_options(connect=endpoint, socketType="PULL", walLocation=location, **options)
    )
    try:
        start = reader.initialOffset()
        reader.latestOffset(start, ReadMaxRows(1))  # from here on it receives
        for number in range(3):
            push.send(str(number).encode())
        feed = reader.log.receiver
        wait_for(lambda: feed.received_end == 3, "three messages")
        try:
            call(reader, start)
        except SystemExit as e:
            assert e.code == 128 + signal.SIGTERM, e.code
            return True
        return False
    finally:
        sys.settrace(None)
        reader.stop()
        push.close(linger=0)
"""

_MOMENTS = """
class Signals:
    def __init__(self, moment):
        self.moment, self.seen = moment, 0

    def trace(self, frame, event, argument):
        if frame.f_code.co_filename not in (threading.__file__, futures.__file__):
            return None
        if frame.f_code.co_name not in ("__enter__", "__exit__", "result"):
            return self.trace
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.seen += 1
            if self.seen == self.moment:
                os.kill(os.getpid(), signal.SIGTERM)
        return self.trace


for moment in range(1, 400):
    signals = Signals(moment)

    def call(reader, start):
        sys._getframe().f_trace_opcodes = True  # early versions of 3.12 do nothing for a frame that asks later
        sys.settrace(signals.trace)
        reader.latestOffset(start, ReadMaxRows(1))

    told = run(f"{sys.argv[1]}/{moment}", call)
    if signals.seen < moment:
        break  # the call has no more moments
    assert told, moment
    print(moment, flush=True)
"""

_GATHERING = """
def call(reader, start):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    reader.prepareForTriggerAvailableNow()
    reader.latestOffset(start, ReadMaxRows(1))


assert run(sys.argv[1], call, timeout="10min")
"""


def run(program: str, directory: Path) -> str:
    """Run a program that must end by itself; return its output."""
    return subprocess.run(
        [sys.executable, "-c", _RUNNER + program, str(directory)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    ).stdout


@pytest.mark.slow
def test_a_signal_between_a_lock_and_its_block_leaves_no_lock_taken(tmp_path: Path) -> None:
    moments = run(_MOMENTS, tmp_path).split()
    assert len(moments) > 10
    for moment in moments:
        assert log_rows(tmp_path / moment)["value"].to_pylist() == [b"0", b"1", b"2"]


def test_a_signal_ends_a_long_wait_and_keeps_what_was_received(tmp_path: Path) -> None:
    run(_GATHERING, tmp_path)
    assert log_rows(tmp_path)["value"].to_pylist() == [b"0", b"1", b"2"]


def test_a_signal_ends_a_receiver_that_waits_for_the_lock_of_its_log(tmp_path: Path) -> None:
    storage = LogStorage(str(tmp_path))
    storage.open_log()
    held = storage.lock(0)
    told = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    told.start()
    began = time.monotonic()
    receive_until_stopped({"socketType": "PULL", "bind": free_endpoint(), "walLocation": str(tmp_path)})
    assert time.monotonic() - began < LOCK_WAIT_SECONDS / 2
    told.join()
    held.release()


def test_a_signal_may_set_a_flag_while_the_same_thread_sets_it_or_waits_for_it() -> None:
    flag, waiting = StopFlag(), threading.Event()

    def send() -> None:
        waiting.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with flag.on_signals():
        waiting.set()
        assert flag.wait(30)
        signal.raise_signal(signal.SIGINT)
        assert flag.is_set()
    sender.join()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
