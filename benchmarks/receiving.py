"""CPU of a receiver without Spark for each message, by thread and by framing. Its log is bounded."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection

from benchmarks.measure import Measurement, Sample, Times, measured, size_name, temporary_directory
from benchmarks.peers import child, peer
from benchmarks.report import Section, Target
from zmq_datasource.receive import receive_until_stopped

_RECEIVING, _SEALING, _OTHERS = "receiving thread", "sealing thread", "libzmq and others"
_PLAIN = "plain"
# The options of the source, by the shape of the message.
_FRAMINGS: Mapping[str, Mapping[str, str]] = {
    _PLAIN: {},
    "numbered": {"framing": "custom", "sequenceAt": "0:0:u64be", "deduplicate": "true"},
    "vllm": {"framing": "vllm", "deduplicate": "true"},
    "sequenced": {"framing": "sequenced", "deduplicate": "true"},
}
SECTION = Section(
    "receiving",
    "What receiving costs",
    f"Microseconds of CPU a message, by thread, of a receiver without Spark, with `deduplicate`. *{_RECEIVING}*: "
    f"from the socket to Arrow. *{_SEALING}*: from Arrow to the disk, for a log of at most 512 MB. *{_OTHERS}*: the "
    "rest of the process. *plain*: one frame without a number. *numbered*: one frame that begins with its number. "
    "*vllm*: three frames. *sequenced*: four, from eight publishers.",
    targets=(
        Target("100 B, plain", _RECEIVING, 0.15, upper=True),
        Target("1 kB, plain", _SEALING, 0.7, upper=True),
    ),
)
_THREADS = {"zmq-receiver": _RECEIVING, "zmq-log-sealer": _SEALING}
_CASES = [(100, framing) for framing in _FRAMINGS] + [(1_000, _PLAIN), (100_000, _PLAIN)]
_MOST_SECONDS = 5.0
# As with a query that keeps up, chunks are deleted soon, so that the system uses the memory of its page cache again.
# A log that only grows needs memory that was never used before, which can cost more than all else.
_BOUNDED = {"walMaxBytes": "512m", "whenFull": "discard"}


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
    seconds = min(times.seconds, _MOST_SECONDS)
    with temporary_directory() as scratch, peer("push", size=size, shape=framing) as push:
        options = {"socketType": "PULL", "connect": push.endpoint, "walLocation": str(scratch / "log")}
        options |= {**_BOUNDED, **_FRAMINGS[framing]}
        with child(_receive, options) as (pipe, _):
            pipe.recv()
            push.go()
            time.sleep(min(1.0, times.warm_up))
            before, first = _ask(pipe), push.mark()
            time.sleep(seconds)
            after, last = _ask(pipe), push.mark()
            push.stop()  # a receiver that ends takes what is still there
    # The queues between hold as many messages at one mark as at the other.
    messages = last.messages - first.messages
    cost = {thread: (after[thread] - before[thread]) / messages for thread in (*_THREADS.values(), _OTHERS)}
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
        pipe.send(clocks | {_OTHERS: used.user + used.system - sum(clocks.values())})
