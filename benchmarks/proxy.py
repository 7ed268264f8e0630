"""Through a proxy: ours, which keeps a log, and libzmq's own, which keeps nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeAlias

import psutil
import pyarrow as pa
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
from benchmarks.peers import child, free_endpoint, peer, window
from benchmarks.report import Section, Target
from zmq_datasource import DurableSubscriber, Proxy
from zmq_datasource.log import LogStorage, read_index, read_slices, slices

_FORWARDING = "zmq.proxy"
_OURS = "proxy"
_CATCHING_UP = "durable subscriber"
_IN_BATCHES = "durable subscriber, in batches"
_LOOP = "Python loop over the log"
_PACE = 1000

_SIZES = (100, 10_000)
_BACKLOGS = {100: 400_000, 10_000: 40_000}  # messages, by their size
# The same for every socket, and large enough that a pause of the machine's scheduler fills no queue.
_HWM = 10_000
SECTION = Section(
    "proxy",
    "The proxy",
    "From a publisher (XPUB) through a proxy to a subscriber, both in C, each in a process of its own: tcp "
    "loopback, high-water marks of 10,000, no drops. Messages of topic and value a second at full speed, and the "
    f"time that a message takes at a thousand a second. *{_FORWARDING}*: libzmq's own, XSUB to XPUB, which writes "
    f"nothing. *{_OURS}*: each message is published at once, and sealed within a second. The log has 256 MiB. "
    "*Catching up*: how fast one loop in Python gets a backlog that a proxy has written. "
    f"*{_CATCHING_UP}*: a `DurableSubscriber`, one message at a time. *{_IN_BATCHES}*: the same by `receive_batch`. "
    f"*{_LOOP}*: the same process reads the sealed chunks, without a proxy.",
    targets=(
        Target("100 B, messages/s", _OURS, 0.8, times=_FORWARDING),
        Target("10 kB, messages/s", _OURS, 0.9, times=_FORWARDING),
        *(
            Target(f"{size_name(size)}, {quantile} in µs", _OURS, limit, upper=True)
            for size in _SIZES
            for quantile, limit in (("p50", 500), ("p99", 3000))
        ),
        *(
            Target(f"{size_name(size)}, catching up, messages/s", method, 0.5, times=_LOOP)
            for method in (_CATCHING_UP, _IN_BATCHES)
            for size in _BACKLOGS
        ),
    ),
)
_TRIES = 5
_MOST_SECONDS = 120.0

# Runs a proxy: the endpoints of publishers and of subscribers, and the proxy's process.
_Method: TypeAlias = Callable[[], AbstractContextManager[tuple[str, str, int]]]


def measure_proxy(times: Times) -> Iterator[Measurement]:
    """Messages a second from a publisher to a subscriber, how long a message takes, and catching up."""
    proxies: Mapping[str, _Method] = {_FORWARDING: _forwarding, _OURS: _ours}
    for what, run in (("messages/s", _rate), ("p50 in µs", _latency)):
        for size in _SIZES:
            runs = {
                name: partial(_tried, partial(run, proxy, size, times)) for name, proxy in proxies.items()
            }
            yield from measured("proxy", f"{size_name(size)}, {what}", "", runs, times)
    for size, count in _BACKLOGS.items():
        yield from _catching_up(size, count, times)


def _catching_up(size: int, count: int, times: Times) -> Iterator[Measurement]:
    """Messages a second that one Python loop gets from a log that a proxy has filled."""
    pull, durable = free_endpoint(), free_endpoint()
    with (
        temporary_directory() as scratch,
        Proxy(pull=pull, durable=durable, wal_location=scratch, wal_max_bytes="8g") as proxy,
        peer("push", connect=pull, size=size, count=count, shape="topic") as push,
    ):
        push.go()
        wait_for("a backlog", lambda: proxy.status()["nextId"] >= count, _MOST_SECONDS)
        rates: Mapping[str, Callable[[], Sample]] = {
            _CATCHING_UP: partial(_subscriber_rate, durable, count, batches=False),
            _IN_BATCHES: partial(_subscriber_rate, durable, count, batches=True),
            _LOOP: lambda: _loop_rate(LogStorage(str(scratch))),
        }
        yield from measured("proxy", f"{size_name(size)}, catching up, messages/s", "", rates, times)


def _subscriber_rate(endpoint: str, count: int, batches: bool) -> Sample:
    """Messages a second of a new durable subscriber, after the first that it gets."""
    with DurableSubscriber(endpoint, f"bench-{time.monotonic_ns()}", auto_ack=False) as subscriber:

        def receive() -> int:
            if not batches:
                return 1 if subscriber.receive() else 0
            batch = subscriber.receive_batch()
            return _loop_over(batch) if batch else 0

        first = rows = receive()
        began = time.perf_counter()
        while rows < count:
            rows += receive()
        took = time.perf_counter() - began
    return Sample((rows - first) / took)


def _loop_rate(storage: LogStorage) -> Sample:
    """Messages a second of a loop over topic and value of all rows in sealed chunks."""
    index, rows = read_index(storage), 0
    began = time.perf_counter()
    for batch in read_slices(storage, slices(index.all, 0, index.durable_end)):
        rows += _loop_over(batch)
    return Sample(rows / (time.perf_counter() - began))


def _loop_over(batch: pa.RecordBatch) -> int:
    columns = (batch.column(name).to_pylist() for name in ("topic", "value"))
    return sum(1 for _message in zip(*columns, strict=True))


def _tried(run: Callable[[], Sample]) -> Sample:
    """Repeat a run in which no message came: libzmq's own proxy with a blocking XPUB sometimes stands still."""
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


def _latency(proxy: _Method, size: int, times: Times) -> Sample:
    """The median and the 99th percentile at ``_PACE`` messages a second."""
    with (
        proxy() as (front, back, _),
        peer("sub", connect=back, hwm=_HWM, shape="stamped") as subscriber,
        peer("pub", connect=front, hwm=_HWM, size=size, shape="stamped", rate=_PACE) as publisher,
    ):
        subscriber.go()
        publisher.go()
        time.sleep(times.warm_up)
        subscriber.latency()  # discards those of the warm-up
        window(subscriber, Times(times.seconds, 0.0, 1), {})
        found = subscriber.latency()
    return Sample(found["p50"], others={f"{size_name(size)}, p99 in µs": found["p99"]})


@contextmanager
def _forwarding() -> Iterator[tuple[str, str, int]]:
    with child(_forward) as (pipe, pid):
        front, back = pipe.recv()
        yield front, back, pid


@contextmanager
def _ours() -> Iterator[tuple[str, str, int]]:
    front, back = free_endpoint(), free_endpoint()
    others = {process.pid for process in psutil.Process().children()}
    with (
        temporary_directory() as scratch,
        Proxy(
            bind=front,
            publish=back,
            wal_location=scratch,
            slow_subscriber="wait",
            rcvhwm=_HWM,
            sndhwm=_HWM,
            wal_max_bytes="256m",
        ),
    ):
        (pid,) = {process.pid for process in psutil.Process().children()} - others
        yield front, back, pid


def _forward(pipe: Connection) -> None:
    """``zmq.proxy`` in a child process; sends its two endpoints through the pipe."""
    context = zmq.Context()
    front, back = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    front.setsockopt(zmq.RCVHWM, _HWM)
    back.setsockopt(zmq.SNDHWM, _HWM)
    back.setsockopt(zmq.XPUB_NODROP, 1)
    ports = [sock.bind_to_random_port("tcp://127.0.0.1") for sock in (front, back)]
    pipe.send([f"tcp://127.0.0.1:{port}" for port in ports])
    zmq.proxy(front, back)
