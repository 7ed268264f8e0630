"""Through a proxy: ours, that writes everything down, and libzmq's own, that forgets."""

from __future__ import annotations

import socket as stdlib_socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import TypeAlias

import zmq

from benchmarks.measure import Measurement, interleaved, temporary_directory
from benchmarks.peers import child, payload
from zmq_datasource.proxy.handle import Proxy

__all__ = ["FORWARDING", "JOURNALING", "JOURNALING_PLAIN", "UNSYNCED_JOURNAL", "measure_proxy"]

FORWARDING = "zmq.proxy"
JOURNALING = "journaling, synced"
UNSYNCED_JOURNAL = "journaling"
JOURNALING_PLAIN = "journaling, plain"

# Messages a run, by size.
_COUNTS = {100: 1_000_000, 10_000: 150_000}
# Large enough that the scheduler of a busy machine is not what is measured, the same everywhere.
_HWM = 10_000
_SECONDS, _TRIES = 30.0, 5
_PACED, _PACE_SECONDS = 2000, 0.001
_END = b"end"

_Method: TypeAlias = Callable[[], AbstractContextManager[tuple[str, str, int]]]


def measure_proxy(scale: float, rounds: int) -> Iterator[Measurement]:
    """Messages a second from a publisher to a subscriber, and how long one takes; a process for each."""
    methods: dict[str, _Method] = {
        FORWARDING: _forwarding,
        UNSYNCED_JOURNAL: lambda: _journaling(sync=False),
        JOURNALING: lambda: _journaling(sync=True),
        JOURNALING_PLAIN: lambda: _journaling(sync=False, plain=True),
    }
    for size, full in _COUNTS.items():
        count = max(1000, round(full * scale))
        rates: dict[str, list[float]] = {method: [] for method in methods}
        for method in interleaved(tuple(methods), rounds):
            rates[method].append(count / _run(methods[method], size, count, paced=False)[0])
        for method, values in rates.items():
            yield Measurement("proxy", f"{_size(size)}, messages/s", method, "", tuple(values), scale)
    for size in _COUNTS:
        medians: dict[str, list[float]] = {method: [] for method in methods}
        tails: dict[str, list[float]] = {method: [] for method in methods}
        for method in interleaved(tuple(methods), rounds):
            paced = max(100, round(_PACED * min(scale, 1.0)))
            _, latencies = _run(methods[method], size, paced, paced=True)
            medians[method].append(statistics.median(latencies))
            tails[method].append(statistics.quantiles(latencies, n=100)[98])
        for what, found in (("p50", medians), ("p99", tails)):
            for method, values in found.items():
                yield Measurement("proxy", f"{_size(size)}, {what} in µs", method, "", tuple(values), scale)


def _size(size: int) -> str:
    return f"{size} B" if size < 1000 else f"{size // 1000} kB"


def _free() -> str:
    with stdlib_socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def _forwarding() -> Iterator[tuple[str, str, int]]:
    """Where publishers connect, where subscribers do, and how many frames a message has there."""
    with child(_forward) as pipe:
        front, back = pipe.recv()
        yield front, back, 2


@contextmanager
def _journaling(sync: bool, plain: bool = False) -> Iterator[tuple[str, str, int]]:
    front, back = _free(), _free()
    with (
        temporary_directory() as scratch,
        Proxy(
            bind=front,
            publish=back,
            wal_location=scratch,
            wal_sync=sync,
            plain=plain,
            slow_subscriber="wait",
            rcvhwm=_HWM,
            wal_max_bytes="256m",
        ),
    ):
        yield front, back, 2 if plain else 3


def _run(method: _Method, size: int, count: int, paced: bool) -> tuple[float, list[float]]:
    """Seconds from the first message to the last, and how long each took in µs, if they are paced."""
    for _ in range(_TRIES):
        with (
            method() as (front, back, frames),
            child(_subscribe, back, frames) as subscriber,
            child(_publish, front, size, count, paced) as publisher,
        ):
            subscriber.recv()
            publisher.send("go")
            if subscriber.poll(_SECONDS):
                got, seconds, latencies = subscriber.recv()
                assert got == count, f"{got} of {count} messages came through"
                return seconds, latencies
        # libzmq's own proxy, with an XPUB that does not drop, stands still for ever now and then.
        print(f"nothing came through for {_SECONDS:.0f} s; once more", flush=True)
    raise TimeoutError(f"{_TRIES} times not all messages came through a proxy")


# What runs in the children.


def _forward(pipe: Connection) -> None:
    context = zmq.Context()
    front, back = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    front.setsockopt(zmq.RCVHWM, _HWM)
    back.setsockopt(zmq.SNDHWM, _HWM)
    back.setsockopt(zmq.XPUB_NODROP, 1)
    ports = [sock.bind_to_random_port("tcp://127.0.0.1") for sock in (front, back)]
    pipe.send([f"tcp://127.0.0.1:{port}" for port in ports])
    zmq.proxy(front, back)


def _publish(pipe: Connection, endpoint: str, size: int, count: int, paced: bool) -> None:
    context = zmq.Context()
    sock = context.socket(zmq.XPUB)
    sock.setsockopt(zmq.XPUB_NODROP, 1)
    sock.setsockopt(zmq.SNDHWM, _HWM)
    sock.connect(endpoint)
    sock.recv()  # the subscription
    pipe.recv()
    send, value = sock.send, payload(size)
    if paced:
        due = time.perf_counter()
        for _ in range(count):
            due += _PACE_SECONDS
            while time.perf_counter() < due:
                time.sleep(_PACE_SECONDS / 10)
            send(b"topic", zmq.SNDMORE)
            send(struct.pack("d", time.monotonic()) + value[8:])
    else:
        for _ in range(count):
            send(b"topic", zmq.SNDMORE)
            send(value)
    send(b"topic", zmq.SNDMORE)
    send(_END)
    pipe.poll(None)  # the socket stays until the subscriber has all


def _subscribe(pipe: Connection, endpoint: str, frames: int) -> None:
    context = zmq.Context()
    sock = context.socket(zmq.SUB)
    sock.setsockopt(zmq.RCVHWM, _HWM)
    sock.connect(endpoint)
    sock.setsockopt(zmq.SUBSCRIBE, b"")
    monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    monitor.recv_multipart()
    # A publisher behind the proxy is told of the subscription a moment later than this; those that the
    # proxy asks for itself it knows already, and libzmq's is waited for by the publisher.
    time.sleep(0.5)
    pipe.send("ready")
    recv, got, began = sock.recv, 0, 0.0
    latencies: list[float] = []
    while True:
        for _ in range(frames):
            value = recv()
        now = time.monotonic()
        if value == _END:
            break
        if not got:
            began = now
        got += 1
        if value[0] != ord("x"):
            latencies.append((now - struct.unpack("d", value[:8])[0]) * 1e6)
    pipe.send((got, now - began, latencies))
