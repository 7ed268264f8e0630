"""The options of the proxy."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from zmq_datasource.errors import OptionError
from zmq_datasource.options.log import LogOptions
from zmq_datasource.options.parser import doc
from zmq_datasource.options.socket import Endpoints
from zmq_datasource.options.types import Duration, LocalPath, Topics


class ProxyOptions(LogOptions, frozen=True, kw_only=True, rename="camel"):
    """``zmq-datasource proxy`` and ``zmq_datasource.Proxy``."""

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
        Endpoints, doc("The endpoints to which PUSH sockets connect. The proxy binds a PULL there.")
    ] = Endpoints()
    router: Annotated[
        Endpoints,
        doc(
            "The endpoints to which `DEALER` sinks and `Producer` connect. Their transactions are "
            "acknowledged when they are in the log (docs/protocol.md)."
        ),
    ] = Endpoints()
    publish: Annotated[
        Endpoints,
        doc("The endpoints to which plain subscribers (SUB, XSUB) connect. The proxy binds an XPUB there."),
    ] = Endpoints()
    durable: Annotated[
        Endpoints,
        doc(
            "The endpoints to which durable subscribers connect. The proxy binds a ROUTER there "
            "(docs/proxy.md)."
        ),
    ] = Endpoints()
    topics: Annotated[
        Topics,
        doc(
            "The topic prefixes to which the proxy always subscribes. So their messages are in the log even if no "
            "plain subscriber asks for them. Prefixes are separated by commas, or a JSON list. The proxy also "
            "subscribes to what plain subscribers ask for."
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
            "and then drops messages for this subscriber only. `wait` waits for it, and so holds all others "
            "back."
        ),
    ] = "drop"
    wal_location: Annotated[
        LocalPath,
        doc("The directory of the log, as an absolute path. Every Spark job that sees it can read the log."),
    ] = LocalPath("")
    subscriber_expiry: Annotated[
        Duration,
        doc(
            "How long a durable subscriber may be away before it is forgotten. A warning is logged when four fifths "
            "of this time have passed."
        ),
    ] = Duration(7 * 86_400)

    title: ClassVar[str] = "proxy option"

    def check(self) -> None:
        super().check()
        if not self.wal_location:
            raise OptionError("walLocation is not set; name the directory where the proxy keeps the messages")
        if not (self.bind or self.connect or self.pull or self.router):
            raise OptionError(
                "no side for publishers: name bind or connect (PUB), pull (PUSH) or router (Producers)"
            )
        if not (self.publish or self.durable):
            raise OptionError("no side for subscribers: name publish or durable")
        bound = [*self.bind, *self.pull, *self.router, *self.publish, *self.durable]
        twice = {str(endpoint) for endpoint in bound if bound.count(endpoint) > 1}
        if twice:
            raise OptionError(f"{', '.join(sorted(twice))} is named for two sides; each needs its own")
        if self.when_full == "discard" and not self.publish:
            raise OptionError(
                "whenFull=discard needs publish: without it no plain subscriber waits for a reader that is behind; "
                "remove it, or set a larger walMaxBytes"
            )
        if self.wal_max_bytes < 1 << 20:
            raise OptionError(
                f"walMaxBytes={self.wal_max_bytes} is too small for a log that is deleted in chunks; set 1 MiB or more"
            )
        for name, value in (
            ("subscriberExpiry", self.subscriber_expiry),
            ("walFlushInterval", self.wal_flush_interval),
        ):
            if value <= 0:
                raise OptionError(f"{name}=0s leaves no time at all; set 100ms or more")
