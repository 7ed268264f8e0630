"""The connections of one socket: which are up, which have shaken hands, and what the operating system knows of each.

libzmq reports a connection by its file descriptor, and only afterwards: the connection may be closed by then, and the
descriptor may belong to another file. So a connection is identified by its inode, and used through a second handle
(``dup``), which remains valid when libzmq closes its own.

A handshake that succeeds or fails is only reported for an endpoint. With several connections at one endpoint it is not
known which one is meant. Then ``Handshakes`` assumes the newest, because a silent peer is usually an old one.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import select
import socket as stdlib_socket
import stat
import sys
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import zmq

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


def find_dead_peers(sock: zmq.Socket[bytes]) -> None:
    """Make tcp end a connection within 30 s, if its peer's machine does not acknowledge what was sent to it.

    Only for conversations whose peers always read. Elsewhere a peer may pause for longer.
    """
    sock.setsockopt(zmq.TCP_MAXRT, 30_000)  # milliseconds


# How often the queues are looked at. They count as empty after so many looks in a row that find them empty, because
# libzmq's thread may refill them in between.
_CHECK_SECONDS, _CHECKS = 0.001, 3
_THREADS = Path("/proc/self/task")


def wait_until_written(
    socks: Sequence[stdlib_socket.socket],
    threads: Iterable[Path] = (),
    *,
    most: float,
    stall: float = math.inf,
    quiet: float = 0.0,
) -> bool:
    """Wait until libzmq's I/O threads and the kernel have sent everything to these connections.

    Args:
        threads: The threads of the connections' context; see ``threads``.
        most: Seconds to wait in all.
        stall: Seconds to wait while the peers take nothing.
        quiet: For how many seconds the queues must stay empty; some milliseconds at least.

    Returns:
        Whether all was sent in time. That says nothing of a connection that has ended.
    """
    now = time.monotonic()
    end, deadline, before = now + most, now + stall, [0]
    empty, checks = 0, max(_CHECKS, round(quiet / _CHECK_SECONDS))
    while empty < checks:
        left = [unwritten(sock) for sock in socks]
        empty = 0 if any(left) or not io_threads_sleep(threads) else empty + 1
        if left != before or not any(left):  # the peers take something
            before, deadline = left, time.monotonic() + stall
        if empty < checks:
            if not empty and time.monotonic() >= min(end, deadline):
                return False
            time.sleep(_CHECK_SECONDS)
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
    if ended(sock, events=0):  # Linux still counts the bytes that the reset has discarded
        return 0
    return _queued(sock, termios.TIOCOUTQ)


def _queued(sock: stdlib_socket.socket, request: int) -> int:
    """Bytes in one of the kernel's queues; 0 where the system does not say."""
    with suppress(OSError):  # the peer is gone, or this system has no such call
        return int.from_bytes(fcntl.ioctl(sock, request, bytes(4)), sys.byteorder)
    return 0


def ended(
    sock: stdlib_socket.socket, wait: float = 0.0, events: int = getattr(select, "POLLRDHUP", 0)
) -> bool:
    """Whether the peer has ended a connection, within ``wait`` seconds; with no ``events``, whether it has reset it."""
    poller = select.poll()
    poller.register(sock, events)
    return bool(poller.poll(None if wait == math.inf else max(0, math.ceil(wait * 1000))))


def had_read_everything(socks: Iterable[stdlib_socket.socket], ends: int) -> bool:
    """Whether the peers of these tcp connections that have ended theirs had read everything that was sent to them.

    A peer that leaves something unread, or receives something afterwards, resets the connection. A unix socket tells
    only libzmq.

    Args:
        ends: How many connections have ended. If fewer of ``socks`` have, the answer is False.
    """
    over = [sock for sock in socks if sock.family != stdlib_socket.AF_UNIX and ended(sock)]
    acknowledged = wait_until_written(over, most=_ANSWER_SECONDS)
    return len(over) >= ends and acknowledged and not any(ended(sock, events=0) for sock in over)


# How long a peer's system may take to acknowledge or refuse the last bytes, after the peer has ended a connection.
_ANSWER_SECONDS = 1.0


class Connection(NamedTuple):
    """A connection that is up, as the operating system sees it.

    Attributes:
        inode: Identifies the connection.
        peer: Its address, for messages.
        received: Bytes that the peer has sent; 0 where the system does not count them (ipc).
        unread: Those of them that the kernel holds, and libzmq has not read.
    """

    inode: int
    peer: str
    received: int
    unread: int = 0


class Connections:
    """The connections that are up, by their file descriptors, as libzmq's socket monitor reports them."""

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}  # by descriptor

    def add(self, descriptor: int) -> None:
        """Note a new connection. Its descriptor may have belonged to an earlier one."""
        inode = _inode_of(descriptor)
        if inode is None:  # it is closed already
            self.remove(descriptor)
        else:
            self._inodes[descriptor] = inode

    def remove(self, descriptor: int) -> None:
        """Note the end of a connection."""
        self._inodes.pop(descriptor, None)

    def inode(self, descriptor: int) -> int | None:
        """The inode of the connection with this descriptor; None if it is gone."""
        return self._inodes.get(descriptor)

    def handles(self) -> list[stdlib_socket.socket]:
        """Second handles on all connections, all open at once; the caller closes them."""
        found = [_second_handle(descriptor, inode) for descriptor, inode in self._inodes.items()]
        return [handle for handle in found if handle is not None]

    def current(self) -> list[Connection]:
        """The state of all connections."""
        return [
            Connection(inode, _peer_name(sock), _received(sock), _queued(sock, termios.FIONREAD))
            for inode, sock in self._each()
        ]

    def bytes_received(self) -> int:
        """The bytes that all tcp connections have received; the sum grows while one large message arrives."""
        return sum(_received(sock) for _, sock in self._each())

    def hang_up(self, connection: Connection) -> None:
        """End one connection, for which libzmq has no call, and discard what it sends. The peer may connect again."""
        for inode, sock in self._each():
            if inode == connection.inode:
                if sys.platform == "linux":
                    _reset(sock)
                with suppress(OSError):  # it has ended already
                    sock.shutdown(stdlib_socket.SHUT_RDWR)

    def _each(self) -> Iterator[tuple[int, stdlib_socket.socket]]:
        """One handle at a time: all at once would take twice as many descriptors as there are connections."""
        for descriptor, inode in list(self._inodes.items()):
            sock = _second_handle(descriptor, inode)
            if sock is not None:
                with sock:
                    yield inode, sock


def _reset(sock: stdlib_socket.socket) -> None:
    """Reset a tcp connection (others stay as they are). After a mere shutdown, Linux goes on receiving.

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


def _second_handle(descriptor: int, inode: int) -> stdlib_socket.socket | None:
    """A second handle on a connection; None if the connection is gone."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    # Checked on the copy, because the descriptor may become that of another file at any time.
    if _inode_of(copy) == inode:
        with suppress(OSError):
            return stdlib_socket.socket(fileno=copy)
    os.close(copy)
    return None


# Where tcpi_bytes_received is in Linux' struct tcp_info.
_BYTES_RECEIVED = 128


def _received(sock: stdlib_socket.socket) -> int:
    """The bytes that a connection has received; 0 where the system does not count them (ipc)."""
    if sys.platform == "linux":
        with suppress(OSError):
            info = sock.getsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_INFO, 192)
            if len(info) >= _BYTES_RECEIVED + 8:
                return int.from_bytes(info[_BYTES_RECEIVED : _BYTES_RECEIVED + 8], sys.byteorder)
    return 0


def _peer_name(sock: stdlib_socket.socket) -> str:
    with suppress(OSError):  # it has ended
        return ":".join(map(str, sock.getpeername()[:2]))
    return "unknown"


class End(Enum):
    """What is known of a connection that has ended."""

    UP = "its handshake had succeeded"
    DOUBTFUL = "its handshake had succeeded, or that of another connection"
    FAILED = "its handshake had failed"
    HUNG_UP = "the peer ended it during the handshake, and libzmq reported no failure"


class Handshakes:
    """Which connections of one socket have shaken hands, from the events of its endpoints."""

    def __init__(self) -> None:
        # By endpoint: the descriptors of connections that have not shaken hands, oldest first.
        self._shaking: dict[str, dict[int, None]] = {}
        # Descriptors of connections of which it is not known whether they have shaken hands.
        self._doubtful: set[int] = set()
        # Endpoints with a failed handshake, until its connection ends.
        self._failed: set[str] = set()

    @property
    def shaking(self) -> int:
        """How many connections have not shaken hands."""
        return sum(map(len, self._shaking.values()))

    def connected(self, endpoint: str, descriptor: int) -> None:
        """A connection was made, and its handshake begins."""
        self._doubtful.discard(descriptor)
        shaking = self._shaking.setdefault(endpoint, {})
        shaking.pop(descriptor, None)
        shaking[descriptor] = None

    def succeeded(self, endpoint: str) -> None:
        """One of the handshakes at an endpoint has succeeded: the newest one, it is assumed."""
        shaking = self._shaking.get(endpoint)
        if shaking:
            if len(shaking) > 1:
                self._doubtful.update(shaking)
            shaking.popitem()

    def failed(self, endpoint: str) -> None:
        """One of the handshakes at an endpoint has failed; the end of its connection follows."""
        self._failed.add(endpoint)

    def ended(self, endpoint: str, descriptor: int) -> End:
        """Note the end of a connection."""
        shaking = self._shaking.get(endpoint, {})
        is_shaking, is_doubtful = descriptor in shaking, descriptor in self._doubtful
        shaking.pop(descriptor, None)
        self._doubtful.discard(descriptor)
        has_failed = endpoint in self._failed and (is_shaking or is_doubtful)
        if has_failed or not shaking:  # else the failure belongs to one that still shakes hands
            self._failed.discard(endpoint)
        if is_shaking and not is_doubtful:
            return End.FAILED if has_failed else End.HUNG_UP
        if is_doubtful and has_failed and not is_shaking:
            self.succeeded(endpoint)  # this one had failed, so another one is up
        return End.DOUBTFUL if is_doubtful and (is_shaking or has_failed) else End.UP
