"""What the operating system knows of a connection and libzmq does not report."""

from __future__ import annotations

import fcntl
import select
import socket as stdlib_socket
import struct
import sys
import termios
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

__all__ = [
    "CHECKS",
    "CHECK_SECONDS",
    "bytes_passed",
    "ended",
    "ended_in_order",
    "find_dead_peers",
    "io_threads_sleep",
    "threads",
    "unread",
    "unsent_by_peer",
    "unwritten",
    "wait_until_written",
]


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


# Where tcpi_bytes_acked is in Linux' struct tcp_info; tcpi_bytes_received follows it.
_BYTES_ACKED = 120


# tcp itself notices the failure of a peer's machine. libzmq's heartbeats would end the connection of a peer that is
# receiving one large message, because a PING waits in the queue behind it.
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 4,
}
_UNACKNOWLEDGED_MS = 30_000


def find_dead_peers(sock: zmq.Socket[bytes]) -> None:
    """Make tcp end a connection within about 30 s after its peer's machine has failed."""
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(option, value)
    sock.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)


# A queue counts as empty if it was in this number of checks. The pause between two lets libzmq's thread refill it.
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
    thread that sleeps has nothing to write. A thread that waits for a processor may have, for long on a busy machine.
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


_TABLES = {stdlib_socket.AF_INET: Path("/proc/net/tcp"), stdlib_socket.AF_INET6: Path("/proc/net/tcp6")}


def unsent_by_peer(sock: stdlib_socket.socket) -> int | None:
    """Bytes in the peer's send queue, if the peer is in the same network namespace of Linux; else None."""
    table = _TABLES.get(sock.family)
    if table is None:
        return None
    with suppress(OSError, ValueError):
        ours, theirs = _as_in_table(sock, sock.getsockname()), _as_in_table(sock, sock.getpeername())
        for line in table.read_text("ascii").splitlines()[1:]:
            _, local, remote, _, queues, *_ = line.split()
            if (local, remote) == (theirs, ours):
                return int(queues.partition(":")[0], 16)
    return None


def _as_in_table(sock: stdlib_socket.socket, address: Any) -> str:
    """An address as /proc/net/tcp writes it: four bytes at a time in the machine's byte order."""
    packed = stdlib_socket.inet_pton(sock.family, address[0].partition("%")[0])
    words = struct.unpack(f"!{len(packed) // 4}I", packed)
    native = struct.pack(f"={len(words)}I", *words)
    return f"{native.hex().upper()}:{address[1]:04X}"


def ended_in_order(held: Sequence[tuple[stdlib_socket.socket, bool]], ends: int) -> bool:
    """Whether ``ends`` connections have ended, and each peer had read everything that was sent to it.

    Over tcp a peer that has read everything ends the stream; a peer that leaves something unread, or receives
    something afterwards, resets it. A unix socket reports the difference only once, and that is to libzmq: so an end
    over ipc never counts.

    Args:
        held: Handles on connections, and whether each is ipc.
    """
    over = [sock for sock, ipc in held if not ipc and ended(sock)]
    # The peer's system may still refuse what it has not acknowledged.
    written = wait_until_written(over, time.monotonic() + _ANSWER_SECONDS)
    return written and ends <= len(over) and not any(ended(sock, by_reset=True) for sock in over)


# How long the answer to bytes may take that were sent into a connection which the peer has ended.
_ANSWER_SECONDS = 1.0


def ended(sock: stdlib_socket.socket, by_reset: bool = False) -> bool:
    """Whether the peer has ended a connection; with ``by_reset``, whether it has reset it."""
    poller = select.poll()
    poller.register(sock, 0 if by_reset else getattr(select, "POLLRDHUP", 0))
    return bool(poller.poll(0))
