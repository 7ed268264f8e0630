"""The sink's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from zmq_datasource.errors import OptionError
from zmq_datasource.options.parser import Role, doc
from zmq_datasource.options.socket import SocketOptions
from zmq_datasource.options.types import Duration, Linger, Location, SinkFraming, SinkSocket

__all__ = ["WriteOptions"]


class WriteOptions(SocketOptions, frozen=True, kw_only=True, rename="camel"):
    """``writeStream.format("zmq")`` and ``df.write.format("zmq")``."""

    socket_type: Annotated[
        SinkSocket,
        doc(
            "`PUSH` shares the rows among PULL peers; `PUB` sends each to every subscriber; `DEALER` makes each "
            "batch a transaction of a `ROUTER` source (docs/protocol.md)."
        ),
    ] = SinkSocket("PUSH")
    topic: Annotated[
        str | None,
        doc("The topic of all rows, in place of a column `topic`."),
    ] = None
    sndhwm: Annotated[
        int,
        doc(
            "Send high-water mark: messages that libzmq queues per connection. libzmq's 0 (no limit) is refused.",
            ge=1,
            le=2**31 - 1,
        ),
    ] = 1000
    linger: Annotated[
        Linger,
        doc(
            "How long a task waits at its end for queued messages to leave the process, in milliseconds or with a "
            "unit; -1 waits for ever."
        ),
    ] = Linger(30_000)
    noblock: Annotated[
        bool,
        doc(
            "If true, a message that finds the queue full is dropped and counted (`hwm`); if false, the task waits up "
            "to `sendTimeout` and then fails. With `deadLetterLocation` it becomes a dead letter instead."
        ),
    ] = False
    send_timeout: Annotated[
        Duration, doc("How long one send may wait for room in the queue (`noblock=false`).")
    ] = Duration(60)
    max_retries: Annotated[
        int,
        doc(
            "How often a message that found a full queue is tried again (where no peer came at all within "
            "`connectTimeout`, nothing is). After one has been tried in vain, the next are tried once each, until one "
            "is sent.",
            ge=0,
            le=1000,
        ),
    ] = 0
    retry_interval: Annotated[
        Duration, doc("How long to wait before the first retry; doubled each time, up to 10 s.")
    ] = Duration(0.1)
    dead_letter_location: Annotated[
        Location | None,
        doc(
            "Where rows go that could not be sent, instead of being dropped or failing the task: Parquet files on any "
            "file system that pyarrow knows, with the reason, once for each committed batch."
        ),
    ] = None
    connect_timeout: Annotated[
        Duration,
        doc(
            "How long a task waits at its start for every endpoint to answer (PUSH) or for `minSubscribers` (PUB)."
        ),
    ] = Duration(30)
    min_subscribers: Annotated[
        int,
        doc(
            "Subscribers that a PUB waits for before the first message; 0 does not wait. One that "
            "subscribes to several "
            "topics while another is connected and has not subscribed yet may count for both.",
            ge=0,
        ),
    ] = 1
    framing: Annotated[
        SinkFraming,
        doc(
            "`plain`: topic and value; `sequenced`: topic, publisher, sequence and value, so that a receiver sees what "
            "is missing or comes twice. See docs/sequences.md."
        ),
    ] = SinkFraming("plain")

    transaction_id: Annotated[
        str | None,
        doc(
            "Names the transaction of a batch write (`DEALER`): the same rows written again under the same name have "
            "no effect, other rows are refused.",
            Role.BATCH,
        ),
    ] = None

    metrics_location: Annotated[
        Location | None,
        doc(
            "Where each committed batch's account is kept, as one small JSON file: a path or URI of a file system that "
            "pyarrow knows. See docs/metrics.md."
        ),
    ] = None
    metrics_retention: Annotated[
        Duration, doc("How long files stay at `metricsLocation`. The totals go on.")
    ] = Duration(86_400)

    title: ClassVar[str] = "write option"
    elsewhere: ClassVar[Mapping[str, str]] = {**SocketOptions.elsewhere, "path": "connect", "hwm": "sndhwm"}
    # Spark hands a writer its own options along with ours.
    ignored: ClassVar[frozenset[str]] = frozenset({"checkpointlocation", "queryname"})

    def check(self) -> None:
        super().check()
        if not (self.connect or self.bind):
            raise OptionError(
                "neither connect nor bind is set; name the consumer, as in .option('connect', 'tcp://consumer:5557')"
            )
        if self.topic == "":
            raise OptionError("topic is empty; remove it to send values without a topic")
        if self.linger == 0 and not self.noblock:
            raise OptionError(
                "linger=0 gives up what is queued when a task ends, which needs noblock=true; set a longer linger"
            )
        if self.metrics_location is None:
            self.refuse(("metrics_retention",), "needs metricsLocation")
        if self.socket_type == "DEALER":
            self.refuse(
                ("noblock", "linger", "max_retries", "retry_interval", "dead_letter_location", "framing"),
                "is not for socketType=DEALER: nothing is dropped, and a batch is sent whole or not at all",
            )
            if self.bind or len(self.connect) != 1:
                raise OptionError(
                    "socketType=DEALER connects to one endpoint, the one receiver of its transactions"
                )
        elif self.transaction_id is not None:
            raise OptionError("transactionId needs socketType=DEALER; other sockets know no transactions")
        if self.transaction_id is not None and not 0 < len(self.transaction_id.encode()) <= 200:
            raise OptionError("transactionId must have 1 to 200 bytes")
        if self.socket_type != "PUB" and self.min_subscribers != 1:
            raise OptionError("minSubscribers needs socketType=PUB; a PUSH waits for its peers")
