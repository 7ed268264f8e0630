"""Who may connect to a socket that is a server of CURVE or PLAIN: ZeroMQ's authentication protocol (ZAP, RFC 27).

libzmq asks a handler within the socket's own context at each handshake. pyzmq has that handler; here is what it asks:
a directory of certificates, and a file of passwords, which may change while the socket is open.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import zmq
import zmq.auth

from zmq_datasource.errors import OptionError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.options.socket import is_on
from zmq_datasource.transport.keys import warn_of_readers
from zmq_datasource.transport.spec import SocketSpec, options_of

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

__all__ = ["Clients", "NameRights", "any_name", "authenticate"]

_log = logging.getLogger(__name__)

# Between looks at the file or directory, so that a flood of handshakes does not read it each time.
_LOOK_SECONDS = 1.0
_EVERYBODY = "*"

_T = TypeVar("_T")
_Stamp = tuple[tuple[str, int, int], ...]


def authenticate(context: zmq.Context[zmq.Socket[bytes]], spec: SocketSpec) -> ThreadAuthenticator | None:
    """Begin to answer libzmq's questions in the context of a socket, before that is bound; ``stop`` it at the end.

    Returns:
        None if libzmq has nothing to ask: the socket is no server, or any client may connect to it.

    Raises:
        OptionError: The directory or the file cannot be read.
    """
    options, access = options_of(spec), spec.access
    curve = is_on(options, "curve_server") and access.clients
    if not curve and not is_on(options, "plain_server"):
        return None

    from zmq.auth.thread import ThreadAuthenticator  # noqa: PLC0415 - it imports asyncio, which few need

    # pyzmq's handler writes passwords into its debug log.
    quiet = logging.Logger("zap", logging.ERROR)
    quiet.parent = _log
    handler = ThreadAuthenticator(context, log=quiet)
    if curve:
        handler.configure_curve_callback(_EVERYBODY, Clients(access.clients))
    else:
        handler.passwords[_EVERYBODY] = _Passwords(Path(access.passwords))  # type: ignore[assignment] # it looks up
    try:
        handler.start()
    except BaseException:
        if handler.is_alive():  # only late
            handler.stop()
            raise
        # It leaves open what it has made, and ending a context waits for every socket.
        for made in (handler.zap_socket, handler.pipe, getattr(handler.thread, "pipe", None)):
            if made is not None:
                made.close(linger=0)
        handler.pipe = handler.zap_socket = None  # type: ignore[assignment]
        raise
    return handler


class _Reread(Generic[_T]):
    """What a file or directory says, read again once it has changed.

    Args:
        read: Reads it.
        stamp: Tells whether it has changed.
        nothing: What it says while it cannot be read.
    """

    def __init__(self, path: Path, read: Callable[[], _T], stamp: Callable[[], _Stamp], nothing: _T) -> None:
        self._path, self._read, self._stamp, self._nothing = path, read, stamp, nothing
        self._seen = stamp()
        self._value = read()
        self._look_at = time.monotonic() + _LOOK_SECONDS

    def __call__(self) -> _T:
        if time.monotonic() < self._look_at:
            return self._value
        try:
            stamp = self._stamp()
            if stamp != self._seen:
                self._value, self._seen = self._read(), stamp
                _log.info("%s has changed: read again", self._path)
        except (OSError, ValueError) as e:
            if self._seen:
                _log.warning("reading %s: %s; nobody may connect until it can be read", self._path, e)
            self._value, self._seen = self._nothing, ()
        self._look_at = time.monotonic() + _LOOK_SECONDS
        return self._value


def _stamp_of(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return path.name, status.st_mtime_ns, status.st_size


class _Certificate(NamedTuple):
    """What a file in the directory says, or said when it could be read last."""

    key: bytes
    names: list[str]
    admits: bool


class Clients:
    """Who may connect: the owners of the certificates in a directory.

    The metadata of a certificate may have a line ``names = "billing orders-*"``. Its owner may then commit and
    subscribe under these names only, and nobody else may under them.

    While a certificate cannot be read, its owner may not connect. Its names stay bound as they were: otherwise a fault
    of the disk would give them to everybody who is connected.

    Raises:
        OptionError: The directory cannot be read.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._refusals = LimitedLog(__name__, "clients refused")
        self._certificates: dict[str, _Certificate] = {}
        self._opening = True
        try:
            self._admitted = _Reread(self._directory, self._read, self._stamp, frozenset[bytes]())
            self._opening = False
        except OSError as e:
            raise OptionError(
                f"option allowedClients: reading {directory}: {e}; it is a directory of certificates, as "
                "zmq-datasource keygen makes them"
            ) from e

    def _files(self) -> list[Path]:
        return sorted(path for path in self._directory.iterdir() if path.suffix == ".key")

    def _stamp(self) -> _Stamp:
        return (_stamp_of(self._directory), *map(_stamp_of, self._files()))

    def _read(self) -> frozenset[bytes]:
        found = {}
        for path in self._files():
            try:
                found[path.name] = _Certificate(zmq.auth.load_certificate(path)[0], _names_in(path), True)
            except (OSError, ValueError) as e:
                if self._opening and isinstance(e, OSError):
                    raise  # nobody knows which names are bound by it
                _log.warning("%s is no certificate, and its owner may not connect: %s", path, e)
                if (before := self._certificates.get(path.name)) is not None:
                    found[path.name] = before._replace(admits=False)
        self._certificates = found
        admitted = frozenset(certificate.key for certificate in found.values() if certificate.admits)
        if not admitted:
            _log.warning("%s has no certificate (*.key): no client may connect", self._directory)
        return admitted

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether the client with this key, in Z85, may connect; called by pyzmq's handler."""
        if key in self._admitted():
            return True
        self._refusals.warn(
            "a client with the public key %s was refused, which is not in %s", key.decode(), self._directory
        )
        return False

    def may_use(self, key: str, name: str) -> bool:
        """Whether the client with this key may commit or subscribe under a name."""
        self._admitted()
        certificates = self._certificates.values()
        own = [pattern for each in certificates if each.key == key.encode() for pattern in each.names]
        return _any_fits(own, name) if own else not any(_any_fits(each.names, name) for each in certificates)


class NameRights:
    """Under which names the sender of a message may commit or subscribe.

    Args:
        directory: As for ``Clients``; empty where nobody is asked for a key, and everybody may use any name.
    """

    def __init__(self, directory: str) -> None:
        self._clients = Clients(directory) if directory else None

    def of(self, frame: zmq.Frame) -> Callable[[str], bool]:
        """Whether its sender may use a name."""
        if self._clients is None:
            return any_name
        return partial(self._clients.may_use, user_of(frame))


def any_name(_name: str) -> bool:
    """The right to every name."""
    return True


def _any_fits(patterns: list[str], name: str) -> bool:
    return any(_fits(pattern, name) for pattern in patterns)


def _fits(pattern: str, name: str) -> bool:
    # Not fnmatch: it takes brackets for a set of characters, and a name with brackets would not fit itself.
    wanted = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(wanted, name, re.DOTALL) is not None


def _names_in(certificate: Path) -> list[str]:
    for line in certificate.read_text(encoding="utf-8").splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip() == "names":
            return value.strip().strip("\"'").split()
    return []


class _Passwords(Mapping[str, str]):
    """Passwords by the name of the client, for pyzmq's handler to look up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._refusals = LimitedLog(__name__, "clients refused")
        try:
            warn_of_readers(path)
            self._by_name = _Reread(path, self._read, lambda: (_stamp_of(path),), dict[str, str]())
        except (OSError, ValueError) as e:
            raise OptionError(
                f"option plainPasswords: reading {path}: {e}; it is a file with a line name:password for each client"
            ) from e

    def _read(self) -> dict[str, str]:
        found = {}
        for number, line in enumerate(self._path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip() and not line.startswith("#"):
                name, colon, password = line.partition(":")
                if not (name and colon and password):
                    raise ValueError(f"line {number} is not name:password")
                found[name] = password
        return found

    def __getitem__(self, name: str) -> str:
        try:
            return self._by_name()[name]
        except KeyError:
            self._refusals.warn(
                "a client with the name %r was refused, which is not in %s", name[:64], self._path
            )
            raise

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name())

    def __len__(self) -> int:
        return len(self._by_name())

    def __bool__(self) -> bool:
        return True  # pyzmq's handler asks whether there is a table at all
