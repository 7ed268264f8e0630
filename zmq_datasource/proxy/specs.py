"""What the plain sockets of a proxy are to be."""

from __future__ import annotations

from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.types import Endpoints
from zmq_datasource.transport.spec import SocketSpec

__all__ = ["proxy_socket"]

_NONE = Endpoints()


def proxy_socket(options: ProxyOptions, kind: str, bind: Endpoints, connect: Endpoints = _NONE) -> SocketSpec:
    """A socket of the proxy, with its high-water marks."""
    return SocketSpec(
        kind=kind,
        bind=bind,
        connect=connect,
        rcvhwm=options.rcvhwm,
        sndhwm=options.send_hwm,
        linger=options.linger,
        zmq=options.zmq,
        access=options.access,
    )
