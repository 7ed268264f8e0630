"""A proxy in a thread of the test's own process: real sockets and files, and quick to start."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from tests.support import Socket, free_endpoint, wait_for
from zmq_datasource.counters import figures
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.serving.durable import DurableServer
from zmq_datasource.serving.publishing import Publishing
from zmq_datasource.serving.subscriptions import REQUEST_BOUNDS, RequestBounds
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.source.filling import filling_of
from zmq_datasource.transport.spec import SocketSpec


def endpoints(*sides: str) -> dict[str, str]:
    """A free endpoint for each side."""
    return {side: free_endpoint() for side in sides}


_MARKERS = itertools.count()


class ProxyThreads:
    """A proxy in threads, which seals often."""

    def __init__(
        self,
        location: Path,
        sides: dict[str, str],
        bounds: RequestBounds = REQUEST_BOUNDS,
        **options: Any,
    ) -> None:
        self.sides = sides
        text = {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in options.items()
        }
        given = {"walLocation": str(location), "walFlushInterval": "10ms", **sides, **text}
        self.options = parse(ProxyOptions, given)
        self.publishing = Publishing(self.options, bounds) if self.options.publish else None
        self.durable: DurableServer | None = None
        self.receiver = FeedReceiver(
            self.options,
            fill=partial(filling_of, publisher=self.publishing),
            side=self._make_server if self.options.durable else None,
        )

    def _make_server(self, receiver: FeedReceiver) -> DurableServer:
        spec, expiry = SocketSpec.of_durable(self.options), self.options.subscriber_expiry
        self.durable = DurableServer(spec, receiver.storage, receiver.log, receiver.await_rows, expiry)
        return self.durable

    def __enter__(self) -> Self:
        self.receiver.start()
        return self

    def status(self) -> dict[str, Any]:
        """The figures as of now."""
        return {
            **figures(self.receiver.counters),
            **({} if self.publishing is None else self.publishing.figures()),
            "durable": [] if self.durable is None else list(self.durable.accounts),
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.receiver.stop()


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
    before = proxy.status()["subscriptions"]
    sock.connect(proxy.sides["publish"])
    for topic in (*topics, marker):  # they arrive in this order
        sock.setsockopt(zmq.SUBSCRIBE, topic)
    wait_for(lambda: proxy.status()["subscriptions"] > before + len(topics) - 1, f"subscription to {topics}")
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
