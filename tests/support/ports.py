"""Ports that nobody else takes between the moment they are found free and the moment they are bound.

The kernel gives the same ephemeral port again to whoever asks next: to a test that runs beside this one, or to the near
end of an outgoing connection. So each process has a block of its own below the ephemeral ports.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import random
import socket
from collections.abc import Iterator

_FIRST, _END, _BLOCK = 10_000, 32_000, 100


def free_port() -> int:
    """A port of 127.0.0.1 that nobody is bound to; the same one again only after many others."""
    ports = _own_ports()[1]
    for port in itertools.islice(ports, _BLOCK):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:  # still in use
            continue
        return port
    raise AssertionError("no port is free")


@functools.cache
def _own_ports() -> tuple[socket.socket, Iterator[int]]:
    """The process that is bound to the first port of a block has the others, until it ends."""
    blocks = list(range(_FIRST, _END, _BLOCK))
    random.shuffle(blocks)
    for first in blocks:
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", first))
        except OSError:
            holder.close()
            continue
        atexit.register(holder.close)
        return holder, itertools.cycle(range(first + 1, first + _BLOCK))
    raise AssertionError("every block of ports is taken")
