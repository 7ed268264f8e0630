"""The peers of a socket: which are up and which were refused, as libzmq's socket monitor reports it.

Unlike libzmq, this reports a peer that hangs up instead of shaking hands, and an endpoint where nothing answers. And it
connects again where libzmq does not (``Redialer``).
"""

from __future__ import annotations

import logging
import math
import socket as stdlib_socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from zmq_datasource.counters import SourceCounters
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.options.parser import ZmqOptions
from zmq_datasource.options.socket import Endpoint
from zmq_datasource.transport.connections import Connections, Handle, Handshakes, connect_to

_log = logging.getLogger(__name__)


class Redialer:
    """Connects the endpoints of one socket again where libzmq does not, and keeps what was received from them.

    libzmq gives up an endpoint if it takes the end of a connection for a fault of the peer: another mechanism or socket
    type, or a frame over MAXMSGSIZE. An endpoint to which libzmq connects again by itself (CONNECT_RETRIED) is left
    alone. ``disconnect`` throws away the messages that were received from an endpoint and not read, so this class waits
    until they are read. Times are monotonic seconds.

    Attributes:
        first_seconds, last_seconds: After a failed handshake: the delay before the next attempt, which doubles up to
            the last.
        lost_seconds: The delay after a connection that was up has ended.
        messages_read: Messages that the user of the socket has read.
    """

    first_seconds, last_seconds = 1.0, 30.0
    lost_seconds = 1.0

    def __init__(self, sock: zmq.Socket[bytes], connect: Sequence[Endpoint]) -> None:
        self._sock = sock
        self._connect = connect
        self._due: dict[str, tuple[float, float]] = {}  # by endpoint: when, and the delay
        self._lost: set[str] = set()  # endpoints that were connected, and are not any more
        # By endpoint: once ``messages_read`` is this, no message of its last connection is left in the socket.
        self._read_by: dict[str, int | float] = {}
        self._empty_at = 0.0
        self.messages_read = 0

    def after_failure(self, endpoint: str) -> None:
        """Plan the next attempt, because a handshake with an endpoint has failed."""
        _, delay = self._due.get(endpoint, (0.0, self.first_seconds / 2))
        delay = min(delay * 2, self.last_seconds)
        self._due[endpoint] = (time.monotonic() + delay, delay)

    def after_loss(self, endpoint: str) -> None:
        """Plan a connection, because one that was up has ended. Does so only for sockets that send nothing."""
        self._lost.add(endpoint)
        # disconnect would drop the messages that other sockets have queued for sending.
        if int(self._sock.type) in (zmq.SUB, zmq.XSUB, zmq.PULL):
            self._due[endpoint] = (time.monotonic() + self.lost_seconds, self.lost_seconds)

    def cancel(self, endpoint: str) -> None:
        """Plan nothing for an endpoint any more: libzmq connects to it by itself, or is connected."""
        self._due.pop(endpoint, None)
        self._lost.discard(endpoint)
        self._read_by.pop(endpoint, None)

    def note_empty(self) -> None:
        """Note that all messages of the socket are read now."""
        self._empty_at = time.monotonic()

    def dial(self, queues: int) -> int:
        """Connect to the endpoints that are due and have no unread messages.

        Args:
            queues: The most queues that libzmq keeps for the socket.

        Returns:
            How many connections libzmq has ended for good because of what their peer sent.
        """
        now, faults = time.monotonic(), 0
        for dialled in self._connect:
            endpoint = str(dialled)
            due, delay = self._due.get(endpoint, (math.inf, 0.0))
            if now < due:
                continue
            if endpoint in self._lost:
                self._lost.discard(endpoint)
                faults += 1
                _log.warning(
                    "libzmq has ended the connection to %s for what the peer sent: a frame over zmq.maxmsgsize (%d "
                    "bytes), or bytes that are not ZMTP. What was sent after it is lost; connecting again",
                    endpoint,
                    self._sock.getsockopt(zmq.MAXMSGSIZE),
                )
            if self._has_unread(endpoint, due, queues):
                continue
            self._read_by.pop(endpoint, None)
            self._due[endpoint] = (now + delay, delay)
            with suppress(zmq.ZMQError):  # it is not connected any more
                self._sock.disconnect(endpoint)
            connect_to(self._sock, dialled)
        return faults

    def _has_unread(self, endpoint: str, since: float, queues: int) -> bool:
        """Whether the socket may still have messages of a connection that ended before ``since``."""
        if self._empty_at >= since or not int(self._sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return False
        # Other peers may send so much that the socket is never empty. libzmq reads from its queues in turn, and none
        # holds more than the high-water mark: after this number of messages it has read all that this queue held.
        hwm = int(self._sock.getsockopt(zmq.RCVHWM)) or math.inf
        return self.messages_read < self._read_by.setdefault(
            endpoint, self.messages_read + queues * (hwm + 1)
        )


# A greeting takes one round trip. Connections that are younger are not examined.
_GREETING_SECONDS = 0.5

_HANDSHAKE_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_AUTH,
)
_HUNG_UP = (
    "the peer hung up during the handshake; its socket type does not match ours, or its security does not"
)
_REFUSED_HERE = "its credentials were refused (option allowedClients)"
_BROKEN_OFF = {
    "CURVE": "the handshake was broken off: a wrong CURVE key, a peer without CURVE, or one that has gone",
    "PLAIN": (
        "the handshake was broken off: a peer without PLAIN, one that cannot check passwords (no ZAP handler), or one "
        "that has gone"
    ),
    "": "the handshake was broken off: the peer is no ZeroMQ socket, wants security (none is set here), or has gone",
}
_OTHER_SECURITY = {
    "CURVE": "the peer uses other security than CURVE, or CURVE with other keys",
    "PLAIN": "the peer uses other security than PLAIN",
    "": "the peer wants security, and none is set here; see the options that begin with 'zmq.' (docs/options.md)",
}


def security_of(options: ZmqOptions) -> str:
    """The security mechanism that the options choose, CURVE or PLAIN; empty for none."""
    for word in ("CURVE", "PLAIN"):
        if any(name.startswith(f"{word.lower()}_") for name in options):
            return word
    return ""


def _why_failed(event: int, value: int, security: str) -> str:
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        return "the peer refused our credentials"
    if event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
        return _BROKEN_OFF[security]
    if value in (zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH, zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC):
        return _OTHER_SECURITY[security]
    return "the peer speaks another protocol, or its socket type does not match ours"


_EVENTS = (
    zmq.Event.CONNECTED
    | zmq.Event.ACCEPTED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.MONITOR_STOPPED
)


class _EndpointNames:
    """Finds the endpoint as the user has written it, because after a reconnect libzmq names the host's address."""

    def __init__(self, connect: Sequence[Endpoint], bound: bool) -> None:
        self._connect = connect
        self._bound = bound
        self._known = {str(endpoint): str(endpoint) for endpoint in connect}

    def find(self, named: str) -> str:
        if named not in self._known:
            found = next((str(endpoint) for endpoint in self._connect if _is_at(endpoint, named)), None)
            if found is None and len(self._connect) == 1 and not self._bound:
                found = str(self._connect[0])  # the address of a host has changed
            self._known[named] = found or named
        return self._known[named]


def _is_at(ours: Endpoint, named: str) -> bool:
    """Whether libzmq's name of a connection means our endpoint."""
    if ours.transport != "tcp" or not named.startswith("tcp://"):
        return False
    host, port = ours.host_port
    address, _, named_port = named.removeprefix("tcp://").rpartition(":")
    if named_port != str(port):
        return False
    with suppress(OSError):
        found = stdlib_socket.getaddrinfo(host, port, type=stdlib_socket.SOCK_STREAM)
        return address.strip("[]") in {where[4][0] for where in found}
    return False


def socket_type(sock: zmq.Socket[bytes]) -> str:
    """The name of a socket's type, such as PULL, for messages."""
    return zmq.SocketType(int(sock.type)).name


class PeerWatch:
    """Follows the events of a socket's monitor, and logs changes.

    Not thread-safe: for the thread that uses the socket. Create it before ``attach``.

    Attributes:
        absent_seconds: The time without an answer after which an endpoint is reported.
        monitor: A socket that is readable when ``update`` has something to do.
        handshakes: Which connections have shaken hands.
        redialer: Connects again where libzmq does not.
        up: By endpoint, the number of connections that have shaken hands.
        refused: By endpoint, why its last handshake has failed.
        connections: Handshakes that have succeeded, in all.
        failures: Handshakes that have failed, in all.
        failure: libzmq's event of the last failed handshake; None if the peer has only hung up.
        lost: Connections that were up and have ended.
        possibly_lost: The same, and those that have ended while it was unknown whether they were up.
        protocol_errors: Connections that were ended because of what the peer sent.
    """

    absent_seconds = 5.0

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        sock: zmq.Socket[bytes],
        connect: Sequence[Endpoint],
        bound: bool,
        security: str,
    ) -> None:
        self._sock = sock
        self._kind = socket_type(sock)
        self._connect = [str(endpoint) for endpoint in connect]
        self._names = _EndpointNames(connect, bound)
        self._security = security
        address = f"inproc://monitor-{uuid.uuid4().hex}"
        sock.monitor(address, _EVENTS)
        self.monitor = context.socket(zmq.PAIR)
        # Unbounded, because a full queue would stop libzmq's own thread.
        self.monitor.setsockopt(zmq.RCVHWM, 0)
        self.monitor.connect(address)
        self._stopped = False
        # After this libzmq ends the connection of a peer that should shake hands. Read now: ``update`` is also called
        # when the socket is closed.
        most = int(sock.getsockopt(zmq.HANDSHAKE_IVL)) / 1000
        self._longest_handshake = most + 1 if most else math.inf
        self._open = Connections()
        self.handshakes = Handshakes()
        self.redialer = Redialer(sock, connect)
        self._refusals = LimitedLog(__name__, "handshakes that failed")
        self._absent_since: dict[str, float] = {}  # infinity: it is reported already
        self.up: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.connections = self.failures = self.lost = self.possibly_lost = self.protocol_errors = 0
        self.failure: zmq.Event | None = None
        self._unclear: dict[str, int] = {}  # the value of a failure, by endpoint, until its connection ends

    @property
    def peers(self) -> int:
        """The number of connections that have shaken hands and are still up."""
        return sum(self.up.values())

    @property
    def queues(self) -> int:
        """The most queues that libzmq keeps for the socket, including those of ended connections."""
        return self.connections + len(self._connect)

    def update(self) -> None:
        """Read the events since the last call. Never waits."""
        self._refusals.flush()
        with suppress(zmq.Again):
            while True:
                message = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
                endpoint = self._names.find(message["endpoint"].decode())
                self._read(message["event"], endpoint, int(message["value"]))
        self._find_older_peers()

    def _find_older_peers(self) -> None:
        """Count the peers of ZMTP 1 and 2 as up. libzmq reports a handshake only for ZMTP 3."""
        for endpoint, descriptor, seconds in self.handshakes.slow(_GREETING_SECONDS):
            if seconds > self._longest_handshake or self._open.speaks_older_zmtp(descriptor):
                self.handshakes.needs_none(endpoint, descriptor)
                self._come_up(endpoint)

    def _read(self, event: int, endpoint: str, value: int) -> None:
        # For CONNECTED, ACCEPTED and DISCONNECTED the value is the file descriptor; handshake events carry none.
        if event == zmq.Event.MONITOR_STOPPED:
            self._stopped = True
        elif event in (zmq.Event.CONNECTED, zmq.Event.ACCEPTED):
            self.handshakes.connected(endpoint, value)
            self._open.add(value, endpoint)
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.handshakes.succeeded(endpoint)
            self._come_up(endpoint)
        elif event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL and self.handshakes.has_older(endpoint):
            # libzmq also reports this when a peer of ZMTP 1 or 2 leaves. The end of the connection, which follows,
            # tells whose it was.
            self._unclear[endpoint] = value
        elif event in _HANDSHAKE_FAILURES:
            self._fail(endpoint, event, value)
        elif event == zmq.Event.DISCONNECTED:
            unclear = self._unclear.pop(endpoint, None)
            if unclear is not None and not self.handshakes.is_older(value):
                self._fail(endpoint, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, unclear)
            self._open.remove(value)
            end = self.handshakes.ended(endpoint, value)
            self.possibly_lost += end.may_have_been_up
            if end.hung_up:
                self._refuse(endpoint, _HUNG_UP)
            elif end.was_up:
                self._lose(endpoint)
        elif event == zmq.Event.CONNECT_RETRIED:
            self.redialer.cancel(endpoint)

    def _fail(self, endpoint: str, event: int, value: int) -> None:
        self.handshakes.failed(endpoint)
        self.failure = zmq.Event(event)
        ours = event == zmq.Event.HANDSHAKE_FAILED_AUTH and endpoint not in self._connect
        self._refuse(endpoint, _REFUSED_HERE if ours else _why_failed(event, value, self._security))

    def _come_up(self, endpoint: str) -> None:
        self.up[endpoint] = self.up.get(endpoint, 0) + 1
        self.connections += 1
        self.refused.pop(endpoint, None)
        self.redialer.cancel(endpoint)
        self._log("peer up", endpoint)

    def _lose(self, endpoint: str) -> None:
        if not self.up.get(endpoint, 0):
            return
        self.up[endpoint] -= 1
        self.lost += 1
        self.possibly_lost += 1
        self.redialer.after_loss(endpoint)
        self._log("peer down", endpoint)

    def _refuse(self, endpoint: str, reason: str) -> None:
        if self.refused.get(endpoint) != reason:
            # Strangers may connect to a bound endpoint as often as they like, so these lines are limited.
            warn = _log.warning if endpoint in self._connect else self._refusals.warn
            warn("no handshake with %s: %s", endpoint, reason)
        self.refused[endpoint] = reason
        self.failures += 1
        self.redialer.after_failure(endpoint)

    def _log(self, what: str, endpoint: str) -> None:
        # Only DEBUG for other sockets, because the connections of a sink come and go with its tasks.
        level = logging.INFO if self._kind in ("SUB", "XSUB", "PULL") else logging.DEBUG
        _log.log(level, "%s: %s %s", what, self._kind, endpoint)

    def report_absent(self, leaving: bool = False) -> None:
        """Warn once of each endpoint that does not answer; libzmq tries it for ever in silence.

        Args:
            leaving: The caller waits no longer, so warn of every endpoint that has not answered yet.
        """
        now = time.monotonic()
        patience = 0.0 if leaving else self.absent_seconds
        for endpoint in self._connect:
            if self.up.get(endpoint) or endpoint in self.refused:
                self._absent_since.pop(endpoint, None)
                continue
            waited = now - self._absent_since.setdefault(endpoint, now)
            if waited >= patience:
                self._absent_since[endpoint] = math.inf
                _log.warning(
                    "no answer at %s for %.1f s; is the endpoint right, and does its publisher run?",
                    endpoint,
                    waited,
                )

    def redial(self) -> None:
        """Connect again where libzmq does not, if it is time. Called in each round of the socket's thread."""
        self.protocol_errors += self.redialer.dial(self.queues)

    def open_connections(self) -> Connections:
        """The connections that are up, after an ``update``."""
        self.update()
        return self._open

    def handles(self) -> list[Handle]:
        """Second handles on the connections that are up; see ``Connections.handles``."""
        self.update()
        return self._open.handles()

    def inode(self, descriptor: int) -> int | None:
        """The inode of the connection with this descriptor, without an ``update``; None if it is gone."""
        return self._open.inode(descriptor)

    def update_until_closed(self, deadline: float) -> None:
        """After the socket was closed: read events until libzmq has let go of it, or until a monotonic time."""
        while not self._stopped and (left := deadline - time.monotonic()) > 0:
            self.monitor.poll(None if left == math.inf else math.ceil(left * 1000))
            self.update()

    def close(self) -> None:
        """Stop monitoring."""
        if not self._sock.closed:
            self._sock.monitor(None, 0)
        self.monitor.close(linger=0)


def count_connections(counters: SourceCounters, watches: Sequence[PeerWatch]) -> None:
    """Copy the figures of the watches to counters that other threads read."""
    counters.connections = sum(watch.peers for watch in watches)
    counters.connections_made = sum(watch.connections for watch in watches)
    counters.connections_lost = sum(watch.lost for watch in watches)
    counters.handshake_failures = sum(watch.failures for watch in watches)
    counters.protocol_errors = sum(watch.protocol_errors for watch in watches)
