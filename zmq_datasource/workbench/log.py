"""What a log holds: its ids, its readers and its messages.

All functions only read files, but for ``drop_reader``, which removes the record of one reader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import pyarrow as pa

from zmq_datasource.errors import DataLossError, LogFormatError, LogLockedError, OptionError
from zmq_datasource.log import (
    ChunkIndex,
    LogStorage,
    ReaderRecord,
    ReaderRecords,
    read_index,
    read_slices,
    slices,
)


class LogSummary(NamedTuple):
    """The chunks of a log.

    Attributes:
        first: Its first id.
        end: The id after the last durable one.
        bytes: Of its chunks.
        oldest, newest: When the first and the last message were received, in seconds since the epoch.
        writer: The process that writes the log now; None if there is none.
    """

    first: int
    end: int
    bytes: int
    chunks: int
    oldest: float | None
    newest: float | None
    writer: str | None


class ReaderSummary(NamedTuple):
    """One reader of the log.

    Attributes:
        kind: ``query``, or ``subscriber`` for a durable subscriber of a proxy.
        next: The first id that the reader still needs.
        behind: Messages of the log that the reader still needs.
        gone: Messages that the reader still needs, and that the log no longer has.
        behind_seconds: The age of the oldest of them; None if there is none.
        running: Whether the query runs; None for a subscriber, because only its proxy knows.
        seen: When the record was last written, in seconds since the epoch; None if this is not known.
        dropped_at: When the record is dropped, in seconds since the epoch; None while the query runs, and for a query
            without a name, which is kept for the ``walRetention`` of the log's writer.
    """

    name: str
    kind: str
    named: bool
    next: int
    behind: int
    gone: int
    behind_seconds: float | None
    running: bool | None
    seen: float | None
    dropped_at: float | None


class Gone(NamedTuple):
    """The ids ``[first, end)`` were asked for, and the log no longer has them."""

    first: int
    end: int


class Message(NamedTuple):
    """One message of a log."""

    id: int
    timestamp: float
    topic: str | None
    value: bytes | None  # None if the message does not fit its framing


def summary(storage: LogStorage) -> LogSummary:
    """Sum up the chunks of a log.

    Raises:
        LogError: There is no log, or it cannot be listed.
    """
    storage.log_id()
    index = read_index(storage)
    oldest, newest = (_received_at(storage, index, id_) for id_ in (index.earliest, index.end - 1))
    return LogSummary(index.earliest, index.end, index.size, len(index), oldest, newest, storage.writer())


def _received_at(storage: LogStorage, index: ChunkIndex, message_id: int) -> float | None:
    """When a message was received; None if the log does not have it."""
    pieces = slices(index.covering(message_id, message_id + 1), message_id, message_id + 1)
    with suppress(DataLossError):  # deleted since the log was listed
        for batch in read_slices(storage, pieces, whole=False):
            return float(batch.column("timestamp")[0].value) / 1e6
    return None


def readers(storage: LogStorage, clock: Callable[[], float] = time.time) -> list[ReaderSummary]:
    """Sum up each reader of a log: queries, and the durable subscribers of a proxy.

    Raises:
        LogError: There is no log, or a record is damaged.
    """
    storage.log_id()
    index, records = read_index(storage), ReaderRecords(storage)
    found = []
    for name, record in records.all().items():
        running, seen = records.is_running(name), records.written_at(name)
        first = max(record.next, index.earliest)
        oldest = _received_at(storage, index, first) if first < index.end else None
        found.append(
            ReaderSummary(
                name,
                "query" if record.subscriber is None else "subscriber",
                record.named,
                record.next,
                max(0, index.end - first),
                first - record.next,
                None if oldest is None else max(0.0, clock() - oldest),
                running,
                seen,
                None if running or seen is None or record.timeout is None else seen + record.timeout,
            )
        )
    return found


def drop_reader(storage: LogStorage, name: str) -> None:
    """Delete the record of a query that does not run: the log keeps nothing for it any more.

    Raises:
        OptionError: The log has no such reader.
        LogLockedError: The query runs.
    """
    records = ReaderRecords(storage)
    with suppress(LogFormatError):  # a damaged record can be dropped, too
        _record(storage, records, name)
    with _held(storage, records, name):
        records.remove(name)
        records.remove_hold(name)


def _record(storage: LogStorage, records: ReaderRecords, name: str) -> ReaderRecord:
    storage.log_id()
    record = records.read(name)
    if record is None:
        there = ", ".join(records.names()) or "none"
        raise OptionError(f"reader {name!r}: log {storage.root} has no such reader; there are: {there}")
    return record


@contextmanager
def _held(storage: LogStorage, records: ReaderRecords, name: str) -> Iterator[None]:
    try:
        hold = records.hold(name, 0.0)
    except LogLockedError as e:
        hint = (
            "its client is there; end the client, and wait until the proxy notices, which takes 5 s"
            if records.is_subscriber(name)
            else f"its query runs ({e}); stop it first"
        )
        raise LogLockedError(f"reader {name!r} of log {storage.root}: {hint}") from e
    try:
        yield
    finally:
        hold.release()


def messages(
    storage: LogStorage,
    *,
    start: int | None = None,
    end: int | None = None,
    last: int | None = None,
) -> Iterator[Message | Gone]:
    """Messages of a log, in the order of their ids; and which of ``start``'s ids are gone.

    Args:
        start, end: The ids ``[start, end)``, as far as the log has them.
        last: Only this many messages, the newest.

    Raises:
        LogError: There is no log, or it cannot be read.
    """
    storage.log_id()
    index = read_index(storage)
    low = index.earliest if start is None else max(start, index.earliest)
    high = index.end if end is None else min(end, index.end)
    if last is not None:
        low = max(low, high - last)
    elif start is not None and start < min(low, high):
        yield Gone(start, min(low, high))
    yield from _rows(storage, index, low, high)


def _rows(storage: LogStorage, index: ChunkIndex, low: int, high: int) -> Iterator[Message]:
    for batch in read_slices(storage, slices(index.covering(low, high), low, high)):
        ids, topics, values = (batch.column(name).to_pylist() for name in ("id", "topic", "value"))
        times = batch.column("timestamp").cast(pa.int64()).to_pylist()
        for id_, at, topic, value in zip(ids, times, topics, values, strict=True):
            yield Message(id_, at / 1e6, topic, value)
