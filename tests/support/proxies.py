"""A proxy in threads of the test's own process: real sockets and files, and quick to start."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from tests.support import Socket, free_endpoint, wait_for
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.proxy import fetch_protocol
from zmq_datasource.proxy.backend import REQUEST_BOUNDS, RequestBounds
from zmq_datasource.proxy.child import NewestReader, NewestWriter
from zmq_datasource.proxy.fetch_protocol import Batch, Fetch, FromClient, FromProxy, Open, Opened, Refused
from zmq_datasource.proxy.flow import LiveFlow
from zmq_datasource.proxy.names import NAME_BOUNDS, NameBounds
from zmq_datasource.proxy.server import Server, serve


def endpoints(*sides: str) -> dict[str, str]:
    """A free endpoint for each side."""
    return {side: free_endpoint() for side in sides}


_MARKERS = itertools.count()


class ProxyThreads:
    """The two processes of a proxy as two threads, which seal often."""

    def __init__(
        self,
        location: Path,
        sides: dict[str, str],
        bounds: RequestBounds = REQUEST_BOUNDS,
        names: NameBounds = NAME_BOUNDS,
        **options: Any,
    ) -> None:
        self.sides = sides
        self._names = names
        self._bounds = bounds
        self._wanted: queue.SimpleQueue[Future[dict[str, Any]]] = queue.SimpleQueue()
        text = {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in options.items()
        }
        given = {"walLocation": str(location), "walFlushInterval": "10ms", **sides, **text}
        self.options = parse(ProxyOptions, given)
        self.status: dict[str, Any] = {}
        self.failure: Exception | None = None
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._flow)
        if self.options.durable:
            self._start(self._serve)
        return self

    def next_status(self) -> dict[str, Any]:
        """A status reported after this call; ``status`` is up to a quarter of a second old."""
        before = self.status
        # The first after this call may have been put together before it, the second was not.
        first = wait_for(lambda: self.status is not before and self.status, "a status")
        return wait_for(lambda: self.status is not first and self.status, "a newer status")

    def flow_status(self) -> dict[str, Any]:
        """The status of the flow, which its own thread makes between two steps."""
        wanted: Future[dict[str, Any]] = Future()
        self._wanted.put(wanted)
        return wanted.result(30)

    def _start(self, target: Any) -> None:
        self._ready.clear()
        thread = threading.Thread(target=self._guard, args=(target,))
        self._threads.append(thread)
        thread.start()
        assert self._ready.wait(30)
        if self.failure is not None:
            thread.join()
            raise self.failure

    def _guard(self, target: Any) -> None:
        try:
            target()
        except Exception as e:
            self.failure = e
            self._ready.set()

    def _flow(self) -> None:
        reads, writes = os.pipe()
        try:
            self._progress, newest = NewestReader(reads), NewestWriter(writes)
            with LiveFlow(self.options, self._bounds) as self.flow:
                self._ready.set()
                while not self._stop.is_set():
                    self.flow.step()
                    newest.send(self.flow.journal.progress)
                    with suppress(queue.Empty):
                        self._wanted.get_nowait().set_result(self.flow.status())
                self.flow.drain()
                newest.send(self.flow.journal.progress)
        finally:
            os.close(writes)  # which ends the server
            for thread in self._threads[1:]:
                thread.join()
            os.close(reads)

    def _serve(self) -> None:
        def report(message: dict[str, Any]) -> None:
            self.status = message.get("status", self.status)
            if self.flow.asked_end != message["askedEnd"]:
                self.flow.asked_end = message["askedEnd"]
                self.flow.wake()

        with closing(Server(self.options, self.flow.journal.progress, self._names)) as self.server:
            self._ready.set()
            serve(self.server, self._progress, report)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        if kind is None and self.failure is not None:
            raise self.failure


class Client:
    """A client of a proxy's durable endpoint that sends exactly the messages of a test.

    Args:
        options: Of its DEALER, as in ``rcvhwm=1``.
    """

    def __init__(self, context: zmq.Context[Socket], endpoint: str, **options: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name.upper()), value)
        self.socket.connect(endpoint)

    def send(self, message: FromClient, topics: Sequence[bytes] = ()) -> None:
        self.socket.send_multipart(fetch_protocol.encode(message, topics))

    def receive(self, milliseconds: int = 30_000) -> tuple[FromClient | FromProxy, Sequence[bytes]]:
        """The next message, and the frames behind its header."""
        assert self.socket.poll(milliseconds), "the proxy does not answer"
        return fetch_protocol.decode(self.socket.recv_multipart())

    def open(self, name: str, session: int = 1, topics: Sequence[bytes] = (), **header: Any) -> Opened:
        """Open a name. Answers to earlier requests are left out."""
        self.send(Open(name=name, session=session, **header), topics)
        while True:
            message, _ = self.receive()
            assert not isinstance(message, Refused), message
            if isinstance(message, Opened) and message.session == session:
                return message

    def fetch(self, name: str, first: int, session: int = 1, **header: Any) -> tuple[Batch, list[bytes]]:
        """Fetch messages from an id on; return the answer, and the last frame of each message."""
        self.send(Fetch(name=name, session=session, first=first, **{"done": first, **header}))
        return self.batch()

    def batch(self) -> tuple[Batch, list[bytes]]:
        """The next answer, which is a BATCH, and the last frame of each of its messages."""
        message, buffers = self.receive()
        assert isinstance(message, Batch), message
        return message, [frames[-1] for _, frames in fetch_protocol.unpack_rows(message, buffers).messages()]

    def refused(self) -> Refused:
        """The next REFUSED; other answers before it are left out."""
        while True:
            message, _ = self.receive()
            if isinstance(message, Refused):
                return message


def publisher(context: zmq.Context[Socket], endpoint: str, topics: tuple[bytes, ...] = (b"",)) -> Socket:
    """A PUB at the proxy, as an XPUB that has received these subscriptions."""
    sock = context.socket(zmq.XPUB)
    sock.setsockopt(zmq.XPUB_NODROP, 1)
    sock.setsockopt(zmq.SNDHWM, 100_000)
    sock.connect(endpoint)
    heard = set()
    while heard != {b"\x01" + topic for topic in topics}:
        assert sock.poll(30_000), heard
        heard.add(sock.recv())
    return sock


def subscriber(
    context: zmq.Context[Socket], proxy: ProxyThreads, *topics: bytes, kind: int = zmq.SUB, **options: int
) -> Socket:
    """A plain subscriber whose subscriptions the proxy has received."""
    marker = b"marker %d" % next(_MARKERS)
    sock = context.socket(kind)
    for name, value in options.items():
        sock.setsockopt(getattr(zmq, name.upper()), value)
    sock.connect(proxy.sides["publish"])
    for topic in (*topics, marker):  # they arrive in this order
        sock.setsockopt(zmq.SUBSCRIBE, topic)
    wait_for(lambda: marker.decode() in proxy.flow.status()["subscriptions"], f"subscription to {topics}")
    return sock


def receive(sock: Socket, count: int, milliseconds: int = 30_000) -> list[list[bytes]]:
    """Receive so many messages."""
    got: list[list[bytes]] = []
    while len(got) < count:
        assert sock.poll(milliseconds), f"{len(got)} of {count} messages came"
        got.append(sock.recv_multipart())
    return got


def drain(sock: Socket, quiet_ms: int) -> list[list[bytes]]:
    """Receive until nothing has come for so long: for messages that must not come, or not all of them."""
    got = []
    while sock.poll(quiet_ms):
        got.append(sock.recv_multipart())
    return got
