"""A peer whose message never ends is disconnected, and no other peer is."""

from __future__ import annotations

import logging
import socket as stdlib_socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from tests.support import Socket, free_endpoint, stream_options, wait_for
from zmq_datasource.counters import SourceCounters
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.socket import Endpoint, Endpoints
from zmq_datasource.proxy.fetch_wire import Router
from zmq_datasource.source.channel import Channel
from zmq_datasource.source.ingest import Ingest
from zmq_datasource.source.receiver import Receiver
from zmq_datasource.transport import unfinished
from zmq_datasource.transport.core import Inbox, Taken
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec

Context = zmq.Context[Socket]
LIMIT = 4 << 20
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_FRAME = b"x" * (64 << 10)
_BYTES_PER_SECOND = 100 << 20


def set_limit(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(unfinished, "MAX_MESSAGE_BYTES", size - (1 << 20))
    monkeypatch.setattr(unfinished.Unfinished, "in_kernel", 1 << 20)


@pytest.fixture(autouse=True)
def _small_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, LIMIT)
    monkeypatch.setattr(unfinished.Unfinished, "check_seconds", 0.02)


class Endless:
    """A peer that sends frames, each of which announces another one, until it is disconnected.

    It limits its rate: otherwise loopback would deliver more than the limit between two checks.
    """

    def __init__(self, endpoint: str, socket_type: bytes) -> None:
        self.sent = 0
        self.ended = threading.Event()
        self._socket = stdlib_socket.create_connection(Endpoint.read(endpoint).host_port)
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
        self._socket.sendall(_GREETING + struct.pack(">BB", 4, len(ready)) + ready)
        answer = b""
        while b"READY" not in answer:
            self._socket.settimeout(10)
            answer += self._socket.recv(4096)
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        with suppress(OSError):
            while not self.ended.wait(len(_FRAME) / _BYTES_PER_SECOND):
                self._socket.sendall(struct.pack(">BQ", 3, len(_FRAME)) + _FRAME)
                self.sent += len(_FRAME)
        self.ended.set()

    def close(self) -> None:
        self.ended.set()
        with suppress(OSError):
            self._socket.shutdown(stdlib_socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


@contextmanager
def receiving(kind: str, endpoint: str, tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Gives a function that receives and checks once, and returns the number of messages."""
    match kind.split():
        case ["XSUB"]:
            spec = SocketSpec(
                kind="XSUB",
                bind=Endpoints.read(endpoint),
                rcvhwm=1000,
                sndhwm=1000,
                linger=0,
            )
            channel = Channel(spec, SourceCounters(), counts_connections=False)
            channel.open()
            with closing(channel):
                channel.socket.send(b"\x01")

                def take() -> int:
                    channel.keep_alive()
                    return channel.receive(Inbox(), 4096, 1 << 20, wait=False).messages

                yield take
        case ["proxy", "ROUTER"]:
            proxy = ProxyOptions(durable=Endpoints.read(endpoint), wal_location=str(tmp_path))
            with closing(Router(proxy, proxy.durable, 10, LIMIT, 7)) as router:
                yield lambda: (router.receive(), len(router.requests), router.requests.clear())[1]
        case ["ROUTER"]:
            ingest = Ingest(stream_options(bind=endpoint, socketType=kind, walLocation=tmp_path))
            ingest.start()
            try:
                yield lambda: 0
            finally:
                ingest.stop()
        case _:
            with Receiver(stream_options(bind=endpoint, socketType=kind), SourceCounters()) as receiver:

                def step() -> int:
                    receiver.keep_alive()
                    taken = receiver.receive()
                    receiver.take()
                    return taken

                yield step


PEERS = {"PULL": zmq.PUSH, "SUB": zmq.XPUB, "XSUB": zmq.XPUB, "ROUTER": zmq.DEALER}


def peer_of(kind: str) -> int:
    return PEERS[kind.rpartition(" ")[2]]


def endless(endpoint: str, kind: str) -> closing[Endless]:
    return closing(Endless(endpoint, zmq.SocketType(peer_of(kind)).name.encode()))


@pytest.fixture(name="disconnected")
def _disconnected(caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
    caplog.set_level(logging.WARNING)
    return lambda: any("does not end" in record.message for record in caplog.records)


@pytest.mark.parametrize("kind", ["PULL", "SUB", "XSUB", "proxy ROUTER", "ROUTER"])
def test_a_peer_whose_message_never_ends_is_disconnected(
    kind: str, tmp_path: Path, disconnected: Callable[[], bool]
) -> None:
    endpoint = free_endpoint()
    with receiving(kind, endpoint, tmp_path) as step, endless(endpoint, kind) as peer:
        wait_for(lambda: (step(), disconnected())[1], "the end of the connection")
        assert peer.ended.wait(30)


@pytest.mark.parametrize("kind", ["PULL", "SUB", "XSUB", "proxy ROUTER"])
def test_other_peers_stay_connected_and_lose_nothing(
    context: Context,
    kind: str,
    tmp_path: Path,
    disconnected: Callable[[], bool],
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint = free_endpoint()
    with receiving(kind, endpoint, tmp_path) as step:
        honest = context.socket(peer_of(kind))
        honest.setsockopt(zmq.SNDHWM, 0)
        honest.connect(endpoint)
        if peer_of(kind) == zmq.XPUB:
            wait_for(lambda: (step(), honest.poll(0))[1], "the subscription")
        sent = got = 0
        with endless(endpoint, kind):
            while not disconnected() or sent * len(_FRAME) < 5 * LIMIT:
                honest.send_multipart([_FRAME, b"v"])
                sent += 1
                got += step()
                assert sent < 100_000

        def all_came() -> bool:
            nonlocal got
            got += step()
            return got >= sent

        wait_for(all_came, "all of the honest peer's messages")
        assert got == sent
    assert len([record for record in caplog.records if "disconnected" in record.message]) == 1


def test_the_memory_of_an_endless_message_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_limit(monkeypatch, 30 << 20)
    endpoint = free_endpoint()
    memory = psutil.Process()
    sent, times = 0, 3
    with receiving("PULL", endpoint, tmp_path) as step, caplog.at_level(logging.WARNING):
        before = memory.memory_info().rss
        for time in range(times):
            with endless(endpoint, "PULL") as peer:
                wait_for(lambda: (step(), len(caplog.records) > time)[1], "the end of the connection", 10)  # noqa: B023
            sent += peer.sent
        assert sent > times * (60 << 20)
        assert memory.memory_info().rss - before < sent / 2


def test_a_server_keeps_one_frame_more_than_it_accepts(context: Context, tmp_path: Path) -> None:
    endpoint = free_endpoint()
    proxy = ProxyOptions(durable=Endpoints.read(endpoint), wal_location=str(tmp_path))
    with closing(Router(proxy, proxy.durable, 10, 1 << 20, 7)) as router:
        client = context.socket(zmq.DEALER)
        client.connect(endpoint)
        for frames in (100_000, 8, 7, 1):
            client.send_multipart([b"x"] * frames)
        wait_for(lambda: (router.receive(), len(router.requests) == 4)[1], "all of them")
        assert [len(request.frames) for request in router.requests] == [8, 8, 7, 1]


def test_a_peer_that_has_sent_much_is_not_suspected(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished.Unfinished, "check_seconds", 0.0)
    endpoint = free_endpoint()
    with Receiver(stream_options(bind=endpoint, socketType="PULL"), SourceCounters()) as receiver:
        push = context.socket(zmq.PUSH)
        push.connect(endpoint)
        (channel,) = receiver.channels
        suspected = []
        for _ in range(5 * LIMIT // len(_FRAME)):
            push.send(_FRAME)
            wait_for(receiver.receive, "the message")
            receiver.take()
            receiver.keep_alive()
            suspected.append(channel.unfinished.has_suspects)
        assert not any(suspected)


def test_a_full_inbox_takes_nothing_of_a_socket_with_a_suspect() -> None:
    """A proxy has one inbox for all its sockets, and another one may have filled it."""

    class Full(Inbox):
        asked = 0

        def take(self, *_: Any, **__: Any) -> Taken:
            self.asked += 1
            assert self.asked < 10, "it is asked for ever"
            return Taken(0, 0, False)

    opened = OpenSocket(SocketSpec.of_source(stream_options(socketType="PULL", bind=free_endpoint())))
    try:
        watched = unfinished.Unfinished(opened)
        watched.has_suspects = True
        assert watched.take(Full(), 100, LIMIT, False) == Taken(0, 0, False)
    finally:
        opened.close(0)
