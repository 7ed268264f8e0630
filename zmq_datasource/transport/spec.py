"""Describes a socket as a value, and creates it with every option set and nothing bound or connected.

libzmq ignores most options once a socket is bound or connected, so all of them are set here.

An option may name a file, a certificate or an environment variable. Each process that opens a socket reads the value
there. So no key appears in a query's plan, its checkpoint, an event log or a list of processes.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import zmq
import zmq.auth

from zmq_datasource.errors import OptionError
from zmq_datasource.messages.columns import MAX_MESSAGE_BYTES
from zmq_datasource.options import ProxyOptions, ReadOptions, ReceiveOptions, WriteOptions
from zmq_datasource.options.parser import ZmqOptions
from zmq_datasource.options.socket import (
    CURVE_KEY_CHARACTERS,
    Endpoints,
    check_security,
    is_server,
)
from zmq_datasource.transport.connections import KEEPALIVE

# libzmq#4767, #3937
_NO_HEARTBEATS = (
    "while a side pauses, its libzmq reads no heartbeats, so the connection ends again and again, and messages are "
    "lost; tcp keepalive, which is on, finds a dead peer (zmq.tcp_keepalive_idle, _intvl and _cnt)"
)

# libzmq's options that are refused, with what to use instead; docs/options.md lists them.
REFUSED = {
    "plain_server": "it is not offered, because PLAIN encrypts nothing; use zmq.curve_server and allowedClients",
    "rcvhwm": "use the option rcvhwm",
    "sndhwm": "use the option sndhwm of a sink; what a source sends is not limited",
    "hwm": "libzmq has no single high-water mark; use rcvhwm or sndhwm",
    "linger": "use the option linger of the sink; a source has nothing to send",
    "subscribe": "use the option topics",
    "unsubscribe": "use the option topics",
    "rcvtimeo": "receiving is driven by Spark's triggers",
    "sndtimeo": "use the option sendTimeout",
    "xpub_nodrop": "it is always on, so that drops are counted",
    "xpub_verbose": "it is always on, to count subscribers",
    "routing_id": "each connection has one of its own; name a Producer with name",
    "identity": "each connection has one of its own; name a Producer with name",
    "router_handover": "each connection has a routing id of its own",
    "router_mandatory": "it belongs to a ROUTER, where it is always on",
    "immediate": "a PUSH has it on, so that no row is queued for a peer that is not there; others have it off",
    "reconnect_stop": "a connection that ends for good takes along what was received and not read",
    "heartbeat_ivl": _NO_HEARTBEATS,
    "heartbeat_timeout": _NO_HEARTBEATS,
    "heartbeat_ttl": _NO_HEARTBEATS,
    "conflate": "it tears messages of several frames; use rcvhwm=1 or sndhwm=1 for a short queue",
}

# With CURVE, libzmq compares MAXMSGSIZE with the encrypted frame, which has 33 bytes more.
_ENCRYPTION_BYTES = 64

# A sink receives subscriptions, or the answers to a DEALER. A PUSH reads nothing, and libzmq keeps what its peers send
# up to the high-water mark.
_TO_SINK_BYTES = 1 << 20


class SocketSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a socket.

    Attributes:
        kind: Its type, in ZeroMQ's words. For ``PUB`` an XPUB is created, because it receives subscriptions.
        bind, connect: Its endpoints.
        rcvhwm, sndhwm: Its high-water marks, in messages for each connection; None for libzmq's defaults.
        max_message_bytes: A frame with more bytes disconnects its sender; -1 for no limit.
        linger: Milliseconds; -1 for no limit.
        zmq: The user's options of libzmq, set after the attributes above; ``maxmsgsize`` overrides
            ``max_message_bytes``.
        allowed_clients: The directory with the certificates of the CURVE clients that may connect; empty for all.
    """

    kind: str
    bind: Endpoints = Endpoints()
    connect: Endpoints = Endpoints()
    rcvhwm: int | None = None
    sndhwm: int | None = None
    max_message_bytes: int = MAX_MESSAGE_BYTES
    linger: int = 0
    zmq: ZmqOptions = ZmqOptions()
    allowed_clients: str = ""

    @classmethod
    def of_source(cls, options: ReadOptions) -> SocketSpec:
        """The socket of a source that has one."""
        return cls.all_of_source(options)[0]

    @classmethod
    def all_of_source(cls, options: ReadOptions) -> list[SocketSpec]:
        return [
            cls(
                kind=kind,
                bind=bind,
                connect=connect,
                rcvhwm=options.rcvhwm,
                zmq=options.zmq,
                allowed_clients=options.allowed_clients,
            )
            for kind, bind, connect in options.receiving_sockets
        ]

    @classmethod
    def of_durable(cls, options: ReceiveOptions) -> SocketSpec:
        """The ROUTER of durable subscribers. It has no CURVE if the feed's socket is only a client of CURVE."""
        given, clients = options.zmq, options.allowed_clients
        if not is_server(given):
            given = ZmqOptions({name: text for name, text in given.items() if not name.startswith("curve_")})
        return cls(kind="ROUTER", bind=options.durable, zmq=given, allowed_clients=clients)

    @classmethod
    def of_sink(cls, options: WriteOptions) -> SocketSpec:
        return cls(
            kind=options.socket_type,
            bind=options.bind,
            connect=options.connect,
            sndhwm=options.sndhwm,
            max_message_bytes=_TO_SINK_BYTES,
            linger=options.linger,
            zmq=options.zmq,
            allowed_clients=options.allowed_clients,
        )

    @classmethod
    def of_publisher(cls, options: ProxyOptions) -> SocketSpec:
        return cls(
            kind="PUB",
            bind=options.publish,
            sndhwm=options.sndhwm,
            zmq=options.zmq,
            allowed_clients=options.allowed_clients,
        )

    @property
    def endpoints(self) -> str:
        """All endpoints in one text, for names and messages."""
        return ",".join(map(str, (*self.connect, *self.bind)))


def new_socket(context: zmq.Context[zmq.Socket[bytes]], spec: SocketSpec) -> zmq.Socket[bytes]:
    """Create a socket with every option set and nothing bound or connected.

    Raises:
        OptionError: An option cannot be set; the error names it.
    """
    check_security(spec.zmq, spec.allowed_clients)
    options = options_of(spec)
    sock = context.socket(zmq.XPUB if spec.kind == "PUB" else zmq.SocketType[spec.kind])
    try:
        for option, value in _ours(spec).items():
            sock.setsockopt(option, value)
        for name, text in options.items():
            _set(sock, name, text)
    except BaseException:
        sock.close(linger=0)
        raise
    return sock


def options_of(spec: SocketSpec) -> ZmqOptions:
    """libzmq's options for this socket. If there are options for servers and for clients, those of one role
    are left out: a socket that binds is a server.

    Raises:
        OptionError: The socket would be both server and client.
    """
    options = spec.zmq
    if not is_server(options):
        # libzmq would read a flag that is off as "no security", and forget keys that were set before.
        return ZmqOptions({name: text for name, text in options.items() if name != "curve_server"})
    if "curve_serverkey" not in options:
        return options
    if spec.bind and spec.connect:
        raise OptionError(
            f"a socket that binds {spec.bind[0]} and connects to {spec.connect[0]} cannot be server "
            "(zmq.curve_server) and client (zmq.curve_serverkey) at once; use two sockets"
        )
    other = "curve_serverkey" if spec.bind else "curve_server"
    return ZmqOptions({name: text for name, text in options.items() if name != other})


def frame_limit(most_bytes: int) -> int:
    """The value of MAXMSGSIZE that lets a frame of ``most_bytes`` arrive, encrypted or not; -1 for no limit."""
    return most_bytes if most_bytes < 0 else most_bytes + _ENCRYPTION_BYTES


def _ours(spec: SocketSpec) -> dict[int, int]:
    ours: dict[int, int] = {
        zmq.LINGER: spec.linger,
        zmq.MAXMSGSIZE: frame_limit(spec.max_message_bytes),
        # libzmq then asks for IPv6 addresses alone: a name that has both kinds would not reach a publisher on IPv4.
        zmq.IPV6: any("[" in endpoint.address for endpoint in (*spec.bind, *spec.connect)),
        **KEEPALIVE,
    }
    if spec.rcvhwm is not None:
        ours[zmq.RCVHWM] = spec.rcvhwm
    if spec.sndhwm is not None:
        ours[zmq.SNDHWM] = spec.sndhwm
    if spec.kind == "PUSH":
        ours[zmq.RCVHWM] = 1
    if spec.kind in ("SUB", "XSUB"):
        # These sockets send subscriptions, which libzmq would drop beyond the high-water mark.
        ours[zmq.SNDHWM] = 0
    if spec.kind == "PUB":
        ours |= {zmq.XPUB_NODROP: 1, zmq.XPUB_VERBOSE: 1}
    return ours


def check_socket_options(spec: SocketSpec) -> None:
    """Let libzmq check the options, on a socket that is closed again.

    Raises:
        OptionError: libzmq refuses an option; the error names it.
    """
    with zmq.Context() as context, new_socket(context, spec):
        pass


def _set(sock: zmq.Socket[bytes], name: str, value: str) -> None:
    if name in REFUSED:
        raise OptionError(f"option zmq.{name}: {REFUSED[name]}")
    option = getattr(zmq.SocketOption, name.upper(), None)
    if option is None:
        raise OptionError(f"option zmq.{name}: libzmq has no socket option of that name; see zmq_setsockopt")
    # repr() of the options hides the value of a secret.
    shown = repr(ZmqOptions({name: value}))
    value = value_of(name, value)
    try:
        if option._opt_type.name == "bytes":
            sock.setsockopt(option, value.encode())
        else:
            sock.setsockopt(option, int(value))
    except (ValueError, OverflowError):
        raise OptionError(
            f"option zmq.{name}: {shown}: it takes a whole number that libzmq can count"
        ) from None
    except zmq.ZMQError as e:
        kind = zmq.SocketType(int(sock.type)).name
        raise OptionError(
            f"option zmq.{name}: {shown}: libzmq refuses it for a {kind} socket: {e.strerror}"
        ) from e
    if name == "reconnect_ivl" and int(value) < 1:
        raise OptionError(
            f"option zmq.{name}: {shown}: without reconnecting, libzmq throws away what it has received from a "
            "connection that ends; use a number of milliseconds"
        )


_FILE, _VARIABLE = "@/", "env:"


def value_of(name: str, text: str) -> str:
    """The value of an option: the text itself, or the content of the place that it names.

    Args:
        name: libzmq's name of the option, in lower case.
        text: ``@PATH``, absolute, stands for the content of a file, without surrounding white space; if the file is a
            certificate (of ``zmq-datasource keygen`` or ``zmq.auth``), for the key that this option takes.
            ``env:NAME`` stands for a variable of this process's environment.

    Raises:
        OptionError: The place has no value. The error names the option and the place, and never shows a value.
    """
    if text.startswith(_VARIABLE):
        variable = text.removeprefix(_VARIABLE)
        if variable not in os.environ:
            raise OptionError(
                f"option zmq.{name}: {text}: the variable {variable} is not set in this process; each machine that "
                "opens the socket needs it"
            )
        return os.environ[variable]
    path = Path(text[1:])
    is_curve = name.startswith("curve_")
    is_key = is_curve and len(text) == CURVE_KEY_CHARACTERS and not path.exists()
    if not text.startswith(_FILE) or is_key:
        if is_curve and text.startswith("@") and not is_key:
            raise OptionError(
                f"option zmq.{name}: a file is named by an absolute path, as in @/etc/zmq/feed.key, because each "
                "machine that opens the socket reads it; a key as text has 40 characters"
            )
        return text
    try:
        content = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise OptionError(
            f"option zmq.{name}: reading {path}: {e}; each machine that opens the socket needs this file"
        ) from e
    return _key_of(name, path) if is_curve and len(content) != CURVE_KEY_CHARACTERS else content


def _key_of(name: str, path: Path) -> str:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except ValueError:
        raise OptionError(f"option zmq.{name}: {path} has neither a key nor a certificate with one") from None
    key = secret if name == "curve_secretkey" else public
    if key is None:
        raise OptionError(
            f"option zmq.{name}: the certificate {path} has no secret key; name the file that ends in .key_secret"
        )
    return key.decode()
