"""Through a proxy: ours, that writes everything down, and libzmq's own, that forgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeAlias

import psutil
import zmq

from benchmarks.measure import (
    Measurement,
    Sample,
    Times,
    measured,
    size_name,
    temporary_directory,
    wait_for,
)
from benchmarks.peers import child, peer, window
from benchmarks.transactions import free_endpoint
from zmq_datasource import DurableSubscriber
from zmq_datasource.log import LogStorage, read_index, read_slices, slices
from zmq_datasource.proxy.handle import Proxy

__all__ = ["CATCHING_UP", "FORWARDING", "LOOP", "OURS", "PACE", "PLAIN", "UNSYNCED", "measure_proxy"]

FORWARDING = "zmq.proxy"
OURS = "proxy"
UNSYNCED = "proxy, walSync=false"
PLAIN = "proxy, walSync=false, plain"
CATCHING_UP = "durable subscriber"
LOOP = "Python loop over the log"
PACE = 1000

_SIZES = (100, 10_000)
# A backlog, by the size of its messages.
_BACKLOGS = {100: 400_000, 10_000: 40_000}
# Large enough that the scheduler of a busy machine is not what is measured, the same everywhere.
_HWM = 10_000
_TRIES = 5
_MOST_SECONDS = 120.0

# Where publishers connect, where subscribers do, and the proxy's process, or that which started it.
_Running: TypeAlias = tuple[str, str, int]
_Method: TypeAlias = Callable[[], AbstractContextManager[_Running]]


def measure_proxy(times: Times) -> Iterator[Measurement]:
    """Messages a second from a publisher to a subscriber, and how long one takes; a process for each."""
    proxies: Mapping[str, _Method] = {
        FORWARDING: _forwarding,
        UNSYNCED: partial(_ours, sync=False),
        OURS: partial(_ours, sync=True),
        PLAIN: partial(_ours, sync=False, plain=True),
    }
    for size in _SIZES:
        rates = {
            method: partial(_tried, partial(_rate, proxy, size, times)) for method, proxy in proxies.items()
        }
        yield from measured("proxy", f"{size_name(size)}, messages/s", "", rates, times)
    for size in _SIZES:
        tails: dict[str, list[float]] = {method: [] for method in proxies}
        paced = {
            method: partial(_tried, partial(_latency, proxy, size, times, tails[method]))
            for method, proxy in proxies.items()
        }
        yield from measured("proxy", f"{size_name(size)}, p50 in µs", "", paced, times)
        for method, values in tails.items():
            # The first round is not counted here either; and with a case left out there is none.
            if values:
                yield Measurement("proxy", f"{size_name(size)}, p99 in µs", method, "", tuple(values[1:]))
    for size, count in _BACKLOGS.items():
        yield from _catching_up(size, count, times)


def _catching_up(size: int, count: int, times: Times) -> Iterator[Measurement]:
    """Messages a second that one Python loop gets, of a log that a proxy has filled."""
    pull, durable = free_endpoint(), free_endpoint()
    with (
        temporary_directory() as scratch,
        Proxy(pull=pull, durable=durable, wal_location=scratch, wal_sync=False, wal_max_bytes="8g") as proxy,
        peer("push", connect=pull, size=size, count=count, shape="topic") as push,
    ):
        push.go()
        wait_for("a backlog", lambda: proxy.status()["nextId"] >= count, _MOST_SECONDS)
        rates = {
            CATCHING_UP: lambda: _subscriber_rate(durable, count),
            LOOP: lambda: _loop_rate(LogStorage(str(scratch))),
        }
        yield from measured("proxy", f"{size_name(size)}, catching up, messages/s", "", rates, times)


def _subscriber_rate(endpoint: str, count: int) -> Sample:
    """Of a new subscriber, from its first message on."""
    with DurableSubscriber(endpoint, f"bench-{time.monotonic_ns()}", auto_ack=False) as subscriber:
        subscriber.receive()
        began = time.perf_counter()
        for message in subscriber:
            if message.id == count - 1:
                break
        took = time.perf_counter() - began
        subscriber.forget()
    return Sample((count - 1) / took)


def _loop_rate(storage: LogStorage) -> Sample:
    """Of a loop over topic and value of all rows in sealed chunks."""
    index, rows = read_index(storage), 0
    began = time.perf_counter()
    for batch in read_slices(storage, slices(index.covering(0, index.end), 0, index.end)):
        topics, values = batch.column("topic").to_pylist(), batch.column("value").to_pylist()
        for _message in zip(topics, values, strict=True):
            rows += 1
    return Sample(rows / (time.perf_counter() - began))


def _tried(run: Callable[[], Sample]) -> Sample:
    """libzmq's own proxy, with an XPUB that does not drop, stands still for ever now and then: then once more."""
    for _ in range(_TRIES):
        try:
            return run()
        except RuntimeError as e:
            print(f"{e}; once more", flush=True)
    raise TimeoutError(f"{_TRIES} times no message came through a proxy")


def _rate(proxy: _Method, size: int, times: Times) -> Sample:
    with (
        proxy() as (front, back, pid),
        peer("sub", connect=back, hwm=_HWM, shape="topic") as subscriber,
        peer("pub", connect=front, hwm=_HWM, size=size, shape="topic") as publisher,
    ):
        subscriber.go()
        publisher.go()
        peers = {"publisher": publisher.pid, "proxy": pid, "subscriber": subscriber.pid}
        return window(subscriber, times, peers)


def _latency(proxy: _Method, size: int, times: Times, tails: list[float]) -> Sample:
    """The median at ``PACE`` messages a second; the 99th percentile goes to ``tails``."""
    with (
        proxy() as (front, back, _),
        peer("sub", connect=back, hwm=_HWM, shape="stamped") as subscriber,
        peer("pub", connect=front, hwm=_HWM, size=size, shape="stamped", rate=PACE) as publisher,
    ):
        subscriber.go()
        publisher.go()
        time.sleep(times.warm_up)
        subscriber.latency()  # of the warm-up
        window(subscriber, Times(times.seconds, 0.0, 1), {})
        found = subscriber.latency()
    tails.append(found["p99"])
    return Sample(found["p50"])


@contextmanager
def _forwarding() -> Iterator[_Running]:
    with child(_forward) as (pipe, pid):
        front, back = pipe.recv()
        yield front, back, pid


@contextmanager
def _ours(sync: bool, plain: bool = False) -> Iterator[_Running]:
    front, back = free_endpoint(), free_endpoint()
    others = {process.pid for process in psutil.Process().children()}
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
        (pid,) = {process.pid for process in psutil.Process().children()} - others
        yield front, back, pid


def _forward(pipe: Connection) -> None:
    """What runs in the child."""
    context = zmq.Context()
    front, back = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    front.setsockopt(zmq.RCVHWM, _HWM)
    back.setsockopt(zmq.SNDHWM, _HWM)
    back.setsockopt(zmq.XPUB_NODROP, 1)
    ports = [sock.bind_to_random_port("tcp://127.0.0.1") for sock in (front, back)]
    pipe.send([f"tcp://127.0.0.1:{port}" for port in ports])
    zmq.proxy(front, back)
