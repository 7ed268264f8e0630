"""Every option of the data source, declared once: name, type, default, range and doc.

``parse`` turns Spark's text options into one of the classes below; the reference in
``docs/options.md`` is generated from the same declarations (``describe``). Nothing here
touches a socket or a file: what only libzmq can judge is checked in ``sockets``.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from zmq_datasource.errors import OptionError
from zmq_datasource.option_types import (
    ByteSize,
    Duration,
    Endpoints,
    Linger,
    Position,
    SinkSocket,
    SourceSocket,
    Topics,
    ZmqOptions,
)

__all__ = [
    "BatchReadOptions",
    "OptionDoc",
    "ReadOptions",
    "SocketOptions",
    "StreamReadOptions",
    "WriteOptions",
    "describe",
    "parse",
]


_CUSTOM = (SourceSocket, SinkSocket, Duration, Linger, ByteSize, Endpoints, Topics, Position)


def _doc(text: str, scope: str | None = None, **constraints: Any) -> Meta:
    return Meta(description=text, extra={"scope": scope}, **constraints)


class SocketOptions(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What every socket has. Subclasses add their side."""

    connect: Annotated[Endpoints, _doc("Endpoints to connect to, comma-separated.")] = Endpoints()
    bind: Annotated[Endpoints, _doc("Endpoints to bind, comma-separated.")] = Endpoints()
    # Not an option of its own name: parse() collects every "zmq.<name>" here.
    zmq: ZmqOptions = msgspec.field(default_factory=ZmqOptions)

    title: ClassVar[str] = "option"
    ignored: ClassVar[frozenset[str]] = frozenset()

    def check(self) -> None:
        """Raise OptionError for values that are each right but do not go together."""
        both = set(self.connect) & set(self.bind)
        if both:
            raise OptionError(f"{', '.join(map(str, both))} is in both connect and bind; keep one")


class ReadOptions(SocketOptions, frozen=True, kw_only=True, rename="camel"):
    """What ``spark.readStream`` and ``spark.read`` accept together.

    ``DataSource.schema`` is not told which of the two it serves, so the DataFrame is checked
    against this union; ``StreamReadOptions`` and ``BatchReadOptions`` then refuse what belongs
    to the other.
    """

    socket_type: Annotated[
        SourceSocket, _doc("`SUB` subscribes to a PUB or XPUB; `PULL` shares a PUSH's messages.")
    ] = SourceSocket("SUB")
    topics: Annotated[
        Topics,
        _doc(
            "Topic prefixes to subscribe to (SUB), comma-separated, or a JSON list where one holds a comma."
        ),
    ] = Topics(("",))
    rcvhwm: Annotated[
        int,
        _doc(
            "Receive high-water mark: messages that libzmq queues per connection. When the queue is full it stops "
            "reading and the peer's own high-water mark decides. libzmq's 0 (no limit) is refused.",
            ge=1,
            le=2**31 - 1,
        ),
    ] = 1000
    linger: Annotated[
        Linger,
        _doc("libzmq's linger at close, in milliseconds or with a unit. A receiver has nothing to send."),
    ] = Linger(0)
    include_frames: Annotated[
        bool, _doc("Adds the column `frames`: every frame of the message as it came.")
    ] = False
    wal_location: Annotated[
        str | None,
        _doc(
            "Directory of the message log, reachable by the driver and every executor. Unset, a streaming read uses a "
            "private directory under the local temporary directory, named from the feed. A batch read with it reads "
            "the log and opens no socket."
        ),
    ] = None
    min_partitions: Annotated[
        int | None,
        _doc(
            "Least number of Spark partitions that a batch is split into, if it has as many messages.", ge=1
        ),
    ] = None
    max_bytes_per_partition: Annotated[
        ByteSize, _doc("Size at which a batch is split into further Spark partitions.")
    ] = ByteSize(64 << 20)
    starting_offsets: Annotated[
        Position | None,
        _doc(
            "Where to start: `earliest`, `latest` or an offset in JSON. A streaming read defaults to `latest` (what "
            "arrives from now on) and uses it only without a checkpoint; a batch read of a log defaults to `earliest`."
        ),
    ] = None
    fail_on_data_loss: Annotated[
        bool,
        _doc(
            "Whether an offset that the log no longer has stops the query; if false, it is a warning and reading goes "
            "on with the oldest message there is."
        ),
    ] = True
    timeout: Annotated[
        Duration,
        _doc(
            "How long a batch read of a live socket receives; also `Trigger.AvailableNow` and `Trigger.Once`, which "
            "first receive for this long."
        ),
    ] = Duration(10)
    idle_timeout: Annotated[
        Duration | None,
        _doc("Ends that receiving early once no message came for this long."),
    ] = None
    max_messages: Annotated[
        int | None, _doc("Most messages that a batch read of a live socket returns.", "batch", ge=1)
    ] = None
    ending_offsets: Annotated[
        Position | None,
        _doc("Where a batch read of a log ends: `latest` (default) or an offset in JSON.", "batch"),
    ] = None
    max_messages_per_trigger: Annotated[
        int | None, _doc("Most messages in one micro-batch.", "stream", ge=1)
    ] = None
    max_bytes_per_trigger: Annotated[
        ByteSize | None,
        _doc("Most bytes of `value` in one micro-batch; one message is always let in.", "stream"),
    ] = None
    min_messages_per_trigger: Annotated[
        int | None,
        _doc("Waits for this many messages before it starts a micro-batch ...", "stream", ge=1),
    ] = None
    max_trigger_delay: Annotated[
        Duration,
        _doc("... but no longer than this after the previous one.", "stream"),
    ] = Duration(900)
    wal_max_bytes: Annotated[
        ByteSize,
        _doc(
            "Size of the log at which receiving stops, so that the high-water marks hold the publisher back, until "
            "Spark has committed enough.",
            "stream",
        ),
    ] = ByteSize(4 << 30)
    wal_retention: Annotated[
        Duration,
        _doc("How long messages stay in the log after they were received and committed.", "stream"),
    ] = Duration(0)
    wal_chunk_bytes: Annotated[
        ByteSize, _doc("Size at which a chunk of the log is sealed; never more than `walMaxBytes`.", "stream")
    ] = ByteSize(32 << 20)
    wal_flush_interval: Annotated[
        Duration,
        _doc(
            "Age at which received messages are sealed though Spark has not asked: the most that a crash of the "
            "machine or the driver can cost.",
            "stream",
        ),
    ] = Duration(1)
    wal_sync: Annotated[
        bool,
        _doc(
            "Whether each chunk is forced to the disk (fsync). If false, a crash of the operating system may lose "
            "messages that Spark was already given.",
            "stream",
        ),
    ] = True

    title: ClassVar[str] = "read option"

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
        least, most = self.min_messages_per_trigger, self.max_messages_per_trigger
        if least is not None and most is not None and least > most:
            raise OptionError(
                f"minMessagesPerTrigger={least} is more than maxMessagesPerTrigger={most}; "
                "lower the one or raise the other"
            )

    def _refuse(self, fields: Collection[str], reason: str) -> None:
        for option in describe(type(self)):
            if option.field in fields and getattr(self, option.field) != option.default_value:
                raise OptionError(f"option {option.name} {reason}; remove it")

    def _of_scope(self, scope: str) -> list[str]:
        return [option.field for option in describe(type(self)) if option.scope == scope]


# Of a batch read: what only a live socket has, and what only a log has.
_LIVE_ONLY = ("socket_type", "topics", "rcvhwm", "linger", "timeout", "idle_timeout", "max_messages")
_LOG_ONLY = (
    "starting_offsets",
    "ending_offsets",
    "min_partitions",
    "max_bytes_per_partition",
    "fail_on_data_loss",
)


class StreamReadOptions(ReadOptions, frozen=True, kw_only=True, rename="camel"):
    """``spark.readStream.format("zmq")``."""

    def check(self) -> None:
        super().check()
        self._refuse(self._of_scope("batch"), "belongs to a batch read, not to spark.readStream")
        if not (self.connect or self.bind):
            raise OptionError(
                "neither connect nor bind is set; name the feed, as in .option('connect', 'tcp://feed:5556')"
            )


class BatchReadOptions(ReadOptions, frozen=True, kw_only=True, rename="camel"):
    """``spark.read.format("zmq")``: of a live socket, or with ``walLocation`` of a log."""

    def check(self) -> None:
        super().check()
        self._refuse(self._of_scope("stream"), "belongs to a streaming read, not to spark.read")
        live = bool(self.connect or self.bind)
        if live and self.wal_location is not None:
            raise OptionError(
                "a batch read takes either connect/bind (a live socket) or walLocation (a log); keep one"
            )
        if not live and self.wal_location is None:
            raise OptionError(
                "neither connect nor bind (a live socket) nor walLocation (a log) is set; name one"
            )
        if live:
            self._refuse(_LOG_ONLY, "needs walLocation: it is about a log, and a live socket has no history")
        else:
            self._refuse(
                _LIVE_ONLY, "is for a live socket; a log is cut with endingOffsets, .where() or .limit()"
            )
            if self.zmq:
                raise OptionError(
                    f"reading a log opens no socket; remove the options zmq.* {sorted(self.zmq)}"
                )
        if self.ending_offsets and self.ending_offsets.word == "earliest":
            raise OptionError("endingOffsets=earliest reads nothing; use latest or an offset in JSON")


class WriteOptions(SocketOptions, frozen=True, kw_only=True, rename="camel"):
    """``writeStream.format("zmq")`` and ``df.write.format("zmq")``."""

    socket_type: Annotated[
        SinkSocket,
        _doc("`PUSH` shares the rows among PULL peers; `PUB` sends each to every subscriber."),
    ] = SinkSocket("PUSH")
    sndhwm: Annotated[
        int,
        _doc(
            "Send high-water mark: messages that libzmq queues per connection. libzmq's 0 (no limit) is refused.",
            ge=1,
            le=2**31 - 1,
        ),
    ] = 1000
    linger: Annotated[
        Linger,
        _doc(
            "How long a task waits at its end for queued messages to leave the process, in milliseconds or with a "
            "unit; -1 waits for ever."
        ),
    ] = Linger(30_000)
    noblock: Annotated[
        bool,
        _doc(
            "If true, a message that finds the queue full is dropped and counted (`hwm`); if false, the task waits up "
            "to `sendTimeout` and then fails."
        ),
    ] = False
    send_timeout: Annotated[
        Duration, _doc("How long one send may wait for room in the queue (`noblock=false`).")
    ] = Duration(60)
    connect_timeout: Annotated[
        Duration,
        _doc(
            "How long a task waits at its start for every endpoint to answer (PUSH) or for `minSubscribers` (PUB)."
        ),
    ] = Duration(30)
    min_subscribers: Annotated[
        int,
        _doc(
            "Subscribers that a PUB waits for before the first message; 0 does not wait. One that "
            "subscribes to several "
            "topics while another is connected and has not subscribed yet may count for both.",
            ge=0,
        ),
    ] = 1

    title: ClassVar[str] = "write option"
    # Spark hands a writer its own option along with ours.
    ignored: ClassVar[frozenset[str]] = frozenset({"checkpointlocation"})

    def check(self) -> None:
        super().check()
        if not (self.connect or self.bind):
            raise OptionError(
                "neither connect nor bind is set; name the consumer, as in .option('connect', 'tcp://consumer:5557')"
            )
        if self.linger == 0 and not self.noblock:
            raise OptionError(
                "linger=0 gives up what is queued when a task ends, which needs noblock=true; set a longer linger"
            )
        if self.socket_type == "PUSH" and self.min_subscribers != 1:
            raise OptionError("minSubscribers needs socketType=PUB; a PUSH waits for its peers")


class OptionDoc(NamedTuple):
    """One declared option, for the reference and for messages."""

    name: str
    field: str
    words: str
    default: str
    default_value: Any
    scope: str | None
    doc: str
    kind: type
    hint: Any


_O = TypeVar("_O", bound=SocketOptions)


@functools.cache
def describe(cls: type[SocketOptions]) -> tuple[OptionDoc, ...]:
    """The options of ``cls`` in the order of declaration, without ``zmq.*``."""
    return tuple(_describe(cls))


def _describe(cls: type[SocketOptions]) -> Iterator[OptionDoc]:
    hints = get_type_hints(cls, include_extras=True)
    for field in msgspec.structs.fields(cls):
        if field.name == "zmq":
            continue
        hint = hints[field.name]
        meta = next(a for a in hint.__metadata__ if isinstance(a, Meta))
        default = field.default
        kinds = [t for t in (get_args(hint.__origin__) or (hint.__origin__,)) if t is not type(None)]
        shown = "" if default in (None, ()) else str(default)
        yield OptionDoc(
            name=field.encode_name,
            field=field.name,
            words=_TYPE_WORDS[kinds[0]],
            default=shown.lower() if isinstance(default, bool) else shown,
            default_value=default,
            scope=(meta.extra or {}).get("scope"),
            doc=meta.description or "",
            kind=kinds[0],
            hint=Annotated[kinds[0], meta],
        )


_TYPE_WORDS = {
    str: "text",
    int: "a whole number",
    bool: "true or false",
    SourceSocket: "SUB or PULL",
    SinkSocket: "PUSH or PUB",
    Duration: "a duration",
    Linger: "milliseconds",
    ByteSize: "a size",
    Endpoints: "endpoints",
    Topics: "topics",
    Position: "an offset",
}


def parse(cls: type[_O], options: Mapping[str, str]) -> _O:
    """Read Spark's text options (names in any case) into ``cls``.

    Raises:
        OptionError: An unknown name, a value outside its range, or values that do not go
            together. Names the option, the value and what is allowed.
    """
    known = {option.name.lower(): option for option in describe(cls)}
    values: dict[str, Any] = {}
    zmq = ZmqOptions()
    for raw_name, text in options.items():
        name = raw_name.lower()
        if name in cls.ignored:
            continue
        if name.startswith("zmq."):
            zmq[name.removeprefix("zmq.")] = text
        elif name in known:
            values[known[name].field] = _read(known[name], text)
        else:
            raise OptionError(_unknown(cls, raw_name, known))
    parsed = cls(**values, zmq=zmq)
    parsed.check()
    return parsed


def _read(option: OptionDoc, text: str) -> Any:
    try:
        if issubclass(option.kind, _CUSTOM):
            return option.kind.read(text.strip())
        return msgspec.convert(text.strip(), option.hint, strict=False)
    except ValueError as e:
        # msgspec knows our type's name in Python, the user knows it in words.
        reason = f"it must be {option.words}" if "got `str`" in str(e) else str(e)
        if isinstance(e, msgspec.ValidationError):
            reason += f" ({option.doc})"
        raise OptionError(f"option {option.name}={text!r}: {reason}") from e


def _unknown(cls: type[SocketOptions], name: str, known: Mapping[str, OptionDoc]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    if near:
        return f"unknown {cls.title} {name!r}; did you mean {known[near[0]].name!r}?"
    names = ", ".join(sorted(option.name for option in known.values()))
    return f"unknown {cls.title} {name!r}; there are {names}, and libzmq's own behind 'zmq.'"
