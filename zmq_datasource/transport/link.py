"""Carries a session over a DEALER socket: receives, sends, and connects again when the session asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from zmq_datasource.errors import OptionError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.peers import PeerWatch
from zmq_datasource.transport.session import Session
from zmq_datasource.transport.spec import SocketSpec

# The longest time between two calls of a session's ``wake`` while no message comes.
TICK_SECONDS = 0.1


class Link:
    """A DEALER socket for one session. For one thread.

    Args:
        spec: The description of the DEALER.
        session: The conversation that it carries.
        prepare: Called with each new socket before it is connected.
    """

    def __init__(
        self,
        spec: SocketSpec,
        session: Session,
        prepare: Callable[[zmq.Socket[bytes]], object] = lambda _: None,
    ) -> None:
        self._spec, self._session, self._prepare = spec, session, prepare
        self._open: OpenSocket | None = None
        self._connections = 0
        self._bytes = 0
        self._next_count = 0.0
        self._faults = LimitedLog(__name__, "faults of connections")

    @property
    def is_open(self) -> bool:
        """Whether it is between ``open`` and ``close``."""
        return self._open is not None

    def open(self) -> None:
        """Create the socket and connect it, without waiting for the connection.

        Raises:
            OptionError, EndpointError: The socket cannot be opened like this.
        """
        self._open = OpenSocket(self._spec, self._prepare)
        self._connections = 0

    def close(self, linger: int) -> None:
        """Close the socket, if it is open, and wait up to ``linger`` milliseconds for its queued messages."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close(linger)

    @property
    def _opened(self) -> OpenSocket:
        assert self._open is not None, "call open() first"
        return self._open

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The DEALER. A redial replaces it."""
        return self._opened.socket

    @property
    def watch(self) -> PeerWatch:
        """The monitor of the DEALER. A redial replaces it."""
        return self._opened.watch

    def run_once(self, wait: float = TICK_SECONDS) -> None:
        """Give the session one message; if there is none, check the connection, wake the session, and wait for one.

        Args:
            wait: Seconds, at most ``TICK_SECONDS``.
        """
        if not self._take_one():
            self.keep_alive()
            if not self.socket.poll(max(1, round(min(wait, TICK_SECONDS) * 1000))) or self._session.redial:
                return
            self._take_one()

    def _take_one(self) -> bool:
        frames = self.receive()
        if frames is not None:
            self._session.receive(frames, time.monotonic())
            self.send_outbox()
        return frames is not None

    def keep_alive(self) -> None:
        """Check the connection, and wake the session."""
        self.check_connection()
        self._check_for_bytes()
        self._session.wake(time.monotonic())
        self.send_outbox()

    def receive_all(self) -> None:
        """Give the session all messages that have arrived, without waiting."""
        while (frames := self.receive()) is not None:
            self._session.receive(frames, time.monotonic())

    def receive(self) -> list[bytes] | None:
        """Receive one message without waiting; None if there is none, or if the session wants a new connection."""
        try:
            frames = self._opened.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        except BaseException:
            self._redial_after_interrupt()
            raise
        # While the session waits for a new connection, messages of the old one are discarded.
        return None if self._session.redial else frames

    def check_connection(self) -> None:
        """Read the monitor's events, connect again where libzmq does not, and tell the session of a new connection."""
        if self._session.redial:
            return
        watch = self._opened.watch
        try:
            watch.update()
        except BaseException:
            self._redial_after_interrupt()
            raise
        watch.redial()
        if watch.connections > self._connections:
            self._bytes = watch.open_connections().bytes_received()  # the bytes of a handshake do not count
            # The first connection is no news: the session's messages have waited for it. Neither is a connection beside
            # another one: it leads to a further address of the same peer.
            if self._connections and watch.peers <= 1:
                self._session.reconnected(time.monotonic())
            self._connections = watch.connections

    def _check_for_bytes(self) -> None:
        now = time.monotonic()
        if now >= self._next_count:
            self._next_count = now + TICK_SECONDS
            before, self._bytes = self._bytes, self._opened.watch.open_connections().bytes_received()
            if self._bytes > before:
                self._session.bytes_arrived(now)

    def send_outbox(self) -> None:
        """Send the session's messages while the socket has room, after a redial if the session asks for one."""
        session = self._session
        if session.redial:
            old = self._opened
            try:
                # Before the old socket is closed, because keys are read again, and there may be no free descriptor.
                self.open()
            except (OptionError, zmq.ZMQError) as e:
                self._faults.warn("connecting to %s again: %s", self._spec.endpoints, e)
                return
            session.redial = False
            old.close(linger=0)
        outbox = session.outbox
        try:
            while outbox:
                self._opened.socket.send_multipart(outbox[0], zmq.NOBLOCK, copy=False)
                outbox.popleft()
        except zmq.Again:
            session.blocked()
        except BaseException:
            self._redial_after_interrupt()
            raise

    def _redial_after_interrupt(self) -> None:
        """Replace a socket that Ctrl-C may have stopped between two frames: the next frames would join that message."""
        self._session.redial = True
        self._session.reconnected(time.monotonic())
