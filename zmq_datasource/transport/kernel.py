"""What the operating system knows of a socket's connections, and libzmq does not tell."""

from __future__ import annotations

import fcntl
import os
import select
import socket as stdlib_socket
import struct
import sys
import termios
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from zmq_datasource.transport.peers import PeerWatch

__all__ = [
    "LOOKS",
    "LOOK_SECONDS",
    "Connection",
    "bytes_received",
    "connections",
    "ended",
    "ended_in_order",
    "find_dead_peers",
    "hang_up",
    "io_threads_sleep",
    "passed",
    "threads",
    "unread",
    "unsent_by_peer",
    "unwritten",
    "wait_until_written",
]


class Connection(NamedTuple):
    """A connection that is up, as the operating system sees it.

    Attributes:
        inode: Its name.
        unsent: Bytes that wait for the peer.
        taken: Grows with what the peer has taken, or changes at least.
        received: Bytes that have come from it; 0 where the system does not tell (ipc).
    """

    inode: int
    peer: str
    unsent: int
    taken: int
    received: int


def connections(watch: PeerWatch) -> list[Connection]:
    """The connections of a socket, as the operating system sees them."""
    found = []
    for handle, ipc in watch.in_turn():
        inode = os.fstat(handle.fileno()).st_ino
        unsent = unwritten(handle)
        taken, received = passed(handle, ipc, unsent)
        found.append(Connection(inode, _peer_name(handle, ipc), unsent, taken, received))
    return found


def hang_up(watch: PeerWatch, connection: Connection) -> None:
    """End one connection of a socket, which libzmq has no call for. The peer may come again."""
    for handle, _ in watch.in_turn():
        if os.fstat(handle.fileno()).st_ino == connection.inode:
            with suppress(OSError):  # gone already
                handle.shutdown(stdlib_socket.SHUT_RDWR)


def passed(handle: stdlib_socket.socket, ipc: bool, unsent: int) -> tuple[int, int]:
    """Bytes that the peer's system has acknowledged, and that have come.

    Where the system does not say: what is left, which changes with it, and 0.
    """
    return (unsent, 0) if ipc else _tcp_bytes(handle) or (unsent, 0)


def _tcp_bytes(handle: stdlib_socket.socket) -> tuple[int, int] | None:
    """What the peer's system has acknowledged, and what was received; None where the system does not say."""
    if sys.platform == "linux":
        with suppress(OSError):
            info = handle.getsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_INFO, 192)
            if len(info) >= _BYTES_ACKED + 16:
                acked, received = struct.unpack_from("=QQ", info, _BYTES_ACKED)
                return int(acked), int(received)
    return None


# Where tcpi_bytes_acked is in Linux' struct tcp_info; tcpi_bytes_received follows it.
_BYTES_ACKED = 120


def bytes_received(watch: PeerWatch) -> int:
    """How many bytes have come by the tcp connections that are up; it grows while a large message is on its way."""
    return sum(passed(handle, ipc, 0)[1] for handle, ipc in watch.in_turn())


# A peer whose machine is gone is noticed by tcp itself. libzmq's own heartbeats take a peer for dead that is
# taking one large message: a PING waits in its queue after that.
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 4,
}
_UNACKNOWLEDGED_MS = 30_000


def find_dead_peers(sock: zmq.Socket[bytes]) -> None:
    """Have the system notice connections whose other end is gone without a word."""
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(option, value)
    sock.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)


def _peer_name(handle: stdlib_socket.socket, ipc: bool) -> str:
    try:
        if ipc:
            credentials = handle.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_PEERCRED, 12)
            return f"process {int.from_bytes(credentials[:4], sys.byteorder)}"
        host, port, *_ = handle.getpeername()
        return f"{host}:{port}"
    except (OSError, AttributeError):  # hung up meanwhile, or a system that cannot tell
        return "unknown"


# Between looks at the kernel's queue, so that libzmq's own thread gets its turn to fill it again.
LOOKS, LOOK_SECONDS = 3, 0.001
_THREADS = Path("/proc/self/task")


def wait_until_written(
    socks: Sequence[stdlib_socket.socket], deadline: float, threads: Iterable[Path] = ()
) -> bool:
    """Wait until neither these I/O threads nor the kernel has anything of these connections left to send."""
    empty = 0 if socks else LOOKS
    while empty < LOOKS:
        empty = 0 if any(map(unwritten, socks)) or not io_threads_sleep(threads) else empty + 1
        if empty < LOOKS:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_SECONDS)
    return True


def threads() -> set[Path]:
    """The threads of this process; empty where the system does not list them."""
    return set(_THREADS.glob("*"))


def io_threads_sleep(threads: Iterable[Path]) -> bool:
    """Whether those of these threads sleep that are I/O threads of libzmq.

    Each writes what is queued as soon as the kernel has room. So while the kernel's queue is empty, one that
    sleeps has nothing to write, and one that waits for a processor, on a busy machine for long, may have.

    What a thread is, it says itself once it runs: so it is asked for only here, and not when it was made.
    """
    for thread in threads:
        with suppress(OSError):  # it has ended meanwhile
            name, state = (thread / "stat").read_bytes().rpartition(b")")[::2]
            if name.partition(b"(")[2].startswith(b"ZMQbg/IO") and state.split()[0] != b"S":
                return False
    return True


def unwritten(sock: stdlib_socket.socket) -> int:
    if ended(sock, by_reset=True):  # Linux goes on counting what the reset has discarded
        return 0
    return _queued(sock, termios.TIOCOUTQ) or 0


def unread(sock: stdlib_socket.socket) -> int | None:
    """Bytes that have come and were not read; None if the system does not say."""
    return _queued(sock, termios.FIONREAD)


def _queued(sock: stdlib_socket.socket, request: int) -> int | None:
    with suppress(OSError):  # the peer is gone, or this system cannot tell
        (queued,) = struct.unpack("i", fcntl.ioctl(sock, request, bytes(4)))
        return int(queued)
    return None


_TABLES = {stdlib_socket.AF_INET: Path("/proc/net/tcp"), stdlib_socket.AF_INET6: Path("/proc/net/tcp6")}


def unsent_by_peer(sock: stdlib_socket.socket) -> int | None:
    """Bytes in the peer's send queue, which Linux shows of its own machine (and network namespace); else None."""
    table = _TABLES.get(sock.family)
    if table is None:
        return None
    with suppress(OSError, ValueError):
        ours, theirs = _written(sock, sock.getsockname()), _written(sock, sock.getpeername())
        for line in table.read_text("ascii").splitlines()[1:]:
            _, local, remote, _, queues, *_ = line.split()
            if (local, remote) == (theirs, ours):
                return int(queues.partition(":")[0], 16)
    return None


def _written(sock: stdlib_socket.socket, address: Any) -> str:
    """An address as /proc/net/tcp writes it: each four bytes in the machine's own order."""
    packed = stdlib_socket.inet_pton(sock.family, address[0].partition("%")[0])
    words = struct.unpack(f"!{len(packed) // 4}I", packed)
    native = struct.pack(f"={len(words)}I", *words)
    return f"{native.hex().upper()}:{address[1]:04X}"


def ended_in_order(held: Sequence[tuple[stdlib_socket.socket, bool]], ends: int) -> bool:
    """Whether so many connections that have ended took nothing along, seen from the handles on them.

    Over tcp a peer that hangs up after it has read everything ends the stream, and one that leaves something
    unread, or is sent something afterwards, resets it. A unix socket tells the two apart only to the first
    who asks, and that is libzmq.
    """
    over = [sock for sock, ipc in held if not ipc and ended(sock)]
    # What the peer's system has not taken yet, it may still refuse.
    written = wait_until_written(over, time.monotonic() + _ANSWER_SECONDS)
    return written and ends <= len(over) and not any(ended(sock, by_reset=True) for sock in over)


# How long an answer to what was sent into a connection that the peer has ended may take.
_ANSWER_SECONDS = 1.0


def ended(sock: stdlib_socket.socket, by_reset: bool = False) -> bool:
    poller = select.poll()
    poller.register(sock, 0 if by_reset else getattr(select, "POLLRDHUP", 0))
    return bool(poller.poll(0))
