"""One socket of the doctor's, and what libzmq's monitor and the kernel tell of its connections."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from socket import SO_RCVBUF, SO_SNDBUF, SOL_SOCKET
from typing import Literal, Self

import zmq

from zmq_datasource.messages.framing import subscriptions
from zmq_datasource.messages.raw import RawMessage
from zmq_datasource.options import ReadOptions
from zmq_datasource.transport.kernel import unread, unsent_by_peer
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec
from zmq_datasource.workbench.doctor.facts import Buffers, Handshake

__all__ = ["ROUND", "TURN_MS", "Link"]

ROUND = 512
TURN_MS = 20
# A handshake that failed is given so long to go well after all: its peer may be starting.
_SECOND_CHANCE_SECONDS = 0.3


class Link:
    """A socket of its own context, attached as the options say; use it in a ``with`` block.

    Args:
        options: Of the source, with one endpoint.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self._began = time.monotonic()
        self._shaken_at: float | None = None
        self._failed_at: float | None = None  # for the first time
        self._opened = OpenSocket(SocketSpec.of_source(options), self._subscribe)
        self.socket, self._watch = self._opened.socket, self._opened.watch

    def _subscribe(self, sock: zmq.Socket[bytes]) -> None:
        if self.options.socket_type == "SUB":
            for prefix in subscriptions(self.options.framing, self.options.topics):
                sock.setsockopt(zmq.SUBSCRIBE, prefix)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up; what was not taken is dropped."""
        self._opened.close(linger=0)

    def hang_up(self) -> None:
        """End the connections early; nothing can be taken any more."""
        self.update()
        with suppress(zmq.ZMQError):  # gone already
            if self.options.bind:
                # The wildcards of the option are addresses by now.
                self.socket.unbind(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))
            else:
                self.socket.disconnect(str(self.options.connect[0]))

    def shake_hands(self, seconds: float) -> bool:
        """Wait until a handshake has succeeded or failed, or time is up; say whether it succeeded."""
        deadline = time.monotonic() + seconds
        while not self._watch.connections and time.monotonic() < deadline:
            if self._failed_at is not None and not self.options.bind:
                deadline = min(deadline, self._failed_at + _SECOND_CHANCE_SECONDS)
            self._watch.monitor.poll(TURN_MS)
            # A SUB that listens sends its subscriptions only while its thread touches it.
            self.socket.getsockopt(zmq.EVENTS)
            self.update()
        return bool(self._watch.connections)

    def update(self) -> None:
        """Take in what the monitor has reported; never waits."""
        self._watch.update()
        if self._watch.connections and self._shaken_at is None:
            self._shaken_at = time.monotonic()
        if self._watch.failures and self._failed_at is None:
            self._failed_at = time.monotonic()

    def receive(self, most: int = ROUND) -> list[RawMessage]:
        """What is there, without waiting, up to ``most`` messages."""
        messages: list[RawMessage] = []
        with suppress(zmq.Again):
            while len(messages) < most:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
                messages.append(frames[0] if len(frames) == 1 else frames)
        return messages

    @property
    def disconnects(self) -> int:
        """Connections that were up and ended."""
        return self._watch.lost

    @property
    def handshake(self) -> Handshake:
        """How the handshake went so far."""
        watch = self._watch
        failure = None if watch.connections else watch.failure
        unshaken: Literal["failed", "hung_up", "none"] = (
            "failed" if failure is not None else "hung_up" if watch.failures else "none"
        )
        return Handshake(
            state="succeeded" if watch.connections else unshaken,
            event=None if failure is None else failure.name,
            seconds=round((self._shaken_at or self._failed_at or self._began) - self._began, 6),
            waited=watch.waited or bool(self.options.bind and watch.connections),
            connections=watch.connections,
            disconnects=watch.lost,
        )

    def kernel_bytes(self) -> tuple[int | None, int | None]:
        """Bytes waiting in the kernel, over all connections: in our buffers, and in the peers' send buffers.

        None where it cannot be known: a peer on another machine shows nothing.
        """
        with ExitStack() as stack:
            streams = [stack.enter_context(stream) for stream, _ in self._watch.handles()]
            return _sum(list(map(unread, streams))), _sum(list(map(unsent_by_peer, streams)))

    @property
    def buffers(self) -> Buffers:
        """Our own end, read back, and what waits in the kernel now."""
        ours, theirs = self.kernel_bytes()
        rcvbuf = sndbuf = None
        for stream, _ in self._watch.handles():
            with stream:
                rcvbuf = stream.getsockopt(SOL_SOCKET, SO_RCVBUF)
                sndbuf = stream.getsockopt(SOL_SOCKET, SO_SNDBUF)
        return Buffers(
            rcvhwm=int(self.socket.getsockopt(zmq.RCVHWM)),
            rcvbuf=rcvbuf,
            sndbuf=sndbuf,
            queued=ours,
            peer_queued=theirs,
        )


def _sum(figures: list[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known and len(known) == len(figures) else None
