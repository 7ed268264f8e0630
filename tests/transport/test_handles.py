"""Second handles on connections: a number that names another file by now gives none, and leaves nothing open."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import zmq

from tests.support import bound
from zmq_datasource.transport.handles import inode_of, second_handle
from zmq_datasource.transport.peers import PeerWatch

needs_eventfd = pytest.mark.skipif(sys.platform != "linux", reason="eventfd is Linux's")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))


def test_a_handle_outlives_the_first() -> None:
    near, far = socket.socketpair()
    handle = second_handle(near.fileno(), inode_of(near.fileno()))
    assert handle is not None
    near.close()
    with handle, far:
        handle.sendall(b"x")
        assert far.recv(1) == b"x"


def test_another_connection_with_its_number_is_not_taken_for_it() -> None:
    near, far = socket.socketpair()
    number, inode = near.fileno(), inode_of(near.fileno())
    near.close()
    with far, socket.socket() as other:
        assert other.fileno() == number
        before = open_files()
        assert second_handle(number, inode) is None
        assert open_files() == before


def test_what_is_closed_has_none() -> None:
    sock = socket.socket()
    number, inode = sock.fileno(), inode_of(sock.fileno())
    sock.close()
    assert inode_of(number) is None
    assert second_handle(number, inode) is None


@needs_eventfd
def test_a_number_that_names_no_connection_leaves_nothing_open(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """All eventfds have one inode: so one that took the number was held as a connection, each time anew."""
    server, _ = bound(context, zmq.PULL)
    watch = PeerWatch(context, server, (), True, "")
    event = os.eventfd(0)
    try:
        before = open_files()
        watch._take(zmq.Event.ACCEPTED, "tcp://127.0.0.1:1", event)
        assert watch.hold() == []
        assert open_files() == before
    finally:
        os.close(event)
        watch.close()
