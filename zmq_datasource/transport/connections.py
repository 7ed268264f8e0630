"""The connections of one socket: which are up, which have shaken hands, and what the system counts of each.

libzmq reports a connection by its file descriptor, and only afterwards: the connection may be closed by then, and the
descriptor may belong to another file. So a connection is identified by its inode, and used through a second handle
(``dup``), which remains valid when libzmq closes its own.

A handshake that succeeds or fails is only reported for an endpoint. With several connections at one endpoint it is not
known which one is meant. Then ``Handshakes`` assumes the newest, because a silent peer is usually an old one, and
``unsure`` says so.
"""

from __future__ import annotations

import itertools
import os
import socket as stdlib_socket
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import zmq

from zmq_datasource.transport.kernel import bytes_passed, unwritten

__all__ = ["Connection", "Connections", "End", "Handle", "Handshakes", "origin_of"]


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


class End(NamedTuple):
    """The end of a connection.

    Attributes:
        was_up: Its handshake had succeeded.
        may_have_been_up: Its handshake had not succeeded, or the handshake of another connection was taken for its own.
        hung_up: The peer ended the connection during the handshake, and libzmq reported no failure.
    """

    was_up: bool = False
    may_have_been_up: bool = False
    hung_up: bool = False


class Handshakes:
    """Follows the events of all endpoints of one socket."""

    def __init__(self) -> None:
        # By endpoint: the descriptors of connections that have not shaken hands, oldest first, with their numbers.
        self._shaking: dict[str, dict[int, int]] = {}
        self._numbers = itertools.count()
        # Descriptors of connections that have certainly shaken hands.
        self._sure: set[int] = set()
        # By endpoint: for connections up to this number it is not known which of them have shaken hands.
        self._unsure: dict[str, int] = {}
        # Endpoints with a failed handshake, until its connection ends.
        self._failed: set[str] = set()

    @property
    def shaking(self) -> int:
        """How many connections have not shaken hands."""
        return sum(map(len, self._shaking.values()))

    @property
    def unsure(self) -> bool:
        """Whether it is unknown for some connections whether they have shaken hands."""
        return any(
            shaking and next(iter(shaking.values())) <= self._unsure.get(endpoint, -1)
            for endpoint, shaking in self._shaking.items()
        )

    def connected(self, endpoint: str, descriptor: int) -> None:
        """A connection was made, and its handshake begins."""
        shaking = self._shaking.setdefault(endpoint, {})
        shaking.pop(descriptor, None)
        self._sure.discard(descriptor)
        shaking[descriptor] = next(self._numbers)

    def succeeded(self, endpoint: str) -> None:
        """One of the handshakes at an endpoint has succeeded."""
        self._remove_newest(endpoint)

    def failed(self, endpoint: str) -> None:
        """One of the handshakes at an endpoint has failed; the end of its connection follows."""
        self._failed.add(endpoint)

    def ended(self, endpoint: str, descriptor: int) -> End:
        """A connection has ended."""
        sure = descriptor in self._sure
        self._sure.discard(descriptor)
        shaking = self._shaking.get(endpoint, {})
        number = shaking.pop(descriptor, None)
        failed = endpoint in self._failed and not sure
        if not (sure and shaking):  # else the failure belongs to one that still shakes hands
            self._failed.discard(endpoint)
        if number is not None:
            return End(may_have_been_up=number <= self._unsure.get(endpoint, -1), hung_up=not failed)
        # This one counted as up. If a handshake has failed and another connection still shakes hands, then either that
        # one was up and this one failed, or this one was up and that one failed.
        if failed and self._remove_newest(endpoint):
            return End(may_have_been_up=True)
        return End(was_up=True)

    def _remove_newest(self, endpoint: str) -> bool:
        """Count the newest connection that still shakes hands as one that has; False if there is none."""
        shaking = self._shaking.get(endpoint)
        if not shaking:
            return False
        several = len(shaking) > 1
        descriptor, number = shaking.popitem()
        if several:
            self._unsure[endpoint] = number
        elif number > self._unsure.get(endpoint, -1):
            self._sure.add(descriptor)
        return True
