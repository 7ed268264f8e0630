"""A peer's greeting in ZMTP 3 (RFC 23 and 37): bytes only.

A greeting has 64 bytes: a signature of 10, the version (2), the name of the security mechanism (20),
whether it is the mechanism's server (1), and zeros. libzmq sends all of its own as soon as it has the
signature and the major version of ours, before it knows our mechanism. With the mechanism NULL the
command READY follows, which names the socket's type, again without waiting for ours.
"""

from __future__ import annotations

import re

from zmq_datasource.host.printable import printable
from zmq_datasource.workbench.doctor.facts import Glance

__all__ = ["GREETING_BYTES", "OPENING", "REST", "is_complete", "read_greeting", "read_socket_type"]

GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
# What we say: as much as makes the peer say everything, and the rest if its mechanism is NULL.
OPENING = _SIGNATURE + b"\x03"
REST = b"\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

_COMMAND, _LONG = 0x04, 0x02
_READY = b"\x05READY"
# A property is its name's length in one byte, the name, its value's length in four, the value.
_SOCKET_TYPE = re.compile(rb"\x0bsocket-type\0\0\0(.)", re.IGNORECASE | re.DOTALL)
_MOST_READY_BYTES = 8192


def read_greeting(received: bytes) -> Glance:
    """What the bytes that came first say."""
    if not received:
        return Glance(state="silent", reason="it accepts the connection and says nothing")
    head = received[:10]
    # The length in the middle is for versions before 2, which nobody speaks any more.
    if head[:1] != b"\xff" or (len(head) == 10 and not head[9] & 1):
        return Glance(state="not_zeromq", reason="what answers there does not speak ZeroMQ's protocol")
    if len(received) < GREETING_BYTES:
        if len(received) > 10 and received[10] < 3:
            return Glance(state="greeted", version=f"{received[10]}.0", reason="it is older than ZeroMQ 4")
        return Glance(state="silent", reason=f"it stopped after {len(received)} bytes of its greeting")
    mechanism = printable(received[12:32].rstrip(b"\0"), 80)
    return Glance(state="greeted", version=f"{received[10]}.{received[11]}", mechanism=mechanism)


def is_complete(received: bytes) -> bool:
    """Whether the greeting and the whole command after it are there."""
    return _command(received) is not None


def read_socket_type(received: bytes) -> str | None:
    """The socket type in the READY command after a greeting; None if there is none."""
    command = _command(received) or b""
    found = _SOCKET_TYPE.search(command) if command.startswith(_READY) else None
    if found is None:
        return None
    (size,) = found[1]
    return printable(command[found.end() : found.end() + size], 80) or None


def _command(received: bytes) -> bytes | None:
    """What follows a greeting, if it is a command; None if more of it must come."""
    body = received[GREETING_BYTES:]
    if len(body) < 2:
        return None
    head, length = (9, int.from_bytes(body[1:9], "big")) if body[0] & _LONG else (2, body[1])
    if not body[0] & _COMMAND or length > _MOST_READY_BYTES:
        return b""
    return body[head : head + length] if len(body) >= head + length else None
