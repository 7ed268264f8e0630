"""The source's options: of a streaming read, and of a batch read of a socket or a log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from zmq_datasource.errors import OptionError
from zmq_datasource.options.framing import FramingOptions
from zmq_datasource.options.offsets import READER_PATTERN
from zmq_datasource.options.parser import Role, doc
from zmq_datasource.options.shares import share_of
from zmq_datasource.options.socket import SocketOptions
from zmq_datasource.options.types import (
    ByteSize,
    Duration,
    Linger,
    Location,
    LogLocation,
    LogServing,
    Position,
    ReadView,
    ReceiversBy,
    SourceSocket,
    Timestamp,
    TimestampStrategy,
    Topics,
)

__all__ = ["BatchReadOptions", "ReadOptions", "StreamReadOptions"]


class ReadOptions(FramingOptions, frozen=True, kw_only=True, rename="camel"):
    """What ``spark.readStream`` and ``spark.read`` accept together.

    ``DataSource.schema`` does not learn which of the two it serves, so the DataFrame is checked
    against this union; ``StreamReadOptions`` and ``BatchReadOptions`` then refuse what belongs
    to the other.
    """

    socket_type: Annotated[
        SourceSocket,
        doc(
            "`SUB` subscribes to a PUB or XPUB; `PULL` shares a PUSH's messages; `ROUTER` takes the transactions of "
            "`DEALER` sinks and Producers (docs/protocol.md).",
            Role.SOCKET,
        ),
    ] = SourceSocket("SUB")
    topics: Annotated[
        Topics,
        doc(
            "Topic prefixes to subscribe to (SUB), comma-separated, or a JSON list where one holds a comma.",
            Role.SOCKET,
            Role.UNACKNOWLEDGED,
        ),
    ] = Topics(("",))
    rcvhwm: Annotated[
        int,
        doc(
            "Receive high-water mark: messages that libzmq queues per connection. When the queue is full it stops "
            "reading and the peer's own high-water mark decides. libzmq's 0 (no limit) is refused.",
            Role.SOCKET,
            ge=1,
            le=2**31 - 1,
        ),
    ] = 1000
    linger: Annotated[
        Linger,
        doc(
            "libzmq's linger at close, in milliseconds or with a unit. A receiver has nothing to send.",
            Role.SOCKET,
        ),
    ] = Linger(0)
    include_frames: Annotated[
        bool, doc("Adds the column `frames`: every frame of the message as it came.", Role.ROWS)
    ] = False
    wal_location: Annotated[
        LogLocation | None,
        doc(
            "Directory of the message log, as an absolute path. Executors of a streaming read that do not see it read "
            "the log from the driver (`serveLog`); a batch read needs a directory that all of them share. Unset, a "
            "streaming read uses a private directory under the local temporary directory, named from the feed. A batch "
            "read with it reads the log and opens no socket."
        ),
    ] = None
    min_partitions: Annotated[
        int | None,
        doc(
            "Least number of Spark partitions that a batch is split into, if it has as many messages.",
            Role.LOG,
            Role.ROWS,
            ge=1,
        ),
    ] = None
    max_bytes_per_partition: Annotated[
        ByteSize, doc("Size at which a batch is split into further Spark partitions.", Role.LOG, Role.ROWS)
    ] = ByteSize(64 << 20)
    starting_offsets: Annotated[
        Position | None,
        doc(
            "Where to start: `earliest`, `latest` or an offset in JSON. A streaming read uses it only without a "
            "checkpoint, and defaults to `latest` (what arrives from now on) at a socket, and to `earliest` at a log "
            "that another process fills (`walLocation` without an endpoint), as a batch read of a log does.",
            Role.LOG,
            Role.ROWS,
        ),
    ] = None
    starting_timestamp: Annotated[
        Timestamp | None,
        doc(
            "Where to start instead of `startingOffsets`: at the first message received at this time or later. "
            "Milliseconds since the epoch, or ISO 8601 with a time zone.",
            Role.LOG,
            Role.ROWS,
        ),
    ] = None
    starting_offsets_by_timestamp_strategy: Annotated[
        TimestampStrategy,
        doc(
            "What happens if there is no such message: `error` ends the query, `latest` starts with what comes from "
            "now on.",
            Role.LOG,
            Role.ROWS,
        ),
    ] = TimestampStrategy("error")
    fail_on_data_loss: Annotated[
        bool,
        doc(
            "Whether an offset that the log no longer has stops the query; if false, it is a warning and reading goes "
            "on with the oldest message there is.",
            Role.LOG,
            Role.ROWS,
        ),
    ] = True
    timeout: Annotated[
        Duration,
        doc(
            "How long a batch read of a live socket receives; also `Trigger.AvailableNow` and `Trigger.Once`, which "
            "first receive for this long. Of a log that another process fills, they take what is there at once.",
            Role.LIVE,
        ),
    ] = Duration(10)
    idle_timeout: Annotated[
        Duration | None,
        doc("Ends that receiving early once no message came for this long.", Role.LIVE),
    ] = None
    max_messages: Annotated[
        int | None,
        doc("Most messages that a batch read of a live socket returns.", Role.BATCH, Role.LIVE, ge=1),
    ] = None
    ending_offsets: Annotated[
        Position | None,
        doc(
            "Where a batch read of a log ends: `latest` (default) or an offset in JSON.",
            Role.BATCH,
            Role.LOG,
            Role.ROWS,
        ),
    ] = None
    ending_timestamp: Annotated[
        Timestamp | None,
        doc(
            "Where a batch read of a log ends instead of `endingOffsets`: before the first message received at this "
            "time or later; at the log's end if there is none.",
            Role.BATCH,
            Role.LOG,
            Role.ROWS,
        ),
    ] = None
    view: Annotated[
        ReadView,
        doc(
            "What a batch read of a log shows: its `messages`, or the `gaps` in their sequences.",
            Role.BATCH,
            Role.LOG,
        ),
    ] = ReadView("messages")
    max_messages_per_trigger: Annotated[
        int | None, doc("Most messages in one micro-batch.", Role.STREAM, ge=1)
    ] = None
    max_bytes_per_trigger: Annotated[
        ByteSize | None,
        doc("Most bytes of `value` in one micro-batch; one message is always let in.", Role.STREAM),
    ] = None
    min_messages_per_trigger: Annotated[
        int | None,
        doc("Waits for this many messages before it starts a micro-batch ...", Role.STREAM, ge=1),
    ] = None
    max_trigger_delay: Annotated[
        Duration,
        doc("... but no longer than this after the previous one.", Role.STREAM),
    ] = Duration(900)
    wal_max_bytes: Annotated[
        ByteSize,
        doc(
            "Size of the log at which receiving stops, so that the high-water marks hold the publisher back, until "
            "Spark has committed enough. With several `receivers`, of each log partition.",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = ByteSize(4 << 30)
    wal_retention: Annotated[
        Duration,
        doc(
            "How long messages stay in the log after they were received and committed. What `zmq-datasource receive` "
            "writes stays until every query that reads the log has committed it, and until there is such a query.",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = Duration(0)
    wal_chunk_bytes: Annotated[
        ByteSize,
        doc(
            "Size at which a chunk of the log is sealed; never more than `walMaxBytes`.",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = ByteSize(32 << 20)
    wal_flush_interval: Annotated[
        Duration,
        doc(
            "Age at which received messages are sealed though Spark has not asked: the most that a crash of the "
            "machine or the driver can cost.",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = Duration(1)
    wal_sync: Annotated[
        bool,
        doc(
            "Whether each chunk is forced to the disk (fsync). If false, a crash of the operating system may lose "
            "messages that Spark was already given; the log is then not written any more, so that their ids are not "
            "given to other messages.",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = True

    wal_retry_timeout: Annotated[
        Duration,
        doc(
            "How long writing the log is tried again while its disk is full, has an I/O error, or the process has too "
            "many open files. Receiving pauses meanwhile; after that it ends, and what was received and not "
            "sealed is lost.",
            Role.STREAM,
        ),
    ] = Duration(300)

    transaction_timeout: Annotated[
        Duration,
        doc(
            "How long a transaction may stay staged without a commit before it is discarded (`ROUTER`).",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = Duration(3600)

    metrics_location: Annotated[
        Location | None,
        doc(
            "Where metrics are kept, as one small JSON file every `metricsInterval`: a path or URI of a file system "
            "that pyarrow knows. See docs/metrics.md.",
            Role.STREAM,
        ),
    ] = None
    metrics_interval: Annotated[
        Duration, doc("How often metrics are written to `metricsLocation`.", Role.STREAM)
    ] = Duration(2)
    metrics_retention: Annotated[Duration, doc("How long files stay at `metricsLocation`.", Role.STREAM)] = (
        Duration(86_400)
    )

    reader: Annotated[
        str | None,
        doc(
            "Names the query among those that read the same log; each needs a name of its own. The log keeps what a "
            "named query still needs even when it is full and the query does not run, until `readerTimeout`. Unset, "
            "the query gets a name that its checkpoint keeps.",
            Role.STREAM,
            pattern=READER_PATTERN,
        ),
    ] = None
    reader_timeout: Annotated[
        Duration,
        doc(
            "How long the log keeps what a query that does not run still needs. After that its position is dropped, "
            "with a warning.",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = Duration(7 * 86_400)

    serve_log: Annotated[
        LogServing,
        doc(
            "Whether the driver serves the log to executors that do not see `walLocation`, encrypted and to them "
            "alone: `auto` (on a free port, unless Spark runs in local mode), `never`, or the endpoint to listen on, "
            "as in `tcp://*:5599`.",
            Role.STREAM,
        ),
    ] = LogServing("auto")

    receivers: Annotated[
        int,
        doc(
            "How many sockets receive the feed, each into a log partition of its own. Those of a PULL share the "
            "messages; those of a SUB share the endpoints, or the topics.",
            Role.STREAM,
            Role.WRITER,
            Role.UNACKNOWLEDGED,
            ge=1,
            le=1024,
        ),
    ] = 1
    receivers_by: Annotated[
        ReceiversBy,
        doc(
            "What the receivers of a SUB share: `endpoints`, or `topics`.",
            Role.STREAM,
            Role.WRITER,
            Role.UNACKNOWLEDGED,
        ),
    ] = ReceiversBy("endpoints")

    title: ClassVar[str] = "read option"
    elsewhere: ClassVar[Mapping[str, str]] = {
        **SocketOptions.elsewhere,
        "maxoffsetspertrigger": "maxMessagesPerTrigger",
        "maxrecordsperfetch": "maxMessagesPerTrigger",
        "minoffsetspertrigger": "minMessagesPerTrigger",
        "subscribe": "topics",
        "subscribepattern": "topics",
        "assign": "topics",
        "topic": "topics",
        "path": "walLocation",
        "includeheaders": "includeFrames",
        "groupidprefix": "reader",
        "kafka.group.id": "reader",
        "hwm": "rcvhwm",
    }

    def check(self) -> None:
        super().check()
        if self.linger < 0:
            raise OptionError(
                f"linger={self.linger} lets a source that stops wait for ever for a peer that is away; "
                "a receiver has nothing to send, leave it at 0"
            )
        if self.socket_type == "PULL" and self.topics != ("",):
            raise OptionError(
                f"topics={self.topics} needs socketType=SUB; a PULL socket receives every message"
            )
        if self.socket_type == "ROUTER" and self.connect:
            raise OptionError(
                f"connect={self.connect} with socketType=ROUTER: senders connect to it; name where it listens with bind"
            )
        if self.socket_type != "ROUTER":
            self.refuse(
                ("transaction_timeout",), "is for socketType=ROUTER; other sockets know no transactions"
            )
        if self.transaction_timeout <= 0:
            raise OptionError(
                "transactionTimeout=0s discards every transaction before its commit; set 1s or more"
            )
        if self.socket_type == "ROUTER":
            self.refuse(
                self.of_role(Role.UNACKNOWLEDGED),
                "is not for socketType=ROUTER, whose messages are acknowledged rows",
            )
        if self.metrics_interval < _LEAST_METRICS_INTERVAL:
            raise OptionError(
                f"metricsInterval={self.metrics_interval} would be busier with metrics than with messages; set "
                f"{_LEAST_METRICS_INTERVAL:g}s or more"
            )
        if self.metrics_location is None:
            self.refuse(("metrics_interval", "metrics_retention"), "needs metricsLocation")
        self._check_filter()
        for place in ("starting", "ending"):
            if getattr(self, f"{place}_offsets") and getattr(self, f"{place}_timestamp"):
                raise OptionError(f"{place}Offsets and {place}Timestamp say the same thing; keep one")
        if self.starting_timestamp is None:
            self.refuse(("starting_offsets_by_timestamp_strategy",), "needs startingTimestamp")
        least, most = self.min_messages_per_trigger, self.max_messages_per_trigger
        if least is not None and most is not None and least > most:
            raise OptionError(
                f"minMessagesPerTrigger={least} is more than maxMessagesPerTrigger={most}; "
                "lower the one or raise the other"
            )

    @property
    def start(self) -> Position | None:
        """Where to start; None if nothing says so."""
        if self.starting_timestamp is not None:
            return Position(None, None, self.starting_timestamp)
        return self.starting_offsets

    @property
    def end(self) -> Position | None:
        """Where a batch read ends; None if nothing says so."""
        if self.ending_timestamp is not None:
            return Position(None, None, self.ending_timestamp)
        return self.ending_offsets

    def _refuse_socket(self, other: Role, reason: str) -> None:
        """A log is read: no options of a socket, nor of this other role."""
        self.refuse(self.of_role(Role.SOCKET, other), reason)
        if self.zmq:
            raise OptionError(f"reading a log opens no socket; remove the options zmq.* {sorted(self.zmq)}")

    def _check_filter(self) -> None:
        """A counter over all topics shows each message of another topic as missing."""
        numbering = self.numbering
        if numbering is None or "topic" in numbering.by or "" in self.topics or self.framing == "vllm":
            return
        raise OptionError(
            f"topics={self.topics} with framing={self.framing}: the publisher counts by {' and '.join(numbering.by)} "
            "over all its topics, so every message of another topic would look lost. Read all topics and filter in "
            "Spark, or set sequenceBy=none to track nothing"
        )


_LEAST_METRICS_INTERVAL = 0.1  # seconds


class StreamReadOptions(ReadOptions, frozen=True, kw_only=True, rename="camel"):
    """``spark.readStream.format("zmq")``."""

    def check(self) -> None:
        super().check()
        self.refuse(self.of_role(Role.BATCH), "belongs to a batch read, not to spark.readStream")
        if self.receivers == 1:
            self.refuse(("receivers_by",), "needs receivers, of which there is one")
        share_of(self, 0)
        live = bool(self.connect or self.bind)
        if not live and self.wal_location is None:
            raise OptionError(
                "neither connect nor bind is set; name the feed, as in .option('connect', 'tcp://feed:5556'), or with "
                "walLocation alone the log that zmq-datasource receive fills"
            )
        if not live:
            self._refuse_socket(
                Role.WRITER,
                "is for the process that receives; this query only reads its log",
            )


class BatchReadOptions(ReadOptions, frozen=True, kw_only=True, rename="camel"):
    """``spark.read.format("zmq")``: of a live socket, or with ``walLocation`` of a log."""

    def check(self) -> None:
        super().check()
        self.refuse(self.of_role(Role.STREAM), "belongs to a streaming read, not to spark.read")
        live = bool(self.connect or self.bind)
        if live and self.wal_location is not None:
            raise OptionError(
                "a batch read takes either connect/bind (a live socket) or walLocation (a log); keep one"
            )
        if not live and self.wal_location is None:
            raise OptionError(
                "neither connect nor bind (a live socket) nor walLocation (a log) is set; name one"
            )
        if self.socket_type == "ROUTER":
            raise OptionError(
                "socketType=ROUTER needs a log to acknowledge into; receive with spark.readStream or zmq-datasource "
                "receive, and read that log with walLocation"
            )
        if live:
            self.refuse(
                self.of_role(Role.LOG),
                "needs walLocation: it is about a log, and a live socket has no history",
            )
        else:
            self._refuse_socket(
                Role.LIVE,
                "is for a live socket; a log is cut with endingOffsets, .where() or .limit()",
            )
        if self.view == "gaps":
            self.refuse(self.of_role(Role.ROWS), "is about messages; view=gaps shows the whole gap table")
        if self.ending_offsets and self.ending_offsets.word == "earliest":
            raise OptionError("endingOffsets=earliest reads nothing; use latest or an offset in JSON")
