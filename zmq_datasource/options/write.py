"""The sink's options."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from zmq_datasource.errors import OptionError
from zmq_datasource.options.parser import Role, doc
from zmq_datasource.options.socket import SocketOptions
from zmq_datasource.options.types import MOST_MILLISECONDS, Duration, Linger, Location


class WriteOptions(SocketOptions, frozen=True, kw_only=True, rename="camel"):
    """``writeStream.format("zmq")`` and ``df.write.format("zmq")``."""

    socket_type: Annotated[
        Literal["PUSH", "PUB", "DEALER"],
        doc(
            "The socket type. `PUSH` shares the rows among the connected PULL sockets. `PUB` sends each row "
            "to all subscribers. `DEALER` makes each micro-batch a transaction of a `ROUTER` source "
            "(docs/protocol.md). It refuses `noblock`, `linger`, `maxRetries`, `retryInterval`, `deadLetterLocation`, "
            "`framing`, `bind` and `valueFormat=arrow`."
        ),
    ] = "PUSH"
    topic: Annotated[
        str | None,
        doc("The topic of all rows. It replaces the column `topic`."),
    ] = None
    sndhwm: Annotated[
        int,
        doc(
            "The send high-water mark: how many messages libzmq queues for each connection. libzmq's 0 (no "
            "limit) is refused.",
            ge=1,
            le=2**31 - 1,
        ),
    ] = 1000
    linger: Annotated[
        Linger,
        doc(
            "How long a task waits at its end until the queued messages have left, in milliseconds or with a "
            "unit. -1 waits without a limit."
        ),
    ] = Linger(30_000)
    noblock: Annotated[
        bool,
        doc(
            "What happens to a message when the queue is full. If true, it is dropped and counted (`hwm`). If "
            "false, the task waits up to `sendTimeout`; then the message becomes a dead letter "
            "(`deadLetterLocation`), or the task fails."
        ),
    ] = False
    send_timeout: Annotated[
        Duration,
        doc(
            "How long a task waits until the queue has room for a message (`noblock=false`). It is also how long a "
            "PUSH tries to resend the messages that a lost connection may have held, and how long a DEALER or a "
            "`Producer` waits for the receiver."
        ),
    ] = Duration(60)
    max_retries: Annotated[
        int,
        doc(
            "How many times the task tries a message again that found a full queue. If all retries of one message "
            "fail, the task tries each following message only once, until one is sent. It retries nothing if no peer "
            "was there within `connectTimeout`.",
            ge=0,
            le=1000,
        ),
    ] = 0
    retry_interval: Annotated[
        Duration,
        doc("How long to wait before the first retry. The time doubles with each retry, up to 10 seconds."),
    ] = Duration(0.1)
    dead_letter_location: Annotated[
        Location | None,
        doc(
            "Where rows that could not be sent or whose `value` is null are kept, instead of being dropped or failing "
            "the task. They are in Parquet files, with the reason, on any file system that pyarrow knows. Each dead "
            "letter of a committed micro-batch is there once, also if Spark repeats tasks or batches."
        ),
    ] = None
    connect_timeout: Annotated[
        Duration,
        doc(
            "How long a task waits at its start for its peers. A PUSH waits until every endpoint of `connect` has "
            "answered and, if it only binds, until one peer has connected. A PUB waits until there are "
            "`minSubscribers`. A DEALER waits until its receiver has answered. If the peers have not come after this "
            "time, the task fails (`NoPeerError`). With `noblock=true` or `deadLetterLocation` it does not fail: it "
            "continues with the peers that are there. If there are none, its rows are dropped or become dead letters "
            "(`no_peer`)."
        ),
    ] = Duration(30)
    min_subscribers: Annotated[
        int,
        doc(
            "The number of subscribers for which a PUB waits before it sends the first message. With 0 it does not "
            "wait. The PUB counts subscriptions, up to the number of connected peers. So a subscriber with several "
            "topics may be counted in place of a connected peer that has not subscribed yet.",
            ge=0,
        ),
    ] = 1
    framing: Annotated[
        Literal["plain", "sequenced"],
        doc(
            "The frames of a message. `plain` is topic and value. `sequenced` is topic, publisher, sequence "
            "and value: a receiver can find missing and repeated messages. See docs/sequences.md."
        ),
    ] = "plain"

    value_format: Annotated[
        Literal["bytes", "arrow"],
        doc(
            "What a message contains. With `bytes` it is the column `value` of one row. With `arrow` it is a record "
            "batch of many rows with all their columns, about 1 MiB, as an Arrow IPC stream. See docs/arrow.md."
        ),
    ] = "bytes"
    transaction_id: Annotated[
        str | None,
        doc(
            "The name of the transaction as which a batch write is sent (`DEALER`). Writing the same rows again with "
            "the same name has no effect. Other rows with the same name are refused.",
            Role.BATCH,
        ),
    ] = None

    metrics_location: Annotated[
        Location | None,
        doc(
            "Where the account (the figures) of each committed micro-batch is kept, as a small JSON file in a folder "
            "for each day, for `spark.read.json`. Each stays for seven days. A path or URI of a file system that "
            "pyarrow knows. See docs/metrics.md."
        ),
    ] = None
    title: ClassVar[str] = "write option"
    # Spark passes its own options to a writer, too.
    ignored: ClassVar[frozenset[str]] = frozenset({"checkpointlocation", "queryname"})

    def check(self) -> None:
        super().check()
        if not self.has_endpoints:
            raise OptionError(
                "neither connect nor bind is set; name the consumer, as in .option('connect', 'tcp://consumer:5557')"
            )
        if self.topic == "":
            raise OptionError("topic is empty; remove it to send values without a topic")
        if self.send_timeout * 1000 > MOST_MILLISECONDS:
            raise OptionError(
                f"sendTimeout={self.send_timeout}: libzmq waits {MOST_MILLISECONDS} ms (24 days) at most; set less"
            )
        if self.linger == 0 and not self.noblock:
            raise OptionError(
                "linger=0 drops the messages that are queued when a task ends, and needs noblock=true; set a longer "
                "linger"
            )
        if self.noblock and self.dead_letter_location is not None:
            raise OptionError(
                "noblock=true drops rows, and deadLetterLocation keeps them: remove one. A row that finds a full queue "
                "becomes a dead letter at once with sendTimeout=0s"
            )
        if self.socket_type == "DEALER":
            self.refuse(
                ("value_format",),
                "is not for socketType=DEALER: the receiver recognises a repeated batch by a digest of its messages, "
                "and a repetition may divide the rows differently. Use PUSH, or write value as JSON or MessagePack",
            )
            self.refuse(
                ("noblock", "linger", "max_retries", "retry_interval", "dead_letter_location", "framing"),
                "is not for socketType=DEALER: nothing is dropped, and a batch is sent whole or not at all",
            )
            if self.bind or len(self.connect) != 1:
                raise OptionError(
                    "socketType=DEALER connects to one endpoint, the one receiver of its transactions"
                )
        elif self.transaction_id is not None:
            raise OptionError("transactionId needs socketType=DEALER; other sockets have no transactions")
        name = self.transaction_id
        if name is not None and not (0 < len(name.encode()) <= 200 and name.isprintable()):
            raise OptionError(f"transactionId={name!r} must have 1 to 200 bytes of printable text")
        if self.socket_type != "PUB" and self.min_subscribers != 1:
            raise OptionError("minSubscribers needs socketType=PUB; a PUSH waits for its peers")
