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
from zmq_datasource.options.socket import Endpoint
from zmq_datasource.transport.connections import Connections, End, Handshakes
from zmq_datasource.transport.spec import SocketSpec

_log = logging.getLogger(__name__)


class Redialer:
    """Connects the endpoints of one socket again where libzmq does not, and keeps what was received from them.

    libzmq gives up an endpoint if it takes the end of a connection for a fault of the peer: another mechanism or socket
    type, or a frame over MAXMSGSIZE. An endpoint to which libzmq connects again by itself (CONNECT_RETRIED) is left
    alone. ``disconnect`` throws away the messages that were received from an endpoint and not read, so this class first
    waits until the socket is empty.

    Attributes:
        seconds: How long after the end of a connection, or after the attempt before, it connects.
    """

    seconds = 1.0

    def __init__(self, sock: zmq.Socket[bytes], connect: Sequence[str]) -> None:
        self._sock = sock
        self._connect = connect
        self._due: dict[str, float] = {}  # monotonic
        self._lost: set[str] = set()  # endpoints that were connected, and are not any more
        self._empty_at = 0.0

    def plan(self, endpoint: str, is_lost: bool = False) -> None:
        """Plan an attempt, because a handshake with an endpoint has failed, or a connection that was up has ended."""
        self._due[endpoint] = time.monotonic() + self.seconds
        if is_lost:
            self._lost.add(endpoint)

    def cancel(self, endpoint: str) -> None:
        """Plan nothing for an endpoint any more: libzmq connects to it by itself, or is connected."""
        self._due.pop(endpoint, None)
        self._lost.discard(endpoint)

    def note_empty(self) -> None:
        """Note that all messages of the socket are read now."""
        self._empty_at = time.monotonic()

    def dial(self) -> int:
        """Connect to the endpoints that are due, once the socket was empty.

        Returns:
            How many connections libzmq has ended for good because of what their peer sent.
        """
        now, faults = time.monotonic(), 0
        for endpoint in self._connect:
            due = self._due.get(endpoint, math.inf)
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
            if self._empty_at < due and int(self._sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                continue
            self.plan(endpoint)
            with suppress(zmq.ZMQError):  # it is not connected any more
                self._sock.disconnect(endpoint)
            self._sock.connect(endpoint)
        return faults


_HANDSHAKE_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_EVENTS = (
    _HANDSHAKE_FAILURES
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.CONNECTED
    | zmq.Event.ACCEPTED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.DISCONNECTED
    | zmq.Event.MONITOR_STOPPED
)


_OTHER_SECURITY = (
    "the peer's security (CURVE, PLAIN, none) or its keys do not fit the options that begin with 'zmq.'"
)
_HUNG_UP = (
    "the peer hung up during the handshake; its socket type does not match ours, or its security does not"
)


class PeerWatch:
    """Follows the events of a socket's monitor, and logs changes.

    Not thread-safe: for the thread that uses the socket. Create it before ``attach``.

    Attributes:
        monitor: A socket that is readable when ``update`` has something to do.
        known: The connections that are up, as of the last ``update``.
        handshakes: Which connections have shaken hands.
        redialer: Connects again where libzmq does not.
        up: By endpoint, the number of connections that have shaken hands.
        refused: By endpoint, why its last handshake has failed.
        connections: Handshakes that have succeeded, in all.
        failures: Handshakes that have failed, in all.
        lost: Connections that were up and have ended.
        possibly_lost: The same, and those that have ended while it was unknown whether they were up.
        protocol_errors: Connections that were ended because of what the peer sent.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], sock: zmq.Socket[bytes], spec: SocketSpec
    ) -> None:
        self._sock = sock
        self._kind = zmq.SocketType(int(sock.type)).name
        self._only_receives = self._kind in ("SUB", "XSUB", "PULL")
        self._spec = spec
        self._ours = [str(endpoint) for endpoint in spec.connect]
        self._names = {endpoint: endpoint for endpoint in self._ours}
        address = f"inproc://monitor-{uuid.uuid4().hex}"
        sock.monitor(address, _EVENTS)
        self.monitor = context.socket(zmq.PAIR)
        # Unbounded, because a full queue would stop libzmq's own thread.
        self.monitor.setsockopt(zmq.RCVHWM, 0)
        self.monitor.connect(address)
        self._stopped = False
        self.known = Connections()
        self.handshakes = Handshakes()
        self.redialer = Redialer(sock, self._ours)
        self._refusals = LimitedLog(__name__, "handshakes that failed")
        self._since = time.monotonic()
        self._answered: set[str] = set()  # endpoints that are not reported as absent (any more)
        self.up: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.connections = self.failures = self.lost = self.possibly_lost = self.protocol_errors = 0

    @property
    def peers(self) -> int:
        """The number of connections that have shaken hands and are still up."""
        return sum(self.up.values())

    def update(self) -> None:
        """Read the events since the last call. Never waits."""
        self._refusals.flush()
        with suppress(zmq.Again):
            while True:
                message = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
                endpoint = self._name_of(message["endpoint"].decode())
                self._read(message["event"], endpoint, int(message["value"]))

    def _read(self, event: int, endpoint: str, value: int) -> None:
        # For CONNECTED, ACCEPTED and DISCONNECTED the value is the file descriptor; handshake events carry none.
        if event == zmq.Event.MONITOR_STOPPED:
            self._stopped = True
        elif event in (zmq.Event.CONNECTED, zmq.Event.ACCEPTED):
            self.handshakes.connected(endpoint, value)
            self.known.add(value)
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.handshakes.succeeded(endpoint)
            self._come_up(endpoint)
        elif event & _HANDSHAKE_FAILURES:
            self.handshakes.failed(endpoint)
            self._refuse(endpoint, self._why_failed(event, endpoint, value))
        elif event == zmq.Event.DISCONNECTED:
            self.known.remove(value)
            end = self.handshakes.ended(endpoint, value)
            if end is End.HUNG_UP:
                self._refuse(endpoint, _HUNG_UP)
            elif end is End.DOUBTFUL:
                self.possibly_lost += 1
            elif end is End.UP:
                self._lose(endpoint)
        elif event == zmq.Event.CONNECT_RETRIED:
            self.redialer.cancel(endpoint)

    def _name_of(self, named: str) -> str:
        """The endpoint as the user has written it: after a reconnect libzmq names the host's address."""
        if named not in self._names:
            connect = self._spec.connect
            # With one endpoint there is no doubt, also if the address of its host has changed.
            is_sure = len(connect) == 1 and not self._spec.bind
            found = connect if is_sure else [endpoint for endpoint in connect if _is_at(endpoint, named)]
            self._names[named] = str(found[0]) if found else named
        return self._names[named]

    def _why_failed(self, event: int, endpoint: str, value: int) -> str:
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            if endpoint in self._ours:
                return "the peer refused our credentials"
            return "its credentials were refused (option allowedClients)"
        if event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            return f"{_OTHER_SECURITY}, or the peer is no ZeroMQ socket, or has gone"
        if value in (zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH, zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC):
            return _OTHER_SECURITY
        return "the peer speaks another protocol, or its socket type does not match ours"

    def _come_up(self, endpoint: str) -> None:
        self.up[endpoint] = self.up.get(endpoint, 0) + 1
        self.connections += 1
        self._answered.add(endpoint)
        self.refused.pop(endpoint, None)
        self.redialer.cancel(endpoint)
        self._log("peer up", endpoint)

    def _lose(self, endpoint: str) -> None:
        if self.up.get(endpoint, 0):
            self.up[endpoint] -= 1
            self.lost += 1
            self.possibly_lost += 1
            if self._only_receives:  # dialling would drop the messages that others have queued for sending
                self.redialer.plan(endpoint, is_lost=True)
            self._log("peer down", endpoint)

    def _refuse(self, endpoint: str, reason: str) -> None:
        if self.refused.get(endpoint) != reason:
            # Strangers may connect to a bound endpoint as often as they like, so these lines are limited.
            warn = _log.warning if endpoint in self._ours else self._refusals.warn
            warn("no handshake with %s: %s", endpoint, reason)
        self.refused[endpoint] = reason
        self._answered.add(endpoint)
        self.failures += 1
        self.redialer.plan(endpoint)

    def _log(self, what: str, endpoint: str) -> None:
        # Only DEBUG for other sockets, because the connections of a sink come and go with its tasks.
        level = logging.INFO if self._only_receives else logging.DEBUG
        _log.log(level, "%s: %s %s", what, self._kind, endpoint)

    def report_absent(self, seconds: float = 5.0) -> None:
        """Warn once of each endpoint that has not answered after ``seconds``; libzmq tries it for ever in silence."""
        waited = time.monotonic() - self._since
        for endpoint in self._ours if waited >= seconds else ():
            if endpoint not in self._answered:
                self._answered.add(endpoint)
                _log.warning(
                    "no answer at %s for %.1f s; is the endpoint right, and does its publisher run?",
                    endpoint,
                    waited,
                )

    def redial(self) -> None:
        """Connect again where libzmq does not, if it is time. Called in each round of the socket's thread."""
        self.protocol_errors += self.redialer.dial()

    def open_connections(self) -> Connections:
        """The connections that are up, after an ``update``."""
        self.update()
        return self.known

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


def count_connections(counters: SourceCounters, watches: Sequence[PeerWatch]) -> None:
    """Copy the figures of the watches to counters that other threads read."""
    counters.connections = sum(watch.peers for watch in watches)
    counters.connections_made = sum(watch.connections for watch in watches)
    counters.connections_lost = sum(watch.lost for watch in watches)
    counters.handshake_failures = sum(watch.failures for watch in watches)
    counters.protocol_errors = sum(watch.protocol_errors for watch in watches)
