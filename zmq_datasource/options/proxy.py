"""The options of the proxy."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from zmq_datasource.errors import OptionError
from zmq_datasource.options.parser import Role, doc
from zmq_datasource.options.read import ReceiveOptions
from zmq_datasource.options.socket import Endpoints
from zmq_datasource.options.types import Topics


class ProxyOptions(ReceiveOptions, frozen=True, kw_only=True, rename="camel"):
    """``zmq-datasource proxy`` and ``zmq_datasource.Proxy``: a receiver that may publish what it receives."""

    bind: Annotated[
        Endpoints,
        doc(
            "The endpoints to which publishers (PUB, XPUB) connect, separated by commas. The proxy binds an "
            "XSUB there."
        ),
    ] = Endpoints()
    connect: Annotated[
        Endpoints, doc("The endpoints of publishers that bind. The proxy's XSUB connects to them.")
    ] = Endpoints()
    pull: Annotated[
        Endpoints,
        doc("The endpoints to which PUSH sockets connect. The proxy binds a PULL there.", Role.SOCKET),
    ] = Endpoints()
    publish: Annotated[
        Endpoints,
        doc("The endpoints to which plain subscribers (SUB, XSUB) connect. The proxy binds an XPUB there."),
    ] = Endpoints()
    topics: Annotated[
        Topics,
        doc(
            "The topic prefixes to which the proxy always subscribes. So their messages are in the log even if no "
            "plain subscriber asks for them. Prefixes are separated by commas. The proxy also subscribes to what plain "
            "subscribers ask for.",
            Role.SOCKET,
        ),
    ] = Topics(("",))
    sndhwm: Annotated[
        int,
        doc(
            "The send high-water mark on the subscribers' side: how many messages libzmq queues for each plain "
            "subscriber.",
            ge=1,
            le=2**31 - 1,
        ),
    ] = 1000
    slow_subscriber: Annotated[
        Literal["drop", "wait"],
        doc(
            "What happens when the queue of a plain subscriber is full. `drop` waits for room for up to 5 ms, "
            "and then drops messages for this subscriber only. `wait` waits for it, and so holds the publishers "
            "and all other subscribers back."
        ),
    ] = "drop"

    title: ClassVar[str] = "proxy option"

    @property
    def has_endpoints(self) -> bool:
        return bool(self.bind or self.connect or self.pull)

    @property
    def endpoints(self) -> str:
        return ",".join(map(str, (*self.connect, *self.bind, *self.pull)))

    @property
    def receiving_sockets(self) -> list[tuple[str, Endpoints, Endpoints]]:
        sockets = [("XSUB", self.bind, self.connect), ("PULL", self.pull, Endpoints())]
        return [(kind, bind, connect) for kind, bind, connect in sockets if bind or connect]

    def check(self) -> None:
        if not self.has_log:
            raise OptionError(
                "walLocation is not set; name the directory where the proxy keeps the messages, or with walStore a "
                "bucket"
            )
        if not self.has_endpoints:
            raise OptionError("no side for publishers: name bind or connect (PUB), or pull (PUSH)")
        if not (self.publish or self.durable):
            raise OptionError("no side for subscribers: name publish or durable; receive serves none")
        self.refuse(("socket_type",), "is for receive: a proxy has an XSUB (bind, connect) and a PULL (pull)")
        super().check()
        bound = [*self.bind, *self.pull, *self.publish, *self.durable]
        twice = {str(endpoint) for endpoint in bound if bound.count(endpoint) > 1}
        if twice:
            raise OptionError(f"{', '.join(sorted(twice))} is named for two sides; each needs its own")
