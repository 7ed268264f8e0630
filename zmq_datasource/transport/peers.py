"""Who is at the other end: what libzmq's socket monitor tells, kept as a state.

Unlike libzmq, this says when a peer hangs up instead of shaking hands, and when nobody answers at all. And it
dials again where libzmq never would: after what libzmq takes for a fault of the peer (another mechanism or
socket type, a frame over its maxmsgsize). The rules:

* Where libzmq comes again by itself it says so (CONNECT_RETRIED), and is left alone.
* ``disconnect`` throws away what was received from there and not read. So it waits until that has been read.
"""

from __future__ import annotations

import itertools
import logging
import math
import socket as stdlib_socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from zmq_datasource.counters import SourceCounters
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.options.types import Endpoint, ZmqOptions
from zmq_datasource.transport.handles import inode_of, second_handle

__all__ = ["PeerWatch", "count_connections", "security_of", "socket_type"]

_log = logging.getLogger(__name__)

_HANDSHAKE_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_AUTH,
)
_HUNG_UP = (
    "the peer hung up during the handshake; its socket type does not match ours, or its security does not"
)
_REFUSED_HERE = "its credentials were refused (options allowedClients and plainPasswords)"
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
    """The mechanism that the options ask for, in a word; empty if none."""
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


def _is_at(ours: Endpoint, named: str) -> bool:
    """Whether ``named``, as libzmq names a connection, is our endpoint."""
    if str(ours) == named:
        return True
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
    """The name of a socket's type, for messages."""
    return zmq.SocketType(int(sock.type)).name


class PeerWatch:
    """What the socket monitor tells: who is up, who refused. Logs changes of state.

    Not thread-safe: used by the thread that uses the socket. Make it before ``attach``.

    Attributes:
        absent_seconds: After so long without an answer an endpoint is reported.
        first_redial, last_redial: Where a handshake has failed: seconds to the next attempt, doubled up to the last.
        lost_redial: Where libzmq has ended a connection and does not dial again: seconds to the next attempt.
    """

    absent_seconds = 5.0
    first_redial = 1.0
    last_redial = 30.0
    lost_redial = 1.0

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        sock: zmq.Socket[bytes],
        connect: Sequence[Endpoint],
        bound: bool,
        security: str,
    ) -> None:
        self._sock = sock
        # A task of a sink is a connection or two: that they come and go tells nothing.
        self._level = logging.INFO if int(sock.type) in (zmq.SUB, zmq.PULL) else logging.DEBUG
        self._only_receives = int(sock.type) in (zmq.SUB, zmq.XSUB, zmq.PULL)
        self._connect = connect
        self._security = security
        self._bound = bound
        address = f"inproc://monitor-{uuid.uuid4().hex}"
        # Unbounded, because a full queue would stop libzmq's own thread.
        sock.monitor(address, _EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(address)
        self._names: dict[str, str] = {}
        # By endpoint: the descriptors of connections that have not shaken hands, oldest first, and their numbers here.
        self._shaking: dict[str, dict[int, int]] = {}
        self._numbers = itertools.count()
        self._refusals = LimitedLog(__name__, "handshakes that failed")
        # Where a connection has failed to shake hands, and has not ended yet.
        self._failed: set[str] = set()
        self._sure: set[int] = set()  # descriptors of connections that have shaken hands beyond doubt
        self._streams: dict[int, tuple[int, bool]] = {}  # file descriptor to inode, and whether ipc
        self._redial: dict[str, tuple[float, float]] = {}  # endpoint: when, delay
        self._ended: set[str] = set()  # endpoints whose connection was up and ended
        self._to_read: dict[
            str, float
        ] = {}  # endpoint: once so many messages were taken, nothing of it is left
        self._empty_at = 0.0
        self.taken = 0  # messages taken from the socket, as far as its user tells
        self._absent_since: dict[str, float] = {}  # infinity: said already
        self.up: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.lost = 0
        self.cut = 0  # those that are lost, and those that may have been up for all that libzmq tells
        # By endpoint: of those up to this number nobody says who has shaken hands.
        self._unsure: dict[str, int] = {}
        self._stopped = False
        self.connections = 0  # that there have been
        self.failures = 0  # handshakes that came to nothing
        self.failure: zmq.Event | None = (
            None  # what libzmq called the last of them; of a peer that hangs up nothing
        )
        self.waited = False  # whether nobody was there at first
        self.protocol_errors = 0  # connections that were ended because of what the peer sent

    @property
    def peers(self) -> int:
        """Connections whose handshake has succeeded and that are still up."""
        return sum(self.up.values())

    @property
    def monitor(self) -> zmq.Socket[bytes]:
        """Readable when there is something for ``update``."""
        return self._monitor

    def update(self) -> None:
        """Take in what has happened since the last call. Never waits."""
        self._refusals.flush()
        with suppress(zmq.Again):
            while True:
                message = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                name = self._name(message["endpoint"].decode())
                self._take(message["event"], name, int(message["value"]))

    def _name(self, endpoint: str) -> str:
        """The endpoint as the user wrote it: after a reconnect libzmq says the address for the host."""
        if endpoint not in self._names:
            ours = {str(e) for e in self._connect}
            found = (
                endpoint
                if endpoint in ours
                else next((str(e) for e in self._connect if _is_at(e, endpoint)), None)
            )
            if found is None and len(ours) == 1 and not self._bound:  # a host whose address has changed
                found = next(iter(ours))
            self._names[endpoint] = found or endpoint
        return self._names[endpoint]

    def _take(self, event: int, endpoint: str, value: int) -> None:
        # For CONNECTED, ACCEPTED and DISCONNECTED the value is the file descriptor; handshake events carry none.
        if event == zmq.Event.MONITOR_STOPPED:
            self._stopped = True
        elif event in (zmq.Event.CONNECTED, zmq.Event.ACCEPTED):
            shaking = self._shaking.setdefault(endpoint, {})
            shaking.pop(value, None)
            self._sure.discard(value)
            shaking[value] = next(self._numbers)
            inode = inode_of(value)
            if inode is None:  # closed meanwhile
                self._streams.pop(value, None)
            else:
                self._streams[value] = inode, endpoint.startswith("ipc:")
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._one_shaken(endpoint)
            self.up[endpoint] = self.up.get(endpoint, 0) + 1
            self.connections += 1
            self.refused.pop(endpoint, None)
            self._forget(endpoint)
            _log.log(self._level, "peer up: %s %s", socket_type(self._sock), endpoint)
        elif event in _HANDSHAKE_FAILURES:
            self._failed.add(endpoint)
            self.failure = zmq.Event(event)
            ours = event == zmq.Event.HANDSHAKE_FAILED_AUTH and endpoint not in map(str, self._connect)
            self._refuse(endpoint, _REFUSED_HERE if ours else _why_failed(event, value, self._security))
        elif event == zmq.Event.DISCONNECTED:
            self._streams.pop(value, None)
            self._disconnected(endpoint, value)
        elif event == zmq.Event.CONNECT_RETRIED:  # libzmq dials by itself
            self.waited = self.waited or not self.connections
            self._forget(endpoint)

    def _disconnected(self, endpoint: str, descriptor: int) -> None:
        sure = descriptor in self._sure
        self._sure.discard(descriptor)
        shaking = self._shaking.get(endpoint, {})
        number = shaking.pop(descriptor, None)
        failed = endpoint in self._failed and not sure
        if not (sure and shaking):  # else one of those that still shake hands has failed
            self._failed.discard(endpoint)
        if number is not None:
            # What was taken for another's handshake may have been its own.
            self.cut += number <= self._unsure.get(endpoint, -1)
            if not failed:
                self._refuse(endpoint, _HUNG_UP)
        elif failed and self._one_shaken(endpoint):
            # Taken for one that had shaken hands, while another one had; or it had, and another one has failed.
            self.cut += 1
        else:
            self._lose(endpoint)

    def _forget(self, endpoint: str) -> None:
        self._redial.pop(endpoint, None)
        self._ended.discard(endpoint)
        self._to_read.pop(endpoint, None)

    def _one_shaken(self, endpoint: str) -> bool:
        """Whether there was one that had not. The newest: who is silent is so for longer."""
        shaking = self._shaking.get(endpoint)
        if not shaking:
            return False
        several = len(shaking) > 1
        descriptor, number = shaking.popitem()
        if several:  # which of them it was, nobody says
            self._unsure[endpoint] = number
        elif number > self._unsure.get(endpoint, -1):
            self._sure.add(descriptor)
        return True

    @property
    def unsure(self) -> bool:
        """Whether there are connections of which libzmq does not tell which ones have shaken hands."""
        return any(
            shaking and next(iter(shaking.values())) <= self._unsure.get(endpoint, -1)
            for endpoint, shaking in self._shaking.items()
        )

    def _lose(self, endpoint: str) -> None:
        """A connection that was up is not any more."""
        if not self.up.get(endpoint, 0):
            return
        self.up[endpoint] -= 1
        self.lost += 1
        self.cut += 1
        self._ended.add(endpoint)
        if self._only_receives:  # nothing is queued that dialling again would drop
            self._redial[endpoint] = (time.monotonic() + self.lost_redial, self.lost_redial)
        _log.log(self._level, "peer down: %s %s", socket_type(self._sock), endpoint)

    def _refuse(self, endpoint: str, reason: str) -> None:
        if self.refused.get(endpoint) != reason:
            # Strangers come to what is bound, as often as they like; what we connect to is few, and each is told.
            warn = _log.warning if endpoint in map(str, self._connect) else self._refusals.warn
            warn("no handshake with %s: %s", endpoint, reason)
        self.refused[endpoint] = reason
        self.failures += 1
        _, delay = self._redial.get(endpoint, (0.0, self.first_redial / 2))
        delay = min(delay * 2, self.last_redial)
        self._redial[endpoint] = (time.monotonic() + delay, delay)

    def report_absent(self, leaving: bool = False) -> None:
        """Say once if nobody answers at an endpoint, which libzmq tries for ever without a word.

        Args:
            leaving: Nobody will wait any longer, so say it though it was not for long.
        """
        now = time.monotonic()
        patience = 0.0 if leaving else self.absent_seconds
        for endpoint in map(str, self._connect):
            if self.up.get(endpoint) or endpoint in self.refused:
                self._absent_since.pop(endpoint, None)
                continue
            waited = now - self._absent_since.setdefault(endpoint, now)
            if waited >= patience:
                self._absent_since[endpoint] = math.inf
                _log.warning(
                    "nobody has answered at %s for %.1f s; is the endpoint right, and does its publisher run?",
                    endpoint,
                    waited,
                )

    def found_empty(self) -> None:
        """The socket had no message left just now."""
        self._empty_at = time.monotonic()

    def redial(self) -> None:
        """Dial again where libzmq does not, once what came from there has been read."""
        now = time.monotonic()
        for endpoint in map(str, self._connect):
            due, delay = self._redial.get(endpoint, (math.inf, 0.0))
            if now < due:
                continue
            if endpoint in self._ended:
                self._ended.discard(endpoint)
                self.protocol_errors += 1
                _log.warning(
                    "libzmq has ended the connection to %s for what the peer sent: a frame over zmq.maxmsgsize (%d "
                    "bytes), or bytes that are not ZMTP. What was sent after it is lost; connecting again",
                    endpoint,
                    self._sock.getsockopt(zmq.MAXMSGSIZE),
                )
            if self._may_hold_messages(endpoint, due):
                continue
            self._to_read.pop(endpoint, None)
            self._redial[endpoint] = (now + delay, delay)
            with suppress(zmq.ZMQError):  # gone already
                self._sock.disconnect(endpoint)
            self._sock.connect(endpoint)

    def _may_hold_messages(self, endpoint: str, since: float) -> bool:
        """Whether the socket may still hold messages of a connection that ended before ``since``."""
        if self._empty_at >= since or not int(self._sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return False
        # Others may send so much that the socket is never empty. It reads from its connections in turn, and none
        # holds more than the high-water mark: after so many messages it has read all that this one held.
        hwm = int(self._sock.getsockopt(zmq.RCVHWM)) or math.inf
        return self.taken < self._to_read.setdefault(endpoint, self.taken + self.queues * (hwm + 1))

    @property
    def queues(self) -> int:
        """No more queues than this does libzmq keep for the socket's connections, also for those that are gone."""
        return self.connections + len(self._connect)

    def inode(self, descriptor: int) -> int | None:
        """The connection with this file descriptor, by its inode; None if it is gone."""
        return self._streams.get(descriptor, (None, False))[0]

    @property
    def inodes(self) -> list[int]:
        """Of the connections that are up."""
        return [inode for inode, _ in self._streams.values()]

    def hold(self) -> list[tuple[stdlib_socket.socket, bool]]:
        """Second handles on the connections that are up, which outlive libzmq's own; and whether ipc."""
        self.update()
        held = []
        for descriptor, (inode, ipc) in self._streams.items():
            handle = second_handle(descriptor, inode)
            if handle is not None:
                held.append((handle, ipc))
        return held

    def in_turn(self) -> Iterator[tuple[stdlib_socket.socket, bool]]:
        """The same, each closed before the next is made: all at once would take twice the descriptors."""
        self.update()
        for descriptor, (inode, ipc) in list(self._streams.items()):
            handle = second_handle(descriptor, inode)
            if handle is not None:
                with handle:
                    yield handle, ipc

    def follow_to_the_end(self, deadline: float) -> None:
        """Take in what happens to a socket that was closed, until libzmq has let go of it."""
        while not self._stopped and (left := deadline - time.monotonic()) > 0:
            self._monitor.poll(None if left == math.inf else math.ceil(left * 1000))
            self.update()

    def close(self) -> None:
        """Stop monitoring."""
        if not self._sock.closed:
            self._sock.monitor(None, 0)
        self._monitor.close(linger=0)


def count_connections(counters: SourceCounters, watches: Sequence[PeerWatch]) -> None:
    """Tell who is there, to whoever reads the counters in another thread."""
    counters.connections = sum(watch.peers for watch in watches)
    counters.connections_made = sum(watch.connections for watch in watches)
    counters.connections_lost = sum(watch.lost for watch in watches)
    counters.handshake_failures = sum(watch.failures for watch in watches)
    counters.protocol_errors = sum(watch.protocol_errors for watch in watches)
