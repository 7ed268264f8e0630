"""Who is at the other end: what libzmq's socket monitor tells, kept as a state.

Unlike libzmq, this says when a peer hangs up instead of shaking hands, and dials it again; and
when nobody answers at all.
"""

from __future__ import annotations

import logging
import math
import os
import socket as stdlib_socket
import time
from collections.abc import Iterable
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from zmq_datasource.option_types import Endpoint

__all__ = ["PeerWatch", "socket_type"]

_log = logging.getLogger(__name__)

_HANDSHAKE_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed (a wrong CURVE key, or a peer without CURVE?)",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the peer speaks another protocol or another security mechanism",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the peer refused our credentials",
}
_HUNG_UP = (
    "the peer hung up during the handshake; its socket type does not match ours, or its security does not"
)


def socket_type(sock: zmq.Socket[bytes]) -> str:
    """The name of a socket's type, for messages."""
    return zmq.SocketType(int(sock.type)).name


class PeerWatch:
    """What the socket monitor tells: who is up, who refused. Logs changes of state.

    Not thread-safe: used by the thread that uses the socket. Make it before ``attach``.
    """

    _ABSENT_SECONDS = 10.0
    _FIRST_REDIAL = 1.0
    _LAST_REDIAL = 30.0

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        self._sock = sock
        self._monitor = sock.get_monitor_socket()
        self._shaking: dict[tuple[str, int], bool] = {}
        self._streams: dict[int, tuple[int, bool]] = {}  # file descriptor to inode, and whether ipc
        self._redial: dict[str, tuple[float, float]] = {}  # endpoint: when, delay
        self._absent_since: dict[str, float] = {}  # infinity: said already
        self.up: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.lost = 0

    @property
    def peers(self) -> int:
        """Connections whose handshake has succeeded and that are still up."""
        return sum(self.up.values())

    @property
    def monitor(self) -> zmq.Socket[bytes]:
        """Readable when there is something for ``update``."""
        return self._monitor

    def update(self) -> None:
        """Take in what has happened since the last call. Never waits."""
        with suppress(zmq.Again):
            while True:
                message = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                self._take(message["event"], message["endpoint"].decode(), int(message["value"]))

    def _take(self, event: int, endpoint: str, value: int) -> None:
        # For CONNECTED, ACCEPTED and DISCONNECTED the value is the file descriptor; handshake
        # events carry none, but a connection shakes hands right after it was made.
        if event in (zmq.Event.CONNECTED, zmq.Event.ACCEPTED):
            self._shaking[endpoint, value] = True
            with suppress(OSError):  # closed meanwhile
                self._streams[value] = os.fstat(value).st_ino, endpoint.startswith("ipc:")
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._one_shaken(endpoint)
            self.up[endpoint] = self.up.get(endpoint, 0) + 1
            self.refused.pop(endpoint, None)
            self._redial.pop(endpoint, None)
            _log.info("peer up: %s %s", socket_type(self._sock), endpoint)
        elif event in _HANDSHAKE_FAILURES:
            self._one_shaken(endpoint)
            self._refuse(endpoint, _HANDSHAKE_FAILURES[zmq.Event(event)])
        elif event == zmq.Event.DISCONNECTED:
            self._streams.pop(value, None)
            if self._shaking.pop((endpoint, value), False):
                self._refuse(endpoint, _HUNG_UP)
            elif self.up.get(endpoint, 0):
                self.up[endpoint] -= 1
                self.lost += 1
                _log.info("peer down: %s %s", socket_type(self._sock), endpoint)

    def _one_shaken(self, endpoint: str) -> None:
        for key, shaking in self._shaking.items():
            if key[0] == endpoint and shaking:
                del self._shaking[key]
                return

    def _refuse(self, endpoint: str, reason: str) -> None:
        if self.refused.get(endpoint) != reason:
            _log.warning("no handshake with %s: %s", endpoint, reason)
        self.refused[endpoint] = reason
        _, delay = self._redial.get(endpoint, (0.0, self._FIRST_REDIAL / 2))
        delay = min(delay * 2, self._LAST_REDIAL)
        self._redial[endpoint] = (time.monotonic() + delay, delay)

    def report_absent(self, connect: Iterable[Endpoint]) -> None:
        """Say once if nobody answers at an endpoint, which libzmq tries for ever without a word."""
        now = time.monotonic()
        for endpoint in map(str, connect):
            if self.up.get(endpoint) or endpoint in self.refused:
                self._absent_since.pop(endpoint, None)
            elif now - self._absent_since.setdefault(endpoint, now) >= self._ABSENT_SECONDS:
                self._absent_since[endpoint] = math.inf
                _log.warning("nobody has answered at %s for %.0f s", endpoint, self._ABSENT_SECONDS)

    def redial(self, connect: Iterable[Endpoint]) -> None:
        """Dial again where a handshake failed, which libzmq does not do by itself."""
        now = time.monotonic()
        for endpoint in map(str, connect):
            due, delay = self._redial.get(endpoint, (None, 0.0))
            if due is None or now < due:
                continue
            self._redial[endpoint] = (now + delay, delay)
            with suppress(zmq.ZMQError):  # gone already
                self._sock.disconnect(endpoint)
            self._sock.connect(endpoint)

    def hold(self) -> list[tuple[stdlib_socket.socket, bool]]:
        """Second handles on the connections that are up, which outlive libzmq's own; and whether ipc."""
        self.update()
        held = []
        for descriptor, (inode, ipc) in self._streams.items():
            with suppress(OSError):  # closed meanwhile
                copy = stdlib_socket.socket(fileno=os.dup(descriptor))
                if os.fstat(copy.fileno()).st_ino == inode:
                    held.append((copy, ipc))
                else:  # the number names another file by now
                    copy.close()
        return held

    def close(self) -> None:
        """Stop monitoring; before the socket is closed."""
        self._sock.disable_monitor()
        self._monitor.close(linger=0)
