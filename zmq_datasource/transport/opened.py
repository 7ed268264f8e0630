"""A socket with a context of its own: opened, watched, flushed, and closed once its messages have left."""

from __future__ import annotations

import errno
import math
import socket as stdlib_socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress

import zmq

from zmq_datasource.errors import EndpointError
from zmq_datasource.host.signals import check_signals
from zmq_datasource.options.socket import Endpoint
from zmq_datasource.transport.authentication import authenticate
from zmq_datasource.transport.connections import ended, threads, wait_until_written
from zmq_datasource.transport.peers import PeerWatch
from zmq_datasource.transport.spec import SocketSpec, new_socket

# Longer than a stopped query drains its sockets (``source.receiver``).
BIND_SECONDS = 8.0
_BIND_TICK = 0.05

# libzmq's timers may fire some milliseconds early. Without this margin, a socket that libzmq closes at the end of its
# linger would seem to be closed because it had nothing left.
_MARGIN_MS = 50
# How long a socket that cannot be opened may take to close.
_DESTROY_SECONDS = 1.0


class OpenSocket:
    """Opens a socket in a new context, with its monitor and its authenticator, and closes all of them together.

    Args:
        spec: The socket's type, options and endpoints.
        prepare: Called with the socket before it is bound or connected.

    Raises:
        OptionError, EndpointError: The socket cannot be opened like this; nothing stays open.
    """

    def __init__(
        self,
        spec: SocketSpec,
        prepare: Callable[[zmq.Socket[bytes]], object] = lambda _: None,
    ) -> None:
        others = threads()  # other contexts have I/O threads too, which may always be busy
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = None
        try:
            self.socket = new_socket(self._context, spec)
            self.watch = PeerWatch(self._context, self.socket, spec)
            self._threads = threads() - others
            self._authenticator = authenticate(self._context, spec)
            prepare(self.socket)
            attach(self.socket, spec.bind, spec.connect)
        except BaseException:  # also Ctrl-C between any two of these
            if self._authenticator is not None:
                self._authenticator.stop()
            # This closes every socket, also those that pyzmq's handler leaves open if it cannot start. Ctrl-C may have
            # left one to the garbage collector: libzmq waits for that, and the caller does not.
            closing = threading.Thread(target=self._context.destroy, kwargs={"linger": 0}, daemon=True)
            closing.start()
            closing.join(_DESTROY_SECONDS)
            raise

    def close(self, linger: int) -> bool:
        """Close the socket, and wait up to ``linger`` milliseconds (-1: without limit) for its queued messages.

        libzmq's own linger waits until its queues are empty, but loses up to 8 kB that it has taken from a queue and
        could not write because the kernel's buffer was full: the last messages to a slow consumer. So this waits
        for the kernel first.

        Returns:
            Whether all messages have left. libzmq does not say so, but it closes before the end of its linger only
            if every queue is empty.
        """
        deadline = math.inf if linger < 0 else time.monotonic() + linger / 1000
        with ExitStack() as stack:
            socks = self._handles(stack) if linger else []
            written = not socks or wait_until_written(socks, self._threads, most=deadline - time.monotonic())
            left = 0 if linger < 0 else deadline - time.monotonic()
            self.socket.close(-1 if linger < 0 else round(left * 1000) + _MARGIN_MS if left > 0 else 0)
            # A connection that ends during the linger takes its messages along, and libzmq does not connect again.
            self.watch.update_until_closed(deadline)
            self.watch.close()
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.term()
            streams = [sock for sock in socks if sock.family == stdlib_socket.AF_UNIX]
            read = _end_streams(streams, deadline)
        return written and read and time.monotonic() < deadline

    def wait_until_flushed(self, stall_seconds: float, most: float = math.inf, quiet: float = 0.0) -> bool:
        """Wait until libzmq's and the kernel's queues are empty for ``quiet`` seconds. Then rows count as sent.

        Queues of connections that libzmq is making again are not included.

        Args:
            stall_seconds: Seconds to wait while the peers take nothing.
            most: Seconds to wait in all.

        Returns:
            Whether the queues are empty, and no connection has ended meanwhile.
        """
        with ExitStack() as stack:
            socks = self._handles(stack)
            written = wait_until_written(socks, self._threads, most=most, stall=stall_seconds, quiet=quiet)
            return written and not any(map(ended, socks))

    def _handles(self, stack: ExitStack) -> list[stdlib_socket.socket]:
        return [stack.enter_context(sock) for sock in self.watch.open_connections().handles()]


def _end_streams(socks: Sequence[stdlib_socket.socket], deadline: float) -> bool:
    """End these ipc connections for sending, and wait until each peer has read everything and hung up.

    If a unix socket is closed instead, the peer learns it at once, even with unread data; its libzmq then drops this
    data if its own queue is full. Over tcp the end comes after the data.

    Returns:
        Whether all peers have read everything by the deadline.
    """
    for sock in socks:
        with suppress(OSError):  # the peer has hung up already
            sock.shutdown(stdlib_socket.SHUT_WR)
    return all(ended(sock, wait=deadline - time.monotonic()) for sock in socks)


def attach(sock: zmq.Socket[bytes], bind: Iterable[Endpoint], connect: Iterable[Endpoint]) -> None:
    """Bind and connect a socket. libzmq resolves hosts later, and again and again.

    Raises:
        EndpointError: An endpoint is in use, or not an address of this machine.
    """
    for endpoint in bind:
        try:
            bind_when_free(sock, endpoint)
        except zmq.ZMQError as e:
            hints = {
                zmq.EADDRINUSE: f"another process or another query of this job has used it for {BIND_SECONDS:g} s; "
                "use another port, or stop that one first",
                errno.ENODEV: "bind takes an IP address or interface of this machine, or *, but no host name",
                zmq.EADDRNOTAVAIL: "it is not an address of this machine; use * for all of them",
                errno.EACCES: "this user may not; use a port from 1024 on, or another directory",
            }
            hint = hints.get(e.errno or 0)
            raise EndpointError(f"binding {endpoint}: {e.strerror}{f'; {hint}' if hint else ''}") from e
    for endpoint in connect:
        try:
            sock.connect(str(endpoint))
        except zmq.ZMQError as e:
            raise EndpointError(f"connecting to {endpoint}: {e.strerror}; write tcp://host:port") from e


def bind_when_free(sock: zmq.Socket[bytes], endpoint: Endpoint) -> None:
    """Bind an endpoint; if it is in use, wait up to ``BIND_SECONDS``, because its last user may still be stopping.

    Raises:
        EndpointError: Another process listens at a path.
        ZMQError: The endpoint cannot be bound.
    """
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            _refuse_ipc_in_use(endpoint)
            sock.bind(str(endpoint))
            return
        except (EndpointError, zmq.ZMQError) as e:
            in_use = not isinstance(e, zmq.ZMQError) or e.errno == zmq.EADDRINUSE
            if not in_use or time.monotonic() >= deadline:
                raise
        check_signals()
        time.sleep(_BIND_TICK)


def _refuse_ipc_in_use(endpoint: Endpoint) -> None:
    """Refuse a path with a listener: libzmq would take it over, and the listener would get no more connections."""
    if endpoint.transport != "ipc":
        return
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as probe:
        probe.setblocking(False)  # connecting to a listener that hangs would block once its backlog is full
        try:
            probe.connect(endpoint.unix_address)
        except BlockingIOError:
            pass
        except OSError:  # no listener, or an error that bind reports too
            return
    raise EndpointError(f"binding {endpoint}: another process listens there; use another path")
