"""The connections of one socket: which are up, and what the operating system counts of each.

libzmq reports a connection by its file descriptor, and only afterwards: the connection may be closed by then, and the
descriptor may belong to another file. So a connection is identified by its inode, and used through a second handle
(``dup``), which remains valid when libzmq closes its own.
"""

from __future__ import annotations

import os
import socket as stdlib_socket
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import zmq

from zmq_datasource.transport.kernel import bytes_passed, unwritten

__all__ = ["Connection", "Connections", "Handle", "origin_of"]


class Handle(NamedTuple):
    """A second handle on a connection, to be closed; and whether the connection is ipc."""

    sock: stdlib_socket.socket
    ipc: bool


class Connection(NamedTuple):
    """A connection that is up, as the operating system sees it.

    Attributes:
        inode: Identifies the connection.
        peer: Its address or process, for messages.
        unsent: Bytes that wait for the peer.
        taken: A number that changes whenever the peer takes bytes.
        received: Bytes that the peer has sent; 0 where the system does not count them (ipc).
    """

    inode: int
    peer: str
    unsent: int
    taken: int
    received: int


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

    @property
    def inodes(self) -> list[int]:
        """The inodes of all connections."""
        return [inode for inode, _ in self._by_descriptor.values()]

    def handles(self) -> list[Handle]:
        """Second handles on all connections, all open at once; the caller closes them."""
        found = [_second_handle(descriptor, *known) for descriptor, known in self._by_descriptor.items()]
        return [handle for handle in found if handle is not None]

    def current(self) -> list[Connection]:
        """The state of all connections."""
        found = []
        for handle in self._each():
            inode = os.fstat(handle.sock.fileno()).st_ino
            unsent = unwritten(handle.sock)
            taken, received = bytes_passed(handle.sock, handle.ipc, unsent)
            found.append(Connection(inode, _peer_name(handle), unsent, taken, received))
        return found

    def bytes_received(self) -> int:
        """The bytes that all tcp connections have received; the sum grows while one large message arrives."""
        return sum(bytes_passed(handle.sock, handle.ipc, 0)[1] for handle in self._each())

    def hang_up(self, connection: Connection) -> None:
        """End one connection, for which libzmq has no call. The peer may connect again."""
        for handle in self._each():
            if os.fstat(handle.sock.fileno()).st_ino == connection.inode:
                with suppress(OSError):  # it has ended already
                    handle.sock.shutdown(stdlib_socket.SHUT_RDWR)

    def _each(self) -> Iterator[Handle]:
        """One handle at a time: all at once would take twice as many descriptors as there are connections."""
        for descriptor, known in list(self._by_descriptor.items()):
            handle = _second_handle(descriptor, *known)
            if handle is not None:
                with handle.sock:
                    yield handle


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
    if (
        _inode_of(copy) == inode
    ):  # after dup: before it, the descriptor could have changed its file in between
        with suppress(OSError):
            return Handle(stdlib_socket.socket(fileno=copy), ipc)
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
