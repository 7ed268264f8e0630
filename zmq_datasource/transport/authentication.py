"""Decides which clients may connect to a server of CURVE, by ZeroMQ's authentication protocol (ZAP, RFC 27).

At each handshake libzmq asks a handler in the socket's context. The handler is pyzmq's. It looks clients up in a
directory of certificates, which may change while the socket is open.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
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

_Stamp = tuple[tuple[str, int, int], ...]


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
    try:
        handler.start()
    except BaseException:
        if handler.is_alive():  # it has started, only too late for pyzmq's own limit
            handler.stop()
            raise
        # pyzmq leaves these sockets open, and terminating a context waits for every socket.
        for made in (handler.zap_socket, handler.pipe, getattr(handler.thread, "pipe", None)):
            if made is not None:
                made.close(linger=0)
        handler.pipe = handler.zap_socket = None  # type: ignore[assignment]
        raise
    return handler


def _stamp_of(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return path.name, status.st_mtime_ns, status.st_size


# A larger file is not read to find out whether it is a certificate. keygen's have 400 bytes.
_MOST_CERTIFICATE_BYTES = 64 << 10


# A certificate of this suffix admits its owner. One that is revoked keeps its names bound, and admits no client.
_ADMITS, _REVOKED = ".key", ".revoked"


class _Certificate(NamedTuple):
    """The content of a certificate file when it could last be read.

    ``admits`` is false if the certificate is revoked, or cannot be read now.
    """

    key: bytes
    names: list[str]
    admits: bool


class Clients:
    """Admits the owners of the certificates in a directory, and binds names to them.

    The metadata of a certificate may have a line ``names = "billing orders-*"``. Then its owner may commit and
    subscribe under these names only, and no other client may use them.

    While a certificate cannot be read, its owner may not connect. Its names remain bound: otherwise a disk fault would
    give them to all connected clients. A server does not start with such a certificate, because it would not know the
    names. Only removing the file frees them.

    Attributes:
        check_seconds: How often the directory is looked at, so that a flood of handshakes does not read it each time.

    Raises:
        OptionError: The directory or a certificate in it cannot be read.
    """

    check_seconds = 1.0

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._refusals = LimitedLog(__name__, "clients refused")
        self._certificates: dict[str, _Certificate] = {}
        self._next_check = 0.0
        try:
            self._seen = self._stamp()
            self._admitted = self._read(opening=True)
        except OSError as e:
            raise OptionError(
                f"option allowedClients: reading {directory}: {e}; it is a directory of certificates, as "
                "zmq-datasource keygen makes them"
            ) from e
        except ValueError as e:
            raise OptionError(
                f"option allowedClients: {e}; restore the file, because the names that it binds are not known without "
                "it, or remove it, which frees them for every client"
            ) from e

    def _files(self) -> list[Path]:
        return sorted(path for path in self._directory.iterdir() if path.suffix in (_ADMITS, _REVOKED))

    def _stamp(self) -> _Stamp:
        stamps = [_stamp_of(self._directory)]
        for path in self._files():
            with suppress(FileNotFoundError):  # deleted at this moment, or a link to a file that is
                stamps.append(_stamp_of(path))
        return tuple(stamps)

    def _reread(self) -> frozenset[bytes]:
        """The keys of the clients that may connect; the directory is read again when it has changed."""
        if time.monotonic() < self._next_check:
            return self._admitted
        try:
            stamp = self._stamp()
            if stamp != self._seen:
                self._admitted, self._seen = self._read(), stamp
                _log.info("%s has changed: read again", self._directory)
        except OSError as e:
            if self._seen:
                _log.warning("reading %s: %s; no client may connect until it can be read", self._directory, e)
            self._admitted, self._seen = frozenset(), ()
        self._next_check = time.monotonic() + self.check_seconds
        return self._admitted

    def _read(self, opening: bool = False) -> frozenset[bytes]:
        found = {}
        for path in self._files():
            try:
                key = zmq.auth.load_certificate(path)[0]
                found[path.name] = _Certificate(key, _names_in(path), path.suffix == _ADMITS)
            except (OSError, ValueError) as e:
                if opening and isinstance(e, OSError):
                    raise
                if opening:
                    raise ValueError(f"{path} is not a certificate: {e}") from e
                _log.warning("%s is not a certificate, and its owner may not connect: %s", path, e)
                if (before := self._certificates.get(path.name)) is not None:
                    found[path.name] = before._replace(admits=False)
        self._certificates = found
        self._warn_of_other_names()
        revoked = {certificate.key for name, certificate in found.items() if name.endswith(_REVOKED)}
        admitted = (
            frozenset(certificate.key for certificate in found.values() if certificate.admits) - revoked
        )
        if not admitted:
            _log.warning("%s has no readable certificate (*.key): no client may connect", self._directory)
        return admitted

    def _warn_of_other_names(self) -> None:
        """Log each certificate that has no effect, because its file is not named ``*.key``."""
        for path in sorted(self._directory.iterdir()):
            if path.suffix in (_ADMITS, _REVOKED):
                continue
            with suppress(OSError, ValueError):  # no certificate, or not for us to read
                if path.stat().st_size > _MOST_CERTIFICATE_BYTES:
                    continue
                _, secret = zmq.auth.load_certificate(path)
                _log.warning(
                    "%s is a certificate, and is not named *.key: its owner may not connect; %s",
                    path,
                    f"name it {path.name}.key"
                    if secret is None
                    else "it has a secret key, so move it elsewhere",
                )

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether the client with this key, in Z85, may connect; called by pyzmq's handler."""
        if key in self._reread():
            return True
        self._refusals.warn(
            "a client with the public key %s was refused: it is not in %s", key.decode(), self._directory
        )
        return False

    def may_use(self, key: str, name: str) -> bool:
        """Whether the client with this key may commit or subscribe under a name."""
        self._reread()
        certificates = self._certificates.values()
        own = [pattern for each in certificates if each.key == key.encode() for pattern in each.names]
        return _any_fits(own, name) if own else not any(_any_fits(each.names, name) for each in certificates)


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
