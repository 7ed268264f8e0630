"""A ROUTER of the server process: it takes requests in small portions, whatever clients send."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import zmq

from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.types import Endpoints
from zmq_datasource.proxy.specs import proxy_socket
from zmq_datasource.transport.answers import Answers, set_router_options
from zmq_datasource.transport.authentication import NameRights
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.unfinished import Unfinished

__all__ = ["Request", "Router"]

# Taken at a time; the others wait in libzmq, which bounds messages and not bytes, and in the kernel.
_MOST_REQUESTS, _MOST_INBOX_BYTES = 256, 8 << 20
_RCVHWM = 16
_HOUSEKEEPING_SECONDS = 0.1


class Request(NamedTuple):
    """What a peer has sent, and whether the peer may use a name."""

    peer: bytes
    frames: list[bytes]
    may_use: Callable[[str], bool]


class Router:
    """A ROUTER that is bound; in one thread.

    Args:
        options: Security and what else belongs to every socket.
        bind: Where.
        sndhwm: Messages that libzmq queues for one peer.
        most_bytes, most_frames: Of a message, and frames of a message, that an honest peer sends. Of a larger
            message no frames are given, so that its reader refuses it.

    Attributes:
        answers: Sends, and knows what is on its way.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    def __init__(
        self,
        options: ProxyOptions,
        bind: Endpoints,
        sndhwm: int,
        most_bytes: int,
        most_frames: int,
    ) -> None:
        def set_options(sock: zmq.Socket[bytes]) -> None:
            set_router_options(sock, _RCVHWM, sndhwm, most_bytes)
            sock.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that comes again may have its name of before

        self._opened = OpenSocket(proxy_socket(options, "ROUTER", bind), set_options)
        self.socket = self._opened.socket
        self._most_bytes = most_bytes
        self._most_frames = 1 + most_frames  # the first one says who
        self._unfinished = Unfinished(self._opened, most_bytes)
        self._rights = NameRights(options.allowed_clients)
        self._next_housekeeping = 0.0
        self._inbox: list[Request] = []
        self.answers = Answers(self.socket)

    def receive(self) -> None:
        """Take what peers have sent; ``inbox`` gives it. To be called often: the connections do their work here."""
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
            self._opened.watch.update()
            self._unfinished.check_connections()
        room = _MOST_INBOX_BYTES
        with suppress(zmq.Again):
            while len(self._inbox) < _MOST_REQUESTS and room > 0:
                peer, *frames = self._unfinished.receive(self._most_frames)
                last = (frames or [peer])[-1]
                size = sum(map(len, frames))
                room -= size
                taken = [frame.bytes for frame in frames] if size <= self._most_bytes else []
                self._inbox.append(Request(peer.bytes, taken, self._rights.of(last)))

    def inbox(self) -> list[Request]:
        """What was received since the last call."""
        inbox, self._inbox = self._inbox, []
        return inbox

    def close(self) -> None:
        self._opened.close(linger=0)
