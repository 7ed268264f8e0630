"""The positions of durable subscribers. Each one is a lease of the log, as that of a named query.

A name is in one of these states:

| State | Lease on disk | Lock | What the log keeps |
| --- | --- | --- | --- |
| unknown | no | no | nothing |
| present: its client has asked within ``PRESENT_SECONDS`` | yes | held here | everything from its position on |
| away | yes | free | the same, for ``subscriberExpiry`` |

The rules:

* One thread of its own, the *keeper*, reads and writes leases, and takes and releases locks. So a disk that stalls
  delays no subscriber that only reads.
* A name is unknown until its lease is on the disk. A client never gets a position that is not on the disk.
* While a name is away, ``zmq-datasource log readers`` may drop its lease. So the keeper reads the lease
  again when the client comes back.
* A position is written about once a second, or at once if a client waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from msgspec.structs import replace

from zmq_datasource.errors import DiskFaultError, LogError, LogFormatError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import (
    Hold,
    Lease,
    LeaseFiles,
    LogStorage,
    SubscriberNotes,
    read_head,
    subscriber_key,
)
from zmq_datasource.messages.columns import integers_of
from zmq_datasource.proxy.fetch_protocol import EARLIEST, LAST, LATEST, Open
from zmq_datasource.proxy.view import LogMoment

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# A client that has asked for nothing for so long is away.
PRESENT_SECONDS = 5.0
# How often positions are written, and all leases listed.
_WRITE_SECONDS = 1.0
# How often the lease of a position that does not move is written, as a sign that the client is present.
_REWRITE_SECONDS = 10.0
# How soon the keeper writes again after the disk has refused.
_REFUSED_SECONDS = 0.25
# How long the keeper waits for a lock: the command line may hold it for a moment to see whether it is free.
_LOCK_SECONDS = 0.5
# A warning is logged when a subscriber has been away for this share of ``subscriberExpiry``.
_WARNING_AT = 0.8
# Bytes of a topic in a lease, beside the topic itself.
_TOPIC_BYTES = 8


class Position:
    """A name and its position. The server's thread changes it, except where the keeper is named.

    Attributes:
        name: The subscriber's name.
        key: The key of its lease.
        next: The first id that the subscriber still needs.
        notes: What else its lease has.
        next_on_disk, lost_on_disk: ``next`` and ``notes.lost_to`` as they are on the disk; set by the keeper.
        topic_bytes: About how many bytes its topics have in the lease.
        newest: The ids of the newest message of each topic below ``notes.snapshot``, in order. Below it only
            these are sent. Set by the keeper.
        is_new: Whether the name was unknown before, and its client has not fetched yet.
        asked: When its client last asked for something, monotonic; None while it is away.
        left: When its client went away, monotonic.
        lock: Keeps other processes from dropping the lease; set by the keeper.
        written_at: When the lease was written, monotonic; set by the keeper.
        is_warned_of: Whether the keeper has logged that the name expires soon.
    """

    def __init__(self, name: str, next_id: int, notes: SubscriberNotes, now: float) -> None:
        self.name = name
        self.key = subscriber_key(name)
        self.next = self.next_on_disk = next_id
        self.notes = notes
        self.lost_on_disk = notes.lost_to
        self.topic_bytes = bytes_of_topics(notes.topics)
        self.newest = integers_of(())
        self.is_new = False
        self.asked: float | None = None
        self.left = self.written_at = now
        self.lock: Hold | None = None
        self.is_warned_of = False

    def note(self, **changes: Any) -> None:
        """Change fields of the notes."""
        self.notes = replace(self.notes, **changes)

    def find_newest(self, log: LogMoment) -> None:
        """Find the messages below the snapshot that are still to be sent."""
        self.newest = log.newest_of_topics(self.next, self.notes.snapshot)

    @property
    def is_on_disk(self) -> bool:
        """Whether the disk has the position and the count of lost messages."""
        return self.next_on_disk >= self.next and self.lost_on_disk >= self.notes.lost_to


class Positions:
    """The positions of all durable subscribers of a log.

    Args:
        storage: The log.
        expiry: Seconds after which a name that is away is forgotten.
        notify: Called by the keeper when it has done something.
        clock: Seconds, monotonic.
        present_seconds: A client that has asked for nothing for so long is away.

    Attributes:
        fault: Why the disk refuses to write positions now; None if it does not.
    """

    def __init__(
        self,
        storage: LogStorage,
        expiry: float,
        notify: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        present_seconds: float = PRESENT_SECONDS,
    ) -> None:
        self._present_seconds = present_seconds
        self._storage = storage
        self._leases = LeaseFiles(storage)
        self._expiry = float(expiry)
        self._notify = notify
        self._clock = clock
        self._all: dict[str, Position] = {}
        self.fault: str | None = None
        self._failure: LogError | None = None
        self._faults = LimitedLog(__name__, "faults of leases")
        self._next_write = self._refused_until = 0.0
        self._writing: Future[None] | None = None
        for key in self._leases.entries():
            try:
                self._take_over(self._leases.read(key))
            except LogFormatError as e:  # only its own name cannot be opened
                self._faults.warn("%s", e)
        self._keeper = ThreadPoolExecutor(1, "zmq-positions")

    def _take_over(self, lease: Lease | None) -> None:
        if lease is None or (notes := _notes_of(lease)) is None:
            return
        self._all[lease.name] = Position(lease.name, lease.next, notes, self._clock())
        if lease.timeout != self._expiry:  # the option has changed since
            self._leases.write(replace(lease, timeout=self._expiry))

    def __iter__(self) -> Iterator[Position]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def get(self, name: str) -> Position | None:
        return self._all.get(name)

    # For the server's thread.

    def submit(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have the keeper do something, such as ``open``, ``lock_again`` or ``forget``; then call ``notify``."""
        future = self._keeper.submit(act, *args, **kwargs)
        future.add_done_callback(lambda _: self._notify())
        return future

    def move(self, position: Position, done: int) -> None:
        """Move a position to the id below which the client has processed everything. It never goes back."""
        if done > position.next:
            position.next = done
            position.note(acknowledged=time.time())

    def write_now(self) -> None:
        """Write the positions that have moved, because a client waits for it."""
        if self._is_idle and self._clock() >= self._refused_until:
            self._writing = self._submit_and_log(self._write_changed)

    @property
    def _is_idle(self) -> bool:
        """Whether the keeper writes nothing now, so that a write is not started twice on a disk that stalls."""
        return self._writing is None or self._writing.done()

    def step(self) -> None:
        """Release the names of clients that are away, and write positions once a second. Called in each round.

        Raises:
            LogError: Leases cannot be written any more.
        """
        if self._failure is not None:
            raise self._failure
        now = self._clock()
        for position in self:
            if position.asked is not None and now - position.asked >= self._present_seconds:
                self.release(position)
        if now >= self._next_write and self._is_idle:
            self._next_write = now + _WRITE_SECONDS
            self._writing = self._submit_and_log(self._write_and_list)

    def release(self, position: Position) -> None:
        """Mark a client as away: write its position, and free the lock."""
        position.asked, position.left = None, position.asked or self._clock()
        position.is_warned_of = False
        self._submit_and_log(self._release, position)

    def close(self) -> None:
        """Write what has changed, and free all locks."""
        for position in self:
            self._submit_and_log(self._release, position)
        self._keeper.shutdown()

    def _submit_and_log(self, act: Callable[..., None], *arguments: Any) -> Future[None]:
        """Have the keeper do something that no client waits for; log its errors."""

        def act_and_log() -> None:
            try:
                act(*arguments)
            except Exception as e:
                self._faults.fault("keeping positions of durable subscribers", error=e)

        return self.submit(act_and_log)

    # The keeper.

    def open(self, request: Open, topics: tuple[bytes, ...], log: LogMoment) -> Position:
        """Give a name to the client that has sent this OPEN, and write its lease.

        Raises:
            LogLockedError: The command line drops the lease at this moment.
            LogError: The lease cannot be read or written.
        """
        key, known = subscriber_key(request.name), self._all.get(request.name)
        held = None if known is None else known.lock
        if known is not None and held is not None:
            self._write(known)  # memory is ahead of the lease, which is read below
        lock = held or self._leases.hold(key, _LOCK_SECONDS)
        try:
            lease = self._leases.read(key)
            notes = None if lease is None else _notes_of(lease)
            is_new = lease is None or notes is None
            next_id = 0 if lease is None else lease.next
            notes = notes or SubscriberNotes(request.session, [], time.time())
            notes = replace(notes, session=request.session, topics=list(topics))
            position = Position(request.name, next_id, notes, self._clock())
            position.is_new = is_new
            if is_new or request.seek:
                # As each new reader: first a lease that needs everything, then what the writer has announced.
                self._leases.write(Lease(request.name, 0, self._expiry, begins=True, subscriber=notes))
                self._place(position, request, log, read_head(self._storage.store).announced)
            else:
                position.find_newest(log)
            self._write(position)
        except BaseException:
            if held is None:
                lock.release()
            raise
        position.lock = lock
        if known is not None:  # a later release of the old position must not free the lock
            known.lock = None
        self._all[request.name] = position
        return position

    def _place(self, position: Position, request: Open, log: LogMoment, announced: int) -> None:
        """Set a position to the start that the OPEN names, but not before what is announced."""
        position.note(snapshot=0)
        if request.since is not None:
            position.next = max(announced, log.first_since(request.since))
        elif request.start == EARLIEST:
            position.next = max(announced, log.earliest())
        elif request.start == LATEST:
            position.next = log.end
        elif request.start == LAST:
            position.note(snapshot=log.end)
            position.next = announced
            position.find_newest(log)
            position.next = position.newest[0].as_py() if len(position.newest) else log.end
        else:
            position.next = min(int(request.start), log.end)

    def lock_again(self, position: Position, log: LogMoment) -> bool:
        """Lock the name of a client that comes back; return False if the lease has another session, or is gone."""
        if position.lock is not None:
            return True
        lock = self._leases.hold(position.key, _LOCK_SECONDS)
        try:
            lease = self._leases.read(position.key)
            if lease is None:
                self._all.pop(position.name, None)
            elif lease.subscriber is not None and lease.subscriber.session == position.notes.session:
                position.find_newest(log)
                position.lock = lock
        finally:
            if position.lock is None:
                lock.release()
        return position.lock is not None

    def forget(self, position: Position) -> None:
        """Delete the lease of a name."""
        self._leases.remove(position.key)
        self._all.pop(position.name, None)
        if position.lock is not None:
            lock, position.lock = position.lock, None
            lock.release()

    def _release(self, position: Position) -> None:
        lock, position.lock = position.lock, None
        if lock is None:
            return
        try:
            with suppress(LogError):  # the lease on the disk is older, and keeps more than is needed
                self._write(position)
        finally:
            lock.release()

    def _write(self, position: Position) -> None:
        """Write the lease of a locked name."""
        next_id, notes = position.next, position.notes  # the server's thread may change them meanwhile
        if next_id >= notes.snapshot:
            notes = replace(notes, snapshot=0)
        self._leases.write(Lease(position.name, next_id, self._expiry, subscriber=notes))
        position.next_on_disk, position.lost_on_disk = next_id, notes.lost_to
        position.written_at = self._clock()

    def _write_changed(self) -> None:
        due = self._clock() - _REWRITE_SECONDS
        try:
            for position in self:
                if position.lock is not None and (not position.is_on_disk or position.written_at < due):
                    self._write(position)
        except DiskFaultError as e:
            self.fault = str(e)
            self._refused_until = self._clock() + _REFUSED_SECONDS
            self._faults.warn("%s; until it is mended, no position of a durable subscriber is confirmed", e)
        except LogError as e:
            self._failure = e
        else:
            self.fault = None

    def _write_and_list(self) -> None:
        """Write what has changed, and forget the names whose lease the log's writer has dropped."""
        self._write_changed()
        try:
            present = self._leases.entries()
        except LogError as e:
            self._faults.warn("%s", e)
            return
        for position in self:
            if position.lock is None and position.key not in present:
                del self._all[position.name]
            elif position.lock is None:
                self._warn_before_expiry(position)

    def _warn_before_expiry(self, position: Position) -> None:
        away = self._clock() - position.left
        if away >= self._expiry * _WARNING_AT and not position.is_warned_of:
            position.is_warned_of = True
            _log.warning(
                "durable subscriber %r has been away for %.0f s and is forgotten in %.0f s; messages from id %d on are "
                "kept for it",
                position.name,
                away,
                max(0.0, self._expiry - away),
                position.next,
            )


def _notes_of(lease: Lease) -> SubscriberNotes | None:
    """What the lease of a subscriber has; None if its OPEN was not finished."""
    return None if lease.begins else lease.subscriber


def bytes_of_topics(topics: Iterable[bytes]) -> int:
    """About how many bytes topics have in a lease."""
    return sum(len(topic) + _TOPIC_BYTES for topic in topics)
