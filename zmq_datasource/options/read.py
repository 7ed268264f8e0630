"""The source's options, and which of them a stream, a batch and a program that only receives accept."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from zmq_datasource.errors import OptionError
from zmq_datasource.options.offsets import READER_PATTERN, Place
from zmq_datasource.options.parser import Role, doc
from zmq_datasource.options.receiving import ReceivingOptions
from zmq_datasource.options.socket import Endpoint, Endpoints
from zmq_datasource.options.types import ByteSize, Duration


class LogServing(str):
    """``auto``, ``never``, or the tcp endpoint at which the driver serves its log."""

    words: ClassVar[str] = "auto, never or an endpoint"

    @classmethod
    def read(cls, text: str) -> LogServing:
        if text.lower() in ("auto", "never"):
            return cls(text.lower())
        if not text.startswith("tcp://"):
            raise ValueError("it must be auto, never, or an endpoint to listen on: tcp://host:port")
        return cls(Endpoint.read(text))


class ReadOptions(ReceivingOptions, frozen=True, kw_only=True, rename="camel"):
    """The options of ``spark.readStream`` and ``spark.read`` together.

    When a DataFrame is made, Spark does not tell which of the two it is for. So this class accepts the options of both.
    ``StreamReadOptions`` later refuses the options of a batch read, and ``BatchReadOptions`` those of a streaming read.
    """

    include_frames: Annotated[
        bool,
        doc(
            "If true, the column `frames` is added. It has all frames of the message as they came.", Role.ROWS
        ),
    ] = False
    value_format: Annotated[
        Literal["bytes", "arrow"],
        doc(
            "What the values are. `bytes` gives a row for each message. `arrow` gives the rows of the record batches "
            "in each value, which is an Arrow IPC stream, as columns of the `.schema(...)` of the read. See "
            "docs/arrow.md.",
            Role.ROWS,
        ),
    ] = "bytes"
    mode: Annotated[
        Literal["PERMISSIVE", "DROPMALFORMED", "FAILFAST"],
        doc(
            "What happens to a value that does not fit the schema (`valueFormat=arrow`), as in Spark's JSON reader. "
            "`PERMISSIVE` gives one row of nulls, with the value in the column `_corrupt_record` if the schema has "
            "that. `DROPMALFORMED` leaves the message out. `FAILFAST` fails the query. The message stays in the log "
            "in each case. Spark's log names the first ten of each task.",
            Role.ROWS,
        ),
    ] = "PERMISSIVE"
    min_partitions: Annotated[
        int | None,
        doc(
            "The minimum number of Spark partitions (tasks) of a micro-batch or a batch read. A batch with fewer "
            "messages has fewer. A task reads about 64 MiB at most: a larger batch has more of them.",
            Role.LOG,
            Role.ROWS,
            ge=1,
        ),
    ] = None
    starting_offsets: Annotated[
        Place | None,
        doc(
            "Where to start: `earliest`, `latest`, an offset in JSON, or a time in ISO 8601 with a time zone, as in "
            "`2026-11-22T10:00:00Z`. A time means the first message that was received then or later. If there is none "
            "yet, a streaming read starts with what arrives from now on, because all of that is later: a feed that was "
            "quiet is no error. So it refuses a time in the future. A streaming read uses this option only without a "
            "checkpoint. The default for a socket is `latest`, which is what arrives from now on. The default for a "
            "log that another process fills (`walLocation` without an endpoint) and for a batch read of a log is "
            "`earliest`.",
            Role.LOG,
            Role.ROWS,
        ),
    ] = None
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
            "`Trigger.Once` receives before it reads. If another process fills the log, such a query reads what "
            "the log has, without waiting.",
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
            "Where a batch read of a log ends: `latest` (the default), an offset in JSON, or a time as in "
            "`startingOffsets`. It ends before the first message that was received at this time or later; if there is "
            "none, at the end of the log.",
            Role.BATCH,
            Role.LOG,
            Role.ROWS,
        ),
    ] = None
    view: Annotated[
        Literal["messages", "gaps"],
        doc(
            "What a batch read of a log returns: the `messages`, or the `gaps` in their sequences.",
            Role.BATCH,
            Role.LOG,
        ),
    ] = "messages"
    max_messages_per_trigger: Annotated[
        int | None, doc("The maximum number of messages in one micro-batch.", Role.QUERY, ge=1)
    ] = None
    max_bytes_per_trigger: Annotated[
        ByteSize | None,
        doc(
            "About how many bytes of the log one micro-batch has at most, by the sizes of chunks: all messages of a "
            "chunk count as equally long. A micro-batch has at least one message.",
            Role.QUERY,
        ),
    ] = None
    reader: Annotated[
        str | None,
        doc(
            "The name of the query among those that read the same log: 1 to 64 letters (A to Z, a to z), digits, `_` "
            "and `-`. Each query needs its own name. While a named query does not run, the log keeps the messages that "
            "the query still needs, for `readerTimeout`. For a query without a name it keeps them for `walRetention`.",
            Role.QUERY,
            pattern=READER_PATTERN,
        ),
    ] = None
    reader_timeout: Annotated[
        Duration,
        doc(
            "How long the log keeps what this query (`reader`) still needs while it does not run. After this time its "
            "position is dropped with a warning.",
            Role.QUERY,
        ),
    ] = Duration(7 * 86_400)
    serve_log: Annotated[
        LogServing,
        doc(
            "Whether the driver serves the log to executors that do not see `walLocation`. They fetch the parts of "
            "chunks that they need, 4 MiB at most at a time. The connection is encrypted, and only executors may "
            "connect. `auto` serves it on a free port unless Spark runs in local mode, `never` does not, and an "
            "endpoint such as `tcp://*:5599` says where.",
            Role.QUERY,
        ),
    ] = LogServing("auto")

    title: ClassVar[str] = "read option"

    def check(self) -> None:
        super().check()
        if self.value_format == "bytes":
            self.refuse(("mode",), "needs valueFormat=arrow: every value fits bytes")
        else:
            self.refuse(("include_frames",), "is for valueFormat=bytes; the rows are those of the values")

    def refuse_socket(self, other: Role, reason: str) -> None:
        """Refuse the options of a socket and of another role, because this read opens no socket."""
        self.refuse(self.of_role(Role.SOCKET, other), reason)
        if self.zmq:
            raise OptionError(f"reading a log opens no socket; remove the options zmq.* {sorted(self.zmq)}")


class StreamReadOptions(ReadOptions, frozen=True, kw_only=True, rename="camel"):
    """``spark.readStream.format("zmq")``."""

    @property
    def starting_place(self) -> Place:
        """Where a query without a checkpoint begins. If it only reads a log, it reads all of it by default."""
        return self.starting_offsets or Place("latest" if self.has_endpoints else "earliest")

    def check(self) -> None:
        super().check()
        self.refuse(self.of_role(Role.BATCH), "belongs to a batch read, not to spark.readStream")
        if self.reader is None:
            self.refuse(("reader_timeout",), "needs reader: it is for a query that has a name")
        if self.wal_store is not None:
            self.refuse(("serve_log",), "has no effect with walStore, which the executors read themselves")
        if not self.has_endpoints and not self.has_log:
            raise OptionError(
                "neither connect nor bind is set; name the feed, as in .option('connect', 'tcp://feed:5556'), or with "
                "walLocation or walStore alone the log that zmq-datasource receive fills"
            )
        if not self.has_endpoints:
            self.refuse_socket(Role.WRITER, "is for the process that receives; this query only reads its log")


class ReceiveOptions(StreamReadOptions, frozen=True, kw_only=True, rename="camel"):
    """``zmq-datasource receive``, which fills a log and reads no rows."""

    durable: Annotated[
        Endpoints,
        doc(
            "The endpoints to which durable subscribers connect, separated by commas. A ROUTER binds there, with the "
            "options `zmq.*` and `allowedClients` of a socket that binds (docs/durable-subscribers.md)."
        ),
    ] = Endpoints()
    subscriber_expiry: Annotated[
        Duration,
        doc(
            "How long a durable subscriber may be away before it is forgotten, and the log keeps nothing for it."
        ),
    ] = Duration(7 * 86_400)

    def check(self) -> None:
        of_a_query = self.of_role(Role.BATCH, Role.QUERY, Role.ROWS, Role.LIVE)
        self.refuse(of_a_query, "has no effect here: set it at the query that reads the log")
        if not self.durable:
            self.refuse(("subscriber_expiry",), "needs durable: it is for durable subscribers")
        if both := set(self.durable) & {*self.bind, *self.connect}:
            raise OptionError(
                f"{', '.join(map(str, both))} is in durable, too; each side needs its own endpoint"
            )
        if self.subscriber_expiry <= 0:
            raise OptionError("subscriberExpiry=0s leaves no time at all; set 100ms or more")
        super().check()


class BatchReadOptions(ReadOptions, frozen=True, kw_only=True, rename="camel"):
    """``spark.read.format("zmq")``: a read of a live socket, or with ``walLocation`` or ``walStore`` of a log."""

    def check(self) -> None:
        super().check()
        self.refuse(
            self.of_role(Role.QUERY, Role.WRITER),
            "belongs to a streaming read, not to spark.read",
        )
        if self.has_endpoints == self.has_log:
            raise OptionError(
                "a batch read takes either connect or bind (a live socket), or walLocation or walStore (a log): "
                f"{'keep' if self.has_log else 'name'} one"
            )
        if self.socket_type == "ROUTER":
            raise OptionError(
                "socketType=ROUTER needs a log to acknowledge into; receive with spark.readStream or zmq-datasource "
                "receive, and read that log with walLocation"
            )
        if self.has_endpoints:
            self.refuse(
                self.of_role(Role.LOG),
                "needs walLocation: it is for a log, and a live socket has no history",
            )
        else:
            self.refuse_socket(
                Role.LIVE,
                "is for a live socket; a log is cut with endingOffsets, .where() or .limit()",
            )
        if self.view == "gaps":
            self.refuse(self.of_role(Role.ROWS), "is about messages; view=gaps shows the whole gap table")
        if self.ending_offsets and self.ending_offsets.word == "earliest":
            raise OptionError(
                "endingOffsets=earliest reads nothing; use latest, an offset in JSON, or a time"
            )
