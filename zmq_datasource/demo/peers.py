"""The programs around Spark, each in a process of its own: a publisher and two consumers.

A peer says the endpoint that it has bound, then its count from time to time; after ``stop``
(or when the demo has died) it says its last count and ends.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import zmq

__all__ = ["TOPIC_PREFIX", "Peer", "consume", "publish"]

TOPIC_PREFIX = "weather."
_CITIES = {"athens": 24.0, "berlin": 13.0, "lisbon": 19.0, "nairobi": 21.0, "oslo": 7.0, "toronto": 10.0}

_START_SECONDS = 30.0
_STOP_SECONDS = 10.0
_TICK = 0.005
_REPORT_SECONDS = 0.1
_QUEUE_SECONDS = 10
# After stop, a consumer takes what is still on its way until nothing has come for so long.
_QUIET_MS = 500


class Peer:
    """The demo's hold on one peer process.

    Attributes:
        count: Messages published or consumed, as far as ``update`` has heard.
    """

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        # Not fork: the demo has threads by then, and libzmq's do not survive one.
        processes = multiprocessing.get_context("spawn")
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=work, args=(theirs, *args), daemon=True)
        # A Ctrl-C in the terminal reaches every process of the demo; only the demo answers it.
        answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._process.start()
        signal.signal(signal.SIGINT, answer)
        theirs.close()
        self.count = 0

    def endpoint(self) -> str:
        """Wait for the peer to have bound its socket."""
        if not self._pipe.poll(_START_SECONDS):
            raise TimeoutError(f"a peer process did not start within {_START_SECONDS:.0f} s")
        return str(self._pipe.recv())

    def update(self) -> int:
        """Take in what the peer has said; never waits."""
        with suppress(EOFError, ConnectionError):
            while self._pipe.poll():
                self.count = self._pipe.recv()
        return self.count

    def finish(self) -> int:
        """Have the peer end, and return its last count."""
        with suppress(ConnectionError):
            self._pipe.send("stop")
        deadline = time.monotonic() + _STOP_SECONDS
        with suppress(EOFError, ConnectionError):
            while self._pipe.poll(max(0.0, deadline - time.monotonic())):
                self.count = self._pipe.recv()
        self._process.join(max(0.0, deadline - time.monotonic()))
        return self.count

    def end(self) -> None:
        """Make sure that the process is gone, whatever state it is in."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()


def _stopped(pipe: Connection, wait: float = 0.0) -> bool:
    try:
        return pipe.poll(wait) and pipe.recv() == "stop"
    except (EOFError, ConnectionError):
        return True


def publish(pipe: Connection, subscribers: int, per_second: int) -> None:
    """Publish numbered weather reports, from the moment that everybody has subscribed.

    An XPUB is a PUB that hears subscriptions. So there is no slow joiner, and what is published
    can be compared with what is received.
    """
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.LINGER, 2000)
        # What is due after a pause of a busy machine goes out at once, and is not to run over.
        socket.setsockopt(zmq.SNDHWM, _QUEUE_SECONDS * per_second)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        pipe.send(f"tcp://127.0.0.1:{port}")
        subscribed = 0
        while subscribed < subscribers:
            if _stopped(pipe):
                pipe.send(0)
                return
            if socket.poll(50):
                subscribed += socket.recv()[:1] == b"\x01"
        cities = list(_CITIES.items())
        began = reported = time.monotonic()
        sent = 0
        while not _stopped(pipe, _TICK):
            now = time.monotonic()
            due = int((now - began) * per_second)
            for number in range(sent, due):
                city, mean = cities[number % len(cities)]
                report = {"number": number, "celsius": round(mean + 4 * math.sin(number / 5000), 2)}
                socket.send_multipart([(TOPIC_PREFIX + city).encode(), json.dumps(report).encode()])
            sent = due
            if now - reported >= _REPORT_SECONDS:
                pipe.send(sent)
                reported = now
        pipe.send(sent)


def consume(pipe: Connection, per_second: int | None, rcvhwm: int, rcvbuf: int) -> None:
    """Take messages from a PULL socket, ``per_second`` at most (None: as fast as they come)."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.RCVHWM, rcvhwm)
        socket.setsockopt(zmq.RCVBUF, rcvbuf)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        pipe.send(f"tcp://127.0.0.1:{port}")
        pause = 1 / per_second if per_second else 0.0
        count, reported = 0, time.monotonic()
        while not _stopped(pipe, pause):
            count += _take(socket, 1 if per_second else 1000, 50)
            if time.monotonic() - reported >= _REPORT_SECONDS:
                pipe.send(count)
                reported = time.monotonic()
        while taken := _take(socket, 1000, _QUIET_MS):
            count += taken
        pipe.send(count)


def _take(socket: zmq.Socket[bytes], most: int, wait_ms: int) -> int:
    taken = 0
    if socket.poll(wait_ms):
        with suppress(zmq.Again):
            while taken < most:
                socket.recv_multipart(zmq.NOBLOCK)
                taken += 1
    return taken
