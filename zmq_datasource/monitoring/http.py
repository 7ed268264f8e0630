"""A small HTTP server for figures, which slow clients cannot hold up.

Of more than ``_CONNECTIONS`` connections at once the oldest ends, so that half a request never keeps a scrape out.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

_log = logging.getLogger(__name__)

_CONNECTIONS = 8
_LOOPBACK = "127.0.0.1"


class HttpAddress(NamedTuple):
    """Where to listen. Port 0 takes a free port."""

    port: int
    host: str = _LOOPBACK

    @classmethod
    def read(cls, text: str) -> HttpAddress:
        """Read ``PORT`` (of loopback) or ``HOST:PORT``, as in ``0.0.0.0:9400`` or ``[::]:9400``. Raises ValueError."""
        host, colon, port = text.rpartition(":")
        if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16) or bool(host) != bool(colon):
            raise ValueError("write a port, as in 9400, or 0.0.0.0:9400 for all addresses of this machine")
        return cls(int(port), host.strip("[]") or _LOOPBACK)


class _Handler(WSGIRequestHandler):
    timeout = 5  # seconds without a byte

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in http.server
        _log.debug(format, *args)


class HttpServer(ThreadingMixIn, WSGIServer):
    """Serves an application of WSGI until ``close``. Raises OSError if the address cannot be listened on."""

    daemon_threads = True

    def __init__(self, address: HttpAddress, app: Callable[..., Any]) -> None:
        self._open: list[socket.socket] = []  # oldest first
        self._lock = threading.Lock()
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        self.address_family = min(family for family, *_ in found)  # IPv4, if the host has it
        super().__init__((address.host, address.port), _Handler)
        self.set_app(app)
        threading.Thread(target=self.serve_forever, name="zmq-metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    # socketserver's side.

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) == _CONNECTIONS:
                with suppress(OSError):  # its thread then reads the end of the request
                    self._open.pop(0).shutdown(socket.SHUT_RDWR)
            self._open.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock, suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("answering %s", client_address, exc_info=True)
