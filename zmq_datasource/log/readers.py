"""The readers of a log: one query's own record, and what a writer must keep for all of them.

A reader is in one of these states:

| State | What the log keeps |
| --- | --- |
| running | everything from its position on |
| ended, with a name (``reader``) | the same, for ``readerTimeout`` |
| ended, without a name | the same, for ``walRetention``, unless the log is full |
| dropped | nothing for this reader |

Only a writer drops a reader, and only if another reader has a use for the room: what the last reader of a log has not
read stays.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from zmq_datasource.errors import LogLockedError, LogWriteError
from zmq_datasource.log.layout import LOCK_WAIT_SECONDS
from zmq_datasource.log.reader_records import ReaderRecord, ReaderRecords, ReaderTerms
from zmq_datasource.log.retrier import Retrier
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Hold

__all__ = ["Reader", "Readers"]

_log = logging.getLogger(__name__)

# How often the position of the query that also writes the log is recorded. An older one keeps more than is needed.
_LAZY_SECONDS = 1.0
# A writer that deletes, or another reader that writes its record, is done with that soon.
_PLACING_SECONDS = 30.0
# So old may records be that decide nothing by themselves.
_FOUND_SECONDS = 1.0


class Reader:
    """The record of one query, which no other query can use until ``end``.

    Args:
        storage: The log; of any of its partitions.
        name: The option ``reader``; None makes a name that no other query has.
        timeout: Seconds that messages are kept after the query has ended; ignored without a name.
        terms: On which the query would receive the feed itself; None if it only reads.
        retry_timeout: Seconds for which a store that refuses for now is waited for.

    Attributes:
        name: Under which the record is kept.
        found: The record that an earlier query of this name has left; None if there is none.
        hold_seconds: How long to wait for a query of this name that is just stopping.
        again_seconds: How often the record of a query that stands still is written again, which says that it runs.

    Raises:
        LogLockedError: Another query of this name runs.
        LogError: The record cannot be read.
    """

    hold_seconds = LOCK_WAIT_SECONDS
    again_seconds = 60.0

    def __init__(
        self,
        storage: LogStorage,
        name: str | None,
        timeout: float,
        terms: ReaderTerms | None = None,
        retry_timeout: float = 0.0,
    ) -> None:
        self._storage = storage
        self.name = name or f"query-{uuid.uuid4().hex[:12]}"
        self._timeout = None if name is None else float(timeout)
        self._terms = terms
        self._records = ReaderRecords(storage)
        self._retrier = Retrier(retry_timeout)
        self._hold, self.found = self._retrier.retry(self._take)
        self._record = self.found
        self._written_at = -math.inf

    def _take(self) -> tuple[Hold, ReaderRecord | None]:
        hold = self._records.hold(self.name, self.hold_seconds)
        try:
            return hold, self._records.read(self.name)
        except BaseException:
            hold.release()
            raise

    def place(self, earliest: Callable[[], Mapping[int, int]]) -> None:
        """Keep all that there is from being deleted, before the query chooses where to begin.

        Args:
            earliest: Lists the log; returns the first id of each partition.

        Raises:
            LogError: The log cannot be listed, or the disk refuses.
        """
        self._retrier.retry(partial(self._place, earliest))

    def _place(self, earliest: Callable[[], Mapping[int, int]]) -> None:
        with self._records.placing(_PLACING_SECONDS):
            self._write(self._kept(earliest()))

    def _kept(self, earliest: Mapping[int, int]) -> ReaderRecord:
        if self.found is not None and self.found.begins:
            return ReaderRecord(self.found.next, self._timeout, True, self._terms)
        return self._at(earliest)

    def _at(self, nexts: Mapping[int, int], *, begins: bool = False) -> ReaderRecord:
        return ReaderRecord(dict(nexts), self._timeout, begins, self._terms)

    def begin(self, begins: Mapping[int, int]) -> None:
        """Record where the query, which has no checkpoint, begins: it begins there again if it dies before a batch."""
        self._retrier.retry(partial(self._write, self._at(begins, begins=True)))

    def move(self, begins: Mapping[int, int], *, lazily: bool) -> None:
        """The query needs nothing below these ids any more.

        Args:
            lazily: Whether the process that deletes knows this without a record. Then a record is written about once a
                second, and a disk that refuses it costs nothing but room.

        Raises:
            LogWriteError: The disk refuses, and ``lazily`` is false.
        """
        record = self._at(begins)
        if record == self._record:
            self._write_again(self.again_seconds)
        elif not lazily:
            self._retrier.retry(partial(self._write, record))
        elif time.monotonic() - self._written_at >= max(_LAZY_SECONDS, self._storage.leisure):
            self._written_at = time.monotonic()  # after a refusal, too
            try:
                self._write(record)
            except LogWriteError as e:
                _log.warning("recording the position of reader %r: %s", self.name, e)

    def _write(self, record: ReaderRecord) -> None:
        self._records.write(self.name, record)
        self._record = record
        self._written_at = time.monotonic()

    def _write_again(self, seconds: float) -> None:
        """Write the record once more, unless that was within so many seconds: its time says that the query runs."""
        if self._record is not None and time.monotonic() - self._written_at >= seconds:
            self._written_at = time.monotonic()
            with suppress(LogWriteError):  # tried again after as long
                self._records.write(self.name, self._record)

    def end(self, begins: Mapping[int, int] | None = None) -> None:
        """Let another query have the name; the record stays for its time.

        Args:
            begins: Where the query has come; None if it has come no further than the record.
        """
        try:
            if begins is None:
                self._write_again(0.0)
            else:
                self._written_at = -math.inf
                self.move(begins, lazily=True)
                self._write_again(_LAZY_SECONDS)
        finally:
            self._hold.release()

    def discard(self) -> None:
        """End, and keep nothing for this name that was not kept before; for a query that did not start."""
        try:
            if self.found is None:
                self._records.remove(self.name)
                self._records.remove_hold(self.name)
        except LogWriteError as e:
            _log.warning("removing the record of reader %r, which did not start: %s", self.name, e)
        finally:
            self._hold.release()


class Readers:
    """What the readers of a log need of one partition, for its writer.

    Args:
        storage: Of the partition.
        retention: Seconds for which messages are kept for a query without a name that has ended (``walRetention``).
        clock: Seconds since the epoch; compared with the modification times of records.

    Attributes:
        own: The reader in this process, whose position the process knows itself.
        retention: The longest ``walRetention`` of the other readers, in seconds, as of the last look at them.
    """

    def __init__(
        self, storage: LogStorage, retention: float = math.inf, clock: Callable[[], float] = time.time
    ) -> None:
        self._storage = storage
        self._records = ReaderRecords(storage)
        self._retention = retention
        self._clock = clock
        self._opened_at = clock()
        self._found: tuple[float, dict[str, ReaderRecord]] = -math.inf, {}
        self.own: str | None = None
        self.retention = 0.0

    def opened(self) -> None:
        """The log is opened for writing; an unnamed query that has ended has ``retention`` from now on to come back.

        Queries that were stopped together are started together: one that comes a moment after the writer must not find
        its record dropped.
        """
        self._opened_at = self._clock()

    def others(self, fresh: bool = True) -> dict[str, ReaderRecord]:
        """The records of all readers but the one in this process, by name.

        Args:
            fresh: Whether they are read now. If not, records of a second ago may be used where the log is in a bucket.

        Raises:
            LogError: A record cannot be read.
        """
        now, found = time.monotonic(), self._found
        if fresh or not self._storage.leisure or now - found[0] >= _FOUND_SECONDS:
            # Its own listing: that of another thread may be older, and chunks are deleted by this.
            found = self._found = now, self._records.all()
        records = dict(found[1])
        records.pop(self.own or "", None)
        wanted = [record.terms.retention for record in records.values() if record.terms is not None]
        self.retention = max(wanted, default=0.0)
        return records

    def replaying(self) -> str | None:
        """The name of another reader that runs and has a ``replayEndpoint``; None if there is none.

        Raises:
            LogError: A record cannot be read.
        """
        for name, record in self.others().items():
            if record.terms is not None and record.terms.replays and self._records.is_running(name):
                return name
        return None

    def needed(self, fresh: bool = True) -> int | None:
        """The first id of the partition that another reader still needs; None if there is no other reader.

        Drops the readers whose time is over, if another reader is left.

        Args:
            fresh: As for ``others``.

        Raises:
            LogError: A record cannot be read, or one that is to be dropped cannot be removed.
        """
        records = self.others(fresh)
        late = {name: why for name, record in records.items() if (why := self._why_late(name, record))}
        if self.own is not None or len(late) < len(records):
            for name, why in late.items():
                if self._drop(name, records[name], why):
                    del records[name]
        return min((record.needs(self._storage.partition) for record in records.values()), default=None)

    def make_room(self, below: int) -> bool:
        """Drop the readers without a name that do not run and need an id below this one, if nothing else keeps it.

        Returns:
            Whether no reader needs an id below this one any more.

        Raises:
            LogError: As ``needed``.
        """
        records = self.others()
        slow = {
            name: record for name, record in records.items() if record.needs(self._storage.partition) < below
        }
        if not slow or any(record.named or self._records.is_running(name) for name, record in slow.items()):
            return False
        if self.own is None and not any(
            self._records.is_running(name) for name in records.keys() - slow.keys()
        ):
            return False
        why = "the log has reached walMaxBytes, and it has no name"
        dropped = [self._drop(name, record, why) for name, record in slow.items()]
        return all(dropped)

    def _why_late(self, name: str, record: ReaderRecord) -> str:
        """Why the messages of this reader are kept no longer; empty if they are, because it runs or its time lasts."""
        moved = self._records.written_at(name)
        if moved is None:
            return ""
        if record.timeout is not None:
            keep = record.timeout
            option = "readerTimeout" if record.subscriber is None else "subscriberExpiry"
            why = f"it has not run for {keep:g} s ({option})"
            if record.subscriber is not None:  # while no proxy ran it could not come
                moved = max(moved, self._opened_at)
        else:
            keep = max(self._retention, record.terms.retention if record.terms is not None else 0.0)
            moved = max(moved, self._opened_at)
            why = f"it has not run for {keep:g} s (walRetention) and has no name"
        return why if self._clock() - moved > keep and not self._records.is_running(name) else ""

    def _drop(self, name: str, record: ReaderRecord, why: str) -> bool:
        """Drop a reader; False if it runs."""
        try:
            hold = self._records.hold(name, 0.0)
        except LogLockedError:
            return False
        try:
            _log.log(
                # The record of a run whose query goes on under another name is dropped in every log.
                logging.WARNING if record.named else logging.INFO,
                "log %s: dropped the position of reader %r: %s. If its query comes back and misses messages, "
                "failOnDataLoss decides",
                self._storage.root,
                name,
                why,
            )
            self._records.remove(name)
            self._records.remove_hold(name)
        finally:
            hold.release()
        return True
