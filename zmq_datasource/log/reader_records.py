"""The records of a log's readers: for each one object, with its position in every log partition.

The rules:

* A record says what the log must keep: nothing below ``next`` is needed by this reader any more. Where a query goes on
  is in its own checkpoint, and nowhere else.
* A new record is written, and chunks are deleted, under one hold (``placing``): what a reader has listed after it wrote
  its record is not deleted.
* The reader's own hold lasts while its query runs. So two queries of one name cannot run, and a writer sees which run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import xxhash

from zmq_datasource.errors import RESTORE, LogFormatError, LogLockedError
from zmq_datasource.host import failpoints
from zmq_datasource.log.layout import LOCK_WAIT_SECONDS, READERS_LOCK_NAME, READERS_NAME
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Hold

__all__ = ["ReaderRecord", "ReaderRecords", "ReaderTerms", "SubscriberNotes", "subscriber_key"]

_SUFFIX, _LOCK_SUFFIX = ".json", ".lock"
_SKIPPED = re.compile(r"([^.]+)\.([0-9]{1,10})\.([0-9]{20})-([0-9]{20})\.skipped")
# Of a subscriber: what any store takes as part of a key.
_SUBSCRIBER = "subscriber."
_SHORT_NAME = re.compile(r"[A-Za-z0-9_-]{1,120}")
_CHECKSUM = "xxh3"
_Id = Annotated[int, msgspec.Meta(ge=0)]


class ReaderTerms(msgspec.Struct, frozen=True):
    """On which terms a query would receive the feed itself.

    Attributes:
        retention: ``walRetention``, in seconds.
        replays: Whether it has a ``replayEndpoint``.
    """

    retention: float
    replays: bool


class SubscriberNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a proxy keeps of a durable subscriber beside its position.

    Attributes:
        name: As the subscriber calls itself, which may be longer than a key.
        session: Of the client that has the name; 0 if the position was set by hand since.
        topics: Prefixes; empty for all messages.
        created: When the name was first used, in seconds since the epoch.
        acknowledged: When its position last moved; None if it never has.
        sent: Messages that were sent, those sent again included.
        lost: Messages that the log had no more when they were due; of all topics.
        lost_to: Up to which id they are counted.
        snapshot: Below this id only the newest message of each topic is sent (``start="last"``).
    """

    name: str
    session: int
    topics: list[bytes]
    created: float
    acknowledged: float | None = None
    sent: int = 0
    lost: int = 0
    lost_to: int = 0
    snapshot: int = 0


class ReaderRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a log keeps for one reader; the content of its object.

    Attributes:
        next: By log partition, the first id that the reader still needs. It needs all of a partition that is missing.
        timeout: Seconds for which the messages are kept after the query has ended; None for a query without a name,
            for which the writer of the log decides.
        begins: Whether a query without a checkpoint begins at ``next``: one of this name has chosen to begin there and
            has finished no batch, or the position was set by hand.
        terms: None of a query that only reads.
        subscriber: None of a query.
    """

    next: dict[_Id, _Id]
    timeout: float | None = None
    begins: bool = False
    terms: ReaderTerms | None = None
    subscriber: SubscriberNotes | None = None

    @property
    def named(self) -> bool:
        """Whether the user has named the reader."""
        return self.timeout is not None

    def needs(self, partition: int) -> int:
        """The first id of this partition that the reader still needs."""
        return self.next.get(partition, 0)


class ReaderRecords:
    """Small JSON objects beside the log partitions, each replaced as a whole.

    Args:
        storage: The log; of any of its partitions.
    """

    def __init__(self, storage: LogStorage) -> None:
        self._storage = storage
        self._store = storage.store

    def path_of(self, name: str) -> str:
        """Where a reader's record is, for messages."""
        return self._store.path_of(_key(name))

    def names(self) -> list[str]:
        """The names of all readers that have a record."""
        return sorted(name.removesuffix(_SUFFIX) for name in self._listed() if name.endswith(_SUFFIX))

    def _listed(self) -> dict[str, float]:
        """What is there about readers, and when each object was written, in seconds since the epoch."""
        return {entry.name: entry.modified for entry in self._store.list(READERS_NAME)}

    def read(self, name: str) -> ReaderRecord | None:
        """The record of a reader; None if there is none.

        Raises:
            DiskFaultError: It cannot be read now.
            LogFormatError: It is damaged.
        """
        content = self._storage.read_json(_key(name))
        if content is None:
            return None
        try:
            record = msgspec.convert(content, ReaderRecord, str_keys=True)
            written = msgspec.to_builtins(record, str_keys=True)
            if content != written | {_CHECKSUM: _checksum(written)}:
                raise ValueError("its checksum differs; the file was changed after it was written")
        except (msgspec.ValidationError, ValueError) as e:
            raise LogFormatError(
                f"reading {self.path_of(name)}: it is no record of a reader ({e}). {RESTORE}; or, to keep nothing "
                f"for this reader: zmq-datasource log readers drop {self._storage.root} {name}"
            ) from e
        return record

    def all(self) -> dict[str, ReaderRecord]:
        """The records of all readers, by name. Raises what ``read`` does."""
        found = {name: self.read(name) for name in self.names()}
        return {name: record for name, record in found.items() if record is not None}

    def write(self, name: str, record: ReaderRecord) -> None:
        """Record, durably, what a reader needs; also when it is the same, which says that its query runs.

        Raises:
            LogWriteError: The store refused.
        """
        failpoints.reach("log.position.before_write")
        content = msgspec.to_builtins(record, str_keys=True)
        self._storage.write_json(_key(name), content | {_CHECKSUM: _checksum(content)})
        failpoints.reach("log.position.after_write")

    def is_subscriber(self, name: str) -> bool:
        """Whether a record is that of a durable subscriber, by its name."""
        return name.startswith(_SUBSCRIBER)

    def written_at(self, name: str) -> float | None:
        """When a reader's record was last written, in seconds since the epoch; None if there is none."""
        found = self._store.find(_key(name))
        return None if found is None else found.modified

    def remove(self, name: str) -> None:
        """Delete a reader's record, and what its tasks have recorded: the log keeps nothing for it any more."""
        self._store.delete(_key(name))
        for found in filter(None, map(_SKIPPED.fullmatch, self._listed())):
            if found[1] == name:
                self._store.delete(f"{READERS_NAME}/{found[0]}")

    # Which queries run.

    def hold(self, name: str, wait: float = LOCK_WAIT_SECONDS) -> Hold:
        """Become the one query that reads under this name.

        Args:
            wait: Seconds to wait for a query that is just stopping.

        Raises:
            LogLockedError: Another query of this name runs; says which process.
        """
        try:
            return self._store.hold(_lock_key(name), wait)
        except LogLockedError as e:
            raise LogLockedError(
                f"reading {self._storage.root} as reader={name}: {e}; give each query a reader of its own"
            ) from e

    def is_running(self, name: str) -> bool:
        """Whether a query of this name runs."""
        return self._store.holder(_lock_key(name)) is not None

    def remove_hold(self, name: str) -> None:
        """Delete the object of a hold. Only for its holder."""
        self._store.delete(_lock_key(name))

    @contextmanager
    def placing(self, wait: float = LOCK_WAIT_SECONDS) -> Iterator[None]:
        """Keep others from writing new records, and writers from deleting, for a moment.

        Raises:
            LogLockedError: Another process has the hold for longer than ``wait`` seconds.
        """
        try:
            hold = self._store.hold(READERS_LOCK_NAME, wait)
        except LogLockedError as e:
            raise LogLockedError(f"recording a reader of {self._storage.root}: {e}; try again") from e
        try:
            yield
        finally:
            hold.release()

    # What tasks have skipped.

    def write_skipped(self, reader: str, first: int, end: int) -> None:
        """Record that a task of this reader has skipped the ids ``[first, end)``, because they were deleted.

        Raises:
            LogWriteError: The store refused.
        """
        self._storage.write_json(self._skipped_key(reader, first, end), {})

    def _skipped_key(self, reader: str, first: int, end: int) -> str:
        return f"{READERS_NAME}/{reader}.{self._storage.partition}.{first:020d}-{end:020d}.skipped"

    def skipped(self, reader: str) -> list[range]:
        """The ids that ``write_skipped`` has recorded, in order. Two tasks, or two attempts, may have the same ids."""
        found = filter(None, map(_SKIPPED.fullmatch, self._listed()))
        partition = str(self._storage.partition)
        ids = [range(int(it[3]), int(it[4])) for it in found if (it[1], it[2]) == (reader, partition)]
        return sorted(ids, key=lambda it: (it.start, it.stop))

    def forget_skipped(self, reader: str, ids: range) -> None:
        """Delete one of these records."""
        self._store.delete(self._skipped_key(reader, ids.start, ids.stop))


def subscriber_key(name: str) -> str:
    """The name of the record of a durable subscriber, which is no name of a query's reader: those have no dot."""
    if _SHORT_NAME.fullmatch(name):
        return f"{_SUBSCRIBER}{name}"
    return f"{_SUBSCRIBER}{xxhash.xxh3_128_hexdigest(name.encode())}.x"


def _key(name: str) -> str:
    return f"{READERS_NAME}/{name}{_SUFFIX}"


def _lock_key(name: str) -> str:
    return f"{READERS_NAME}/{name}{_LOCK_SUFFIX}"


def _checksum(content: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
