"""This machine's addresses and processes, the limit of open files, and files that only their owner may read."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
from contextlib import suppress

from zmq_datasource.errors import OptionError

# The mode of a file that only its owner may read: the log and its neighbours hold whole messages.
PRIVATE = 0o600

_SIOCGIFADDR = 0x8915  # Linux
_MOST_ADDRESSES = 8


def make_private(path: str | os.PathLike[str]) -> None:
    """Create an empty file that only its owner may read, or empty an existing one.

    Called before a library writes the file, because a library would create it with the mode of the umask.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE))


def allow_many_files() -> None:
    """Raise this process's limit of open files to the highest that its user may have.

    Without this, many connections could use up all descriptors, and the log could not open its files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems report a limit that they refuse to set
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# Addresses.


def own_addresses() -> list[str]:
    """The IPv4 addresses by which other machines may reach this one, the likeliest first and loopback last.

    Host names are left out: a machine that cannot resolve one waits for the resolver before it tries the next address.
    """
    found = [os.environ.get("SPARK_LOCAL_IP", "")]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError):  # there is no route
            probe.connect(("192.0.2.1", 9))  # chooses the interface; a datagram socket sends nothing here
            found.append(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no address, or this is not Linux
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
    reachable = [host for host in dict.fromkeys(found) if _is_ipv4(host) and not host.startswith("127.")]
    return [*reachable[: _MOST_ADDRESSES - 1], "127.0.0.1"]


def _is_ipv4(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        return False
    return True


# Processes.

# How many forks lead from the first process to this one.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_count_fork)


class ThisProcess:
    """The process that has created an object; a forked child has the object, but no threads and no connections.

    Args:
        what: The object, for the error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()
        self._forks = _forks

    @property
    def is_forked(self) -> bool:
        """Whether this code runs in a forked child."""
        return self._forks != _forks  # os.getpid would be a system call for each message

    def check(self) -> None:
        """Refuse a forked child. Call it before taking a lock, which the fork may have copied in its taken state.

        Raises:
            OptionError: This is a forked child.
        """
        if self.is_forked:
            raise OptionError(
                f"using {self._what} of process {self._pid} in its forked child {os.getpid()}: a fork does not take "
                "over the connection. Make a new one in the child, or start the child with spawn"
            )
