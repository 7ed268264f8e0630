"""Handles on connections: a descriptor that belongs to another file by now gives no handle, and leaks none."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import pytest

from zmq_datasource.transport.connections import Connections

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def open_files() -> int:
    return len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))


def test_a_handle_remains_valid_when_the_first_one_is_closed(pair: Pair) -> None:
    near, far = pair
    connections = Connections()
    connections.add(near.fileno())
    (handle,) = connections.handles()
    near.close()
    with handle:
        handle.sendall(b"x")
        assert far.recv(1) == b"x"


def test_a_closed_connection_gives_no_handle_nor_does_another_with_its_descriptor(pair: Pair) -> None:
    near, _ = pair
    closed, connections = Connections(), Connections()
    number = near.fileno()
    for each in (closed, connections):
        each.add(number)
    near.close()
    assert closed.handles() == []
    with socket.socket() as other:
        assert other.fileno() == number
        before = open_files()
        assert connections.handles() == []
        assert connections.current() == []
        assert open_files() == before
    late = Connections()
    late.add(number)  # as libzmq reports a connection that is closed by then
    assert late.inode(number) is None
