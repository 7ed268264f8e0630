"""What every socket has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from zmq_datasource.errors import OptionError
from zmq_datasource.options.parser import OptionSet, doc
from zmq_datasource.options.types import Endpoints, ZmqOptions

__all__ = ["CURVE_KEY_CHARACTERS", "SocketOptions", "check_security"]

# Of a key as text, in Z85, whose characters include "@" and "/".
CURVE_KEY_CHARACTERS = 40


class SocketOptions(OptionSet, frozen=True, kw_only=True, rename="camel"):
    """What every socket has. Subclasses add their side."""

    connect: Annotated[
        Endpoints,
        doc("Endpoints to connect to, comma-separated. `tcp://vllm-[0-7]:5557` stands for eight of them."),
    ] = Endpoints()
    bind: Annotated[Endpoints, doc("Endpoints to bind, comma-separated.")] = Endpoints()

    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (*("endpoint", "endpoints", "address", "host", "port", "url", "uri"), "kafka.bootstrap.servers"),
        "connect",
    )

    @property
    def endpoints(self) -> str:
        """All endpoints as one text, for names and messages."""
        return ",".join(map(str, (*self.connect, *self.bind)))

    def check(self) -> None:
        both = set(self.connect) & set(self.bind)
        if both:
            raise OptionError(f"{', '.join(map(str, both))} is in both connect and bind; keep one")
        check_security(self.zmq)


def check_security(options: ZmqOptions) -> None:
    """Refuse what libzmq takes, and what then lets nobody through.

    Raises:
        OptionError: Half a key ring, or a PLAIN server.
    """
    given = {name for name in options if name.startswith("curve_")}
    if options.get("curve_server") not in (None, "0") and "curve_secretkey" not in given:
        raise OptionError(
            "zmq.curve_server needs zmq.curve_secretkey, the server's own; nobody could connect"
        )
    missing = {"curve_publickey", "curve_secretkey"} - given
    if "curve_serverkey" in given and missing:
        names = " and ".join(f"zmq.{name}" for name in sorted(missing))
        raise OptionError(
            f"zmq.curve_serverkey needs {names}, the client's own (zmq.curve_keypair() makes a pair); nobody would "
            "answer"
        )
    if options.get("plain_server") not in (None, "0"):
        raise OptionError(
            "zmq.plain_server needs a ZAP handler that checks passwords, which this package does not run, so every "
            "handshake would fail; use CURVE (zmq.curve_server), or connect as a PLAIN client"
        )
