"""A socket of a context of its own: opened, watched, and closed only when what it was given has left."""

from __future__ import annotations

import logging
import math
import os
import socket as stdlib_socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import zmq

from zmq_datasource.transport.attach import attach
from zmq_datasource.transport.authentication import authenticate
from zmq_datasource.transport.kernel import (
    LOOK_SECONDS,
    LOOKS,
    ended,
    ended_in_order,
    io_threads_sleep,
    passed,
    threads,
    unwritten,
    wait_until_written,
)
from zmq_datasource.transport.peers import PeerWatch, security_of
from zmq_datasource.transport.spec import SocketSpec, new_socket, options_of

__all__ = ["OpenSocket"]

_log = logging.getLogger(__name__)

_ALL_INTERFACES = ("*", "0.0.0.0", "::")
_warned: set[str] = set()

# libzmq's timers may fire some milliseconds before the clock says so. A socket that was closed because its time was up
# would then pass for one that had nothing left.
_LATER_MS = 50


class OpenSocket:
    """A socket of its own context, watched and attached; closed as a whole.

    Args:
        spec: What it is to be.
        prepare: Called with the socket before it is bound or connected.
        check_hosts: Whether to refuse a host that does not resolve, which takes a moment.

    Attributes:
        lost: Whether a connection ended while this closed, and perhaps with something in it.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked; nothing stays open.
    """

    def __init__(
        self,
        spec: SocketSpec,
        prepare: Callable[[zmq.Socket[bytes]], object] = lambda _: None,
        check_hosts: bool = True,
    ) -> None:
        others = threads()  # of other contexts, which may always be busy
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.socket = new_socket(self._context, spec)
        except BaseException:
            self._context.term()
            raise
        self.watch = PeerWatch(
            self._context, self.socket, spec.connect, bool(spec.bind), security_of(options_of(spec))
        )
        self._threads = threads() - others
        self.lost = False
        self._authenticator = None
        try:
            self._authenticator = authenticate(self._context, spec)
            _warn_of_strangers(spec)
            prepare(self.socket)
            attach(self.socket, spec.bind, spec.connect, check_hosts)
        except BaseException:
            self.close(linger=0)
            raise

    @property
    def closed(self) -> bool:
        return bool(self.socket.closed)

    def close(self, linger: int, before: Sequence[tuple[stdlib_socket.socket, bool]] = ()) -> bool:
        """Close, and wait up to ``linger`` milliseconds (-1: for ever) for what is queued.

        libzmq's own linger waits until its queues are empty, but forgets up to 8 kB that it
        has taken from a queue and could not write because the kernel's buffer was full: the
        last messages to a slow consumer. So this waits for the kernel first.

        Args:
            before: Handles on connections that were up when somebody last looked, as ``PeerWatch.hold`` gives them.

        Returns:
            Whether all of it has left. libzmq does not say, but it closes in time only when every queue is empty: it
            is given a little longer than that.
        """
        deadline = math.inf if linger < 0 else time.monotonic() + linger / 1000
        with ExitStack() as stack:
            cut = self.watch.cut  # before one more is noticed, whose end nobody has looked at
            held = [(stack.enter_context(s), ipc) for s, ipc in self.watch.hold()] if linger else []
            written = wait_until_written([sock for sock, _ in held], deadline, self._threads)
            left = 0 if linger < 0 else deadline - time.monotonic()
            self.socket.close(-1 if linger < 0 else round(left * 1000) + _LATER_MS if left > 0 else 0)
            # A connection that is lost while libzmq lingers takes along what was in it, and is not made anew.
            self.watch.follow_to_the_end(deadline)
            self.watch.close()
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.term()
            streams = [sock for sock, ipc in held if ipc]
            read, broken = _end_streams(streams, deadline)
            again = {os.fstat(sock.fileno()).st_ino for sock, _ in held}
            if linger:  # else nobody waits for an answer of theirs
                held += [each for each in before if os.fstat(each[0].fileno()).st_ino not in again]
            self.lost = broken or not ended_in_order(held, self.watch.cut - cut)
        return written and read and time.monotonic() < deadline

    def settle(self, patience: float, most: float = math.inf, quiet: float = 0.003) -> bool:
        """Wait until libzmq's queues and the kernel's are empty, and stay so for ``quiet`` seconds.

        Those of connections that are being made anew are not looked at.

        Args:
            patience: How long to wait without any progress.
            most: How long in all.

        Returns:
            Whether they are, and no connection has ended by then.
        """
        looks = max(LOOKS, round(quiet / LOOK_SECONDS))
        with ExitStack() as stack:
            held = [(stack.enter_context(sock), ipc) for sock, ipc in self.watch.hold()]
            now = time.monotonic()
            end, deadline, empty, before = now + most, now + patience, 0, None
            while empty < looks:
                unsent = [unwritten(sock) for sock, _ in held]
                if any(unsent) or not io_threads_sleep(self._threads):
                    taken = [
                        passed(sock, ipc, left)[0] for (sock, ipc), left in zip(held, unsent, strict=True)
                    ]
                    empty = 0
                    if taken != before:
                        before, deadline = taken, time.monotonic() + patience
                    if time.monotonic() >= min(end, deadline):
                        return False
                else:
                    empty += 1
                time.sleep(LOOK_SECONDS)
            return not any(ended(sock) for sock, _ in held)


def _warn_of_strangers(spec: SocketSpec) -> None:
    """Say once if whoever reaches the machine may connect."""
    for endpoint in spec.bind:
        everywhere = endpoint.transport == "tcp" and endpoint.host_port[0] in _ALL_INTERFACES
        if everywhere and not security_of(options_of(spec)) and str(endpoint) not in _warned:
            _warned.add(str(endpoint))
            _log.warning(
                "%s %s is bound on all interfaces without security: whoever reaches this machine may connect. Bind one "
                "address, or set keys (docs/security.md)",
                spec.kind,
                endpoint,
            )


def _end_streams(socks: Sequence[stdlib_socket.socket], deadline: float) -> tuple[bool, bool]:
    """Tell the peers that no more comes, and wait until each has read everything and hangs up.

    A unix socket that is closed tells the other side at once, even if that one still has unread
    data; libzmq then drops the data where the receiver's queue is full (up to 8 kB of what it
    has read, and all that it has not). Over tcp the peer learns of it only when it gets there.

    Returns:
        Whether all have hung up, and whether one did so before it had read everything.
    """
    for sock in socks:
        with suppress(OSError):  # the peer has hung up already
            sock.shutdown(stdlib_socket.SHUT_WR)
    broken = False
    for sock in socks:
        try:
            if not _hung_up(sock, deadline):
                return False, broken
        except OSError:
            broken = True
    return True, broken


def _hung_up(sock: stdlib_socket.socket, deadline: float) -> bool:
    try:
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(None if left == math.inf else left)
            if not sock.recv(4096):
                return True
    except TimeoutError:
        pass
    return False
