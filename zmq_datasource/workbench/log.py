"""What a log holds: its partitions, its readers and its messages, and which of its files are damaged.

Reads files only. The one exception is the reader's record that ``seek`` and ``drop`` change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import pyarrow as pa

from zmq_datasource.errors import (
    DataLossError,
    LogFormatError,
    LogLockedError,
    OptionError,
)
from zmq_datasource.log import (
    ChunkIndex,
    Damage,
    Hold,
    LogFollower,
    LogStorage,
    ReaderRecord,
    ReaderRecords,
    first_since,
    read_index,
    read_slices,
    slices,
    verify_log,
)
from zmq_datasource.options.types import Position

__all__ = [
    "Damage",
    "Message",
    "PartitionSummary",
    "ReaderSummary",
    "drop_reader",
    "follow",
    "messages",
    "partitions",
    "readers",
    "seek_reader",
    "verify",
]

_FOLLOW_SECONDS = 0.1


@dataclass(frozen=True)
class PartitionSummary:
    """One log partition.

    Attributes:
        first: The first id there is.
        end: The id after the last durable one.
        bytes: Of its chunks.
        oldest, newest: When the first and the last message were received, in seconds since the epoch.
        writer: The process that writes it now; None if there is none.
    """

    partition: int
    first: int
    end: int
    bytes: int
    chunks: int
    oldest: float | None
    newest: float | None
    writer: str | None


@dataclass(frozen=True)
class ReaderSummary:
    """One reader of the log.

    Attributes:
        kind: ``query``, or ``subscriber`` for a durable subscriber of a proxy.
        next: By log partition, the first id that the reader still needs.
        behind: Messages that it still needs, as far as the log has them.
        behind_seconds: The age of the oldest of them; None if there is none.
        running: Whether its query runs; None where this is not known here (subscribers).
        seen: When its record was last written, in seconds since the epoch; None where this is not known.
        dropped_at: When the record of a query that does not run is dropped, in seconds since the epoch; None for a
            query without a name, which is kept for the ``walRetention`` of the log's writer.
    """

    name: str
    kind: str
    named: bool
    next: dict[int, int]
    behind: int
    behind_seconds: float | None
    running: bool | None
    seen: float | None
    dropped_at: float | None


class Message(NamedTuple):
    """One message of a log."""

    partition: int
    id: int
    timestamp: float
    topic: str | None
    value: bytes


def partitions(storage: LogStorage) -> list[PartitionSummary]:
    """What the partitions of a log hold.

    Raises:
        LogError: There is no log, or it cannot be listed.
    """
    storage.log_id()
    return [_summary(storage.of(partition)) for partition in storage.partitions()]


def _summary(storage: LogStorage) -> PartitionSummary:
    index = read_index(storage)
    return PartitionSummary(
        storage.partition,
        index.earliest,
        index.end,
        index.size,
        len(index),
        _received_at(storage, index, index.earliest),
        _received_at(storage, index, index.end - 1),
        storage.writer(),
    )


def _received_at(storage: LogStorage, index: ChunkIndex, message_id: int) -> float | None:
    """When a message was received; None if the log does not have it."""
    pieces = slices(index.covering(message_id, message_id + 1), message_id, message_id + 1)
    with suppress(DataLossError):  # deleted since the log was listed
        for batch in read_slices(storage, pieces, whole=False):
            return float(batch.column("timestamp")[0].value) / 1e6
    return None


def readers(storage: LogStorage, clock: Callable[[], float] = time.time) -> list[ReaderSummary]:
    """The readers of a log: queries, and the durable subscribers of a proxy.

    Raises:
        LogError: There is no log, or a record is damaged.
    """
    storage.log_id()
    there = [storage.of(partition) for partition in storage.partitions()]
    indexes = {each.partition: (each, read_index(each)) for each in there}
    found = []
    records = ReaderRecords(storage)
    for name, record in records.all().items():
        running, seen = records.is_running(name), records.written_at(name)
        dropped = None if running or seen is None or record.timeout is None else seen + record.timeout
        nexts = {partition: record.needs(partition) for partition in indexes}
        kind = "query" if record.subscriber is None else "subscriber"
        found.append(_reader(name, kind, record.named, nexts, indexes, clock(), running, seen, dropped))
    return found


def _reader(
    name: str,
    kind: str,
    named: bool,
    nexts: dict[int, int],
    indexes: dict[int, tuple[LogStorage, ChunkIndex]],
    now: float,
    running: bool | None,
    seen: float | None,
    dropped_at: float | None,
) -> ReaderSummary:
    behind, oldest = 0, math.inf
    for partition, next_id in nexts.items():
        storage, index = indexes[partition]
        first = max(next_id, index.earliest)
        if first < index.end:
            behind += index.end - first
            received = _received_at(storage, index, first)
            oldest = oldest if received is None else min(oldest, received)
    age = None if math.isinf(oldest) else max(0.0, now - oldest)
    return ReaderSummary(name, kind, named, nexts, behind, age, running, seen, dropped_at)


def drop_reader(storage: LogStorage, name: str) -> None:
    """Delete the record of a query that does not run: the log keeps nothing for it any more.

    Raises:
        OptionError: The log has no such reader.
        LogLockedError: Its query runs.
    """
    records = ReaderRecords(storage)
    with suppress(LogFormatError):  # a damaged record is dropped like any other
        _check_reader(storage, records, name)
    hold = _hold(storage, records, name)
    try:
        records.remove(name)
        records.remove_hold(name)
    finally:
        hold.release()


def seek_reader(storage: LogStorage, name: str, to: Position) -> dict[int, int]:
    """Set the position of a query that does not run, and that begins there without a checkpoint.

    Args:
        to: ``earliest``, ``latest``, a time, or an offset, as in ``startingOffsets``.

    Returns:
        The new position.

    Raises:
        OptionError: The log has no such reader, or not such a place.
        LogLockedError: Its query runs.
    """
    records = ReaderRecords(storage)
    record = _check_reader(storage, records, name)
    hold = _hold(storage, records, name)
    try:
        with records.exclusive():  # nothing is deleted between the listing and the record
            nexts = {}
            for partition in storage.partitions():
                at = storage.of(partition)
                nexts[partition] = _place(at, read_index(at), to)
            notes = record.subscriber
            if notes is not None:  # a client that goes on without opening the name again is told
                notes = msgspec.structs.replace(notes, session=0, snapshot=0)
            records.write(name, ReaderRecord(nexts, record.timeout, begins=True, subscriber=notes))
    finally:
        hold.release()
    return nexts


def _check_reader(storage: LogStorage, records: ReaderRecords, name: str) -> ReaderRecord:
    storage.log_id()
    record = records.read(name)
    if record is None:
        there = ", ".join(records.names()) or "none"
        raise OptionError(f"reader {name!r}: log {storage.root} has no such reader; there are: {there}")
    return record


def _hold(storage: LogStorage, records: ReaderRecords, name: str) -> Hold:
    try:
        return records.hold(name, 0.0)
    except LogLockedError as e:
        hint = (
            "its client is there; end the client, and wait until the proxy notices, which takes 5 s"
            if records.is_subscriber(name)
            else f"its query runs ({e}); stop it first"
        )
        raise LogLockedError(f"reader {name!r} of log {storage.root}: {hint}") from e


def _place(storage: LogStorage, index: ChunkIndex, to: Position) -> int:
    if to.time is not None:
        found = first_since(storage, index.covering(index.earliest, index.end), to.time)
        return index.end if found is None else found
    if to.offset is None:
        return index.earliest if to.word == "earliest" else index.end
    wanted = to.offset.next.get(storage.partition, index.earliest)
    if not index.earliest <= wanted <= index.end:
        raise OptionError(
            f"--to {wanted}: {storage} has the ids {index.earliest} to {index.end - 1}; name one of them, or "
            f"{index.end} for what comes next"
        )
    return wanted


# Damage.


def verify(storage: LogStorage, done: Callable[[str], None] = lambda _: None) -> Iterator[Damage]:
    """Read every checksum of a log; yield the files that are damaged or missing.

    The log may be written meanwhile; what its writer deletes during the reading is no damage.

    Args:
        done: Called with the name of each file that was read.

    Raises:
        DiskFaultError: A file cannot be read now.
    """
    yield from verify_log(storage, done)


# Messages.


def messages(
    storage: LogStorage,
    *,
    partition: int | None = None,
    start: int | None = None,
    end: int | None = None,
    last: int | None = None,
) -> Iterator[Message]:
    """Messages of a log, partition by partition, in the order of their ids.

    Args:
        partition: Of this partition alone.
        start, end: The ids ``[start, end)``, as far as the log has them.
        last: So many of the newest of each partition.

    Raises:
        OptionError: There is no such partition.
        LogError: There is no log, or it cannot be read.
    """
    for at in _chosen(storage, partition):
        index = read_index(at)
        low = index.earliest if start is None else max(start, index.earliest)
        high = index.end if end is None else min(end, index.end)
        if last is not None:
            low = max(low, high - last)
        yield from _rows(at, index, low, high)


def follow(
    storage: LogStorage, ends: dict[int, int], partition: int | None = None
) -> Iterator[Message | None]:
    """The messages that come from these ids on, by partition, for ever; None after each look at the log.

    Raises:
        LogError: The log cannot be read any more.
    """
    followers: dict[int, LogFollower] = {}
    while True:
        for at in _chosen(storage, partition):
            if at.partition not in followers:
                followers[at.partition] = LogFollower(at)
                followers[at.partition].open()
            follower = followers[at.partition]
            follower.refresh()
            low = ends.setdefault(at.partition, follower.earliest)
            yield from _rows(at, follower, max(low, follower.earliest), follower.durable_end)
            ends[at.partition] = max(low, follower.durable_end)
        yield None
        time.sleep(_FOLLOW_SECONDS)


def _chosen(storage: LogStorage, partition: int | None) -> Sequence[LogStorage]:
    storage.log_id()
    there = storage.partitions()
    if partition is not None and partition not in there:
        raise OptionError(f"--partition {partition}: log {storage.root} has the partitions {there}")
    return [storage.of(each) for each in there if partition in (None, each)]


def _rows(storage: LogStorage, index: ChunkIndex | LogFollower, low: int, high: int) -> Iterator[Message]:
    pieces = slices(index.covering(low, high), low, high)
    for batch in read_slices(storage, pieces):
        yield from _messages_of(storage.partition, batch)


def _messages_of(partition: int, batch: pa.RecordBatch) -> Iterator[Message]:
    ids, topics, values = (batch.column(name).to_pylist() for name in ("id", "topic", "value"))
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    for row in zip(ids, times, topics, values, strict=True):
        yield Message(partition, row[0], row[1] / 1e6, row[2], row[3] or b"")
