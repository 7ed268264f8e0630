"""Read a peer's greeting in ZMTP 3 (RFC 23 and 37): its version, its security, and its socket type.

libzmq's events say that a peer has hung up, but not why. The peer's greeting shows why. ``ask_for_greeting`` reads it
on a separate connection, and closes this connection before the handshake ends. So the peer sends no message over it. A
monitor of the peer's socket shows a failed handshake.

A greeting of ZMTP 3 has 64 bytes: a signature of 10, the version (2), the name of the security mechanism (20), whether
the sender is the server of that mechanism (1), and zeros. A peer that uses libzmq sends its whole greeting as soon as
it has our signature and our major version, before it knows our mechanism. If both mechanisms are NULL, the peer then
sends the command READY, which names its socket type. It does not wait for our READY.

A peer of ZMTP 2 has the same signature and a lower version. A peer of ZMTP 1 has no greeting: it sends its identity, a
length and a zero before it, at once.
"""

from __future__ import annotations

import re
import socket as stdlib_socket
import time
from contextlib import suppress

from zmq_datasource.host.log_lines import printable
from zmq_datasource.options.socket import Endpoint
from zmq_datasource.workbench.doctor.facts import Greeting

GREETING_BYTES = 64
# A peer of ZMTP 1 reads the signature as an empty identity.
_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
# OPENING makes the peer send its whole greeting. REST completes our greeting; only a peer with NULL gets it.
OPENING = _SIGNATURE + b"\x03"
REST = b"\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

_COMMAND, _LONG = 0x04, 0x02
_READY = b"\x05READY"
# A property is the length of its name (1 byte), its name, the length of its value (4 bytes), and its value. The name of
# a socket type is short, so the first three of the four bytes are zero.
_SOCKET_TYPE = re.compile(rb"\x0bsocket-type\0\0\0(.)", re.IGNORECASE | re.DOTALL)
_MOST_READY_BYTES = 8192
_MOST_BYTES = 1 << 16


def parse_greeting(received: bytes) -> Greeting:
    """Interpret the first bytes that a peer has sent."""
    if not received:
        return Greeting(state="silent", reason="it accepts the connection and says nothing")
    if _is_old(received):
        return Greeting(state="old", reason="it speaks ZMTP 1 or 2, of libzmq before version 4")
    # The eight bytes between are a length in old versions. Nothing depends on it, so they are not checked.
    if received[0] != 0xFF or (len(received) > 9 and not received[9] & 1):
        return Greeting(state="not_zeromq", reason="its first bytes are no greeting of ZMTP")
    if len(received) < GREETING_BYTES:
        return Greeting(state="silent", reason=f"it stopped after {len(received)} bytes of its greeting")
    return Greeting(
        state="greeted",
        version=f"{received[10]}.{received[11]}",
        mechanism=printable(received[12:32].rstrip(b"\0"), 80),
        socket_type=_socket_type(_command(received) or b""),
    )


def is_complete(received: bytes) -> bool:
    """Whether no more bytes are needed: the greeting is there, and the whole command after it or something else."""
    return _command(received) is not None


def _is_old(received: bytes) -> bool:
    if received[:1] == b"\xff":
        return len(received) > 10 and received[9] & 1 == 1 and received[10] < 3
    return received[:2] == b"\x01\x00" or (received[1:2] == b"\x00" and len(received) == received[0] + 1)


def _socket_type(command: bytes) -> str:
    found = _SOCKET_TYPE.search(command) if command.startswith(_READY) else None
    if found is None:
        return ""
    (size,) = found[1]
    return printable(command[found.end() : found.end() + size], 80)


def _command(received: bytes) -> bytes | None:
    """The command after a greeting. None while bytes are missing; empty if it is too long, or no command."""
    body = received[GREETING_BYTES:]
    if len(body) < 2:
        return None
    head, length = (9, int.from_bytes(body[1:9], "big")) if body[0] & _LONG else (2, body[1])
    if not body[0] & _COMMAND or length > _MOST_READY_BYTES:
        return b""
    return body[head : head + length] if len(body) >= head + length else None


def ask_for_greeting(endpoint: Endpoint, seconds: float) -> Greeting:
    """Connect to ``endpoint``, and return what its greeting says, or why there is none.

    Takes up to about ``seconds``, beside the time of the resolver. Raises no error.
    """
    try:
        if endpoint.transport == "tcp":
            stdlib_socket.getaddrinfo(*endpoint.host_port, type=stdlib_socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:  # UnicodeError: a text such as a..b
        why = getattr(e, "strerror", None) or "it is no host name"
        return Greeting(
            state="unresolved", reason=f"host {endpoint.host_port[0]!r} does not resolve here: {why}"
        )
    try:
        with _dial(endpoint, seconds) as sock:
            return _exchange_greetings(sock, time.monotonic() + seconds)
    except TimeoutError:
        return Greeting(state="no_answer", reason=f"nothing answered within {seconds:g} s")
    except (ConnectionRefusedError, FileNotFoundError) as e:
        return Greeting(state="refused", reason=(e.strerror or str(e)).lower())
    except OSError as e:
        return Greeting(state="no_answer", reason=(e.strerror or str(e)).lower())


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


def _exchange_greetings(sock: stdlib_socket.socket, deadline: float) -> Greeting:
    received = b""
    with suppress(OSError):  # the bytes before an error tell enough
        sock.sendall(OPENING)
        while len(received) < GREETING_BYTES and (more := _receive(sock, deadline)):
            received += more
            if received[:1] != b"\xff" or _is_old(received):
                break
        if parse_greeting(received).mechanism == "NULL":
            sock.sendall(REST)
            while not is_complete(received) and (more := _receive(sock, deadline)):
                received += more
    return parse_greeting(received)


def _receive(sock: stdlib_socket.socket, deadline: float) -> bytes:
    """The next bytes; empty at the end of the stream, or after the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        return b""
    sock.settimeout(left)
    return sock.recv(_MOST_BYTES)
