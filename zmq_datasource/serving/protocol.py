"""The messages between a durable subscriber and the server of a log: bytes only. Specified in docs/durable-protocol.md.

Each request says all that the server needs to know, so it may be repeated until it is answered::

    subscriber                           server
    OPEN   name, start, topics    ─────► finds the position of the name, or begins at ``start``
           ◄──────────────────── OPENED  log, next
    FETCH  first, done            ─────► waits for rows from ``first`` on
           ◄───────────────────── BATCH  log, first, next, done, rows
    FETCH  first=next, done       ─────► ...

That page says what each field means.

``transport.session`` has the form of a message, and ``messages.packed`` that of the columns in a BATCH.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.errors import ProtocolError
from zmq_datasource.messages.columns import FRAMES, binary_of
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.messages.packed import MOST_ROWS, pack_columns, unpack_columns
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.transport.session import Envelope, Header

VERSION = 3
EARLIEST, LATEST, LAST = "earliest", "latest", "last"
MOST_NAME_BYTES = 200
# A session that every client can write exactly, in JavaScript too.
MOST_SESSION = 2**53 - 1
# How long a FETCH waits for messages.
MOST_WAIT_SECONDS = 1.0
# A server answers within MOST_WAIT_SECONDS, unless its disk stalls. After so many seconds without a byte the client
# asks again, and after twice as many on a new connection. The bytes of a large message count: 100 MB may take longer
# than that.
SILENCE_SECONDS = 3.0
_MOST_TOPICS, _MOST_TOPIC_BYTES = 1000, 32_768
# The frames of a request: kind, header, and topics.
MOST_FRAMES = 2 + _MOST_TOPICS

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
    """Client: take a name over. Answered by ``Opened``. The frames behind it are topic prefixes."""

    kind = b"O"
    log: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    start: Annotated[str, msgspec.Meta(max_length=16)] | _Number = EARLIEST

    def check(self) -> None:
        super().check()
        if isinstance(self.start, str) and self.start not in (EARLIEST, LATEST, LAST):
            raise ProtocolError(f"start {self.start!r} is not earliest, latest, last, or an id")


class Opened(Header, frozen=True, kw_only=True):
    """Server: the position of the name is ``next``."""

    kind = b"R"
    session: _Number
    log: str
    next: _Number
    new: bool


class Fetch(_Named, frozen=True, kw_only=True, omit_defaults=True):
    """Client: send the messages from ``first`` on. Answered by ``Batch``, after a second at the latest."""

    kind = b"F"
    first: _Number
    done: _Number
    max_bytes: _Number = 1 << 20
    confirm: bool = False

    def check(self) -> None:
        super().check()
        if self.done > self.first:
            raise ProtocolError(f"done {self.done} is beyond first {self.first}")


class Batch(Header, frozen=True, kw_only=True, omit_defaults=True):
    """Server: the messages from ``first`` to before ``next`` that have the wanted topics; perhaps none.

    If there are rows, the frames behind it are the ids (64 bits, little-endian) and the buffers of ``columns``.
    """

    kind = b"B"
    session: _Number
    log: str
    first: _Number
    next: _Number
    done: _Number
    lost: _Number = 0
    rows: _Number = 0
    columns: tuple[str, ...] = ()

    def check(self) -> None:
        if self.next < self.first + self.lost:
            raise ProtocolError(
                f"a BATCH from {self.first} to before {self.next}, of which {self.lost} are lost"
            )


class Refused(Header, frozen=True, kw_only=True, omit_defaults=True):
    """Server: the request cannot be fulfilled. Programs decide by ``code``; ``reason`` explains it to people."""

    kind = b"X"
    code: str
    reason: str
    session: _Number | None = None


FromClient: TypeAlias = Open | Fetch
FromServer: TypeAlias = Opened | Batch | Refused
_ENVELOPE: Envelope[Any] = Envelope(
    VERSION, (Open, Opened, Fetch, Batch, Refused), "the protocol of durable subscribers"
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
    return message, rest


# The number of rows of a BATCH, their columns and their buffers.
PackedRows: TypeAlias = tuple[int, Sequence[str], Sequence[Any]]


def pack_rows(batch: pa.RecordBatch) -> PackedRows:
    """Pack rows of the log for a BATCH."""
    ids = [memoryview(batch.column("id").buffers()[1])[8 * batch.column("id").offset :][: 8 * batch.num_rows]]
    if batch.column("frames").null_count == batch.num_rows:
        columns, buffers = pack_columns(batch.select(["topic", "value"]))
    else:  # some messages have more frames, or a topic that is not UTF-8
        columns, buffers = pack_columns(pa.record_batch({"frames": raw_messages(batch).lists()}))
    return batch.num_rows, columns, [*ids, *buffers]


def unpack_rows(message: Batch, buffers: Sequence[bytes]) -> pa.RecordBatch:
    """Check the whole BATCH, and return its rows as ``BATCH_SCHEMA``.

    Raises:
        ProtocolError: The buffers do not fit the header.
    """
    if not message.rows:
        if buffers:
            raise ProtocolError(f"a BATCH without rows, and {len(buffers)} buffers")
        return pa.record_batch([pa.nulls(0, field.type) for field in BATCH_SCHEMA], BATCH_SCHEMA)
    if not buffers or message.rows > MOST_ROWS or len(buffers[0]) != 8 * message.rows:
        raise ProtocolError(f"{message.rows} rows, and not as many ids")
    ids = pa.Array.from_buffers(pa.int64(), message.rows, [None, pa.py_buffer(buffers[0])])
    columns = unpack_columns(message.columns, message.rows, buffers[1:])
    grow = message.rows == 1 or pc.all(pc.greater(ids[1:], ids[:-1])).as_py()
    if not (grow and message.first <= ids[0].as_py() and ids[-1].as_py() < message.next):
        raise ProtocolError(
            f"the ids of a BATCH from {message.first} to {message.next - 1} do not grow within these"
        )
    if "frames" in columns:
        raw = RawMessages.of_lists(columns["frames"])
        topics, values, frames = raw.first, raw.last, columns["frames"]
    else:
        values, frames = columns["value"], pa.nulls(message.rows, FRAMES)
        topics = columns.get("topic", pa.nulls(message.rows, pa.binary()))
    rows = [ids, topics.fill_null(_EMPTY), values, frames]
    return pa.record_batch(rows, schema=BATCH_SCHEMA)
