"""The positions of durable subscribers. Each one is the record of a named reader of the log.

A name is in one of these states:

| State | Record on disk | Lock | What the log keeps |
| --- | --- | --- | --- |
| unknown | no | no | nothing |
| present: its client has asked within ``PRESENT_SECONDS`` | yes | held here | everything from its position on |
| away | yes | free | the same, for ``subscriberExpiry`` |

The rules:

* One thread of its own, the *keeper*, reads and writes records, and takes and releases locks. So a disk that stalls
  delays no subscriber that only reads.
* A name is unknown until its record is on the disk. A client never gets a position that is not on the disk.
* While a name is away, ``zmq-datasource log readers`` may change or delete its record. So the keeper reads the record
  again when the client comes back.
* A position is written about once a second, or at once if a client waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, ParamSpec, TypeVar

from msgspec.structs import replace

from zmq_datasource.errors import DataLossError, DiskFaultError, LogError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import (
    Hold,
    LogStorage,
    ReaderRecord,
    ReaderRecords,
    SubscriberNotes,
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
# How often positions are written, and the records of all readers listed.
_WRITE_SECONDS = 1.0
# How often the record of a position that does not move is written: the record's time says that the client is present.
_REWRITE_SECONDS = 60.0
# How soon the keeper writes again after the disk has refused.
_REFUSED_SECONDS = 0.25
# How long the keeper waits for a lock: the command line may hold it for a moment to see whether it is free.
_LOCK_SECONDS = 0.5
# A warning is logged when a subscriber has been away for this share of ``subscriberExpiry``.
_WARNING_AT = 0.8
# Bytes of a topic in a record, beside the topic itself.
_TOPIC_BYTES = 8


class Position:
    """A name and its position. The server's thread changes it, except where the keeper is named.

    Attributes:
        key: The name of its record.
        next: The first id that the subscriber still needs.
        notes: The other fields of the record.
        next_on_disk, lost_on_disk: ``next`` and ``notes.lost_to`` as they are on the disk; set by the keeper.
        topic_bytes: About how many bytes its topics have in the record.
        newest: The ids of the newest message of each topic below ``notes.snapshot``, in order. Below it only
            these are sent. Set by the keeper.
        is_new: Whether the name was unknown before, and its client has not fetched yet.
        asked: When its client last asked for something, monotonic; None while it is away.
        left: When its client went away, monotonic.
        lock: Keeps other processes from changing the record; set by the keeper.
        written_at: When the record was written, monotonic; set by the keeper.
        is_warned_of: Whether the keeper has logged that the name expires soon.
    """

    def __init__(self, record: ReaderRecord, notes: SubscriberNotes, now: float) -> None:
        self.key = subscriber_key(notes.name)
        self.next = self.next_on_disk = record.next
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
        end: The id after the log's last one.
        expiry: Seconds after which a name that is away is forgotten.
        notify: Called by the keeper when it has done something.
        clock: Seconds, monotonic.
        present_seconds: A client that has asked for nothing for so long is away.

    Attributes:
        fault: Why the disk refuses to write positions now; None if it does not.

    Raises:
        LogFormatError: A record is damaged.
        DataLossError: A position is beyond the end of the log: the newest chunks of the log are gone.
    """

    def __init__(
        self,
        storage: LogStorage,
        end: int,
        expiry: float,
        notify: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        present_seconds: float = PRESENT_SECONDS,
    ) -> None:
        self._present_seconds = present_seconds
        self._records = ReaderRecords(storage)
        self._expiry = float(expiry)
        self._notify = notify
        self._clock = clock
        self._all: dict[str, Position] = {}
        self.fault: str | None = None
        self._failure: LogError | None = None
        self._faults = LimitedLog(__name__, "faults of the records of readers")
        self._next_write = self._refused_until = 0.0
        self._writing: Future[None] | None = None
        self._due_write: Future[None] | None = None
        for record, notes in read_positions(storage, end):
            position = self._all[notes.name] = Position(record, notes, clock())
            if record.timeout != self._expiry:  # the option has changed since
                self._records.write(position.key, replace(record, timeout=self._expiry))
        self._keeper = ThreadPoolExecutor(1, "zmq-positions")

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
        if (self._writing is None or self._writing.done()) and self._clock() >= self._refused_until:
            self._writing = self._submit_and_log(self._write_changed)

    def step(self) -> None:
        """Release the names of clients that are away, and write positions once a second. Called in each round.

        Raises:
            LogError: Records cannot be written any more.
        """
        if self._failure is not None:
            raise self._failure
        now = self._clock()
        for position in self:
            if position.asked is not None and now - position.asked >= self._present_seconds:
                self.release(position)
        if now >= self._next_write and (self._due_write is None or self._due_write.done()):
            self._next_write = now + _WRITE_SECONDS
            self._due_write = self._submit_and_log(self._write_and_list)

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
        """Give a name to the client that has sent this OPEN, and write its record.

        Raises:
            LogLockedError: The command line changes the record at this moment.
            LogError: The record cannot be read or written.
        """
        key, known = subscriber_key(request.name), self._all.get(request.name)
        held = None if known is None else known.lock
        if known is not None and held is not None:
            self._write(known)  # memory is ahead of the record, which is read below
        lock = held or self._records.hold(key, _LOCK_SECONDS)
        try:
            record = self._records.read(key)
            is_new = record is None or record.subscriber is None
            if record is None or record.subscriber is None:
                notes = SubscriberNotes(request.name, request.session, list(topics), time.time())
                record = ReaderRecord(0, self._expiry, subscriber=notes)
            else:
                notes = replace(record.subscriber, session=request.session, topics=list(topics))
            position = Position(record, notes, self._clock())
            position.is_new = is_new
            if is_new or request.seek:
                # While this lock is held, no chunk is deleted. Afterwards the record protects the chunks.
                with self._records.exclusive():
                    self._place(position, request, log)
                    self._write(position)
            else:
                position.find_newest(log)
                self._write(position)
        except BaseException:
            if held is None:
                lock.release()
            raise
        position.lock = lock
        if known is not None:
            known.lock = (
                None  # the new position has the lock, so a later release of the old one must not free it
            )
        self._all[request.name] = position
        return position

    def _place(self, position: Position, request: Open, log: LogMoment) -> None:
        """Set a position to the start that the OPEN names."""
        position.note(snapshot=0)
        if request.since is not None:
            position.next = log.first_since(request.since)
        elif request.start == EARLIEST:
            position.next = log.earliest()
        elif request.start == LATEST:
            position.next = log.end
        elif request.start == LAST:
            position.note(snapshot=log.end)
            position.next = 0
            position.find_newest(log)
            position.next = position.newest[0].as_py() if len(position.newest) else log.end
        else:
            position.next = min(int(request.start), log.end)

    def lock_again(self, position: Position, log: LogMoment) -> bool:
        """Lock the name of a client that comes back; return False if the record has another session, or is gone."""
        if position.lock is not None:
            return True
        with ExitStack() as stack:
            lock = self._records.hold(position.key, _LOCK_SECONDS)
            stack.callback(lock.release)
            record = self._records.read(position.key)
            if record is None:
                self._all.pop(position.notes.name, None)
                return False
            if record.subscriber is None or record.subscriber.session != position.notes.session:
                return False
            position.find_newest(log)
            stack.pop_all()
        position.lock = lock
        return True

    def forget(self, position: Position) -> None:
        """Delete the record of a name."""
        self._records.remove(position.key)
        self._all.pop(position.notes.name, None)
        if position.lock is not None:
            lock, position.lock = position.lock, None
            self._records.remove_hold(position.key)
            lock.release()

    def _release(self, position: Position) -> None:
        lock, position.lock = position.lock, None
        if lock is None:
            return
        try:
            with suppress(LogError):  # the record on the disk is older, and keeps more than is needed
                self._write(position)
        finally:
            lock.release()

    def _write(self, position: Position) -> None:
        """Write the record of a locked name."""
        next_id, notes = position.next, position.notes  # the server's thread may change them meanwhile
        if next_id >= notes.snapshot:
            notes = replace(notes, snapshot=0)
        self._records.write(position.key, ReaderRecord(next_id, self._expiry, subscriber=notes))
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
        """Write what has changed, and forget the names without a record: the log's writer deletes expired records."""
        self._write_changed()
        try:
            present = set(self._records.names())
        except LogError as e:
            self._faults.warn("%s", e)
            return
        for position in self:
            if position.lock is None and position.key not in present:
                del self._all[position.notes.name]
            elif position.lock is None:
                self._warn_before_expiry(position)

    def _warn_before_expiry(self, position: Position) -> None:
        away = self._clock() - position.left
        if away >= self._expiry * _WARNING_AT and not position.is_warned_of:
            position.is_warned_of = True
            _log.warning(
                "durable subscriber %r has been away for %.0f s and is forgotten in %.0f s; messages from id %d on are "
                "kept for it",
                position.notes.name,
                away,
                max(0.0, self._expiry - away),
                position.next,
            )


def read_positions(storage: LogStorage, end: int) -> list[tuple[ReaderRecord, SubscriberNotes]]:
    """The records of all durable subscribers.

    Args:
        end: The id after the log's last one.

    Raises:
        LogFormatError: A record is damaged.
        DataLossError: A position is beyond the end: the ids below it would be given to other messages.
    """
    found = []
    for record in ReaderRecords(storage).all().values():
        notes, position = record.subscriber, record.next
        if notes is None:
            continue
        if position > end:
            raise DataLossError(
                f"opening log {storage.root}: it ends at id {end}, and durable subscriber {notes.name!r} has "
                f"acknowledged the ids below {position}: its newest chunks are gone. Their ids are not given to other "
                "messages. Restore the chunks, or use a new walLocation"
            )
        found.append((record, notes))
    return found


def bytes_of_topics(topics: Iterable[bytes]) -> int:
    """About how many bytes topics have in a record."""
    return sum(len(topic) + _TOPIC_BYTES for topic in topics)
