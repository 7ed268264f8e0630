"""The messages between a durable subscriber and the server of a log: bytes only. Specified in docs/durable-protocol.md.

Each request says all that the server needs to know, so it may be repeated until it is answered::

    subscriber                           server
    OPEN   name, start, topics    ─────► finds the position of the name, or begins at ``start``
           ◄──────────────────── OPENED  log, next
    FETCH  first, done            ─────► waits for rows from ``first`` on
           ◄───────────────────── BATCH  log, first, next, done, rows
    FETCH  first=next, done       ─────► ...

OPENED, BATCH and LOST carry the log's id, because an id of a message means nothing in another log.

``transport.session`` has the form of a message, and ``messages.packed`` that of the columns in a BATCH.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.errors import ProtocolError
from zmq_datasource.host.log_lines import printable
from zmq_datasource.messages.columns import FRAMES, binary_of, integers_of
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.messages.packed import MOST_ROWS, pack_columns, unpack_columns
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.transport.session import Envelope, Header

VERSION = 3
EARLIEST, LATEST, LAST = "earliest", "latest", "last"
MOST_NAME_BYTES = 200
# A session that every client can write exactly, in JavaScript too.
MOST_SESSION = 2**53 - 1
# How long a FETCH may wait for messages.
MOST_WAIT_MS = 1000
# A server answers a FETCH within MOST_WAIT_MS, unless its disk stalls. After so many seconds without a byte the client
# asks again, and after twice as many on a new connection. The bytes of a large message count: 100 MB may take longer
# than that.
SILENCE_SECONDS = 3.0
_MOST_TOPICS, _MOST_TOPIC_BYTES = 1000, 32_768
# The frames of a request: kind, header, and topics.
MOST_FRAMES = 2 + _MOST_TOPICS
_MOST_REASON, _MOST_CODE = 2000, 64

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_EMPTY = binary_of([b""])[0]
# Messages as columns, for a user of ``DurableSubscriber.receive_batch``.
BATCH_SCHEMA = pa.schema(
    [("id", pa.int64()), ("topic", pa.binary()), ("value", pa.binary()), ("frames", FRAMES)]
)


class _Named(Header, frozen=True, kw_only=True):
    name: str
    session: _Number

    def check(self) -> None:
        if (
            not 0 < len(self.name.encode("utf-8", "replace")) <= MOST_NAME_BYTES
            or not self.name.isprintable()
        ):
            raise ProtocolError(
                f"a name has 1 to {MOST_NAME_BYTES} bytes of printable text, not {self.name[:32]!r}"
            )
        if not self.session:
            raise ProtocolError("session 0, which means no session; use another number")


class Open(_Named, frozen=True, kw_only=True, omit_defaults=True):
    """Client: take a name over. Answered by ``Opened``. The frames behind it are topic prefixes.

    Attributes:
        log: The log in which the client has saved ids; another log is refused. None if the client has saved none.
        session: Distinguishes this client from another one under the same name; a random number.
        start: Where an unknown name begins: ``earliest``, ``latest``, ``last`` (the newest message of each topic, then
            all later ones), or an id.
        since: Instead of ``start``, a time in microseconds since the epoch: the name begins with the first message that
            the log received then or later.
    """

    kind = b"O"
    log: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    start: Annotated[str, msgspec.Meta(max_length=16)] | _Number = EARLIEST
    since: _Number | None = None

    def check(self) -> None:
        super().check()
        if isinstance(self.start, str) and self.start not in (EARLIEST, LATEST, LAST):
            raise ProtocolError(f"start {self.start!r} is not earliest, latest, last, or an id")


class Opened(Header, frozen=True, kw_only=True):
    """Server: the position of the name is ``next``, and the log ends at ``end``.

    Attributes:
        log: The log's id.
        new: Whether the name was unknown. It stays so until the client's first FETCH has come.
    """

    kind = b"R"
    session: _Number
    log: str
    next: _Number
    end: _Number
    new: bool


class Fetch(_Named, frozen=True, kw_only=True, omit_defaults=True):
    """Client: send the messages from ``first`` on. Answered by ``Batch`` or ``Lost``.

    Attributes:
        first: The first id that the client wants.
        done: The client has processed all messages below this id.
        max_bytes: Bytes of the rows, about; one message at least. 0 asks for no rows.
        wait: How many milliseconds the server waits for a message, up to ``MOST_WAIT_MS``.
        confirm: Whether the server answers only when ``done`` is on its disk.
    """

    kind = b"F"
    first: _Number
    done: _Number
    max_bytes: _Number = 1 << 20
    wait: _Number = 0
    confirm: bool = False

    def check(self) -> None:
        super().check()
        if self.done > self.first:
            raise ProtocolError(f"done {self.done} is beyond first {self.first}")


class _Answer(Header, frozen=True, kw_only=True, omit_defaults=True):
    """An answer to a FETCH.

    Attributes:
        log: The log's id.
        first: That of the request.
        next: The ``first`` of the next request.
        end: The id after the last one of the log.
        done: The client's position as it is on the server's disk.
    """

    session: _Number
    log: str
    first: _Number
    next: _Number
    end: _Number
    done: _Number


class Batch(_Answer, frozen=True, kw_only=True, omit_defaults=True):
    """Server: the messages from ``first`` to before ``next`` that have the wanted topics; perhaps none.

    If there are rows, the frames behind it are the ids (64 bits, little-endian) and the buffers of ``columns``.
    """

    kind = b"B"
    rows: _Number = 0
    columns: tuple[str, ...] = ()

    def check(self) -> None:
        if self.next < self.first:
            raise ProtocolError(f"a BATCH from {self.first} to before {self.next}")


class Lost(_Answer, frozen=True, kw_only=True, omit_defaults=True):
    """Server: the log no longer has the ids from ``first`` to before ``next``."""

    kind = b"L"

    def check(self) -> None:
        if self.next <= self.first:
            raise ProtocolError(f"a LOST from {self.first} to before {self.next}")


class Forget(_Named, frozen=True, kw_only=True):
    """Client: end the subscription. Answered by ``Forgotten``."""

    kind = b"G"


class Forgotten(Header, frozen=True, kw_only=True):
    """Server: the subscription has ended."""

    kind = b"N"
    session: _Number


class Refused(Header, frozen=True, kw_only=True, omit_defaults=True):
    """Server: the request cannot be fulfilled. Programs decide by ``code``; ``reason`` explains it to people."""

    kind = b"X"
    code: str
    reason: str
    session: _Number | None = None


FromClient: TypeAlias = Open | Fetch | Forget
FromServer: TypeAlias = Opened | Batch | Lost | Forgotten | Refused
_ENVELOPE: Envelope[Any] = Envelope(
    VERSION,
    (Open, Opened, Fetch, Batch, Lost, Forget, Forgotten, Refused),
    "the protocol of durable subscribers",
)
encode: Callable[..., list[Any]] = _ENVELOPE.encode


def decode(frames: Sequence[bytes]) -> tuple[FromClient | FromServer, Sequence[bytes]]:
    """A message, and the frames behind its header.

    Raises:
        ProtocolError: It is not a message of this protocol.
    """
    message, rest = _ENVELOPE.decode(frames)
    if isinstance(message, Open) and (len(rest) > _MOST_TOPICS or sum(map(len, rest)) > _MOST_TOPIC_BYTES):
        raise ProtocolError(
            f"{len(rest)} topics of {sum(map(len, rest))} bytes; {_MOST_TOPICS} of {_MOST_TOPIC_BYTES} are the most"
        )
    if isinstance(message, Refused):
        message = Refused(
            code=printable(message.code, _MOST_CODE),
            reason=printable(message.reason, _MOST_REASON),
            session=message.session,
        )
    return message, rest


def pack_rows(batch: pa.RecordBatch) -> tuple[list[str], list[object]]:
    """The columns and the buffers of a BATCH with these rows of the log."""
    ids = [memoryview(batch.column("id").buffers()[1])[8 * batch.column("id").offset :][: 8 * batch.num_rows]]
    if batch.column("frames").null_count == batch.num_rows:
        columns, buffers = pack_columns(batch.select(["topic", "value"]))
    else:  # some messages have more frames, or a topic that is not UTF-8
        columns, buffers = pack_columns(pa.record_batch({"frames": raw_messages(batch).lists()}))
    return columns, [*ids, *buffers]


class BatchRows:
    """The rows of a BATCH, all checked.

    Args:
        ids: Their ids, which grow.
        columns: Either ``topic`` and ``value``, or ``frames``.
    """

    def __init__(self, ids: pa.Array, columns: Mapping[str, pa.Array]) -> None:
        self._ids, self._columns = ids, columns
        self._lists: tuple[list[int], list[Any], list[Any]] | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def message(self, at: int) -> tuple[int, tuple[bytes, ...]]:
        """The id and the frames of a message. A message of one frame gets an empty topic in front.

        The tuples are made one at a time: if all of them lived at once, Python's garbage collector would look at each
        of them again and again.
        """
        if self._lists is None:
            topics = self._columns.get("topic")
            values = self._columns["frames" if "frames" in self._columns else "value"]
            self._lists = (
                self._ids.to_pylist(),
                [] if topics is None else topics.to_pylist(),
                values.to_pylist(),
            )
        ids, first, last = self._lists
        if "frames" in self._columns:
            frames = tuple(last[at])
            return ids[at], frames if len(frames) > 1 else (b"", *frames)
        return ids[at], (first[at] if first else b"", last[at])

    def rest(self, at: int) -> pa.RecordBatch:
        """The rows from a place on, as ``BATCH_SCHEMA``."""
        columns, rows = self._columns, len(self)
        if "frames" in columns:
            frames = columns["frames"]
            raw = RawMessages.of_lists(frames)
            topic, value = raw.first.fill_null(_EMPTY), raw.last
        else:
            topic = columns.get("topic", pa.repeat(_EMPTY, rows))
            value, frames = columns["value"], pa.nulls(rows, FRAMES)
        return pa.record_batch([self._ids, topic, value, frames], schema=BATCH_SCHEMA).slice(at)


NO_ROWS = BatchRows(integers_of([]), {"value": binary_of([])})


def unpack_rows(message: Batch, buffers: Sequence[bytes]) -> BatchRows:
    """Check the whole BATCH, and return its rows.

    Raises:
        ProtocolError: The buffers do not fit the header.
    """
    if not message.rows:
        if buffers:
            raise ProtocolError(f"a BATCH without rows, and {len(buffers)} buffers")
        return NO_ROWS
    if not buffers or message.rows > MOST_ROWS or len(buffers[0]) != 8 * message.rows:
        raise ProtocolError(f"{message.rows} rows, and not as many ids")
    ids = pa.Array.from_buffers(pa.int64(), message.rows, [None, pa.py_buffer(buffers[0])])
    columns = unpack_columns(message.columns, message.rows, buffers[1:])
    grow = message.rows == 1 or pc.all(pc.greater(ids[1:], ids[:-1])).as_py()
    if not (grow and message.first <= ids[0].as_py() and ids[-1].as_py() < message.next):
        raise ProtocolError(
            f"the ids of a BATCH from {message.first} to {message.next - 1} do not grow within these"
        )
    if "topic" in columns:
        columns["topic"] = columns["topic"].fill_null(_EMPTY)
    return BatchRows(ids, columns)
