"""A peer of a ROUTER whose message never ends is disconnected, and no other peer is."""

from __future__ import annotations

import logging
import socket as stdlib_socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from tests.support import Socket, free_endpoint, stream_options, wait_for
from tests.support.hostile import shake_hands
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.socket import Endpoint, Endpoints
from zmq_datasource.proxy.fetch_protocol import MOST_FRAMES
from zmq_datasource.proxy.fetch_wire import FetchWire
from zmq_datasource.source.feed_receiver import FeedReceiver

Context = zmq.Context[Socket]
MIB = 1 << 20
EMPTY = b"\x01\x00" * (32 << 10)  # frames without content, each of which announces another
LARGE = struct.pack(">BQ", 3, 64 << 10) + bytes(64 << 10)


class Endless:
    """A peer that sends the same frames again and again until it is disconnected, or has sent ``most`` bytes."""

    def __init__(self, endpoint: str, frames: bytes, most: int) -> None:
        self._frames, self._most = frames, most
        self.is_disconnected = threading.Event()
        self._socket = stdlib_socket.create_connection(Endpoint.read(endpoint).host_port, timeout=30)
        shake_hands(self._socket, b"DEALER")
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        try:
            for _ in range(self._most // len(self._frames)):
                self._socket.sendall(self._frames)
            while self._socket.recv(4096):  # until the other side ends the connection
                pass
        except TimeoutError:
            return
        except OSError:
            pass
        self.is_disconnected.set()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(stdlib_socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


@contextmanager
def durable(endpoint: str, log: Path) -> Iterator[Callable[[], int]]:
    """A server of durable subscribers. Gives a function that receives once, and returns the number of requests."""
    options = ProxyOptions(durable=Endpoints.read(endpoint), wal_location=str(log))
    with closing(FetchWire(options)) as router:
        yield lambda: (router.receive(), len(router.requests), router.requests.clear())[1]


@pytest.fixture(name="disconnections")
def _disconnections(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    caplog.set_level(logging.WARNING)
    return lambda: sum("does not end" in record.message for record in caplog.records)


@pytest.mark.parametrize("frames", [EMPTY, LARGE])
def test_a_client_whose_request_never_ends_is_disconnected(
    frames: bytes, tmp_path: Path, disconnections: Callable[[], int]
) -> None:
    endpoint = free_endpoint()
    with durable(endpoint, tmp_path) as step, closing(Endless(endpoint, frames, 20 * MIB)) as peer:
        wait_for(lambda: (step(), disconnections())[1], "the end of the connection")
        assert peer.is_disconnected.wait(30)


def test_a_sender_whose_message_never_ends_is_disconnected(
    tmp_path: Path, disconnections: Callable[[], int]
) -> None:
    endpoint = free_endpoint()
    ingest = FeedReceiver(stream_options(bind=endpoint, socketType="ROUTER", walLocation=tmp_path))
    ingest.start()
    try:
        with closing(Endless(endpoint, LARGE, 160 * MIB)) as peer:
            wait_for(disconnections, "the end of the connection")
            assert peer.is_disconnected.wait(30)
        wait_for(lambda: ingest.counters.protocol_errors == 1, "that it is counted")
    finally:
        ingest.stop()


def test_other_clients_stay_connected_and_lose_nothing(
    context: Context, tmp_path: Path, disconnections: Callable[[], int]
) -> None:
    """Also one that sends much more than its bound, in messages that end, so that the socket is never empty."""
    endpoint = free_endpoint()
    with durable(endpoint, tmp_path) as step, closing(Endless(endpoint, EMPTY, 20 * MIB)):
        honest = context.socket(zmq.DEALER)
        honest.setsockopt(zmq.SNDHWM, 0)
        honest.connect(endpoint)
        sent = got = 0
        while not disconnections() or sent < 300:
            honest.send(bytes(60 << 10))
            sent += 1
            got += step()
            assert sent < 20_000

        def all_came() -> bool:
            nonlocal got
            got += step()
            return got >= sent

        wait_for(all_came, "all of the honest client's requests")
        assert (got, disconnections()) == (sent, 1)


def test_a_server_keeps_one_frame_more_than_it_accepts(context: Context, tmp_path: Path) -> None:
    endpoint = free_endpoint()
    proxy = ProxyOptions(durable=Endpoints.read(endpoint), wal_location=str(tmp_path))
    with closing(FetchWire(proxy)) as router:
        client = context.socket(zmq.DEALER)
        client.connect(endpoint)
        for frames in (100_000, MOST_FRAMES + 1, MOST_FRAMES, 1):
            client.send_multipart([b"x"] * frames)
        wait_for(lambda: (router.receive(), len(router.requests) == 4)[1], "all of them")
        kept = [len(request.frames) for request in router.requests]
        assert kept == [MOST_FRAMES + 1, MOST_FRAMES + 1, MOST_FRAMES, 1]
