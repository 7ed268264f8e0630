"""Binds and connects a socket, and refuses two mistakes that libzmq accepts in silence.

These are a host that does not resolve, and an ipc path on which another process listens.
"""

from __future__ import annotations

import errno
import socket as stdlib_socket
from collections.abc import Iterable

import zmq

from zmq_datasource.errors import EndpointError
from zmq_datasource.options.types import Endpoint

__all__ = ["attach"]


def attach(
    sock: zmq.Socket[bytes], bind: Iterable[Endpoint], connect: Iterable[Endpoint], check_hosts: bool = True
) -> None:
    """Bind and connect a socket.

    Raises:
        EndpointError: An endpoint is in use or not an address of this machine, or its host does not resolve.
    """
    for endpoint in bind:
        _refuse_ipc_in_use(endpoint)
        try:
            sock.bind(str(endpoint))
        except zmq.ZMQError as e:
            hints = {
                zmq.EADDRINUSE: "another process or another query of this job uses it; use another port",
                errno.ENODEV: "bind takes an IP address or interface of this machine, or *, but no host name",
                zmq.EADDRNOTAVAIL: "it is not an address of this machine; use * for all of them",
                errno.EACCES: "this user may not; use a port from 1024 on, or another directory",
            }
            hint = hints.get(e.errno or 0)
            raise EndpointError(f"binding {endpoint}: {e.strerror}{f'; {hint}' if hint else ''}") from e
    for endpoint in connect:
        if check_hosts:
            _refuse_unknown_host(endpoint)
        try:
            sock.connect(str(endpoint))
        except zmq.ZMQError as e:
            raise EndpointError(f"connecting to {endpoint}: {e.strerror}; write tcp://host:port") from e


def _refuse_ipc_in_use(endpoint: Endpoint) -> None:
    """Refuse a path with a listener: libzmq would take it over, and the listener would get no more connections."""
    if endpoint.transport != "ipc":
        return
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as probe:
        probe.setblocking(False)  # connecting to a listener that hangs would block once its backlog is full
        try:
            probe.connect(endpoint.unix_address)
        except BlockingIOError:
            pass
        except OSError:  # no listener, or an error that bind reports too
            return
    raise EndpointError(f"binding {endpoint}: another process listens there; use another path")


def _refuse_unknown_host(endpoint: Endpoint) -> None:
    if endpoint.transport != "tcp":
        return
    host, port = endpoint.host_port
    try:
        stdlib_socket.getaddrinfo(host, port, type=stdlib_socket.SOCK_STREAM)
    except OSError as e:
        raise EndpointError(
            f"connecting to {endpoint}: host {host!r} does not resolve on {stdlib_socket.gethostname()}: "
            f"{e.strerror or e}"
        ) from e
