"""The source's options about receiving a feed and writing its log."""

from __future__ import annotations

from typing import Annotated, Literal

from zmq_datasource.errors import OptionError
from zmq_datasource.options.framing import FramingOptions
from zmq_datasource.options.parser import Role, doc
from zmq_datasource.options.socket import Endpoints
from zmq_datasource.options.types import LocalPath, StoreLocation, Topics


class ReceivingOptions(FramingOptions, frozen=True, kw_only=True, rename="camel"):
    """The options of a process that receives a feed, or fills its log."""

    socket_type: Annotated[
        Literal["SUB", "PULL", "ROUTER"],
        doc(
            "The socket type. `SUB` subscribes to a PUB or XPUB. `PULL` takes a share of a PUSH's messages. "
            "`ROUTER` takes the transactions of `DEALER` sinks and of `Producer` (docs/protocol.md).",
            Role.SOCKET,
        ),
    ] = "SUB"
    topics: Annotated[
        Topics,
        doc(
            "The topic prefixes to subscribe to (SUB), separated by commas. `hex:ff00` means bytes that are not UTF-8, "
            "as the column `topic` shows them; a topic that contains a comma or begins with `hex:` is written so, too.",
            Role.SOCKET,
            Role.UNACKNOWLEDGED,
        ),
    ] = Topics(("",))
    wal_location: Annotated[
        LocalPath | None,
        doc(
            "The directory of the message log, as an absolute path. If it is not set, a streaming read uses a "
            "private directory in the local temporary directory, whose name depends on the feed. Executors of "
            "a streaming read that do not see the directory read the log from the driver (`serveLog`). With this "
            "option a batch read reads the log and opens no socket. All executors must share the directory then."
        ),
    ] = None
    wal_store: Annotated[
        StoreLocation | None,
        doc(
            "The bucket of the message log, in place of `walLocation`, as a URI (`s3://bucket/orders`). The scheme is "
            "`s3`, `gs`, `gcs`, `abfs` or `abfss`. A message counts as received when the bucket has it, and another "
            "machine can continue the log. While the bucket is away, memory fills up to its bound, and receiving "
            "waits. "
            "Needs `pip install zmq_datasource[bucket]`. See docs/scaling.md.",
        ),
    ] = None

    def check(self) -> None:
        super().check()
        if self.socket_type == "PULL" and self.topics != ("",):
            raise OptionError(
                f"topics={self.topics} needs socketType=SUB; a PULL socket receives every message"
            )
        if self.socket_type == "ROUTER" and self.connect:
            raise OptionError(
                f"connect={self.connect} with socketType=ROUTER: senders connect to it; name where it listens with bind"
            )
        if self.socket_type == "ROUTER":
            self.refuse(
                self.of_role(Role.UNACKNOWLEDGED),
                "is not for socketType=ROUTER, whose messages are acknowledged rows",
            )
        else:
            self.refuse(
                ("transaction_timeout",), "is for socketType=ROUTER; other sockets have no transactions"
            )
        self._check_filter()
        if self.wal_store is not None and not self.wal_store.with_credentials:
            raise OptionError("walStore is empty; name where the log is kept, as in s3://bucket/orders")
        if self.wal_store is not None and self.wal_location is not None:
            raise OptionError(
                f"walLocation={self.wal_location!r} and walStore={self.wal_store!r}: a log is in one place; keep one"
            )

    @property
    def receiving_sockets(self) -> list[tuple[str, Endpoints, Endpoints]]:
        """Each socket that receives: its type, and the endpoints that it binds and connects to."""
        return [(self.socket_type, self.bind, self.connect)]

    @property
    def receiving_types(self) -> set[str]:
        """The types of the sockets that receive."""
        return {kind for kind, _, _ in self.receiving_sockets}

    @property
    def has_log(self) -> bool:
        """Whether a log is named."""
        return self.wal_location is not None or self.wal_store is not None

    def _check_filter(self) -> None:
        """Refuse a topic filter if publishers count over all topics: each message of another topic would look lost."""
        numbering = self.numbering
        if numbering is None or "topic" in numbering.by or "" in self.topics or self.framing == "vllm":
            return
        raise OptionError(
            f"topics={self.topics} with framing={self.framing}: the publisher counts by {' and '.join(numbering.by)} "
            "over all its topics, so each message of another topic would look lost. If topics have their own numbers, "
            f"set sequenceBy={','.join(numbering.by)},topic. Otherwise read all topics and filter in Spark, or set "
            "sequenceBy=none to track nothing"
        )
