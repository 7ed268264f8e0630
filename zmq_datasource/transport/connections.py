"""The connections of one socket: which are up, which have shaken hands, and what the operating system knows of each.

libzmq reports a connection by its file descriptor, and only afterwards: the connection may be closed by then, and the
descriptor may belong to another file. So a connection is identified by its inode, and used through a second handle
(``dup``), which remains valid when libzmq closes its own.

A handshake that succeeds or fails is only reported for an endpoint. With several connections at one endpoint it is not
known which one is meant. Then ``Handshakes`` assumes the newest, because a silent peer is usually an old one."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import select
import socket as stdlib_socket
import stat
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import zmq

from zmq_datasource.options.socket import Endpoint


def bytes_passed(handle: stdlib_socket.socket, ipc: bool, unsent: int) -> tuple[int, int]:
    """The bytes that the peer's system has acknowledged, and the bytes received.

    Where the system does not count them: ``unsent``, which changes when the peer takes bytes, and 0.
    """
    return (unsent, 0) if ipc else _tcp_bytes(handle) or (unsent, 0)


def _tcp_bytes(handle: stdlib_socket.socket) -> tuple[int, int] | None:
    """Linux' counts for a tcp connection: acknowledged by the peer, and received; None if it has none."""
    if sys.platform == "linux":
        with suppress(OSError):
            info = handle.getsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_INFO, 192)
            if len(info) >= _BYTES_ACKED + 16:
                acked, received = struct.unpack_from("=QQ", info, _BYTES_ACKED)
                return int(acked), int(received)
    return None


# The greeting of ZMTP 3.
_GREETING_BYTES = 64
# Where tcpi_bytes_acked is in Linux' struct tcp_info; tcpi_bytes_received follows it.
_BYTES_ACKED = 120


# tcp itself notices the failure of a peer's machine. libzmq's heartbeats would end the connection of a peer that pauses
# or receives one large message, because a PING waits in the queue behind it.
# A connection that ends takes along what is between the sockets. So a network may fail for two minutes before tcp gives
# the connection up.
KEEPALIVE: dict[int, int] = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 9,
}
# In a conversation what is lost is asked for again.
_SHORT_KEEPALIVE = KEEPALIVE | {
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 4,
}
_UNACKNOWLEDGED_MS = 30_000


def find_dead_peers(sock: zmq.Socket[bytes]) -> None:
    """Make tcp end a connection within about 30 s after its peer's machine has failed, or has stopped reading.

    Only for conversations whose peers always read. Other sockets have ``KEEPALIVE`` alone, which a peer with a full
    queue answers.
    """
    for option, value in _SHORT_KEEPALIVE.items():
        sock.setsockopt(option, value)
    sock.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)


def connect_to(sock: zmq.Socket[bytes], endpoint: Endpoint) -> None:
    """Connect to an endpoint, over IPv6 if it has no other address.

    ZMQ_IPV6 belongs to the whole socket, but libzmq reads it at each bind and connect. With it on, libzmq asks for IPv6
    addresses alone, so a name with both kinds would not reach a publisher on IPv4.
    """
    sock.setsockopt(zmq.IPV6, _has_only_ipv6(endpoint))
    sock.connect(str(endpoint))


def bind_to(sock: zmq.Socket[bytes], endpoint: Endpoint) -> None:
    """Bind an endpoint, over IPv6 if its address is one of IPv6."""
    sock.setsockopt(zmq.IPV6, "[" in endpoint.address)
    sock.bind(str(endpoint))


def _has_only_ipv6(endpoint: Endpoint) -> bool:
    if endpoint.transport != "tcp":
        return False
    host, port = endpoint.host_port
    if ":" in host:
        return True
    with suppress(OSError, UnicodeError):  # UnicodeError: a text such as a..b
        found = stdlib_socket.getaddrinfo(host, port, type=stdlib_socket.SOCK_STREAM)
        return {family for family, *_ in found} == {stdlib_socket.AF_INET6}
    return False


# A queue counts as empty after this number of checks in a row that find it empty. Between two checks libzmq's thread
# may refill it.
CHECKS, CHECK_SECONDS = 3, 0.001
_THREADS = Path("/proc/self/task")


def wait_until_written(
    socks: Sequence[stdlib_socket.socket], deadline: float, threads: Iterable[Path] = ()
) -> bool:
    """Wait until libzmq's I/O threads and the kernel have sent everything to these connections.

    Args:
        deadline: A monotonic time.
        threads: The threads of the connections' context; see ``threads``.

    Returns:
        Whether all was sent by the deadline. That says nothing of a connection that has ended.
    """
    empty = 0 if socks else CHECKS
    while empty < CHECKS:
        empty = 0 if any(map(unwritten, socks)) or not io_threads_sleep(threads) else empty + 1
        if empty < CHECKS:
            if time.monotonic() >= deadline:
                return False
            time.sleep(CHECK_SECONDS)
    return True


def threads() -> set[Path]:
    """The threads of this process; empty where the system does not list them."""
    return set(_THREADS.glob("*"))


def io_threads_sleep(threads: Iterable[Path]) -> bool:
    """Whether libzmq's I/O threads among these threads sleep.

    An I/O thread writes queued messages as soon as the kernel has room. So while the kernel's queue is empty, a
    thread that sleeps has nothing to write. On a busy machine a thread may wait long for a processor, and have messages
    to write.
    """
    for thread in threads:
        with suppress(OSError):  # it has ended
            # Read here, and not once at the start, because a thread sets its name only when it first runs.
            name, state = (thread / "stat").read_bytes().rpartition(b")")[::2]
            if name.partition(b"(")[2].startswith(b"ZMQbg/IO") and state.split()[0] != b"S":
                return False
    return True


def unwritten(sock: stdlib_socket.socket) -> int:
    """Bytes in the kernel's send queue; 0 after a reset and where the system does not say."""
    if ended(sock, by_reset=True):  # Linux still counts the bytes that the reset has discarded
        return 0
    return _queued(sock, termios.TIOCOUTQ) or 0


def unread(sock: stdlib_socket.socket) -> int | None:
    """Bytes in the kernel's receive queue; None if the system does not say."""
    return _queued(sock, termios.FIONREAD)


def _queued(sock: stdlib_socket.socket, request: int) -> int | None:
    with suppress(OSError):  # the peer is gone, or this system has no such call
        (queued,) = struct.unpack("i", fcntl.ioctl(sock, request, bytes(4)))
        return int(queued)
    return None


def ended_in_order(held: Sequence[Handle], ends: int) -> bool:
    """Whether each peer that has ended its connection had read everything that was sent to it.

    Over tcp a peer that has read everything ends the stream; a peer that leaves something unread, or receives
    something afterwards, resets it. A unix socket reports the difference only once, and that is to libzmq: so an end
    over ipc never counts as in order.

    Args:
        held: Handles on connections.
        ends: How many connections have ended. If fewer tcp connections in ``held`` have, the answer is False.
    """
    over = [handle.sock for handle in held if not handle.ipc and ended(handle.sock)]
    # The peer's system may still refuse what it has not acknowledged.
    written = wait_until_written(over, time.monotonic() + _ANSWER_SECONDS)
    return written and ends <= len(over) and not any(ended(sock, by_reset=True) for sock in over)


# How long the peer's system may take to acknowledge or refuse the last bytes, after the peer has ended a connection.
_ANSWER_SECONDS = 1.0


def ended(sock: stdlib_socket.socket, by_reset: bool = False) -> bool:
    """Whether the peer has ended a connection; with ``by_reset``, whether it has reset it."""
    poller = select.poll()
    poller.register(sock, 0 if by_reset else getattr(select, "POLLRDHUP", 0))
    return bool(poller.poll(0))


class Handle(NamedTuple):
    """A second handle on a connection, to be closed; whether the connection is ipc, and its inode."""

    sock: stdlib_socket.socket
    ipc: bool
    inode: int


class Connection(NamedTuple):
    """A connection that is up, as the operating system sees it.

    Attributes:
        inode: Identifies the connection.
        peer: Its address or process, for messages.
        unsent: Bytes that wait for the peer.
        received: Bytes that the peer has sent; 0 where the system does not count them (ipc).
        unread: Those of them that the kernel holds, and libzmq has not read.
    """

    inode: int
    peer: str
    unsent: int
    received: int
    unread: int = 0


class Connections:
    """The connections that are up, by their file descriptors, as libzmq's socket monitor reports them."""

    def __init__(self) -> None:
        self._by_descriptor: dict[int, tuple[int, bool]] = {}  # inode, and whether ipc

    def add(self, descriptor: int, endpoint: str) -> None:
        """Note a new connection. Its descriptor may have belonged to an earlier one."""
        inode = _inode_of(descriptor)
        if inode is None:  # it is closed already
            self.remove(descriptor)
        else:
            self._by_descriptor[descriptor] = inode, endpoint.startswith("ipc:")

    def remove(self, descriptor: int) -> None:
        """Note the end of a connection."""
        self._by_descriptor.pop(descriptor, None)

    def inode(self, descriptor: int) -> int | None:
        """The inode of the connection with this descriptor; None if it is gone."""
        return self._by_descriptor.get(descriptor, (None, False))[0]

    def handles(self) -> list[Handle]:
        """Second handles on all connections, all open at once; the caller closes them."""
        found = [_second_handle(descriptor, *known) for descriptor, known in self._by_descriptor.items()]
        return [handle for handle in found if handle is not None]

    def current(self) -> list[Connection]:
        """The state of all connections."""
        found = []
        for handle in self._each():
            unsent = unwritten(handle.sock)
            _, received = bytes_passed(handle.sock, handle.ipc, unsent)
            left = unread(handle.sock) or 0
            found.append(Connection(handle.inode, _peer_name(handle), unsent, received, left))
        return found

    def bytes_received(self) -> int:
        """The bytes that all tcp connections have received; the sum grows while one large message arrives."""
        return sum(bytes_passed(handle.sock, handle.ipc, 0)[1] for handle in self._each())

    def speaks_older_zmtp(self, descriptor: int) -> bool:
        """Whether the peer of a new tcp connection has answered with an older greeting than that of ZMTP 3.

        libzmq begins with 10 bytes, and sends the rest of the 64 bytes of ZMTP 3 as soon as the peer's greeting says
        this version. To an older peer it sends 2 bytes more, and never reports a handshake. Sent bytes count also
        before a distant peer has acknowledged them. The greeting of every version has 2 bytes or more.
        """
        known = self._by_descriptor.get(descriptor)
        handle = None if known is None else _second_handle(descriptor, *known)
        if handle is None:
            return False
        with handle.sock:
            counts = None if handle.ipc else _tcp_bytes(handle.sock)
            unsent = unwritten(handle.sock)
        return counts is not None and counts[0] + unsent < _GREETING_BYTES and counts[1] > 1

    def hang_up(self, connection: Connection) -> None:
        """End one connection, for which libzmq has no call, and discard what it sends. The peer may connect again."""
        for handle in self._each():
            if handle.inode == connection.inode:
                if not handle.ipc and sys.platform == "linux":
                    _reset(handle.sock)
                with suppress(OSError):  # it has ended already
                    handle.sock.shutdown(stdlib_socket.SHUT_RDWR)

    def _each(self) -> Iterator[Handle]:
        """One handle at a time: all at once would take twice as many descriptors as there are connections."""
        for descriptor, known in list(self._by_descriptor.items()):
            handle = _second_handle(descriptor, *known)
            if handle is not None:
                with handle.sock:
                    yield handle


def _reset(sock: stdlib_socket.socket) -> None:
    """Reset a tcp connection. After a mere shutdown, Linux goes on receiving what the peer sends.

    A connect to the family AF_UNSPEC does that (connect(2)), which Python's ``connect`` cannot name.
    """
    ctypes.CDLL(None).connect(sock.fileno(), bytes(16), 16)


def origin_of(frame: zmq.Frame) -> int:
    """The file descriptor of the connection of a frame; -1 if libzmq does not know it.

    Never raises: if a peer resets its connection at once, libzmq cannot read the address, and the messages of this
    connection have no properties. Any stranger can cause this.
    """
    try:
        return int(frame.get(zmq.MessageOption.SRCFD))
    except zmq.ZMQError:
        return -1


def _inode_of(descriptor: int) -> int | None:
    """The inode of the connection with this descriptor; None if it is closed, or the descriptor is no connection."""
    with suppress(OSError):
        found = os.fstat(descriptor)
        if stat.S_ISSOCK(found.st_mode):
            return found.st_ino
    return None


def _second_handle(descriptor: int, inode: int, ipc: bool) -> Handle | None:
    """A second handle on a connection; None if the connection is gone."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    # Checked on the copy, because the descriptor may become that of another file at any time.
    if _inode_of(copy) == inode:
        with suppress(OSError):
            return Handle(stdlib_socket.socket(fileno=copy), ipc, inode)
    os.close(copy)
    return None


def _peer_name(handle: Handle) -> str:
    try:
        if handle.ipc:
            credentials = handle.sock.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_PEERCRED, 12)
            return f"process {int.from_bytes(credentials[:4], sys.byteorder)}"
        host, port, *_ = handle.sock.getpeername()
        return f"{host}:{port}"
    except (OSError, AttributeError):  # it has ended, or this system has no SO_PEERCRED
        return "unknown"


class ConnectionEnd(NamedTuple):
    """The end of a connection.

    Attributes:
        was_up: Its handshake had succeeded.
        may_have_been_up: It is not known whether its handshake had succeeded or that of another connection.
        hung_up: The peer ended the connection during the handshake, and libzmq reported no failure.
    """

    was_up: bool = False
    may_have_been_up: bool = False
    hung_up: bool = False


class Handshakes:
    """Follows the events of all endpoints of one socket.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[int, float] = {}  # when, by the descriptor of a connection that shakes hands
        # By endpoint: the descriptors of connections that have not shaken hands, oldest first, with their numbers.
        self._shaking: dict[str, dict[int, int]] = {}
        self._numbers = itertools.count()
        # Descriptors of connections that have certainly shaken hands.
        self._sure: set[int] = set()
        # By endpoint: for connections up to this number it is not known which of them have shaken hands.
        self._unsure: dict[str, int] = {}
        # Endpoints with a failed handshake, until its connection ends.
        self._failed: set[str] = set()
        # By descriptor: the endpoints of peers of ZMTP 1 and 2.
        self._older: dict[int, str] = {}

    @property
    def shaking(self) -> int:
        """How many connections have not shaken hands."""
        return sum(map(len, self._shaking.values()))

    def connected(self, endpoint: str, descriptor: int) -> None:
        """A connection was made, and its handshake begins."""
        shaking = self._shaking.setdefault(endpoint, {})
        shaking.pop(descriptor, None)
        self._sure.discard(descriptor)
        self._older.pop(descriptor, None)
        shaking[descriptor] = next(self._numbers)
        self._begun[descriptor] = self._clock()

    def slow(self, seconds: float) -> list[tuple[str, int, float]]:
        """The connections whose handshake takes this time or longer: endpoint, descriptor, and seconds."""
        since = [
            (endpoint, descriptor, self._clock() - self._begun[descriptor])
            for endpoint, shaking in self._shaking.items()
            for descriptor in shaking
        ]
        return [found for found in since if found[2] >= seconds]

    def needs_none(self, endpoint: str, descriptor: int) -> None:
        """A connection is up without a handshake: libzmq reports none for peers of ZMTP 1 and 2."""
        del self._shaking[endpoint][descriptor]
        self._begun.pop(descriptor, None)
        self._sure.add(descriptor)
        self._older[descriptor] = endpoint

    def has_older(self, endpoint: str) -> bool:
        """Whether a peer of ZMTP 1 or 2 is up at an endpoint."""
        return endpoint in self._older.values()

    def is_older(self, descriptor: int) -> bool:
        """Whether a connection is that of a peer of ZMTP 1 or 2."""
        return descriptor in self._older

    def succeeded(self, endpoint: str) -> None:
        """One of the handshakes at an endpoint has succeeded."""
        self._remove_newest(endpoint)

    def failed(self, endpoint: str) -> None:
        """One of the handshakes at an endpoint has failed; the end of its connection follows."""
        self._failed.add(endpoint)

    def ended(self, endpoint: str, descriptor: int) -> ConnectionEnd:
        """Note the end of a connection. Returns how far its handshake had come."""
        sure = descriptor in self._sure
        self._sure.discard(descriptor)
        self._older.pop(descriptor, None)
        shaking = self._shaking.get(endpoint, {})
        number = shaking.pop(descriptor, None)
        self._begun.pop(descriptor, None)
        failed = endpoint in self._failed and not sure
        if not (sure and shaking):  # else the failure belongs to one that still shakes hands
            self._failed.discard(endpoint)
        if number is not None:
            return ConnectionEnd(
                may_have_been_up=number <= self._unsure.get(endpoint, -1), hung_up=not failed
            )
        # This connection counted as up. If a handshake has failed and another connection still shakes hands, then one
        # of the two was up and the other has failed.
        if failed and self._remove_newest(endpoint):
            return ConnectionEnd(may_have_been_up=True)
        return ConnectionEnd(was_up=True)

    def _remove_newest(self, endpoint: str) -> bool:
        """Count the newest connection that still shakes hands as one that has; False if there is none."""
        shaking = self._shaking.get(endpoint)
        if not shaking:
            return False
        several = len(shaking) > 1
        descriptor, number = shaking.popitem()
        self._begun.pop(descriptor, None)
        if several:
            self._unsure[endpoint] = number
        elif number > self._unsure.get(endpoint, -1):
            self._sure.add(descriptor)
        return True
