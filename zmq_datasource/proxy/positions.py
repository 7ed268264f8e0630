"""The positions of durable subscribers: each is the record of a named reader of the log.

A name is in one of these states:

| State | Record on disk | Hold | What the log keeps |
| --- | --- | --- | --- |
| unknown | no | no | nothing |
| here: its client has asked within ``PRESENT_SECONDS`` | yes | yes | everything from its position on |
| away | yes | no | the same, for ``subscriberExpiry`` |

The rules:

* One thread of its own, the *keeper*, reads and writes records, and takes and releases holds. So a disk that stalls
  stalls no subscriber that only reads.
* A name is unknown until its record is on the disk, and its client hears of no position that is not.
* While a name is away, ``zmq-datasource log readers`` may change or delete its record. So the record is read again
  when its client comes back.
* A position is written about once a second, or at once if a client waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.errors import DataLossError, DiskFaultError, LogError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.log import (
    PARTITION,
    Hold,
    LogStorage,
    ReaderRecord,
    ReaderRecords,
    SubscriberNotes,
    first_since,
    read_index,
    read_slices,
    slices,
    subscriber_key,
)
from zmq_datasource.messages.columns import integers_of, number
from zmq_datasource.proxy.fetch_protocol import EARLIEST, LAST, LATEST, Open
from zmq_datasource.proxy.topics import topics_of

__all__ = ["PRESENT_SECONDS", "Position", "Positions", "bytes_of_topics", "read_positions"]

_log = logging.getLogger(__name__)

# A client that has asked for nothing for so long is away.
PRESENT_SECONDS = 5.0
# How often positions are written, and the records of all readers are read.
_LAZY_SECONDS = 1.0
# The record of a name that stands still is written again so often: its time says that the client was there.
_AGAIN_SECONDS = 60.0
# How soon after the disk refused it is asked again.
_REFUSED_SECONDS = 0.25
# The command line may look at this moment whether the name is held.
_HOLD_SECONDS = 0.5
# Forgetting is announced when this much of the time has passed.
_WARNING_AT = 0.8
# Bytes that the record takes for a topic, beside the topic.
_TOPIC_BYTES = 8


class Position:
    """One name and its position. Only the server's thread changes it, unless it says otherwise.

    Attributes:
        next: The first id that the subscriber still needs.
        kept: The same, on the disk; changed by the keeper.
        session: Of the client that has the name; 0 if the position was set by hand since.
        topics: Prefixes; empty for all messages.
        topic_bytes: What they take in the record, about.
        created, acknowledged: Seconds since the epoch.
        sent, lost, lost_to: As in ``SubscriberNotes``.
        lost_kept: ``lost_to``, on the disk; changed by the keeper.
        snapshot: Below this id only the messages in ``newest`` are sent.
        newest: Ids in order, of the newest message of each topic below ``snapshot``.
        is_new: Whether the name was not known before its client opened it, which has asked for nothing yet.
        asked: When its client last asked for something, monotonic; None if it is away.
        left: When it went away, monotonic.
        hold: Nobody else has the name; changed by the keeper.
    """

    def __init__(self, record: ReaderRecord, notes: SubscriberNotes, now: float) -> None:
        self.name = notes.name
        self.key = subscriber_key(notes.name)
        self.next = self.kept = record.needs(PARTITION)
        self.session = notes.session
        self.set_topics(tuple(notes.topics))
        self.created, self.acknowledged = notes.created, notes.acknowledged
        self.sent, self.lost, self.lost_to = notes.sent, notes.lost, notes.lost_to
        self.lost_kept = notes.lost_to
        self.snapshot, self.newest = notes.snapshot, integers_of(())
        self.is_new = False
        self.asked: float | None = None
        self.left = now
        self.hold: Hold | None = None
        self.written_at = now

    def set_topics(self, topics: tuple[bytes, ...]) -> None:
        self.topics, self.topic_bytes = topics, bytes_of_topics(topics)

    def notes(self) -> SubscriberNotes:
        return SubscriberNotes(
            self.name,
            self.session,
            list(self.topics),
            self.created,
            self.acknowledged,
            self.sent,
            self.lost,
            self.lost_to,
            self.snapshot if self.next < self.snapshot else 0,
        )

    @property
    def is_kept(self) -> bool:
        """Whether the position is on the disk, and what was lost before it."""
        return self.kept >= self.next and self.lost_kept >= self.lost_to


class Positions:
    """All durable subscribers of a log.

    Args:
        storage: Where their records are.
        end: Tells the id after the log's last one.
        expiry: Seconds after which one that is away is forgotten.
        notify: Called by the keeper when it has done something that the server may wait for.
        clock: Seconds, monotonic.

    Attributes:
        fault: Why the disk refuses to keep positions; it is tried again.

    Raises:
        LogFormatError: A record is not what was written.
        DataLossError: A client has done with more than the log has: its ids would be given again.
    """

    def __init__(
        self,
        storage: LogStorage,
        end: Callable[[], int],
        expiry: float,
        notify: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._records = ReaderRecords(storage)
        self._end = end
        self._expiry = float(expiry)
        self._notify = notify
        self._clock = clock
        self._all: dict[str, Position] = {}
        self._warned: set[str] = set()
        self.fault: str | None = None
        self._failure: LogError | None = None
        self._faults = LimitedLog(__name__, "faults of the records of readers")
        self._next_look = self._refused_until = 0.0
        self._writing: Future[None] | None = None
        self._looking: Future[None] | None = None
        for record, notes in read_positions(storage, end()):
            position = self._all[notes.name] = Position(record, notes, clock())
            if record.timeout != self._expiry:  # the option has changed since
                self._records.write(position.key, msgspec.structs.replace(record, timeout=self._expiry))
        self._keeper = ThreadPoolExecutor(1, "zmq-positions")

    def __iter__(self) -> Iterator[Position]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def get(self, name: str) -> Position | None:
        return self._all.get(name)

    # For the server's thread.

    def open(
        self, wanted: Open, topics: tuple[bytes, ...], end: int, tail: list[pa.RecordBatch]
    ) -> Future[tuple[Position, bool]]:
        """Give a name to a client; the future has the position, and whether the name is new.

        Args:
            end: The log's end.
            tail: The rows of the open chunk.

        Raises (the future):
            LogLockedError: The command line changes the record at this moment.
            LogError: The record cannot be read or written.
        """
        return self._submit(partial(self._open, wanted, topics, end, tail))

    def come_back(self, position: Position, tail: list[pa.RecordBatch]) -> Future[bool]:
        """Hold a name again whose client was away; the future says whether the record is still the client's.

        Args:
            tail: The rows of the open chunk.
        """
        return self._submit(partial(self._come_back, position, tail))

    def forget(self, position: Position) -> Future[None]:
        """Delete the record of a name."""
        return self._submit(partial(self._forget, position))

    def move(self, position: Position, done: int) -> None:
        """A client has done with everything below an id."""
        if done > position.next:
            position.next = done
            position.acknowledged = time.time()

    def keep(self) -> None:
        """Write what has changed as soon as possible: a client waits for it."""
        if (self._writing is None or self._writing.done()) and self._clock() >= self._refused_until:
            self._writing = self._do(self._write_changed)

    def step(self) -> None:
        """Do what is due.

        Raises:
            LogError: The records cannot be written.
        """
        if self._failure is not None:
            raise self._failure
        now = self._clock()
        for position in self:
            if position.asked is not None and now - position.asked >= PRESENT_SECONDS:
                self.leave(position)
        if now >= self._next_look and (self._looking is None or self._looking.done()):
            self._next_look = now + _LAZY_SECONDS
            self._looking = self._do(self._look)

    def leave(self, position: Position) -> None:
        """The client of a name is away from now on."""
        position.asked, position.left = None, position.asked or self._clock()
        self._warned.discard(position.name)
        self._do(partial(self._release, position))

    def close(self) -> None:
        """Write what has changed, and release all names."""
        for position in self:
            self._do(partial(self._release, position))
        self._keeper.shutdown()

    def _submit(self, job: Callable[[], pa.Any]) -> Future[pa.Any]:
        future = self._keeper.submit(job)
        future.add_done_callback(lambda _: self._notify())
        return future

    def _do(self, job: Callable[[], None]) -> Future[None]:
        """Have the keeper do something for which no client waits."""

        def act() -> None:
            try:
                job()
            except Exception as e:
                self._faults.fault("keeping positions of durable subscribers", error=e)

        return self._submit(act)

    # The keeper.

    def _open(
        self, wanted: Open, topics: tuple[bytes, ...], end: int, tail: list[pa.RecordBatch]
    ) -> tuple[Position, bool]:
        key, known = subscriber_key(wanted.name), self._all.get(wanted.name)
        held = known.hold if known is not None else None
        if known is not None and held is not None:
            self._write(known)  # so that its record says all
        hold = held or self._records.hold(key, _HOLD_SECONDS)
        try:
            record = self._records.read(key)
            notes = None if record is None else record.subscriber
            is_new = record is None or notes is None
            if record is None or notes is None:
                notes = SubscriberNotes(wanted.name, wanted.session, list(topics), time.time())
                record = ReaderRecord({PARTITION: 0}, self._expiry, subscriber=notes)
            position = Position(record, notes, self._clock())
            position.session = wanted.session
            position.set_topics(topics)
            if is_new or wanted.seek:
                with self._records.placing():  # nothing is deleted between the listing and the record
                    self._place(position, wanted, end, tail)
                    self._write(position)
            else:
                self._find_newest(position, tail)
                self._write(position)
        except BaseException:
            if held is None:
                hold.release()
            raise
        position.hold = hold
        if known is not None:
            known.hold = None  # it may be about to leave, and would release it
        self._all[wanted.name] = position
        return position, is_new

    def _place(self, position: Position, wanted: Open, end: int, tail: list[pa.RecordBatch]) -> None:
        """Set a position to where a client wants to begin."""
        index = read_index(self._storage)
        position.snapshot = 0
        if wanted.since is not None:
            position.next = self._since(wanted.since, end, tail)
        elif wanted.start == EARLIEST:
            position.next = index.earliest if len(index) else _first_id(tail, end)
        elif wanted.start == LATEST:
            position.next = end
        elif wanted.start == LAST:
            position.snapshot = end
            position.next = 0
            self._find_newest(position, tail)
            position.next = position.newest[0].as_py() if len(position.newest) else end
        else:
            position.next = min(int(wanted.start), end)

    def _since(self, time_us: int, end: int, tail: list[pa.RecordBatch]) -> int:
        index = read_index(self._storage)
        found = first_since(self._storage, index.covering(index.earliest, index.end), time_us)
        if found is not None:
            return found
        for batch in tail:
            times = batch.column("timestamp").cast(pa.int64())
            late = pc.index(pc.greater_equal(times, number(time_us)), True).as_py()
            if late >= 0:
                return int(batch.column("id")[late].as_py())
        return end

    def _find_newest(self, position: Position, tail: list[pa.RecordBatch]) -> None:
        """List the newest message of each topic below the position's snapshot, as far as it is still needed."""
        if position.next >= position.snapshot:
            position.newest = integers_of(())
            return
        newest: dict[bytes | None, int] = {}
        index = read_index(self._storage)
        sealed = min(index.end, position.snapshot)
        first = max(index.earliest, position.next)  # what is done with may be deleted at this moment
        pieces = slices(index.covering(first, sealed), first, sealed)
        for batch in [*read_slices(self._storage, pieces), *tail]:
            found = pa.table({"topic": topics_of(batch), "id": batch.column("id")})
            found = found.filter(pc.less(found.column("id"), number(position.snapshot)))
            for row in found.group_by("topic").aggregate([("id", "max")]).to_pylist():
                newest[row["topic"]] = max(row["id_max"], newest.get(row["topic"], -1))
        position.newest = integers_of(sorted(newest.values()))

    def _come_back(self, position: Position, tail: list[pa.RecordBatch]) -> bool:
        if position.hold is not None:
            return True
        hold = self._records.hold(position.key, _HOLD_SECONDS)
        record = self._records.read(position.key)
        if record is None or record.subscriber is None or record.subscriber.session != position.session:
            hold.release()
            if record is None:
                self._all.pop(position.name, None)
            return False
        self._find_newest(position, tail)
        position.hold = hold
        return True

    def _forget(self, position: Position) -> None:
        self._records.remove(position.key)
        self._all.pop(position.name, None)
        if position.hold is not None:
            hold, position.hold = position.hold, None
            self._records.remove_hold(position.key)
            hold.release()

    def _release(self, position: Position) -> None:
        hold, position.hold = position.hold, None
        if hold is None:
            return
        try:
            with suppress(LogError):  # the record that is there keeps more than is needed
                self._write(position)
        finally:
            hold.release()

    def _write(self, position: Position) -> None:
        """Write the record of a name that is held."""
        next_id, notes = position.next, position.notes()
        self._records.write(position.key, ReaderRecord({PARTITION: next_id}, self._expiry, subscriber=notes))
        position.kept, position.lost_kept = next_id, notes.lost_to
        position.written_at = self._clock()

    def _write_changed(self) -> None:
        again = self._clock() - _AGAIN_SECONDS
        try:
            for position in self:
                if position.hold is not None and (not position.is_kept or position.written_at < again):
                    self._write(position)
        except DiskFaultError as e:
            self.fault = str(e)
            self._refused_until = self._clock() + _REFUSED_SECONDS
            self._faults.warn("%s; positions of durable subscribers are not confirmed until then", e)
        except LogError as e:
            self._failure = e
        else:
            self.fault = None

    def _look(self) -> None:
        """Write what has changed, and forget the names whose record is gone: the log's writer drops late ones."""
        self._write_changed()
        try:
            there = set(self._records.names())
        except LogError as e:
            self._faults.warn("%s", e)
            return
        for position in self:
            if position.hold is None and position.key not in there:
                del self._all[position.name]
            elif position.hold is None:
                self._warn(position)

    def _warn(self, position: Position) -> None:
        away = self._clock() - position.left
        if away >= self._expiry * _WARNING_AT and position.name not in self._warned:
            self._warned.add(position.name)
            _log.warning(
                "durable subscriber %r has been away for %.0f s and is forgotten in %.0f s; messages from id %d on are "
                "kept for it",
                position.name,
                away,
                max(0.0, self._expiry - away),
                position.next,
            )


def read_positions(storage: LogStorage, end: int) -> list[tuple[ReaderRecord, SubscriberNotes]]:
    """The records of all durable subscribers.

    Args:
        end: The id after the log's last one.

    Raises:
        LogFormatError: A record is not what was written.
        DataLossError: A client has done with more than the log has: its ids would be given again.
    """
    found = []
    for record in ReaderRecords(storage).all().values():
        notes, position = record.subscriber, record.needs(PARTITION)
        if notes is None:
            continue
        if position > end:
            raise DataLossError(
                f"opening log {storage.root}: it ends at id {end}, and durable subscriber {notes.name!r} has "
                f"acknowledged the ids below {position}: its newest chunks are gone (after a crash of the machine with "
                "walSync=false, or from a copy). Their ids are not given to other messages. Restore the chunks, or use "
                "a new walLocation"
            )
        found.append((record, notes))
    return found


def _first_id(tail: list[pa.RecordBatch], end: int) -> int:
    return int(tail[0].column("id")[0].as_py()) if tail else end


def bytes_of_topics(topics: Iterable[bytes]) -> int:
    """Bytes that a record takes for topics, about."""
    return sum(len(topic) + _TOPIC_BYTES for topic in topics)
