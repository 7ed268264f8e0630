"""What a message costs the process that receives it, by thread: a receiver without Spark, that nobody reads from."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection

from benchmarks.framings import FRAMINGS, PLAIN
from benchmarks.measure import Measurement, Sample, Times, measured, size_name, temporary_directory
from benchmarks.peers import child, peer
from zmq_datasource.receive import receive_until_stopped

__all__ = ["OTHERS", "RECEIVING", "SEALING", "measure_receiving"]

RECEIVING, SEALING, OTHERS = "receiving thread", "sealing thread", "libzmq and others"
_THREADS = {"zmq-receiver": RECEIVING, "zmq-log-sealer": SEALING}
_CASES = [(100, framing) for framing in FRAMINGS] + [(1_000, PLAIN), (100_000, PLAIN)]
# The log is not read, so not deleted either.
_MOST_LOG_SECONDS = 5.0


def measure_receiving(times: Times) -> Iterator[Measurement]:
    """Microseconds of CPU a message, for every thread."""
    for size, framing in _CASES:
        sample = partial(_cost, size, framing, times)
        for m in measured(
            "receiving", f"{size_name(size)}, {framing}", "messages/s", {"rate": sample}, times
        ):
            for thread, values in m.cpu.items():
                yield Measurement(m.section, m.case, thread, "µs", values)


def _cost(size: int, framing: str, times: Times) -> Sample:
    seconds = min(times.seconds, _MOST_LOG_SECONDS)
    with temporary_directory() as scratch, peer("push", size=size, shape=framing) as push:
        options = {"socketType": "PULL", "connect": push.endpoint, "walLocation": str(scratch / "log")}
        options |= {"walMaxBytes": "1t", **FRAMINGS[framing]}
        with child(_receive, options) as (pipe, _):
            pipe.recv()
            push.go()
            time.sleep(min(1.0, times.warm_up))
            before, first = _ask(pipe), push.mark()
            time.sleep(seconds)
            after, last = _ask(pipe), push.mark()
            push.stop()  # a receiver that ends takes what is still there
    # What is in the queues between is the same at both marks.
    messages = last.messages - first.messages
    cost = {thread: (after[thread] - before[thread]) / messages for thread in (*_THREADS.values(), OTHERS)}
    return Sample(messages / seconds, cost)


def _ask(pipe: Connection) -> dict[str, float]:
    pipe.send("clocks")
    return dict(pipe.recv())


def _receive(pipe: Connection, options: Mapping[str, str]) -> None:
    threading.Thread(target=_answer, args=(pipe,), daemon=True).start()
    receive_until_stopped(options)


def _answer(pipe: Connection) -> None:
    while not any(thread.name in _THREADS for thread in threading.enumerate()):
        time.sleep(0.01)
    pipe.send("ready")
    while True:
        pipe.recv()
        clocks = {
            _THREADS[thread.name]: time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
            for thread in threading.enumerate()
            if thread.name in _THREADS
        }
        used = os.times()
        pipe.send(clocks | {OTHERS: used.user + used.system - sum(clocks.values())})
