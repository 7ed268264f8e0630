"""The source's options: all that a streaming read or a batch read accepts. ``read_kinds`` restricts them to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from zmq_datasource.errors import OptionError
from zmq_datasource.options.framing import FramingOptions
from zmq_datasource.options.offsets import READER_PATTERN
from zmq_datasource.options.parser import Role, doc
from zmq_datasource.options.socket import SocketOptions
from zmq_datasource.options.types import (
    ByteSize,
    Duration,
    Linger,
    Location,
    LogLocation,
    LogServing,
    Place,
    ReadView,
    ReceiversBy,
    SourceSocket,
    StoreLocation,
    Timestamp,
    TimestampStrategy,
    Topics,
    ValueFormat,
    ValueMode,
    WhenFull,
)

__all__ = ["ReadOptions"]


class ReadOptions(FramingOptions, frozen=True, kw_only=True, rename="camel"):
    """The options of ``spark.readStream`` and ``spark.read`` together.

    When a DataFrame is made, Spark does not tell which of the two it is for. So its options are checked against all.
    ``StreamReadOptions`` and ``BatchReadOptions`` later refuse the options of the other.
    """

    socket_type: Annotated[
        SourceSocket,
        doc(
            "The socket type. `SUB` subscribes to a PUB or XPUB. `PULL` takes a share of a PUSH's messages. "
            "`ROUTER` takes the transactions of `DEALER` sinks and of `Producer` (docs/protocol.md).",
            Role.SOCKET,
        ),
    ] = SourceSocket("SUB")
    topics: Annotated[
        Topics,
        doc(
            "The topic prefixes to subscribe to (SUB), separated by commas, or as a JSON list if a prefix "
            "contains a comma.",
            Role.SOCKET,
            Role.UNACKNOWLEDGED,
        ),
    ] = Topics(("",))
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
    linger: Annotated[
        Linger,
        doc(
            "libzmq's linger period when the socket is closed, in milliseconds or with a unit. A receiver has "
            "nothing to send.",
            Role.SOCKET,
        ),
    ] = Linger(0)
    include_frames: Annotated[
        bool,
        doc(
            "If true, the column `frames` is added. It has all frames of the message as they came.", Role.ROWS
        ),
    ] = False
    value_format: Annotated[
        ValueFormat,
        doc(
            "What the values are. `bytes` gives a row for each message. `arrow` gives the rows of the record batches "
            "in each value, which is an Arrow IPC stream, as columns of the `.schema(...)` of the read. See "
            "docs/arrow.md.",
            Role.ROWS,
        ),
    ] = ValueFormat("bytes")
    mode: Annotated[
        ValueMode,
        doc(
            "What happens to a value that does not fit the schema (`valueFormat=arrow`), as in Spark's JSON reader. "
            "`PERMISSIVE` gives one row of nulls, with the value in the column `_corrupt_record` if the schema has "
            "that. `DROPMALFORMED` leaves the message out. `FAILFAST` fails the query. The message stays in the log "
            "in each case. Spark's log names the first ten of each task.",
            Role.ROWS,
        ),
    ] = ValueMode("PERMISSIVE")
    wal_location: Annotated[
        LogLocation | None,
        doc(
            "The directory of the message log, as an absolute path. If it is not set, a streaming read uses a "
            "private directory in the local temporary directory, whose name depends on the feed. Executors of "
            "a streaming read that do not see the directory read the log from the driver (`serveLog`). A "
            "batch read needs a directory that all executors share: it reads the log and opens no socket."
        ),
    ] = None
    wal_store: Annotated[
        StoreLocation | None,
        doc(
            "The bucket of the message log, in place of `walLocation`, as a URI (`s3://bucket/orders`). The scheme is "
            "`s3`, `gs`, `gcs`, `abfs` or `abfss`. A message counts as received when it is there, and another machine "
            "can continue the log. While the bucket is away, memory fills up to its bound, and receiving waits. "
            "Needs `pip install zmq_datasource[bucket]`. See docs/scaling.md.",
        ),
    ] = None
    min_partitions: Annotated[
        int | None,
        doc(
            "The minimum number of Spark partitions (tasks) of a micro-batch or a batch read. A batch with fewer "
            "messages has fewer.",
            Role.LOG,
            Role.ROWS,
            ge=1,
        ),
    ] = None
    max_bytes_per_partition: Annotated[
        ByteSize,
        doc(
            "The maximum number of bytes in one Spark partition. A batch with more bytes has more partitions.",
            Role.LOG,
            Role.ROWS,
        ),
    ] = ByteSize(64 << 20)
    starting_offsets: Annotated[
        Place | None,
        doc(
            "Where to start: `earliest`, `latest`, or an offset in JSON. A streaming read uses it only "
            "without a checkpoint. The default for a socket is `latest`, which is what arrives from now on. "
            "The default for a log that another process fills (`walLocation` without an endpoint) and for a "
            "batch read of a log is `earliest`.",
            Role.LOG,
            Role.ROWS,
        ),
    ] = None
    starting_timestamp: Annotated[
        Timestamp | None,
        doc(
            "Start at the first message that was received at this time or later, instead of at "
            "`startingOffsets`. The time is in milliseconds since the epoch, or in ISO 8601 with a time zone.",
            Role.LOG,
            Role.ROWS,
        ),
    ] = None
    starting_offsets_by_timestamp_strategy: Annotated[
        TimestampStrategy,
        doc(
            "What happens if no message was received at `startingTimestamp` or later. `error` stops the "
            "query. `latest` starts with what arrives from now on.",
            Role.LOG,
            Role.ROWS,
        ),
    ] = TimestampStrategy("error")
    fail_on_data_loss: Annotated[
        bool,
        doc(
            "If true, the query stops when it needs an offset that the log no longer has. If false, it warns "
            "and continues with the oldest message that the log has. This also holds for messages that the log's "
            "writer deletes between the planning of a batch and the reading.",
            Role.LOG,
            Role.ROWS,
        ),
    ] = True
    timeout: Annotated[
        Duration,
        doc(
            "How long a batch read of a socket receives, and how long a query with `Trigger.AvailableNow` or "
            "`Trigger.Once` receives before it reads. With a log that another process fills, they take what "
            "is there without waiting.",
            Role.LIVE,
        ),
    ] = Duration(10)
    idle_timeout: Annotated[
        Duration | None,
        doc("Receiving for `timeout` ends early when no message has come for this long.", Role.LIVE),
    ] = None
    max_messages: Annotated[
        int | None,
        doc(
            "The maximum number of messages that a batch read of a socket returns.",
            Role.BATCH,
            Role.LIVE,
            ge=1,
        ),
    ] = None
    ending_offsets: Annotated[
        Place | None,
        doc(
            "Where a batch read of a log ends: `latest` (the default) or an offset in JSON.",
            Role.BATCH,
            Role.LOG,
            Role.ROWS,
        ),
    ] = None
    ending_timestamp: Annotated[
        Timestamp | None,
        doc(
            "A batch read of a log ends before the first message that was received at this time or later, "
            "instead of at `endingOffsets`. If there is no such message, it ends at the end of the log.",
            Role.BATCH,
            Role.LOG,
            Role.ROWS,
        ),
    ] = None
    view: Annotated[
        ReadView,
        doc(
            "What a batch read of a log returns: the `messages`, or the `gaps` in their sequences.",
            Role.BATCH,
            Role.LOG,
        ),
    ] = ReadView("messages")
    max_messages_per_trigger: Annotated[
        int | None, doc("The maximum number of messages in one micro-batch.", Role.STREAM, Role.QUERY, ge=1)
    ] = None
    max_bytes_per_trigger: Annotated[
        ByteSize | None,
        doc(
            "The maximum number of bytes of `value` in one micro-batch. A micro-batch has at least one "
            "message.",
            Role.STREAM,
            Role.QUERY,
        ),
    ] = None
    min_messages_per_trigger: Annotated[
        int | None,
        doc(
            "A micro-batch starts only when there are this many messages, or when `maxTriggerDelay` has "
            "passed.",
            Role.STREAM,
            Role.QUERY,
            ge=1,
        ),
    ] = None
    max_trigger_delay: Annotated[
        Duration,
        doc(
            "The maximum time between two micro-batches while there are fewer than `minMessagesPerTrigger` "
            "messages.",
            Role.STREAM,
            Role.QUERY,
        ),
    ] = Duration(900)
    wal_max_bytes: Annotated[
        ByteSize,
        doc(
            "The maximum size of the log. When the log is full, receiving stops until Spark has committed "
            "enough, and the high-water marks hold the sender back. With several `receivers` this is the size "
            "of each log partition.",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = ByteSize(4 << 30)
    wal_retention: Annotated[
        Duration,
        doc(
            "How long messages stay in the log after they were received, even if no query needs them any more. They "
            "are history, which gives way when the log would pass `walMaxBytes`. What a query without a name "
            "(`reader`) has not read is kept for the same time after it has ended. See docs/delivery.md.",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = Duration(600)
    when_full: Annotated[
        WhenFull,
        doc(
            "What happens when the log has reached `walMaxBytes` and is full of messages that are still needed. With "
            "`wait` receiving waits until the readers have read on, and the high-water marks hold the senders back. "
            "With `discard` the oldest messages are deleted, and a query that needed them learns of it "
            "(`failOnDataLoss`).",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = WhenFull("wait")
    wal_chunk_bytes: Annotated[
        ByteSize,
        doc(
            "A chunk of the log is sealed when it has this size. It is never larger than `walMaxBytes`.",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = ByteSize(32 << 20)
    wal_flush_interval: Annotated[
        Duration,
        doc(
            "Received messages are sealed after this time even if Spark has not asked for them. If the machine "
            "or the source runner crashes, what was not yet sealed is lost, and what was in the queues of libzmq "
            "and of the kernel. While the disk is slow or refuses to write, this can be more than was received in "
            "this time.",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = Duration(1)
    wal_sync: Annotated[
        bool,
        doc(
            "If true, each chunk is forced to the disk (fsync). If false, a crash of the operating system can "
            "lose messages that Spark already has. After such a loss no process can write to this log, because it "
            "would give the ids of the lost messages to new ones: use a new `walLocation` and new checkpoints. Has no "
            "effect with `walStore`.",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = True

    wal_retry_timeout: Annotated[
        Duration,
        doc(
            "How long writing the log is repeated while the disk is full or has an I/O error, the process has too "
            "many open files, or the bucket (`walStore`) is away. Receiving pauses meanwhile. After this time "
            "receiving ends, and what was received and not sealed is lost.",
            Role.STREAM,
        ),
    ] = Duration(300)

    connect_timeout: Annotated[
        Duration,
        doc(
            "How long receiving waits for its publishers. If an endpoint of `connect` has not answered once after this "
            "time, or no publisher has connected to `bind`, the query fails (`NoPeerError`). With 0 it waits without "
            "end, and a line in the log says which endpoints have not answered.",
            Role.STREAM,
            Role.WRITER,
            Role.UNACKNOWLEDGED,
        ),
    ] = Duration(0)

    transaction_timeout: Annotated[
        Duration,
        doc(
            "How long a transaction may wait for its commit before it is discarded (`ROUTER`).",
            Role.STREAM,
            Role.WRITER,
        ),
    ] = Duration(3600)

    metrics_location: Annotated[
        Location | None,
        doc(
            "Where the metrics are kept, as one small JSON file every `metricsInterval`. It is a path or URI "
            "of a file system that pyarrow knows. See docs/metrics.md.",
            Role.STREAM,
        ),
    ] = None
    metrics_interval: Annotated[
        Duration, doc("How often the metrics are written to `metricsLocation`.", Role.STREAM)
    ] = Duration(2)
    metrics_retention: Annotated[
        Duration, doc("How long the files stay at `metricsLocation`.", Role.STREAM)
    ] = Duration(86_400)

    reader: Annotated[
        str | None,
        doc(
            "The name of the query among those that read the same log: 1 to 64 letters (A to Z, a to z), digits, `_` "
            "and `-`. Each query needs its own name. While a named query does not run, the log keeps what it still "
            "needs for `readerTimeout`. For a query without a name it keeps that for `walRetention`.",
            Role.STREAM,
            Role.QUERY,
            pattern=READER_PATTERN,
        ),
    ] = None
    reader_timeout: Annotated[
        Duration,
        doc(
            "How long the log keeps what this query (`reader`) still needs while it does not run. After this time its "
            "position is dropped with a warning.",
            Role.STREAM,
            Role.QUERY,
        ),
    ] = Duration(7 * 86_400)

    serve_log: Annotated[
        LogServing,
        doc(
            "Whether the driver serves the log to executors that do not see `walLocation`. They fetch whole "
            "chunks, and each task holds one in memory. The connection is encrypted, and only they may connect. "
            "`auto` serves it on a free port unless Spark runs in local mode, `never` does not, and an endpoint "
            "such as `tcp://*:5599` says where.",
            Role.STREAM,
            Role.QUERY,
        ),
    ] = LogServing("auto")

    receivers: Annotated[
        int,
        doc(
            "The number of sockets that receive the feed. Each fills a log partition of its own. The "
            "receivers of a PULL share the messages. The receivers of a SUB share the endpoints or the topics "
            "(`receiversBy`).",
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
            "What the receivers of a SUB share: the `endpoints` or the `topics`.",
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
                f"linger={self.linger}: a source that stops could wait for a peer without a limit; a receiver has "
                "nothing to send, leave it at 0"
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
                ("transaction_timeout",), "is for socketType=ROUTER; other sockets have no transactions"
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
        if self.value_format == "bytes":
            self.refuse(("mode",), "needs valueFormat=arrow: every value fits bytes")
        else:
            self.refuse(("include_frames",), "is for valueFormat=bytes; the rows are those of the values")
        self._check_filter()
        if self.wal_store is not None and not self.wal_store.plain:
            raise OptionError("walStore is empty; name where the log is kept, as in s3://bucket/orders")
        if self.wal_store is not None and self.wal_location is not None:
            raise OptionError(
                f"walLocation={self.wal_location!r} and walStore={self.wal_store!r}: a log is in one place; keep one"
            )
        for place in ("starting", "ending"):
            if getattr(self, f"{place}_offsets") and getattr(self, f"{place}_timestamp"):
                raise OptionError(f"{place}Offsets and {place}Timestamp have the same meaning; keep one")
        if self.starting_timestamp is None:
            self.refuse(("starting_offsets_by_timestamp_strategy",), "needs startingTimestamp")
        least, most = self.min_messages_per_trigger, self.max_messages_per_trigger
        if least is not None and most is not None and least > most:
            raise OptionError(
                f"minMessagesPerTrigger={least} is more than maxMessagesPerTrigger={most}; "
                "lower the one or raise the other"
            )

    @property
    def has_log(self) -> bool:
        """Whether a log is named."""
        return self.wal_location is not None or self.wal_store is not None

    @property
    def start(self) -> Place | None:
        """Where to start: ``startingTimestamp`` or ``startingOffsets``; None if neither is set."""
        if self.starting_timestamp is not None:
            return Place(None, None, self.starting_timestamp)
        return self.starting_offsets

    @property
    def end(self) -> Place | None:
        """Where a batch read ends: ``endingTimestamp`` or ``endingOffsets``; None if neither is set."""
        if self.ending_timestamp is not None:
            return Place(None, None, self.ending_timestamp)
        return self.ending_offsets

    def refuse_socket(self, other: Role, reason: str) -> None:
        """Refuse the options of a socket and of another role, because this read opens no socket."""
        self.refuse(self.of_role(Role.SOCKET, other), reason)
        if self.zmq:
            raise OptionError(f"reading a log opens no socket; remove the options zmq.* {sorted(self.zmq)}")

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


_LEAST_METRICS_INTERVAL = 0.1  # seconds
