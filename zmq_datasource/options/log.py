"""The options of every process that fills a log: a query, ``zmq-datasource receive`` and the proxy."""

from __future__ import annotations

from typing import Annotated, Literal

from zmq_datasource.errors import OptionError
from zmq_datasource.options.parser import Role, doc
from zmq_datasource.options.socket import SocketOptions
from zmq_datasource.options.types import ByteSize, Duration

# A task reads a chunk of this size in a few milliseconds, and a receiver has four of them in memory at most.
_CHUNK_BYTES = 32 << 20


class LogOptions(SocketOptions, frozen=True, kw_only=True, rename="camel"):
    """How a feed is received into a log. One default for all that fill one."""

    rcvhwm: Annotated[
        int,
        doc(
            "The receive high-water mark: how many messages libzmq queues for each connection. When the queue "
            "is full, libzmq stops reading, and what happens next depends on the sender and its high-water "
            "mark. libzmq's 0 (no limit) is refused.",
            Role.SOCKET,
            ge=1,
            le=2**31 - 1,
        ),
    ] = 1000
    transaction_timeout: Annotated[
        Duration,
        doc(
            "How long a transaction may wait for its commit before it is discarded (`ROUTER`).",
            Role.WRITER,
        ),
    ] = Duration(3600)
    wal_max_bytes: Annotated[
        ByteSize,
        doc(
            "The maximum size of the log. When the log is full of messages that are still needed, `whenFull` decides.",
            Role.WRITER,
        ),
    ] = ByteSize(4 << 30)
    wal_retention: Annotated[
        Duration,
        doc(
            "How long messages stay in the log after they were received, even if no reader needs them any more. "
            "Messages that no reader needs are deleted earlier if the log would exceed `walMaxBytes`. What a query "
            "without a name (`reader`) has not read is kept for the same time after it has ended. The default is "
            "enough for a restart. See docs/delivery.md.",
            Role.WRITER,
        ),
    ] = Duration(600)
    when_full: Annotated[
        Literal["discard", "wait"],
        doc(
            "What happens when the log has reached `walMaxBytes` and is full of messages that are still needed. With "
            "`wait` receiving waits until the readers have read on, and the high-water marks hold the senders back. "
            "With `discard` the oldest messages are deleted, and a reader that needed them learns which they were "
            "(`failOnDataLoss`).",
            Role.WRITER,
        ),
    ] = "wait"
    wal_flush_interval: Annotated[
        Duration,
        doc(
            "Received messages are sealed after this time even if Spark has not asked for them. If the machine or the "
            "source runner crashes, the messages that were not sealed yet are lost, and those in the queues of libzmq "
            "and the kernel. While the disk is slow or refuses to write, these can be more messages than arrive in "
            "this time. Messages are sealed earlier while a durable subscriber waits at the end of the log.",
            Role.WRITER,
        ),
    ] = Duration(1)

    @property
    def chunk_bytes(self) -> int:
        """The size at which a chunk is sealed: at most a sixteenth of the log's size.

        The log deletes whole chunks, and begins when it has room for five more. With few large ones it would delete
        needed messages while it is almost empty.
        """
        return min(_CHUNK_BYTES, max(self.wal_max_bytes // 16, 1))

    def check(self) -> None:
        super().check()
        if self.transaction_timeout <= 0:
            raise OptionError(
                "transactionTimeout=0s discards every transaction before its commit; set 1s or more"
            )
