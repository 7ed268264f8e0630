"""What the two servers of a proxy share: a ROUTER that never waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import zmq

from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.types import Endpoints
from zmq_datasource.proxy.specs import proxy_socket
from zmq_datasource.transport.authentication import NameRights
from zmq_datasource.transport.core import Outbox
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.origin import origin_of
from zmq_datasource.transport.spec import frame_limit
from zmq_datasource.transport.unfinished import Unfinished

__all__ = ["Request", "Router"]

# Taken at a time; the others wait in libzmq, which bounds messages and not bytes, and in the kernel.
_MOST_REQUESTS, _MOST_INBOX_BYTES = 256, 8 << 20
_RCVHWM = 16
_HOUSEKEEPING_SECONDS = 0.1


class Request(NamedTuple):
    """What a peer has sent, the descriptor of its connection, and whether the peer may use a name."""

    peer: bytes
    frames: list[bytes]
    descriptor: int
    may_use: Callable[[str], bool]


class Router:
    """A ROUTER that is bound; in one thread.

    Args:
        options: Security and what else belongs to every socket.
        bind: Where.
        sndhwm: Messages that libzmq queues for one peer.
        most_bytes, most_frames: Of a message, and frames of a message, that an honest peer sends. Of a larger
            message no frames are given, so that its reader refuses it.
        prepare: Sets further options.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.

    Attributes:
        stuck: Whether something could not be sent because a queue is full; reset by its user.
    """

    def __init__(
        self,
        options: ProxyOptions,
        bind: Endpoints,
        sndhwm: int,
        most_bytes: int,
        most_frames: int,
        prepare: Callable[[zmq.Socket[bytes]], None] = lambda sock: None,
    ) -> None:
        def set_options(sock: zmq.Socket[bytes]) -> None:
            sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
            sock.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that comes again may have its name of before
            sock.setsockopt(zmq.MAXMSGSIZE, frame_limit(most_bytes))
            sock.setsockopt(zmq.RCVHWM, _RCVHWM)
            sock.setsockopt(zmq.SNDHWM, sndhwm)
            prepare(sock)

        self._opened = OpenSocket(proxy_socket(options, "ROUTER", bind), set_options)
        self.socket = self._opened.socket
        self._most_bytes = most_bytes
        self._most_frames = 1 + most_frames  # the first one says who
        self._unfinished = Unfinished(self._opened, most_bytes)
        self._rights = NameRights(options.allowed_clients)
        self._next_housekeeping = 0.0
        self._inbox: list[Request] = []
        self.stuck = False

    def receive(self) -> None:
        """Take what peers have sent; ``inbox`` gives it. To be called often: the connections do their work here."""
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
            self._opened.watch.update()
            self._unfinished.look()
        room = _MOST_INBOX_BYTES
        with suppress(zmq.Again):
            while len(self._inbox) < _MOST_REQUESTS and room > 0:
                peer, *frames = self._unfinished.receive(self._most_frames)
                last = (frames or [peer])[-1]
                size = sum(map(len, frames))
                room -= size
                taken = [frame.bytes for frame in frames] if size <= self._most_bytes else []
                self._inbox.append(Request(peer.bytes, taken, origin_of(last), self._rights.of(last)))

    def inbox(self) -> list[Request]:
        """What was received since the last call."""
        inbox, self._inbox = self._inbox, []
        return inbox

    def send(self, frames: list[Any]) -> bool:
        """Whether the message was taken, its first frame being the peer; never waits.

        Raises:
            zmq.ZMQError: EHOSTUNREACH: the peer is gone.
        """
        return self.send_tracked(frames) is not None

    def send_tracked(self, frames: list[Any]) -> zmq.MessageTracker | None:
        """The same; what is returned tells when libzmq has handed on the last frame. None if it was not taken.

        Large frames are not copied.
        """
        peer, *parts, last = frames
        for attempt in range(2):
            try:
                self.socket.send(
                    peer, zmq.SNDMORE | zmq.NOBLOCK
                )  # of a message only this frame can be refused
                break
            except zmq.Again:
                if attempt:
                    self.stuck = True
                    return None
                self.socket.getsockopt(zmq.EVENTS)  # libzmq may not have looked whether there is room
        for part in parts:
            self.socket.send(part, zmq.SNDMORE, copy=False)
        frame = zmq.Frame(last, track=True, copy=False, copy_threshold=0)
        self.socket.send(frame, copy=False)
        assert isinstance(frame.tracker, zmq.MessageTracker)
        return frame.tracker

    def give(self, outbox: Outbox, start: int, end: int) -> int:
        """Send rows whose first frame is the peer, as far as there is room; the row that found none, or ``end``.

        Raises:
            zmq.ZMQError: EHOSTUNREACH: the peer is gone.
        """
        reached = outbox.give(self.socket, start, end)
        self.stuck = self.stuck or reached < end
        return reached

    def close(self) -> None:
        self._opened.close(linger=0)
