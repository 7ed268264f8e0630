"""The options of every socket: its endpoints, libzmq's own options, and the checks of its security."""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

from zmq_datasource.errors import OptionError
from zmq_datasource.options.parser import OptionSet, ZmqOptions, doc
from zmq_datasource.options.types import LocalPath

# The length of a key as text (Z85). A key may look like a path, because Z85 has "@" and "/".
CURVE_KEY_CHARACTERS = 40


class Endpoint(NamedTuple):
    """One address: ``tcp://host:port`` or ``ipc://path``."""

    transport: str
    address: str

    def __str__(self) -> str:
        return f"{self.transport}://{self.address}"

    @property
    def host_port(self) -> tuple[str, int]:
        """Host (without IPv6 brackets) and port of a tcp endpoint."""
        # libzmq allows "source:port;host:port". The peer is after the semicolon.
        host, _, port = self.address.rpartition(";")[2].rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def unix_address(self) -> str:
        """The address of an ipc endpoint as the system writes it. libzmq's ``@name`` is in Linux's abstract
        namespace."""
        return "\0" + self.address[1:] if self.address.startswith("@") else self.address

    @classmethod
    def read(cls, text: str) -> Endpoint:
        transport, separator, address = text.partition("://")
        if not separator:
            raise ValueError(f"{text!r} has no transport; write tcp://{text} or ipc://{text}")
        if transport not in ("tcp", "ipc"):
            raise ValueError(f"transport {transport!r} of {text!r} is not supported; use tcp:// or ipc://")
        if transport == "ipc":
            # sockaddr_un holds 108 bytes with the closing zero. libzmq would refuse a longer path later.
            if not 0 < len(address.encode()) < 108:
                raise ValueError(f"the path of {text!r} must have 1 to 107 bytes")
            return cls(transport, address)
        host, separator, port = address.rpartition(":")
        if not separator or not host:
            raise ValueError(f"{text!r} must be tcp://host:port")
        if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
            # libzmq takes the port modulo 65536, and dials port 0 without an error.
            raise ValueError(f"port {port!r} of {text!r} must be a number from 1 to 65535")
        return cls(transport, address)


class Endpoints(tuple[Endpoint, ...]):
    """Endpoints separated by commas."""

    words: ClassVar[str] = "endpoints"

    def __str__(self) -> str:
        return ",".join(map(str, self))

    @classmethod
    def read(cls, text: str) -> Endpoints:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise ValueError("it names no endpoint; write tcp://host:port or ipc://path")
        endpoints = cls(map(Endpoint.read, parts))
        doubles = {str(e) for e in endpoints if endpoints.count(e) > 1}
        if doubles:
            raise ValueError(f"{', '.join(sorted(doubles))} is named more than once")
        return endpoints


class SocketOptions(OptionSet, frozen=True, kw_only=True, rename="camel"):
    """The options of every socket. Subclasses add those of the source, the sink and the proxy."""

    connect: Annotated[Endpoints, doc("The endpoints to connect to, separated by commas.")] = Endpoints()
    bind: Annotated[Endpoints, doc("The endpoints to bind, separated by commas.")] = Endpoints()

    allowed_clients: Annotated[
        LocalPath,
        doc(
            "The directory with the certificates (`*.key`) of the clients that may connect to a CURVE server "
            "(`zmq.curve_server`). Without it every client that knows the server's public key may connect. A "
            "certificate that is added or removed counts for the next connection. See docs/security.md."
        ),
    ] = LocalPath("")

    @property
    def has_endpoints(self) -> bool:
        """Whether an endpoint is named. Without one, no socket is opened."""
        return bool(self.connect or self.bind)

    @property
    def endpoints(self) -> str:
        """All endpoints as one text."""
        return ",".join(map(str, (*self.connect, *self.bind)))

    def check(self) -> None:
        both = set(self.connect) & set(self.bind)
        if both:
            raise OptionError(f"{', '.join(map(str, both))} is in both connect and bind; keep one")
        check_security(self.zmq, self.allowed_clients)


def is_server(options: ZmqOptions) -> bool:
    """Whether a socket is a server of CURVE. ``check_security`` refuses values other than 0 and 1."""
    return options.get("curve_server", "0") != "0"


def check_security(options: ZmqOptions, allowed_clients: str) -> None:
    """Refuse combinations that libzmq accepts, but that would let no client connect, or every client.

    Raises:
        OptionError: ``zmq.curve_server`` is neither 0 nor 1, a key is missing, or no server checks the clients.
    """
    if options.get("curve_server", "0") not in ("0", "1"):
        raise OptionError(f"option zmq.curve_server={options['curve_server']}: it takes 1, or 0 for a client")
    given = {name for name in options if name.startswith("curve_")}
    if is_server(options) and "curve_secretkey" not in given:
        raise OptionError(
            "zmq.curve_server needs zmq.curve_secretkey, the server's own; without it no client could connect"
        )
    missing = {"curve_publickey", "curve_secretkey"} - given
    if "curve_serverkey" in given and missing:
        names = " and ".join(f"zmq.{name}" for name in sorted(missing))
        raise OptionError(
            f"zmq.curve_serverkey needs {names}, the client's own (zmq.curve_keypair() makes a pair); without "
            "them the server would not answer"
        )
    if allowed_clients and not is_server(options):
        raise OptionError(
            f"allowedClients={allowed_clients} needs zmq.curve_server=1: without it no client is asked for a key"
        )
