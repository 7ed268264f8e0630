"""Second handles on libzmq's connections, by the descriptors that it tells of.

It tells of them afterwards: the connection may be closed by then, and the number may name another file.
"""

from __future__ import annotations

import os
import socket as stdlib_socket
import stat
from contextlib import suppress

__all__ = ["inode_of", "second_handle"]


def inode_of(descriptor: int) -> int | None:
    """What identifies the connection with this descriptor; None if it is closed, or the number names something else."""
    with suppress(OSError):
        found = os.fstat(descriptor)
        if stat.S_ISSOCK(found.st_mode):
            return found.st_ino
    return None


def second_handle(descriptor: int, inode: int | None) -> stdlib_socket.socket | None:
    """Another handle on a connection, which outlives libzmq's own; None if it is gone. To be closed."""
    if inode is None:
        return None
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    if inode_of(copy) == inode:
        with suppress(OSError):
            return stdlib_socket.socket(fileno=copy)
    os.close(copy)
    return None
