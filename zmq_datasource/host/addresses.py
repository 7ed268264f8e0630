"""By which addresses others may reach this machine."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress

__all__ = ["own_addresses"]

_SIOCGIFADDR = 0x8915  # Linux
_MOST = 8


def own_addresses() -> list[str]:
    """IPv4 addresses of this machine, the likeliest first, loopback last.

    No names: a machine that looks one up in vain would wait for that, and with it for all other addresses.
    """
    found = [os.environ.get("SPARK_LOCAL_IP", "")]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError):  # there is no way out
            probe.connect(("192.0.2.1", 9))  # a datagram socket sends nothing here
            found.append(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none, or this is not Linux
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
    first = [host for host in dict.fromkeys(found) if _is_numeric(host) and not host.startswith("127.")]
    return [*first[: _MOST - 1], "127.0.0.1"]


def _is_numeric(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        return False
    return True
