"""One socket of the doctor's, and what libzmq's monitor and the kernel tell of its connections."""

from __future__ import annotations

import os
import socket as stdlib_socket
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

import zmq
from zmq.utils.monitor import parse_monitor_message

from zmq_datasource.messages.framing import subscriptions
from zmq_datasource.options import ReadOptions
from zmq_datasource.transport.attach import attach
from zmq_datasource.transport.spec import SocketSpec, new_socket
from zmq_datasource.workbench.doctor import kernel
from zmq_datasource.workbench.doctor.facts import Buffers, Handshake

__all__ = ["Link"]

_FAILED = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_AUTH,
}
_WATCHED = (
    zmq.Event.CONNECTED
    | zmq.Event.ACCEPTED
    | zmq.Event.DISCONNECTED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_TURN_MS = 20
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
        self._binds = bool(options.bind)
        self._began = time.monotonic()
        self._streams: dict[int, stdlib_socket.socket] = {}
        self._shaking = 0
        self._waited = False
        self._state: str = "none"
        self._event: str | None = None
        self._seconds = 0.0
        self._failed_at: float | None = None
        self.connections = 0
        self.disconnects = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.socket = new_socket(self._context, SocketSpec.of_source(options))
        except BaseException:
            self._context.term()
            raise
        self._monitor = self.socket.get_monitor_socket(_WATCHED)
        # A monitor that is full stops libzmq's own thread.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        try:
            if options.socket_type == "SUB":
                for prefix in subscriptions(options.framing, options.topics):
                    self.socket.setsockopt(zmq.SUBSCRIBE, prefix)
            attach(self.socket, options.bind, options.connect)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hang_up(self) -> None:
        """End the connections early; nothing can be taken any more."""
        self.update()
        with suppress(zmq.ZMQError):  # gone already
            if self._binds:
                # The wildcards of the option are addresses by now.
                self.socket.unbind(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))
            else:
                self.socket.disconnect(str(self.options.connect[0]))
        self._release()

    def _release(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def close(self) -> None:
        """Hang up; what was not taken is dropped."""
        self._release()
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)
        self._context.term()

    def shake_hands(self, seconds: float) -> bool:
        """Wait until a handshake has succeeded or failed, or time is up; say whether it succeeded."""
        deadline = time.monotonic() + seconds
        while self._state != "succeeded":
            now = time.monotonic()
            if now >= deadline or (self._failed_at is not None and now >= self._failed_at):
                break
            self._monitor.poll(_TURN_MS)
            # A SUB that listens sends its subscriptions only while its thread touches it.
            self.socket.getsockopt(zmq.EVENTS)
            self.update()
        return self._state == "succeeded"

    def update(self) -> None:
        """Take in what the monitor has told; never waits."""
        with suppress(zmq.Again):
            while True:
                message = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                self._take(message["event"], int(message["value"]))

    def _take(self, event: int, value: int) -> None:
        now = time.monotonic()
        if event in (zmq.Event.CONNECTED, zmq.Event.ACCEPTED):
            self._shaking += 1
            self._waited = self._waited or (event == zmq.Event.ACCEPTED)
            # A handle of our own: libzmq's number may name another file by the time it is used.
            with suppress(OSError):
                self._streams[value] = stdlib_socket.socket(fileno=os.dup(value))
        elif event == zmq.Event.CONNECT_RETRIED:
            # Until the first success these say that nobody was there; later ones follow a break.
            self._waited = self._waited or self._state != "succeeded"
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._shaking = max(0, self._shaking - 1)
            self.connections += 1
            if self._state != "succeeded":
                self._seconds = now - self._began
            self._state, self._event = "succeeded", None
        elif event in _FAILED:
            self._shaking = max(0, self._shaking - 1)
            self._fail("failed", zmq.Event(event).name, now)
        elif event == zmq.Event.DISCONNECTED:
            # Before the peer sees the end of the stream, this handle must be closed too.
            if (stream := self._streams.pop(value, None)) is not None:
                stream.close()
            if self._shaking:
                self._shaking -= 1
                self._fail("hung_up", None, now)
            elif self._state == "succeeded":
                self.disconnects += 1

    def _fail(self, state: str, event: str | None, now: float) -> None:
        if self._state in ("succeeded", "failed"):
            return
        self._state, self._event, self._seconds = state, event, now - self._began
        if not self._binds and self._failed_at is None:
            self._failed_at = now + _SECOND_CHANCE_SECONDS

    @property
    def handshake(self) -> Handshake:
        """How it went so far."""
        return Handshake(
            state=self._state,  # type: ignore[arg-type]
            event=self._event,
            seconds=round(self._seconds, 6),
            waited=self._waited,
            connections=self.connections,
            disconnects=self.disconnects,
        )

    def kernel_bytes(self) -> tuple[int | None, int | None]:
        """Bytes waiting in the kernel, over all connections: in our buffers, and in the peers' send buffers.

        None where it cannot be known: a peer on another machine shows nothing.
        """
        self.update()
        ours = [kernel.queued(stream) for stream in self._streams.values()]
        theirs = [kernel.peer_queued(stream) for stream in self._streams.values()]
        return _sum(ours), _sum(theirs)

    @property
    def buffers(self) -> Buffers:
        """Our own end, read back, and what waits in the kernel now."""
        ours, theirs = self.kernel_bytes()
        sizes: tuple[int | None, int | None] = (None, None)
        for stream in self._streams.values():
            with suppress(OSError):
                sizes = kernel.buffer_sizes(stream)
        return Buffers(
            rcvhwm=int(self.socket.getsockopt(zmq.RCVHWM)),
            rcvbuf=sizes[0],
            sndbuf=sizes[1],
            queued=ours,
            peer_queued=theirs,
        )


def _sum(figures: list[int | None]) -> int | None:
    if not figures or any(figure is None for figure in figures):
        return None
    return sum(figure for figure in figures if figure is not None)
