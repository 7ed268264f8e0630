"""A small HTTP server for figures that no client can hold up.

At most ``_CONNECTIONS`` clients are served at once, each for a few seconds. If one more client connects, the oldest
connection ends, so that clients which send half a request do not keep a scrape out.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

_log = logging.getLogger(__name__)

_CONNECTIONS = 8
REQUEST_SECONDS = 5.0
_LOOPBACK = "127.0.0.1"


class HttpAddress(NamedTuple):
    """Where to listen. Port 0 takes a free port."""

    port: int
    host: str = _LOOPBACK

    @classmethod
    def read(cls, text: str) -> HttpAddress:
        """Read ``PORT`` (of loopback) or ``HOST:PORT``, as in ``0.0.0.0:9400`` or ``[::]:9400``. Raises ValueError."""
        host, _, port = text.rpartition(":")
        if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16) or text.startswith(":"):
            raise ValueError("write a port, as in 9400, or 0.0.0.0:9400 for all addresses of this machine")
        return cls(int(port), host.strip("[]") or _LOOPBACK)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class HttpServer(ThreadingMixIn, WSGIServer):
    """Serves an application of WSGI in threads of its own, from its construction until ``close``.

    Args:
        seconds: How long a connection may take.

    Raises:
        OSError: The address cannot be listened on.
    """

    daemon_threads = True

    def __init__(
        self, address: HttpAddress, app: Callable[..., Any], seconds: float = REQUEST_SECONDS
    ) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._ends: dict[socket.socket, float] = {}  # oldest first
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        self.address_family = found[0][0]
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
            if len(self._ends) >= _CONNECTIONS:
                _end(next(iter(self._ends)))
                del self._ends[next(iter(self._ends))]
            self._ends[request] = time.monotonic() + self._seconds
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End the connections whose time is over. Called at least twice a second."""
        with self._lock:
            for request, end in self._ends.items():
                if end <= time.monotonic():
                    _end(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._ends.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("answering %s", client_address, exc_info=True)


def _end(request: socket.socket) -> None:
    """End a connection. Its thread then reads the end of the request."""
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in http.server
        _log.debug(format, *args)
