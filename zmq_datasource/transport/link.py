"""A session is one side of a conversation over DEALER, as a state machine; a link carries it over a socket.

A session has no socket, no clock and no thread: it is given messages and the time, and gives messages. So every
order of loss, delay and silence can be tried in a moment. What sockets and connections do is the link's alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from zmq_datasource.errors import OptionError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.transport.kernel import bytes_received
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.peers import PeerWatch
from zmq_datasource.transport.spec import SocketSpec, new_socket

__all__ = ["TICK_SECONDS", "Link", "Session"]

# How long a session goes without being woken, and so how late it may notice that something is due.
TICK_SECONDS = 0.1
# More bytes than the heartbeats of both sides have in that time. libzmq's own thread answers them, also for a program
# that is stuck or has dropped a message.
_MOST_HEARTBEAT_BYTES = 256


class Session:
    """One side of a conversation. Times are seconds, monotonic.

    Attributes:
        outbox: Messages to be sent, oldest first, each as its frames. The link takes them out as they leave.
        redial: Whether the link is to open a new connection before it sends them, and forget what the old one has
            not brought yet; the link resets it.
    """

    def __init__(self) -> None:
        self.outbox: deque[Sequence[Any]] = deque()
        self.redial = False

    def receive(self, frames: list[bytes], now: float) -> None:
        """Take a message that has come."""
        raise NotImplementedError

    def wake(self, now: float) -> None:
        """No message is there: do what is due. Called every ``TICK_SECONDS`` then."""

    def connected(self, now: float) -> None:
        """libzmq has made the connection anew: the peer may not know who this is, and what was sent may be lost."""

    def alive(self, now: float) -> None:
        """Bytes have come, more than heartbeats have: perhaps of a message that is not whole yet."""

    def blocked(self) -> None:
        """The socket takes nothing more at present; what is left in ``outbox`` is tried again."""


class Link:
    """A DEALER and its connection, for one session; in one thread.

    Args:
        spec: What the DEALER is to be.
        session: What it carries.
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
        self._next_look = 0.0
        self._faults = LimitedLog(__name__, "faults of connections")

    def open(self, check_hosts: bool = True) -> None:
        """Connect, without waiting for the connection.

        Raises:
            OptionError, EndpointError: It cannot be opened as asked.
        """
        self._open = OpenSocket(self._spec, self._prepare, check_hosts)
        self._connections = 0

    def close(self, linger: int) -> None:
        """Close, after up to ``linger`` milliseconds for what is queued; if it is open."""
        if self._open is not None:
            self._open.close(linger)
            self._open = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @property
    def _opened(self) -> OpenSocket:
        assert self._open is not None, "use it in a with block"
        return self._open

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The DEALER; it is replaced whenever the session asks to redial."""
        return self._opened.socket

    @property
    def watch(self) -> PeerWatch:
        return self._opened.watch

    def carry(self, wait: float = TICK_SECONDS) -> None:
        """One turn: give the session a message; if none is there, see to the connection and wait for one.

        Args:
            wait: Seconds, ``TICK_SECONDS`` at most.
        """
        frames = self.receive()
        if frames is None:
            self.look()
            self._look_for_bytes()
            self._session.wake(time.monotonic())
            self.send()
            if not self.socket.poll(max(1, round(min(wait, TICK_SECONDS) * 1000))) or self._session.redial:
                return
            frames = self.receive()
            if frames is None:
                return
        self._session.receive(frames, time.monotonic())
        self.send()

    def take(self) -> None:
        """Give the session what is there, without waiting."""
        while (frames := self.receive()) is not None:
            self._session.receive(frames, time.monotonic())

    def receive(self) -> list[bytes] | None:
        """Receive a message, if there is one."""
        try:
            frames = self._opened.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        except BaseException:
            self._begin_anew()
            raise
        # While the session waits for a new connection, what comes by the old one is forgotten.
        return None if self._session.redial else frames

    def look(self) -> None:
        """See to the connection: libzmq's own, which is dialled again where libzmq does not."""
        watch = self._opened.watch
        watch.update()
        watch.redial()
        if watch.connections > self._connections:
            self._bytes = bytes_received(watch)  # a handshake is no sign of life of the peer's own thread
            # The session knows of the first one: what it has sent waited for that. One that comes beside another leads
            # to a further address of the same peer.
            if self._connections and watch.peers <= 1:
                self._session.connected(time.monotonic())
            self._connections = watch.connections

    def _look_for_bytes(self) -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + TICK_SECONDS
            before, self._bytes = self._bytes, bytes_received(self._opened.watch)
            # It falls where a connection ends, which is no sign of life either.
            if self._bytes > before + _MOST_HEARTBEAT_BYTES:
                self._session.alive(now)

    def send(self) -> None:
        """Send what the session has to say, as far as the socket takes it."""
        session = self._session
        if session.redial:
            try:
                # Keys are read anew, and there may be no free descriptor. Without the old one there would be no socket.
                new_socket(self.socket.context, self._spec).close(linger=0)
            except (OptionError, zmq.ZMQError) as e:
                self._faults.warn("connecting to %s again: %s", self._spec.endpoints, e)
                return
            session.redial = False
            self.close(linger=0)
            # A name that does not resolve (any more) is libzmq's to try again.
            self.open(check_hosts=False)
        outbox = session.outbox
        try:
            while outbox:
                self._opened.socket.send_multipart(outbox[0], zmq.NOBLOCK, copy=False)
                outbox.popleft()
        except zmq.Again:
            session.blocked()
        except BaseException:
            self._begin_anew()
            raise

    def _begin_anew(self) -> None:
        """After Ctrl-C, perhaps between two frames: what followed on this socket would belong to that message."""
        self._session.redial = True
        self._session.connected(time.monotonic())
