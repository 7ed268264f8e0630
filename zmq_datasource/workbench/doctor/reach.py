"""A glance at an endpoint: who greets there, before any handshake is done.

libzmq's events say that a peer hung up, not why. Its greeting says why: which security it wants, and
which socket it is. The connection is closed before the handshake ends, so the peer never counts it among
its peers and gives it no message; its monitor shows a handshake that failed.
"""

from __future__ import annotations

import socket as stdlib_socket
import time
from contextlib import suppress

from zmq_datasource.options.types import Endpoint
from zmq_datasource.workbench.doctor import zmtp
from zmq_datasource.workbench.doctor.facts import Glance

__all__ = ["glance"]

_MOST_BYTES = 1 << 16


def glance(endpoint: Endpoint, seconds: float) -> Glance:
    """What answers at ``endpoint``, within about ``seconds``; never raises."""
    deadline = time.monotonic() + seconds
    try:
        sock = _dial(endpoint, seconds)
    except (stdlib_socket.gaierror, UnicodeError) as e:  # the latter for what is no name at all, as a..b
        host, _ = endpoint.host_port
        why = getattr(e, "strerror", None) or "it is no host name"
        return Glance(state="unresolved", reason=f"host {host!r} does not resolve here: {why}")
    except TimeoutError:
        return Glance(state="no_answer", reason=f"nothing answered within {seconds:g} s")
    except OSError as e:
        state = "refused" if isinstance(e, ConnectionRefusedError | FileNotFoundError) else "no_answer"
        return Glance(state=state, reason=(e.strerror or str(e)).lower())  # type: ignore[arg-type]
    with sock:
        return _listen(sock, deadline)


def _dial(endpoint: Endpoint, seconds: float) -> stdlib_socket.socket:
    if endpoint.transport == "tcp":
        return stdlib_socket.create_connection(endpoint.host_port, timeout=seconds)
    sock = stdlib_socket.socket(stdlib_socket.AF_UNIX)
    try:
        sock.settimeout(seconds)
        sock.connect(endpoint.unix_address)
    except BaseException:
        sock.close()
        raise
    return sock


def _listen(sock: stdlib_socket.socket, deadline: float) -> Glance:
    received = b""
    with suppress(OSError):  # what it said until then tells enough
        sock.sendall(zmtp.OPENING)
        while len(received) < zmtp.GREETING_BYTES and (more := _receive(sock, deadline)):
            received += more
            if received[:1] != b"\xff":
                break
    found = zmtp.read_greeting(received)
    if found.mechanism != "NULL":
        return found
    with suppress(OSError):
        sock.sendall(zmtp.REST)
        while not zmtp.is_complete(received) and (more := _receive(sock, deadline)):
            received += more
    return Glance(
        state="greeted",
        version=found.version,
        mechanism=found.mechanism,
        socket_type=zmtp.read_socket_type(received),
    )


def _receive(sock: stdlib_socket.socket, deadline: float) -> bytes:
    """What comes next; nothing at the end, or when time is up."""
    left = deadline - time.monotonic()
    if left <= 0:
        return b""
    sock.settimeout(left)
    return sock.recv(_MOST_BYTES)
