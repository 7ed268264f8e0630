"""The leases of a log: for each reader, the messages that are kept for it.

A lease is one object, ``readers/<key>.json``, with the first id that its reader still needs. The reader writes it; the
log's writer reads all leases, deletes the chunks that no lease needs (``retention``), and drops leases (``silence``). A
query continues from its own checkpoint; the lease only says what must not be deleted.

The rules:

* While a reader runs it holds its name (``readers/<key>.lock``), so that two readers cannot have one name. A thread
  writes its lease when its reader has moved, at most once a second, and every 10 s as a sign of life (in a bucket every
  10 s and 20 s).
* A new reader writes a lease that needs everything, and then reads the head: it begins at the id that is announced
  there, or later. The writer announces, reads all leases again, and then deletes. So either the writer sees the lease,
  or the reader sees what is announced. Neither waits for the other.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable
from typing import Annotated

import msgspec
import xxhash

from zmq_datasource.errors import LogError, LogLockedError
from zmq_datasource.host import failpoints
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log.head import read_head
from zmq_datasource.log.layout import LOCK_WAIT_SECONDS, READERS_NAME
from zmq_datasource.log.records import encode_record, read_record
from zmq_datasource.log.retrier import Retrier
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Entry, Hold

_SUFFIX, _LOCK_SUFFIX = ".json", ".lock"
# The lease of a subscriber has its name in its key if every store accepts the characters; otherwise a hash.
_SUBSCRIBER = "subscriber."
_SHORT_NAME = re.compile(r"[A-Za-z0-9_-]{1,120}")
_OTHER_NAME = "give each query a reader of its own"
_Id = Annotated[int, msgspec.Meta(ge=0)]


class SubscriberNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The data of a durable subscriber beside its position.

    Attributes:
        session: The session of the client that has the name.
        topics: Prefixes of topics; empty for all messages.
        snapshot: Below this id only the newest message of each topic is sent (``start="last"``).
        new: Whether the subscriber has not fetched yet, and the name was unknown before.
    """

    session: int
    topics: list[bytes]
    snapshot: int = 0
    new: bool = False


class Lease(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the log keeps for one reader.

    Attributes:
        name: The reader's name as the user wrote it; a random one for a query without a name.
        next: The reader needs nothing below this id.
        timeout: Seconds of silence after which the lease counts no more.
        named: Whether a user has given the name. Without one, the lease of a query that has ended makes room in a full
            log.
        begins: Whether a query without a checkpoint begins at ``next``: a query of this name has begun there and
            finished no batch.
        subscriber: None for a query.
        beat: Differs in each write, also in its length, because some stores show times by the second.
    """

    name: str
    next: _Id
    timeout: Annotated[float, msgspec.Meta(ge=0)]
    named: bool = True
    begins: bool = False
    subscriber: SubscriberNotes | None = None
    beat: str = ""

    @property
    def key(self) -> str:
        """The name of its object."""
        return self.name if self.subscriber is None else subscriber_key(self.name)


def subscriber_key(name: str) -> str:
    """The key of a durable subscriber's lease. It has a dot, which a query's reader cannot have in its name."""
    if _SHORT_NAME.fullmatch(name):
        return f"{_SUBSCRIBER}{name}"
    return f"{_SUBSCRIBER}{xxhash.xxh3_128_hexdigest(name.encode())}.x"


class LeaseFiles:
    """Reads and writes leases, which are small JSON objects, by their keys.

    Args:
        storage: The log.
    """

    def __init__(self, storage: LogStorage) -> None:
        self._storage = storage
        self._store = storage.store
        self._writes = 0

    def path_of(self, key: str) -> str:
        """The full path of a lease, for messages."""
        return self._store.path_of(_object(key))

    def entries(self) -> dict[str, Entry]:
        """What a listing shows of each lease."""
        return {
            entry.name.removesuffix(_SUFFIX): entry
            for entry in self._store.list(READERS_NAME)
            if entry.name.endswith(_SUFFIX)
        }

    def read(self, key: str) -> Lease | None:
        """A lease; None if there is none.

        Raises:
            DiskFaultError: It cannot be read now.
            LogFormatError: It is damaged.
        """
        hint = f"; or, to keep nothing for this reader: zmq-datasource log readers drop {self._storage.root} {key}"
        return read_record(self._store, _object(key), Lease, "the lease of a reader", hint)

    def write(self, lease: Lease) -> Lease:
        """Write a lease durably, with a new beat. Returns what was written.

        Raises:
            LogWriteError: The store refuses.
        """
        self._writes += 1
        lease = msgspec.structs.replace(lease, beat=uuid.uuid4().hex[: 8 + self._writes % 16])
        failpoints.reach("log.position.before_write")
        self._store.put(_object(lease.key), encode_record(lease))
        failpoints.reach("log.position.after_write")
        return lease

    def remove(self, key: str) -> None:
        """Delete a lease and the object of its hold. Only for the holder of the name."""
        self._store.delete(_object(key))
        self._store.delete(_lock(key))

    def hold(self, key: str, wait: float = LOCK_WAIT_SECONDS) -> Hold:
        """Take the name of a reader.

        Args:
            wait: Seconds to wait for a reader that is stopping.

        Raises:
            LogLockedError: Another reader has this name; the error names its process.
        """
        try:
            return self._store.hold(_lock(key), wait)
        except LogLockedError as e:
            raise LogLockedError(f"reading {self._storage.root} as reader={key}: {e}; {_OTHER_NAME}") from e

    def is_running(self, key: str) -> bool:
        """Whether a reader of this name runs."""
        return self._store.holder(_lock(key)) is not None


class Reader:
    """The lease of one query, whose name no other query can use until ``close``. For one thread.

    Args:
        storage: The log.
        name: The option ``reader``; None chooses a random name.
        timeout: Seconds of silence for which messages are kept.
        retry_timeout: Seconds for which a call is repeated that the store refuses.

    Attributes:
        name: The name of the lease.
        found: The lease of an earlier query of this name; None if there is none.
        hold_seconds: How long to wait for a query of this name that is stopping.
        move_seconds: How often the lease of a query that moves is written, at most.
        beat_seconds: How often the lease of a query that does not move is written.

    Raises:
        LogLockedError: Another query of this name runs.
        LogError: The lease cannot be read.
    """

    hold_seconds = LOCK_WAIT_SECONDS
    move_seconds = 1.0
    beat_seconds = 10.0

    def __init__(
        self, storage: LogStorage, name: str | None, timeout: float, retry_timeout: float = 0.0
    ) -> None:
        self._storage = storage
        self.name = name or f"query-{uuid.uuid4().hex[:12]}"
        self._files = LeaseFiles(storage)
        self._retrier = Retrier(retry_timeout)
        self._hold, self.found = self._retrier.retry(self._hold_name)
        self._lease = Lease(self.name, 0, float(timeout), named=name is not None)
        self._written: Lease | None = None
        self._written_at = 0.0
        self._writing = threading.Lock()
        self._woken = threading.Event()
        self._closed = False
        self._faults = LimitedLog(__name__, "faults of leases")
        self._thread = threading.Thread(target=self._keep, name="zmq-lease", daemon=True)
        self.move_seconds = max(self.move_seconds, storage.request_interval)
        self.beat_seconds = max(self.beat_seconds, 2 * storage.request_interval)

    def _hold_name(self) -> tuple[Hold, Lease | None]:
        hold = self._files.hold(self.name, self.hold_seconds)
        try:
            return hold, self._files.read(self.name)
        except BaseException:
            hold.release()
            raise

    def open(self) -> int:
        """Keep every message from which the query may begin. Called before it chooses where to begin.

        Returns:
            The query must begin at this id or later, unless its checkpoint says otherwise.

        Raises:
            LogError: The lease cannot be written, or the head not read.
        """
        found = self.found
        if found is not None and found.begins:
            self._lease = msgspec.structs.replace(self._lease, next=found.next, begins=True)
        self._retrier.retry(self.write)
        announced = self._retrier.retry(lambda: read_head(self._storage.store)).announced
        self._thread.start()
        return announced

    def begin(self, next_id: int) -> None:
        """Record where a query without a checkpoint begins, so that it begins there again after a crash."""
        self._lease = msgspec.structs.replace(self._lease, next=next_id, begins=True)
        self._retrier.retry(self.write)

    def move(self, next_id: int) -> None:
        """Note that the query needs nothing below this id any more. The lease is written a moment later.

        Raises:
            LogLockedError: Another process has taken the name.
        """
        self._check_hold()
        lease = self._lease
        if (lease.next, lease.begins) != (next_id, False):
            self._lease = msgspec.structs.replace(lease, next=next_id, begins=False)
            self._woken.set()

    def close(self, started: bool = True) -> None:
        """Write the lease a last time, and release the name. The lease stays until its timeout.

        Args:
            started: Whether the query has started. If not, the lease becomes again what it was.
        """
        self._closed = True
        self._woken.set()
        try:
            if self._thread.ident is not None:
                self._thread.join()
            if not started:
                self._try(self._undo)
            elif self._written is not None:
                self._try(self.write)
        finally:
            self._hold.release()

    def _undo(self) -> None:
        if self.found is None:
            self._files.remove(self.name)
        elif self._written is not None:
            self._files.write(self.found)

    def _try(self, write: Callable[[], None]) -> None:
        """Only warn of an error: with an older lease the log keeps too much."""
        try:
            write()
        except LogError as e:
            self._faults.warn("writing the lease of reader %r: %s", self.name, e)

    def write(self) -> None:
        """Write the lease now. The thread does that, too."""
        with self._writing:
            # Noted also if this fails, so that the write is not repeated at once.
            lease, self._written_at = self._lease, time.monotonic()
            self._check_hold()
            self._files.write(lease)
            self._written = lease

    def _check_hold(self) -> None:
        if lost := self._hold.lost:
            raise LogLockedError(
                f"reading {self._storage.root} as reader={self.name}: this process has lost the name to {lost}; "
                f"{_OTHER_NAME}"
            )

    def _keep(self) -> None:
        """Write the lease after it has moved, and as a sign of life, also during a batch of an hour."""
        while True:
            self._woken.clear()  # before the looks at what it announces
            if self._closed:
                return
            moved = self._lease is not self._written
            due = self._written_at + (self.move_seconds if moved else self.beat_seconds)
            if (left := due - time.monotonic()) > 0:
                self._woken.wait(left)
            else:
                self._try(self.write)


def _object(key: str) -> str:
    return f"{READERS_NAME}/{key}{_SUFFIX}"


def _lock(key: str) -> str:
    return f"{READERS_NAME}/{key}{_LOCK_SUFFIX}"
