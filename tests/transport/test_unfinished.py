"""A peer of a ROUTER whose message never ends is disconnected, and no other peer is."""

from __future__ import annotations

import logging
import socket as stdlib_socket
import struct
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import zmq

from tests.support import Socket, wait_for
from tests.support.hostile import shake_hands
from tests.support.serving import Client, Serving
from zmq_datasource.options.socket import Endpoint
from zmq_datasource.serving.protocol import Open

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


@pytest.fixture(name="disconnections")
def _disconnections(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    caplog.set_level(logging.WARNING)
    return lambda: sum("does not end" in record.message for record in caplog.records)


@pytest.mark.parametrize("frames", [EMPTY, LARGE])
def test_a_client_whose_request_never_ends_is_disconnected_early(
    frames: bytes, tmp_path: Path, disconnections: Callable[[], int]
) -> None:
    """140 MiB of empty frames would take 4 GiB of memory."""
    with Serving(tmp_path) as it:
        before = psutil.Process().memory_info().rss
        with closing(Endless(it.durable, frames, 140 * MIB)) as peer:
            wait_for(disconnections, "the end of the connection")
            assert peer.is_disconnected.wait(30)
        assert psutil.Process().memory_info().rss - before < 200 * MIB


def test_other_clients_stay_connected(
    context: Context, tmp_path: Path, disconnections: Callable[[], int]
) -> None:
    """Also one that sends much more than its bound, in messages that end, so that the socket is never empty."""
    with Serving(tmp_path) as it, closing(Endless(it.durable, EMPTY, 20 * MIB)):
        honest = Client(context, it.durable, sndhwm=0)
        honest.open("me")
        for sent in range(20_000):
            if disconnections() and sent >= 300:
                break
            honest.send(Open(name="me", session=1), [bytes(32_000)])
        assert honest.open("me", 2).session == 2
        assert disconnections() == 1
