"""How many receivers, and how much of everything else, a feed needs: arithmetic, from what one receiver takes here.

What one receiver costs is measured (``measure_receiver``): a real one, into a real log, from a sender in a process of
its own. What Spark costs to read a log is taken from the project's benchmarks, because it takes minutes to measure.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import zmq

from zmq_datasource.errors import WorkbenchError
from zmq_datasource.messages.columns import binary_of
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.source.ingest import Ingest
from zmq_datasource.transport.core import FrameColumn, Outbox

__all__ = ["ClusterPlan", "ReceiverCost", "make_cluster_plan", "measure_receiver"]

# Of what a receiver takes at its limit: bursts, and a machine that is not as quiet as this one.
_SHARE = 0.6
# What Spark takes to read a log, without a user's function: core seconds a message, and a byte. That is 1.5 to 2.5
# times what benchmarks/RESULTS.md has (source throughput, the log alone, CPU of all: 0.38 µs for 100 B, 1.7 for 1 kB,
# 146 for 100 kB, 1,438 for 1 MB).
_SPARK_MESSAGE_SECONDS, _SPARK_BYTE_SECONDS = 0.2e-6, 3.5e-9
# What a chunk has beside the values: id, time, offsets.
_ROW_BYTES = 28
# ZMTP's header of a frame, and the share of TCP's and Ethernet's headers.
_FRAME_BYTES, _NETWORK_FACTOR = 9, 1.05
_START_SECONDS = 30.0
_BATCH_BYTES = 4 << 20
_THIS = [sys.executable, "-m", "zmq_datasource.workbench.cluster"]


@dataclass(frozen=True)
class ReceiverCost:
    """What one receiver takes on this machine.

    Attributes:
        rate: Messages a second.
        cpu_seconds: CPU seconds of its process, a message.
    """

    rate: float
    cpu_seconds: float


@dataclass(frozen=True)
class ClusterPlan:
    """What a feed needs.

    Attributes:
        receivers: How many; each takes ``rate_each`` messages a second.
        rate_each: Messages a second.
        receiver_cores: Cores that all of them keep busy.
        spark_cores: Cores that reading the log keeps busy, in executors, without what is done with the rows.
        network_bits: Bits a second into all receivers.
        log_bytes: Bytes a second that are written, and then read, in the log.
        stored_bytes: What a retention keeps; 0 without one.
    """

    receivers: int
    rate_each: float
    receiver_cores: float
    spark_cores: float
    network_bits: float
    log_bytes: float
    stored_bytes: float


def make_cluster_plan(rate: float, size: int, cost: ReceiverCost, retention: float = 0.0) -> ClusterPlan:
    """What a feed of ``rate`` messages a second with ``size`` bytes each needs.

    Args:
        retention: Seconds for which messages stay in the log.
    """
    receivers = max(1, math.ceil(rate / (_SHARE * cost.rate)))
    log_bytes = rate * (size + _ROW_BYTES)
    return ClusterPlan(
        receivers=receivers,
        rate_each=rate / receivers,
        receiver_cores=rate * cost.cpu_seconds,
        spark_cores=rate * (_SPARK_MESSAGE_SECONDS + size * _SPARK_BYTE_SECONDS),
        network_bits=rate * (size + _FRAME_BYTES) * 8 * _NETWORK_FACTOR,
        log_bytes=log_bytes,
        stored_bytes=log_bytes * retention,
    )


def measure_receiver(size: int, seconds: float = 4.0) -> ReceiverCost:
    """What one receiver takes here, from one sender over tcp, into a log in the temporary directory.

    Raises:
        WorkbenchError: It receives nothing.
    """
    with (
        # Ours, because whoever receives may be killed.
        tempfile.TemporaryDirectory(prefix="zmq-datasource-plan-", ignore_cleanup_errors=True) as directory,
        subprocess.Popen([*_THIS, "send", str(size)], stdout=subprocess.PIPE, text=True) as sender,
    ):
        assert sender.stdout is not None
        try:
            endpoint = sender.stdout.readline().strip()
            done = subprocess.run(
                [*_THIS, "receive", endpoint, directory, str(seconds)],
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            sender.kill()
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it has said nothing"])[-1]
        raise WorkbenchError(f"measuring a receiver on this machine: {last}")
    rate, cpu_seconds = json.loads(done.stdout)
    return ReceiverCost(rate, cpu_seconds)


def _receive(endpoint: str, directory: str, seconds: float) -> None:
    """Receive for so long; print the messages a second, and this process' CPU seconds a message."""
    options = {"socketType": "PULL", "connect": endpoint, "walLocation": directory, "walMaxBytes": "1t"}
    ingest = Ingest(parse(StreamReadOptions, options))
    ingest.start()
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not ingest.log.durable_end:
            ingest.check()
            if time.monotonic() > deadline:
                raise WorkbenchError(f"nothing was received within {_START_SECONDS:.0f} s")
            time.sleep(0.05)
        time.sleep(min(1.0, seconds))  # the first chunks are not like the others
        began, before, spent = time.monotonic(), ingest.log.durable_end, time.process_time()
        time.sleep(seconds)
        messages = ingest.log.durable_end - before
        took, spent = time.monotonic() - began, time.process_time() - spent
    finally:
        ingest.stop()
    if not messages:
        raise WorkbenchError(f"nothing was sealed in {seconds:g} s: the disk is too slow")
    print(json.dumps([messages / took, spent / messages]))


def _send(size: int) -> None:
    """As fast as it goes, until killed."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        port = push.bind_to_random_port("tcp://127.0.0.1")
        print(f"tcp://127.0.0.1:{port}", flush=True)
        count = max(1, _BATCH_BYTES // max(size, 100))
        rows = Outbox([FrameColumn(binary_of([bytes(size)] * count))], count)
        while True:
            rows.give(push, 0, count, True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever has started this ends it
    match sys.argv[1:]:
        case ["send", size]:
            _send(int(size))
        case ["receive", endpoint, directory, seconds]:
            _receive(endpoint, directory, float(seconds))
