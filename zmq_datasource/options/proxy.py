"""The options of the journaling proxy."""

from __future__ import annotations

from typing import Annotated, ClassVar

from zmq_datasource.errors import OptionError
from zmq_datasource.options.parser import doc
from zmq_datasource.options.socket import SocketOptions
from zmq_datasource.options.types import (
    ByteSize,
    Duration,
    Endpoints,
    Linger,
    LogLocation,
    SlowSubscriber,
    Topics,
    WhenFull,
)

__all__ = ["ProxyOptions"]


_LEAST_LOG = 1 << 20


class ProxyOptions(SocketOptions, frozen=True, kw_only=True, rename="camel"):
    """``zmq-datasource proxy`` and ``zmq_datasource.Proxy``."""

    bind: Annotated[Endpoints, doc("Where publishers (PUB, XPUB) connect to, comma-separated: an XSUB.")] = (
        Endpoints()
    )
    connect: Annotated[Endpoints, doc("Publishers that are bound somewhere: the XSUB connects to them.")] = (
        Endpoints()
    )
    pull: Annotated[Endpoints, doc("Where PUSH sockets connect to: a PULL that is bound.")] = Endpoints()
    router: Annotated[
        Endpoints,
        doc(
            "Where `DEALER` sinks and Producers connect to; their transactions are acknowledged once they are in the "
            "log (docs/protocol.md)."
        ),
    ] = Endpoints()
    publish: Annotated[
        Endpoints, doc("Where plain subscribers (SUB, XSUB) connect to: an XPUB that is bound.")
    ] = Endpoints()
    replay: Annotated[
        Endpoints, doc("Where any message of the log is asked for again: a ROUTER (docs/proxy.md).")
    ] = Endpoints()
    durable: Annotated[Endpoints, doc("Where durable subscribers connect to: a ROUTER (docs/proxy.md).")] = (
        Endpoints()
    )
    topics: Annotated[
        Topics,
        doc(
            "Topic prefixes that the proxy asks its publishers for, comma-separated or a JSON list, and so keeps, "
            "whoever is subscribed. What plain subscribers ask for is asked for too."
        ),
    ] = Topics(("",))
    plain: Annotated[
        bool,
        doc("Whether messages are published with the frames they came with, without their id in the log."),
    ] = False
    rcvhwm: Annotated[
        int,
        doc(
            "Receive high-water mark of the publishers' side: messages that libzmq queues per connection.",
            ge=1,
            le=2**31 - 1,
        ),
    ] = 1000
    sndhwm: Annotated[
        int | None,
        doc(
            "Send high-water mark of the subscribers' side, per subscriber; unset, that of the other side.",
            ge=1,
            le=2**31 - 1,
        ),
    ] = None
    slow_subscriber: Annotated[
        SlowSubscriber,
        doc(
            "What a full queue of a plain subscriber means: `drop` for it alone, `wait` for it (and so hold everybody "
            "back), or `disconnect` it once it has taken nothing for `slowTimeout`, and drop for it until then."
        ),
    ] = SlowSubscriber("drop")
    slow_timeout: Annotated[
        Duration,
        doc("How long a plain subscriber may take nothing, though data waits for it (`disconnect`)."),
    ] = Duration(10)
    linger: Annotated[
        Linger, doc("At the end, how long what is queued for plain subscribers is waited for.")
    ] = Linger(1000)
    wal_location: Annotated[
        LogLocation, doc("Directory of the log, as an absolute path; any Spark job that sees it can read it.")
    ] = LogLocation("")
    wal_max_bytes: Annotated[ByteSize, doc("The most that the log takes on disk.")] = ByteSize(4 << 30)
    wal_retention: Annotated[
        Duration,
        doc(
            "How long messages stay at least, unless the log is full. What a subscriber still needs stays longer."
        ),
    ] = Duration(86_400)
    when_full: Annotated[
        WhenFull,
        doc(
            "What a full log means: `discard` the oldest messages, even if a durable subscriber or a Spark query still "
            "needs them (it learns what it lost), or `wait` until those have read on."
        ),
    ] = WhenFull("discard")
    wal_chunk_bytes: Annotated[
        ByteSize,
        doc("Size at which a chunk of the log is sealed; never more than a sixteenth of `walMaxBytes`."),
    ] = ByteSize(32 << 20)
    wal_flush_interval: Annotated[
        Duration, doc("Age at which a chunk is sealed, for Spark to read. Subscribers do not wait for it.")
    ] = Duration(1)
    wal_sync: Annotated[
        bool,
        doc(
            "Whether messages are forced to the disk (fsync) before they are published. If false, they survive a crash "
            "of the proxy, and not one of the machine."
        ),
    ] = True
    wal_retry_timeout: Annotated[
        Duration,
        doc(
            "How long writing the log is tried again while its disk is full, has an I/O error, or the process has too "
            "many open files. Receiving pauses meanwhile; after that the proxy ends, and what was received and not "
            "written is lost."
        ),
    ] = Duration(300)
    subscriber_expiry: Annotated[
        Duration,
        doc(
            "How long a durable subscriber may be away before it is forgotten; from four fifths of it on the log warns."
        ),
    ] = Duration(7 * 86_400)
    transaction_timeout: Annotated[
        Duration, doc("How long a transaction may stay staged without a commit (`router`).")
    ] = Duration(3600)

    title: ClassVar[str] = "proxy option"

    def check(self) -> None:
        super().check()
        if not self.wal_location:
            raise OptionError("walLocation is not set; name the directory where the proxy keeps what passes")
        if not (self.bind or self.connect or self.pull or self.router):
            raise OptionError(
                "no side for publishers: name bind or connect (PUB), pull (PUSH) or router (Producers)"
            )
        if not (self.publish or self.replay or self.durable):
            raise OptionError("no side for subscribers: name publish, durable or replay")
        bound = [*self.bind, *self.pull, *self.router, *self.publish, *self.replay, *self.durable]
        twice = {str(endpoint) for endpoint in bound if bound.count(endpoint) > 1}
        if twice:
            raise OptionError(f"{', '.join(sorted(twice))} is named for two sides; each needs its own")
        if self.plain and self.replay and not self.durable:
            raise OptionError(
                "plain publishes no ids, so nobody would know what to ask the replay endpoint for; remove one"
            )
        if self.wal_max_bytes < _LEAST_LOG:
            raise OptionError(
                f"walMaxBytes={self.wal_max_bytes} is too small for a log that is deleted in chunks; set "
                f"{ByteSize(_LEAST_LOG)} or more"
            )
        if self.linger < 0:
            raise OptionError(f"linger={self.linger} would wait for ever for a subscriber; set a time")
        for name, value in (
            ("slowTimeout", self.slow_timeout),
            ("subscriberExpiry", self.subscriber_expiry),
            ("walFlushInterval", self.wal_flush_interval),
            ("transactionTimeout", self.transaction_timeout),
        ):
            if value <= 0:
                raise OptionError(f"{name}=0s leaves no time at all; set 100ms or more")

    @property
    def chunk_bytes(self) -> int:
        """At which size a chunk is sealed; a log of a few chunks could not be held within its bounds."""
        return min(self.wal_chunk_bytes, max(self.wal_max_bytes // 16, 1))

    @property
    def send_hwm(self) -> int:
        """The high-water mark of the subscribers' side."""
        return self.rcvhwm if self.sndhwm is None else self.sndhwm
