"""The transaction protocol's messages: bytes only. Specified in docs/protocol.md.

A message is a frame of ``ZDS``, the version (one byte) and the kind (one letter), a frame of JSON,
and for data the columns' buffers, each a frame, laid out as Arrow does: nothing in them decides
about memory or control before it has been checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.errors import ProtocolError
from zmq_datasource.host.printable import printable
from zmq_datasource.messages.columns import join_frames, number, only_rows, text
from zmq_datasource.messages.framing import decode_plain
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.messages.rows import message_rows, text_of, times_of
from zmq_datasource.messages.schemas import FRAMES

__all__ = [
    "CONFLICT",
    "DATA_BYTES",
    "INTERNAL",
    "MOST_FRAMES",
    "MOST_FRAME_BYTES",
    "MOST_NAME_BYTES",
    "UNKNOWN",
    "VERSION",
    "Abort",
    "Aborted",
    "Commit",
    "Committed",
    "Credit",
    "Data",
    "End",
    "Hello",
    "Message",
    "Refusal",
    "Staged",
    "Welcome",
    "decode",
    "encode",
    "is_name",
    "pack_columns",
    "rows_of",
    "split_batch",
    "unpack_columns",
]

VERSION = 1
# The code of a refusal about an attempt that the receiver does not have (any more).
UNKNOWN = "unknown"
# About a number under which something else is committed.
CONFLICT = "conflict"
# About a message that met an error which the receiver did not expect; it may have done what the message asks for.
INTERNAL = "internal"
_MAGIC = b"ZDS"
# About the size of one data message: large enough for Arrow, small enough for credit.
DATA_BYTES = 1 << 20
MOST_NAME_BYTES = 256  # of a producer
_ATTEMPT = re.compile("[0-9a-f]{32}")
_DIGEST = re.compile("[0-9a-f]{16}")
_MOST_ROWS = 1 << 18
# The largest frame, and so the largest row.
MOST_FRAME_BYTES = 64 << 20
# Of a message: its kind, its header, and the buffers of up to three columns.
MOST_FRAMES = 2 + 3 * 3


def is_name(text: str) -> bool:
    """Whether a producer may be called so: names are shown in logs and refusals."""
    return 0 < len(text.encode("utf-8", "replace")) <= MOST_NAME_BYTES and text.isprintable()


class _Base(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    kind: ClassVar[bytes]

    def check(self) -> None:
        """Raise ProtocolError for a value that no honest peer sends."""
        attempts = [getattr(self, "attempt", None), *getattr(self, "attempts", ())]
        for attempt in attempts:
            if attempt is not None and not _ATTEMPT.fullmatch(attempt):
                raise ProtocolError(f"attempt {attempt[:64]!r} is not 32 hexadecimal digits")
        producer = getattr(self, "producer", "-")
        if not is_name(producer):
            raise ProtocolError(
                f"the producer's name must have 1 to {MOST_NAME_BYTES} bytes of printable text"
            )
        for name in ("number", "partition", "index", "rows", "messages"):
            value = getattr(self, name, 0)
            if not 0 <= value < 2**63:
                raise ProtocolError(f"{name} {value} is out of range")


class Hello(_Base, frozen=True, kw_only=True):
    """Sender: here I am (again), about this attempt. Answered by ``Welcome``."""

    kind = b"H"
    attempt: str
    producer: str


class Welcome(_Base, frozen=True, kw_only=True):
    """Receiver: how many bytes of data may be on their way, how many data messages of the attempt it
    has, the producer's last committed transaction and one of its attempts, and the largest frame."""

    kind = b"W"
    attempt: str
    credit: int
    received: int
    committed: int | None
    by: str | None
    limit: int


class Data(_Base, frozen=True, kw_only=True):
    """Sender: some rows; ``index`` counts the attempt's data messages from 0."""

    kind = b"D"
    attempt: str
    producer: str
    number: int
    partition: int
    index: int
    rows: int
    columns: list[str]


class Credit(_Base, frozen=True, kw_only=True):
    """Receiver: so many data messages of the attempt were taken off the socket."""

    kind = b"C"
    attempt: str
    received: int


class End(_Base, frozen=True, kw_only=True):
    """Sender: that was all of this attempt. Answered by ``Staged``."""

    kind = b"E"
    attempt: str
    producer: str
    number: int
    partition: int
    messages: int
    rows: int


class Staged(_Base, frozen=True, kw_only=True):
    """Receiver: the attempt is on disk, and nobody sees it yet."""

    kind = b"S"
    attempt: str
    rows: int


class Commit(_Base, frozen=True, kw_only=True, omit_defaults=True):
    """Sender: these attempts make up the transaction. Answered by ``Committed``.

    ``digest`` is that of all its rows (``digests``), by which a repeated one is compared; a sender may leave it out.
    """

    kind = b"M"
    producer: str
    number: int
    attempts: list[str]
    rows: int
    digest: str | None = None

    def check(self) -> None:
        super().check()
        if self.digest is not None and not _DIGEST.fullmatch(self.digest):
            raise ProtocolError(f"digest {self.digest[:64]!r} is not 16 hexadecimal digits")


class Committed(_Base, frozen=True, kw_only=True):
    """Receiver: the transaction is in the log, now or (``again``) for longer; ``by`` is one of the attempts
    of the producer's last one."""

    kind = b"K"
    producer: str
    number: int
    again: bool
    by: str | None


class Abort(_Base, frozen=True, kw_only=True):
    """Sender: forget these attempts. Answered by ``Aborted``."""

    kind = b"A"
    producer: str
    number: int
    attempts: list[str]


class Aborted(_Base, frozen=True, kw_only=True):
    """Receiver: the attempts are forgotten."""

    kind = b"B"
    producer: str
    number: int


class Refusal(_Base, frozen=True, kw_only=True):
    """Receiver: it cannot be done; ``code`` is for programs, ``reason`` for people."""

    kind = b"X"
    code: str
    reason: str
    attempt: str | None = None


Message: TypeAlias = (
    Hello | Welcome | Data | Credit | End | Staged | Commit | Committed | Abort | Aborted | Refusal
)
_KINDS: dict[bytes, type[_Base]] = {
    cls.kind: cls
    for cls in (Hello, Welcome, Data, Credit, End, Staged, Commit, Committed, Abort, Aborted, Refusal)
}
_DECODERS = {kind: msgspec.json.Decoder(cls) for kind, cls in _KINDS.items()}


def encode(message: Message, buffers: Sequence[Any] = ()) -> list[Any]:
    """The frames of a message."""
    return [_MAGIC + bytes([VERSION]) + message.kind, msgspec.json.encode(message), *buffers]


def decode(frames: Sequence[bytes]) -> tuple[Message, Sequence[bytes]]:
    """A message and its buffers.

    Raises:
        ProtocolError: The frames are none, or of another version.
    """
    head = bytes(frames[0]) if frames else b""
    if len(head) != 5 or not head.startswith(_MAGIC) or len(frames) < 2:
        raise ProtocolError(
            "this is no message of the transaction protocol; DEALER and ROUTER speak only that"
        )
    if head[3] != VERSION:
        raise ProtocolError(f"version {head[3]} of the protocol; this side speaks {VERSION}")
    decoder = _DECODERS.get(head[4:])
    if decoder is None:
        raise ProtocolError(f"unknown kind of message {head[4:]!r}")
    try:
        message: Message = decoder.decode(frames[1])  # type: ignore[assignment]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise ProtocolError(
            f"the header of a {_KINDS[head[4:]].__name__} message: {printable(str(e), 200)}"
        ) from e
    message.check()
    return message, frames[2:]


def split_batch(batch: pa.RecordBatch, size: int = DATA_BYTES) -> Iterator[pa.RecordBatch]:
    """Slices of about ``size`` bytes; one row at least."""
    rows = max(1, min(_MOST_ROWS, int(batch.num_rows * size / max(batch.nbytes, 1))))
    for begin in range(0, batch.num_rows, rows):
        piece = batch.slice(begin, rows)
        if piece.nbytes > 4 * size and piece.num_rows > 1:
            yield from split_batch(piece, size)  # large rows among small ones
        else:
            yield piece


def pack_columns(batch: pa.RecordBatch) -> tuple[list[str], list[object]]:
    """The columns of rows as their names and buffers.

    ``value`` and ``topic`` are offsets (32 bits, from 0) and data, ``topic`` with a bitmap of
    validity in front (empty: no nulls); ``frames`` is the list's offsets and the frames' offsets and
    data.
    """
    buffers: list[object] = []
    for name in batch.schema.names:
        column = batch.column(name)
        if name == "frames":
            lists = _fresh(column.cast(FRAMES))
            buffers += [_offsets(lists), *_offsets_and_data(_fresh(lists.flatten()))]
        else:
            column = _fresh(_binary(column))
            if name == "topic":
                bits = (len(column) + 7) // 8
                buffers.append(column.buffers()[0].slice(0, bits) if column.null_count else b"")
            buffers += _offsets_and_data(column)
    return list(batch.schema.names), buffers


def unpack_columns(message: Data, buffers: Sequence[bytes]) -> dict[str, pa.Array]:
    """The columns again, checked: whatever the bytes are, no row reaches beyond them.

    Raises:
        ProtocolError: They are not what they should be.
    """
    expected = {("value",): 2, ("topic", "value"): 5, ("value", "topic"): 5, ("frames",): 3}
    count = expected.get(tuple(message.columns))
    if count is None or count != len(buffers):
        raise ProtocolError(f"data with columns {str(message.columns)[:100]} and {len(buffers)} buffers")
    if not 0 < message.rows <= _MOST_ROWS:
        raise ProtocolError(f"data with {message.rows} rows")
    rest = iter(pa.py_buffer(buffer) for buffer in buffers)
    columns = {}
    try:
        for name in message.columns:
            if name == "frames":
                offsets, *child = rest
                frames = len(child[0]) // 4 - 1
                values = pa.Array.from_buffers(pa.binary(), frames, [None, *child])
                column = pa.Array.from_buffers(FRAMES, message.rows, [None, offsets], children=[values])
            else:
                validity = next(rest) if name == "topic" else None
                bitmap = validity if validity is not None and len(validity) else None
                column = pa.Array.from_buffers(pa.binary(), message.rows, [bitmap, next(rest), next(rest)])
            column.validate(full=True)
            columns[name] = column
    except (pa.ArrowException, ValueError, StopIteration) as e:
        raise ProtocolError(f"data whose column {name} is damaged: {e}") from e
    return columns


def rows_of(message: Data, buffers: Sequence[bytes], timestamp: int) -> pa.RecordBatch:
    """The rows of a data message, with ``messages.schemas.MESSAGE_SCHEMA``.

    Args:
        timestamp: When they were received, in microseconds since the epoch.

    Raises:
        ProtocolError: The buffers are not what they should be.
    """
    columns = unpack_columns(message, buffers)
    try:
        return _make_rows(message, columns, timestamp)
    except (pa.ArrowException, ValueError) as e:
        raise ProtocolError(f"data that makes no rows: {e}") from e


def _make_rows(message: Data, columns: dict[str, pa.Array], timestamp: int) -> pa.RecordBatch:
    timestamps = [(timestamp, message.rows)]
    producer = pa.repeat(text(message.producer), message.rows)
    numbers = pa.repeat(number(message.number), message.rows)
    if "frames" in columns:
        messages = columns["frames"]
        if pc.min(pc.list_value_length(messages)).as_py() == 0:
            raise ProtocolError("a message without frames")
        return decode_plain(RawMessages.of_lists(messages), timestamps, producer, numbers)
    value, topic, bad = columns["value"], None, set[int]()
    if "topic" in columns:
        topic, bad = text_of(columns["topic"])
    return message_rows(
        value,
        times_of(timestamps),
        topic=topic,
        publisher=producer,
        sequence=numbers,
        frames=only_rows(join_frames([columns["topic"], value]), bad) if bad else None,
    )


def _binary(column: pa.Array) -> pa.Array:
    return column if pa.types.is_binary(column.type) else pc.cast(column, pa.binary())


def _fresh(column: pa.Array) -> pa.Array:
    """The same with offsets from 0; a slice carries what is before it."""
    if column.offset == 0 and not int.from_bytes(memoryview(_offsets(column))[:4], "little"):
        return column
    return pa.concat_arrays([column, column.slice(0, 0)])


def _offsets(column: pa.Array) -> pa.Buffer:
    """As far as the rows reach, as are the data: what follows them is not sent."""
    found = column.buffers()[1]
    size = 4 * (len(column) + 1)
    return pa.py_buffer(bytes(size)) if found is None or found.size < size else found.slice(0, size)


def _offsets_and_data(column: pa.Array) -> list[object]:
    offsets = _offsets(column)
    data = column.buffers()[2]
    size = int.from_bytes(memoryview(offsets)[-4:], "little")
    return [offsets, b"" if data is None else data.slice(0, size)]
