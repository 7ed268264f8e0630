"""The records of a log's readers: one object for each reader, with its position.

The rules:

* A record says what the log must keep: this reader needs nothing below ``next`` any more. A query continues from its
  own checkpoint, and from nothing else.
* New records are written and chunks are deleted under one hold (``exclusive``). So chunks that a reader lists after it
  wrote its record are not deleted.
* A reader has a hold of its own while its query runs. So two queries of one name cannot run, and a writer knows which
  queries run.
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

_SUFFIX, _LOCK_SUFFIX = ".json", ".lock"
# The record of a subscriber has its name in its key if every store accepts the characters; otherwise a hash.
_SUBSCRIBER = "subscriber."
_SHORT_NAME = re.compile(r"[A-Za-z0-9_-]{1,120}")
_CHECKSUM = "xxh3"
_Id = Annotated[int, msgspec.Meta(ge=0)]


class ReaderTerms(msgspec.Struct, frozen=True):
    """The options with which a query would receive the feed itself.

    Attributes:
        retention: ``walRetention``, in seconds.
        replays: Whether the query has a ``replayEndpoint``.
    """

    retention: float
    replays: bool


class SubscriberNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The data of a durable subscriber that its proxy keeps with its position. Times are seconds since the epoch.

    Attributes:
        name: The subscriber's name, which may be too long for a key.
        session: The session of the client that has the name.
        topics: Prefixes of topics; empty for all messages.
        created: When the name was first used.
        acknowledged: When the subscriber's position last moved; None for never.
        sent: Messages that were sent, including repetitions.
        lost: Messages of any topic that the log had deleted before they were sent.
        lost_to: Lost messages are counted up to this id.
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
    """The record of one reader.

    Attributes:
        next: The first id that the reader still needs.
        timeout: Seconds for which messages are kept after the query has ended; None for a query without a name, for
            which the log's writer decides.
        begins_here: Whether a query without a checkpoint begins at ``next``. True if a query of this name has begun
            there and finished no batch.
        terms: None for a query that only reads.
        subscriber: None for a query.
    """

    next: _Id
    timeout: float | None = None
    begins_here: bool = msgspec.field(default=False, name="begins")
    terms: ReaderTerms | None = None
    subscriber: SubscriberNotes | None = None

    @property
    def named(self) -> bool:
        """Whether the user has named the reader."""
        return self.timeout is not None


class ReaderRecords:
    """Reads and writes the records, which are small JSON objects beside the chunks.

    Args:
        storage: The log.
    """

    def __init__(self, storage: LogStorage) -> None:
        self._storage = storage
        self._store = storage.store

    def path_of(self, name: str) -> str:
        """The full path of a reader's record, for messages."""
        return self._store.path_of(_key(name))

    def names(self) -> list[str]:
        """The names of all readers that have a record."""
        return sorted(name.removesuffix(_SUFFIX) for name in self._listed() if name.endswith(_SUFFIX))

    def _listed(self) -> dict[str, float]:
        """The names of all objects of readers, and their modification times in seconds since the epoch."""
        return {entry.name: entry.modified for entry in self._store.list(READERS_NAME)}

    def read(self, name: str) -> ReaderRecord | None:
        """The record of a reader; None if there is none.

        Raises:
            DiskFaultError: The record cannot be read now.
            LogFormatError: The record is damaged.
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
                f"reading {self.path_of(name)}: it is not the record of a reader ({e}). {RESTORE}; or, to keep nothing "
                f"for this reader: zmq-datasource log readers drop {self._storage.root} {name}"
            ) from e
        return record

    def all(self) -> dict[str, ReaderRecord]:
        """The records of all readers, by name. Raises what ``read`` does."""
        found = {name: self.read(name) for name in self.names()}
        return {name: record for name, record in found.items() if record is not None}

    def write(self, name: str, record: ReaderRecord) -> None:
        """Write a reader's record durably. An unchanged record is written too: its new time says that the query runs.

        Raises:
            LogWriteError: The store refused.
        """
        failpoints.reach("log.position.before_write")
        content = msgspec.to_builtins(record, str_keys=True)
        self._storage.write_json(_key(name), content | {_CHECKSUM: _checksum(content)})
        failpoints.reach("log.position.after_write")

    def is_subscriber(self, name: str) -> bool:
        """Whether this is the name of a durable subscriber's record."""
        return name.startswith(_SUBSCRIBER)

    def written_at(self, name: str) -> float | None:
        """When a reader's record was last written, in seconds since the epoch; None if there is none."""
        found = self._store.find(_key(name))
        return None if found is None else found.modified

    def remove(self, name: str) -> None:
        """Delete a reader's record, so that the log keeps nothing for it."""
        self._store.delete(_key(name))

    # Which queries run.

    def hold(self, name: str, wait: float = LOCK_WAIT_SECONDS) -> Hold:
        """Take a reader's name for a query.

        Args:
            wait: Seconds to wait for a query that is stopping.

        Raises:
            LogLockedError: Another query of this name runs; the error names its process.
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
        """Delete the object of a reader's hold. Only for its holder."""
        self._store.delete(_lock_key(name))

    @contextmanager
    def exclusive(self, wait: float = LOCK_WAIT_SECONDS) -> Iterator[None]:
        """In a block, let no other process write new records or delete chunks.

        Raises:
            LogLockedError: Another process is in such a block for longer than ``wait`` seconds.
        """
        try:
            hold = self._store.hold(READERS_LOCK_NAME, wait)
        except LogLockedError as e:
            raise LogLockedError(f"recording a reader of {self._storage.root}: {e}; try again") from e
        try:
            yield
        finally:
            hold.release()


def subscriber_key(name: str) -> str:
    """The name of a durable subscriber's record. It has a dot, which a query's reader cannot have in its name."""
    if _SHORT_NAME.fullmatch(name):
        return f"{_SUBSCRIBER}{name}"
    return f"{_SUBSCRIBER}{xxhash.xxh3_128_hexdigest(name.encode())}.x"


def _key(name: str) -> str:
    return f"{READERS_NAME}/{name}{_SUFFIX}"


def _lock_key(name: str) -> str:
    return f"{READERS_NAME}/{name}{_LOCK_SUFFIX}"


def _checksum(content: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
