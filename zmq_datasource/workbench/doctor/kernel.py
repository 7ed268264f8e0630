"""What the kernel tells of a connection: its buffers, and what waits in them.

Of a tcp peer on this machine (in the same network namespace) Linux shows the send queue in /proc/net/tcp.
Of one elsewhere nothing can be read; nor of the queues inside libzmq, on either side.
"""

from __future__ import annotations

import fcntl
import socket as stdlib_socket
import struct
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["buffer_sizes", "peer_queued", "queued"]

_TABLES = {stdlib_socket.AF_INET: Path("/proc/net/tcp"), stdlib_socket.AF_INET6: Path("/proc/net/tcp6")}


def buffer_sizes(sock: stdlib_socket.socket) -> tuple[int, int]:
    """SO_RCVBUF and SO_SNDBUF in bytes, as the kernel counts them (Linux: twice what was asked for)."""
    return (
        sock.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_RCVBUF),
        sock.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_SNDBUF),
    )


def queued(sock: stdlib_socket.socket) -> int | None:
    """Bytes that have come and were not read; None if the system does not say."""
    with suppress(OSError):
        (waiting,) = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))
        return int(waiting)
    return None


def peer_queued(sock: stdlib_socket.socket) -> int | None:
    """Bytes in the peer's send queue; None if its end is not on this machine."""
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
