"""Decides which clients may connect to a server of CURVE, by ZeroMQ's authentication protocol (ZAP, RFC 27).

At each handshake libzmq asks a handler in the socket's context. The handler is pyzmq's. It looks clients up in a
directory of certificates, which may change while the socket is open.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import zmq
import zmq.auth

from zmq_datasource.errors import OptionError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.options.socket import is_server
from zmq_datasource.transport.spec import SocketSpec, options_of

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

_log = logging.getLogger(__name__)

_ALL_DOMAINS = "*"
# A certificate of the first suffix admits its owner. One of the second only keeps its names bound.
_ADMITS, _REVOKED = ".key", ".revoked"


def authenticate(context: zmq.Context[zmq.Socket[bytes]], spec: SocketSpec) -> ThreadAuthenticator | None:
    """Start the handler in the context of a socket. Called before the socket is bound; the caller stops it at the end.

    Returns:
        The handler; None if the socket is not a server, or any client may connect.

    Raises:
        OptionError: The directory cannot be read.
    """
    if not (is_server(options_of(spec)) and spec.allowed_clients):
        return None

    from zmq.auth.thread import ThreadAuthenticator  # noqa: PLC0415 - it imports asyncio, which most sockets do not need

    # pyzmq's handler logs each client that it refuses, and any stranger may connect often.
    quiet = logging.Logger("zap", logging.ERROR)
    quiet.parent = _log
    handler = ThreadAuthenticator(context, log=quiet)
    handler.configure_curve_callback(_ALL_DOMAINS, Clients(spec.allowed_clients))
    handler.start()
    return handler


class _Certificate(NamedTuple):
    key: bytes
    names: list[str]
    is_revoked: bool


class Clients:
    """Admits the owners of the certificates in a directory, and binds names to them.

    The metadata of a certificate may have a line ``names = "billing orders-*"``. Then its owner may commit and
    subscribe under these names only, and no other client may use them.

    While the directory or a certificate in it cannot be read, no client may connect. The names that were bound remain
    bound: otherwise a disk fault would give them to all connected clients. A server does not start like that, because
    it would not know the names. Only removing a file frees its names.

    Attributes:
        check_seconds: How often the directory is read at most, so that a flood of handshakes does not read it each
            time.

    Raises:
        OptionError: The directory or a certificate in it cannot be read.
    """

    check_seconds = 1.0

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._refusals = LimitedLog(__name__, "clients refused")
        self._faults = LimitedLog(__name__, "faults of allowedClients")
        self._next_check = time.monotonic() + self.check_seconds
        try:
            self._certificates = self._read()
        except (OSError, ValueError) as e:
            raise OptionError(
                f"option allowedClients: reading {directory}: {e}; it is a directory of certificates, as "
                "zmq-datasource keygen makes them. Restore a damaged file, because the names that it binds are not "
                "known without it, or remove it, which frees them for every client"
            ) from e
        self._admitted = _admitted(self._certificates)

    def _read(self) -> list[_Certificate]:
        found = []
        for path in sorted(self._directory.iterdir()):
            if path.suffix in (_ADMITS, _REVOKED):
                try:
                    key = zmq.auth.load_certificate(path)[0]
                except ValueError as e:
                    raise ValueError(f"{path} is not a certificate: {e}") from e
                found.append(_Certificate(key, _names_in(path), path.suffix == _REVOKED))
        return found

    def _reread(self) -> None:
        if time.monotonic() < self._next_check:
            return
        try:
            self._certificates = self._read()
            self._admitted = _admitted(self._certificates)
        except (OSError, ValueError) as e:
            self._faults.warn(
                "reading %s: %s; no client may connect until it can be read", self._directory, e
            )
            self._admitted = frozenset()
        self._next_check = time.monotonic() + self.check_seconds

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether the client with this key, in Z85, may connect; called by pyzmq's handler."""
        self._reread()
        if key in self._admitted:
            return True
        self._refusals.warn(
            "a client with the public key %s was refused: it is not in %s", key.decode(), self._directory
        )
        return False

    def may_use(self, key: str, name: str) -> bool:
        """Whether the client with this key may commit or subscribe under a name."""
        self._reread()
        own = [pattern for each in self._certificates if each.key == key.encode() for pattern in each.names]
        return (
            _any_fits(own, name)
            if own
            else not any(_any_fits(each.names, name) for each in self._certificates)
        )


class NameRights:
    """Says under which names the sender of a message may commit or subscribe.

    Args:
        directory: As for ``Clients``; empty if no keys are checked, so that every client may use any name.
    """

    def __init__(self, directory: str) -> None:
        self._clients = Clients(directory) if directory else None

    def of(self, frame: zmq.Frame) -> Callable[[str], bool]:
        """A function that says whether the sender of this frame may use a name."""
        if self._clients is None:
            return any_name
        return partial(self._clients.may_use, _user_of(frame))


def any_name(_name: str) -> bool:
    """Allow every name."""
    return True


def _user_of(frame: zmq.Frame) -> str:
    """The client's key, as the handler reported it; empty if libzmq does not know it, as after a reset."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _admitted(certificates: list[_Certificate]) -> frozenset[bytes]:
    revoked = {each.key for each in certificates if each.is_revoked}
    return frozenset(each.key for each in certificates) - revoked


def _any_fits(patterns: list[str], name: str) -> bool:
    return any(_fits(pattern, name) for pattern in patterns)


def _fits(pattern: str, name: str) -> bool:
    # Not fnmatch: for it brackets are a set of characters, so that a name with brackets would not fit itself.
    wanted = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(wanted, name, re.DOTALL) is not None


def _names_in(certificate: Path) -> list[str]:
    for line in certificate.read_text(encoding="utf-8").splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip() == "names":
            return value.strip().strip("\"'").split()
    return []
