"""Bind and connect, with the checks that libzmq leaves out.

What libzmq takes in silence is refused here: a host that does not resolve, an ipc path that
another process listens on.
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
    """Bind and connect.

    Raises:
        EndpointError: An endpoint is in use, not of this machine, or its host does not resolve.
    """
    for endpoint in bind:
        _refuse_ipc_in_use(endpoint)
        try:
            sock.bind(str(endpoint))
        except zmq.ZMQError as e:
            hints = {
                zmq.EADDRINUSE: "another process has it, or another query of this job; use another port",
                errno.ENODEV: "bind takes an IP address or interface of this machine, or *, and no host name",
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
    """libzmq takes over the path of a living listener; ask whether there is one."""
    if endpoint.transport != "ipc":
        return
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a listener that hangs has a full backlog
        try:
            probe.connect(endpoint.unix_address)
        except BlockingIOError:
            pass
        except OSError:  # nobody there, or something that bind will name
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
