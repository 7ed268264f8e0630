"""The messages of the transaction protocol, to bytes and back; and digests. Pure; docs/protocol.md specifies all of it.

``transport.session`` has the common form of messages. The buffers of a data message are columns (``messages.packed``).

The digest of a transaction's rows shows whether a repeated transaction is the same. The digest of a row is a chain over
its frames (topic and value, value alone, or all of ``frames``): XXH3-64 of each frame, seeded with the hash of the
frame before it, and with 0 for the first. The digest of many rows is the sum modulo 2^64. So it depends neither on the
order of the rows nor on the tasks and messages that carry them: both may differ when Spark repeats a batch. Unlike an
exclusive or, a sum counts a repeated row twice.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from zmq_datasource.errors import ProtocolError
from zmq_datasource.messages.columns import number, text
from zmq_datasource.messages.framing import decode_plain
from zmq_datasource.messages.packed import MOST_BUFFERS, MOST_ROWS, unpack_columns
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.transport.columns import FrameColumn, FramesColumn
from zmq_datasource.transport.core import digest
from zmq_datasource.transport.session import Envelope, Header

VERSION = 2
# Codes of refusals. The receiver does not have the attempt (any more), and the sender begins another one:
UNKNOWN = "unknown"
# Any other reason:
REFUSED = "refused"
# About the size of a data message: large enough for Arrow, small enough to keep one for each sender.
DATA_BYTES = 1 << 20
MOST_NAME_BYTES = 256  # of a producer
# The name of a producer that no later program uses begins so.
_ANONYMOUS = "anonymous-"
_ATTEMPT = re.compile("[0-9a-f]{32}")
_DIGEST = re.compile("[0-9a-f]{16}")
# The size of the largest frame, and so of the largest row.
MOST_FRAME_BYTES = 64 << 20
# A message has its kind, its header, and the buffers of its columns.
MOST_FRAMES = 2 + MOST_BUFFERS
_MODULUS = 1 << 64


def is_name(text: str) -> bool:
    """Whether this is a valid name of a producer. Names are shown in logs and refusals."""
    return 0 < len(text.encode("utf-8", "replace")) <= MOST_NAME_BYTES and text.isprintable()


def anonymous_name(kind: str) -> str:
    """A new name for a producer. No later program uses it, so a receiver forgets its transactions first."""
    return f"{_ANONYMOUS}{kind}-{uuid.uuid4().hex}"


def is_anonymous(name: str) -> bool:
    """Whether no later program uses this name of a producer."""
    return name.startswith(_ANONYMOUS)


class _Base(Header, frozen=True, kw_only=True):
    def check(self) -> None:
        """Raise ProtocolError for a value that the protocol does not allow."""
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
    """Sender: asks for the producer's last transaction. Answered by ``Welcome``."""

    kind = b"H"
    attempt: str
    producer: str


class Welcome(_Base, frozen=True, kw_only=True):
    """Receiver: the producer's last committed transaction (``committed``), with one of its attempts (``by``)."""

    kind = b"W"
    attempt: str
    committed: int | None
    by: str | None


class Data(_Base, frozen=True, kw_only=True):
    """Sender: rows. ``index`` counts the attempt's data messages from 0. Answered by ``Taken``."""

    kind = b"D"
    attempt: str
    producer: str
    number: int
    partition: int
    index: int
    rows: int
    columns: list[str]


class Taken(_Base, frozen=True, kw_only=True):
    """Receiver: the number of data messages of the attempt that it has, from the first one on."""

    kind = b"T"
    attempt: str
    received: int


class End(_Base, frozen=True, kw_only=True):
    """Sender: the attempt has no more rows. Answered by ``Staged``."""

    kind = b"E"
    attempt: str
    messages: int
    rows: int


class Staged(_Base, frozen=True, kw_only=True):
    """Receiver: the attempt is on disk, and readers do not see it yet."""

    kind = b"S"
    attempt: str
    rows: int


class Commit(_Base, frozen=True, kw_only=True, omit_defaults=True):
    """Sender: these attempts make up the transaction. Answered by ``Committed``.

    ``digest`` is the digest of all its rows, for the comparison when the transaction is repeated. It may be left out.
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
    """Receiver: the transaction is in the log, and was there before this commit if ``again``. ``by`` is one of the
    attempts of the producer's last transaction."""

    kind = b"K"
    producer: str
    number: int
    again: bool
    by: str | None


class Refusal(_Base, frozen=True, kw_only=True):
    """Receiver: a message is refused. ``code`` is for programs, ``reason`` for people."""

    kind = b"X"
    code: str
    reason: str
    attempt: str | None = None


Message: TypeAlias = Hello | Welcome | Data | Taken | End | Staged | Commit | Committed | Refusal
_HEADERS = (Hello, Welcome, Data, Taken, End, Staged, Commit, Committed, Refusal)
_ENVELOPE: Envelope[Any] = Envelope(VERSION, _HEADERS, "the transaction protocol")
encode = _ENVELOPE.encode
decode: Callable[[Sequence[bytes]], tuple[Message, Sequence[bytes]]] = _ENVELOPE.decode


def split_batch(batch: pa.RecordBatch, size: int = DATA_BYTES) -> Iterator[pa.RecordBatch]:
    """Slices of about ``size`` bytes, with at least one row each."""
    rows = max(1, min(MOST_ROWS, int(batch.num_rows * size / max(batch.nbytes, 1))))
    for begin in range(0, batch.num_rows, rows):
        piece = batch.slice(begin, rows)
        if piece.nbytes > 4 * size and piece.num_rows > 1:
            yield from split_batch(piece, size)  # large rows among small ones
        else:
            yield piece


def rows_of(message: Data, buffers: Sequence[bytes], timestamp: int) -> pa.RecordBatch:
    """The rows of a data message, as ``messages.columns.MESSAGE_SCHEMA``.

    Args:
        timestamp: When they were received, in microseconds since the epoch.

    Raises:
        ProtocolError: The buffers do not fit the header.
    """
    columns = unpack_columns(message.columns, message.rows, buffers)
    try:
        return _make_rows(message, columns, timestamp)
    except (pa.ArrowException, ValueError) as e:
        raise ProtocolError(f"data that makes no rows: {e}") from e


def _make_rows(message: Data, columns: dict[str, pa.Array], timestamp: int) -> pa.RecordBatch:
    timestamps = [(timestamp, message.rows)]
    producer = pa.repeat(text(message.producer), message.rows)
    numbers = pa.repeat(number(message.number), message.rows)
    if "frames" in columns:
        return decode_plain(RawMessages.of_lists(columns["frames"]), timestamps, producer, numbers)
    topics = columns.get("topic", pa.nulls(message.rows, pa.binary()))
    return decode_plain(RawMessages(topics, columns["value"]), timestamps, producer, numbers)


# Digests.


def digest_of(batch: pa.RecordBatch) -> int:
    """The digest of a batch with the columns ``value`` and perhaps ``topic``, or ``frames``."""
    if "frames" in batch.schema.names:
        return digest([FramesColumn(batch.column("frames"))], len(batch))
    topic = batch.column("topic") if "topic" in batch.schema.names else None
    has_topics = topic is not None and topic.null_count < len(topic)
    topics = [FrameColumn(topic)] if has_topics else []  # a column of only nulls may have Arrow's type null
    return digest([*topics, FrameColumn(batch.column("value"))], len(batch))


def as_text(digest: int) -> str:
    """16 hexadecimal digits, because some JSON readers round numbers beyond 2^53."""
    return f"{digest % _MODULUS:016x}"
