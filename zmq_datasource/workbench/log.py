"""What a log holds: its ids, its readers and its messages.

All functions only read files, but for ``drop_reader``, which removes the lease of one reader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa

from zmq_datasource.errors import DataLossError, LogFormatError, LogLockedError, OptionError
from zmq_datasource.log import (
    ChunkIndex,
    Deletions,
    Lease,
    LeaseFiles,
    LogStorage,
    read_head,
    read_index,
    read_slices,
    slices,
    subscriber_key,
)

# A durable subscriber is there at least so long after its lease was written.
_PRESENT_SECONDS = 30.0


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
        name: As the user wrote it; of a damaged lease, the name of its file.
        kind: ``query``; ``subscriber`` for a durable subscriber of a proxy; ``damaged`` if its lease cannot be read.
        next: The first id that the reader still needs.
        behind: Messages of the log that the reader still needs.
        gone: Messages that the reader still needs, and that the log no longer has.
        behind_seconds: The age of the oldest of them; None if there is none.
        running: Whether the reader runs.
        seen: When the lease was last written, in seconds since the epoch.
        silent: For how long a writer of the log has seen no sign of life, in seconds, as it has last noted. After
            ``timeout`` it drops the lease.
        timeout: ``readerTimeout`` or ``subscriberExpiry``, in seconds; for a query without a name, ``walRetention``.
    """

    name: str
    kind: str
    named: bool
    next: int
    behind: int
    gone: int
    behind_seconds: float | None
    running: bool
    seen: float
    silent: float
    timeout: float


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
    oldest, newest = (_received_at(storage, index, id_) for id_ in (index.earliest, index.durable_end - 1))
    return LogSummary(
        index.earliest, index.durable_end, index.size, index.chunks, oldest, newest, storage.writer()
    )


def _received_at(storage: LogStorage, index: ChunkIndex, message_id: int) -> float | None:
    """When a message was received; None if the log does not have it."""
    with suppress(DataLossError):  # deleted since the log was listed
        for batch in _read(storage, index, message_id, message_id + 1):
            return float(batch.column("timestamp")[0].value) / 1e6
    return None


def _read(storage: LogStorage, index: ChunkIndex, low: int, high: int) -> Iterator[pa.RecordBatch]:
    """The rows of a range, also of chunks that were merged since the log was listed."""
    merged = Deletions(storage, storage.log_id(), fails=True)
    yield from read_slices(storage, slices(index.covering(low, high), low, high), merged)


def readers(storage: LogStorage, clock: Callable[[], float] = time.time) -> list[ReaderSummary]:
    """Sum up each reader of a log: queries, and the durable subscribers of a proxy.

    Raises:
        LogError: There is no log, or it cannot be read.
    """
    storage.log_id()
    files, silent = LeaseFiles(storage), read_head(storage.store).silent
    index = read_index(storage)
    found = []
    for key, entry in sorted(files.entries().items()):
        kind, lease = "damaged", None
        with suppress(LogFormatError):
            lease = files.read(key)
            if lease is None:  # dropped meanwhile
                continue
            kind = "query" if lease.subscriber is None else "subscriber"
        lease = lease or Lease(key, 0, 0.0)
        first = max(lease.next, index.earliest)
        received = _received_at(storage, index, first) if first < index.durable_end else None
        found.append(
            ReaderSummary(
                lease.name,
                kind,
                lease.named,
                lease.next,
                max(0, index.durable_end - first),
                first - lease.next,
                None if received is None else max(0.0, clock() - received),
                files.is_running(key) or _may_be_present(key, clock() - entry.modified),
                entry.modified,
                silent.get(lease.beat, 0.0),
                lease.timeout,
            )
        )
    return found


def _may_be_present(key: str, age: float) -> bool:
    """Whether the client of a durable subscriber may be there: then the server writes its lease every ten seconds.

    Args:
        age: Seconds since the lease was written.
    """
    return key.startswith("subscriber.") and age < _PRESENT_SECONDS


def drop_reader(storage: LogStorage, name: str) -> None:
    """Delete the lease of a reader that does not run: the log keeps nothing for it any more.

    Args:
        name: The name of a query, a durable subscriber, or a damaged lease, as ``readers`` shows it. A subscriber that
            has the name of a query is named by the file of its lease.

    Raises:
        OptionError: The log has no such reader.
        LogLockedError: It runs, or has run less than half a minute ago.
    """
    storage.log_id()
    files = LeaseFiles(storage)
    keys = files.entries()
    key = next((it for it in (name, subscriber_key(name)) if it in keys), None)
    if key is None:
        there = ", ".join(reader.name for reader in readers(storage)) or "none"
        raise OptionError(f"reader {name!r}: log {storage.root} has no such reader; there are: {there}")
    if _may_be_present(key, time.time() - keys[key].modified):
        raise LogLockedError(
            f"reader {name!r} of log {storage.root}: its lease was written less than {_PRESENT_SECONDS:.0f} s ago, so "
            "its client may be there; end the client, and wait as long"
        )
    try:
        hold = files.hold(key, 0.0)
    except LogLockedError as e:
        raise LogLockedError(
            f"reader {name!r} of log {storage.root}: its query runs ({e}); stop it first"
        ) from e
    try:
        files.remove(key)
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
    high = index.durable_end if end is None else min(end, index.durable_end)
    if last is not None:
        low = max(low, high - last)
    elif start is not None and start < min(low, high):
        yield Gone(start, min(low, high))
    yield from _rows(storage, index, low, high)


def _rows(storage: LogStorage, index: ChunkIndex, low: int, high: int) -> Iterator[Message]:
    for batch in _read(storage, index, low, high):
        ids, topics, values = (batch.column(name).to_pylist() for name in ("id", "topic", "value"))
        times = batch.column("timestamp").cast(pa.int64()).to_pylist()
        for id_, at, topic, value in zip(ids, times, topics, values, strict=True):
            yield Message(id_, at / 1e6, topic, value)
