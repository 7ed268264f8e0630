"""The readers of a log: ``Reader`` keeps the record of one query, ``Readers`` finds the ids that a writer must keep.

A reader is in one of these states:

| State | What the log keeps |
| --- | --- |
| running | everything from its position on |
| ended, with a name (``reader``) | the same, for ``readerTimeout`` |
| ended, without a name | the same, for ``walRetention``, unless the log is full |
| dropped | nothing for this reader |

A writer drops a reader only if another reader remains. So messages that the last reader of a log has not read are
kept.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from zmq_datasource.errors import LogLockedError, LogWriteError
from zmq_datasource.log.layout import LOCK_WAIT_SECONDS
from zmq_datasource.log.reader_records import ReaderRecord, ReaderRecords, ReaderTerms
from zmq_datasource.log.retrier import Retrier
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Hold

_log = logging.getLogger(__name__)

# How often a query that also writes the log writes its record. With an older record the log only keeps too much.
_LAZY_SECONDS = 1.0
# How long to wait for the lock on all records: a writer may be deleting, or another reader writing its record.
_EXCLUSIVE_SECONDS = 30.0
# How often a writer checks whether a reader runs that has not moved.
_SEEN_SECONDS = 10.0
# How old records may be if a decision to delete does not depend on them alone.
_FOUND_SECONDS = 1.0


class Reader:
    """The record of one query, which no other query can use until ``end``.

    Args:
        storage: The log.
        name: The option ``reader``; None chooses a random name.
        timeout: Seconds for which messages are kept after the query has ended; ignored without a name.
        terms: The options with which the query would receive the feed itself; None if it only reads.
        retry_timeout: Seconds for which a call is repeated that the store refuses.

    Attributes:
        name: The name of the record.
        found: The record of an earlier query of this name; None if there is none.
        hold_seconds: How long to wait for a query of this name that is stopping.
        rewrite_seconds: How often an idle query writes its record again, as a sign that it runs.

    Raises:
        LogLockedError: Another query of this name runs.
        LogError: The record cannot be read.
    """

    hold_seconds = LOCK_WAIT_SECONDS
    rewrite_seconds = 60.0

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
        self._hold, self.found = self._retrier.retry(self._hold_name)
        self._record = self.found
        self._written_at = -math.inf

    def _hold_name(self) -> tuple[Hold, ReaderRecord | None]:
        hold = self._records.hold(self.name, self.hold_seconds)
        try:
            return hold, self._records.read(self.name)
        except BaseException:
            hold.release()
            raise

    def keep_everything(self, earliest: Callable[[], int]) -> None:
        """Write a record that keeps every chunk from which the query may begin. Called before it chooses the place.

        Args:
            earliest: Lists the log, and returns its first id.

        Raises:
            LogError: The log cannot be listed, or the disk refuses.
        """
        self._retrier.retry(partial(self._keep_everything, earliest))

    def _keep_everything(self, earliest: Callable[[], int]) -> None:
        with self._records.exclusive(_EXCLUSIVE_SECONDS):
            self._write(self._kept(earliest()))

    def _kept(self, earliest: int) -> ReaderRecord:
        if self.found is not None and self.found.begins_here:
            return ReaderRecord(self.found.next, self._timeout, True, self._terms)
        return self._at(earliest)

    def _at(self, next_id: int, *, begins_here: bool = False) -> ReaderRecord:
        return ReaderRecord(next_id, self._timeout, begins_here, self._terms)

    def begin(self, begin: int) -> None:
        """Record where a query without a checkpoint begins, so that it begins there again after a crash."""
        self._retrier.retry(partial(self._write, self._at(begin, begins_here=True)))

    def move(self, begin: int, *, lazily: bool) -> None:
        """Record that the query needs nothing below this id any more.

        Args:
            lazily: Whether this process also deletes chunks, and so knows the id without the record. Then the record
                is written about once a second. If the disk refuses it, the log only keeps too much.

        Raises:
            LogWriteError: The disk refuses, and ``lazily`` is false.
        """
        record = self._at(begin)
        if record == self._record:
            self._rewrite(self.rewrite_seconds)
        elif not lazily:
            self._retrier.retry(partial(self._write, record))
        elif time.monotonic() - self._written_at >= max(_LAZY_SECONDS, self._storage.request_interval):
            self._written_at = time.monotonic()  # also after a refusal, so that it is not repeated at once
            try:
                self._write(record)
            except LogWriteError as e:
                _log.warning("recording the position of reader %r: %s", self.name, e)

    def _write(self, record: ReaderRecord) -> None:
        self._records.write(self.name, record)
        self._record = record
        self._written_at = time.monotonic()

    def _rewrite(self, seconds: float) -> None:
        """Write the same record again if it is older than ``seconds``: its new time says that the query runs."""
        if self._record is not None and time.monotonic() - self._written_at >= seconds:
            self._written_at = time.monotonic()
            with suppress(LogWriteError):  # the next try is after the same time
                self._records.write(self.name, self._record)

    def end(self, begin: int | None = None) -> None:
        """Release the name; the record stays until its timeout. Called when the query stops.

        Args:
            begin: The first id that the query still needs; None if the record has it.
        """
        try:
            if begin is None:
                self._rewrite(0.0)
            else:
                self._written_at = -math.inf
                self.move(begin, lazily=True)
                self._rewrite(_LAZY_SECONDS)
        finally:
            self._hold.release()

    def discard(self) -> None:
        """Release the name, and delete a record that this object has created. Called if the query could not start."""
        try:
            if self.found is None:
                self._records.remove(self.name)
                self._records.remove_hold(self.name)
        except LogWriteError as e:
            _log.warning("removing the record of reader %r, which did not start: %s", self.name, e)
        finally:
            self._hold.release()


class Readers:
    """Finds the ids that readers still need. The log's writer asks before it deletes.

    Args:
        storage: The log.
        retention: Seconds for which messages are kept for an ended query without a name (``walRetention``).
        clock: Returns seconds since the epoch, for comparison with the modification times of records.

    Attributes:
        own: The name of the reader in this process, whose position the writer knows without a record; None if there
            is no such reader.
        longest_retention: The longest ``walRetention`` in the records of the other readers, in seconds, as last read.
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
        self._seen: dict[str, float] = {}  # when a reader may have run last; see _last_ran
        self.own: str | None = None
        self.longest_retention = 0.0

    def opened(self) -> None:
        """Count the time of ended queries without a name, and of subscribers, from now. Called when the log is opened.

        Queries that were stopped together are often started together: a query that starts a moment after the writer
        must not find its record dropped.
        """
        self._opened_at = self._clock()

    def others(self, fresh: bool = True) -> dict[str, ReaderRecord]:
        """The records of all readers but the one in this process, by name.

        Args:
            fresh: Whether to read them now. Otherwise, in a bucket, they may be a second old.

        Raises:
            LogError: A record cannot be read.
        """
        now, found = time.monotonic(), self._found
        if fresh or not self._storage.request_interval or now - found[0] >= _FOUND_SECONDS:
            # Below, use ``found`` and not ``self._found``, which another thread may replace by an older listing: this
            # listing decides which chunks are deleted.
            found = self._found = now, self._records.all()
        records = dict(found[1])
        records.pop(self.own or "", None)
        wanted = [record.terms.retention for record in records.values() if record.terms is not None]
        self.longest_retention = max(wanted, default=0.0)
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
        """The lowest id that another reader still needs; None if there is no other reader.

        Drops expired readers, if another reader remains.

        Args:
            fresh: As for ``others``.

        Raises:
            LogError: A record cannot be read or removed.
        """
        records = self.others(fresh)
        expired = {name: why for name, record in records.items() if (why := self._why_expired(name, record))}
        if self.own is not None or len(expired) < len(records):
            for name, why in expired.items():
                if self._drop(name, records[name], why):
                    del records[name]
        return min((record.next for record in records.values()), default=None)

    def make_room(self, below: int) -> bool:
        """Drop the ended, unnamed readers that still need an id below ``below``.

        Drops nothing if a running or a named reader needs such an id, or if no running reader would remain.

        Returns:
            True if such readers were found, and all of them were dropped.

        Raises:
            LogError: As ``needed``.
        """
        records = self.others()
        slow = {name: record for name, record in records.items() if record.next < below}
        if not slow or any(record.named or self._records.is_running(name) for name, record in slow.items()):
            return False
        if self.own is None and not any(
            self._records.is_running(name) for name in records.keys() - slow.keys()
        ):
            return False
        why = "it has no name, and the log has reached walMaxBytes"
        dropped = [self._drop(name, record, why) for name, record in slow.items()]
        return all(dropped)

    def _why_expired(self, name: str, record: ReaderRecord) -> str:
        """Why this reader has expired; empty if it runs, or its timeout has not passed."""
        moved = self._records.written_at(name)
        if moved is None:
            return ""
        if record.timeout is not None:
            keep = record.timeout
            option = "readerTimeout" if record.subscriber is None else "subscriberExpiry"
            why = f"it has not run for {keep:g} s ({option})"
            if record.subscriber is not None:  # it could not connect while no proxy ran
                moved = max(moved, self._opened_at)
        else:
            keep = max(self._retention, record.terms.retention if record.terms is not None else 0.0)
            moved = max(moved, self._opened_at)
            why = f"it has not run for {keep:g} s (walRetention) and has no name"
        return why if self._clock() - self._last_ran(name, moved, keep) > keep else ""

    def _last_ran(self, name: str, moved: float, keep: float) -> float:
        """When a reader may have run last. In a long batch it does not move, and then it may end without a word.

        Args:
            moved: When it moved last.
            keep: Its timeout; a tenth of it is exact enough for the checks.
        """
        now, interval = self._clock(), min(_SEEN_SECONDS, keep / 10)
        seen = max(moved, self._seen.get(name, moved))
        if now - seen > interval and self._records.is_running(name):
            # It may end just before the next check, and its time then begins.
            seen = self._seen[name] = now + interval
        return seen

    def _drop(self, name: str, record: ReaderRecord, why: str) -> bool:
        """Drop a reader; return False if it runs."""
        try:
            hold = self._records.hold(name, 0.0)
        except LogLockedError:
            return False
        try:
            self._storage.check_writer()  # another writer may have the log, and keep this reader for longer
            _log.log(
                # Each run of an unnamed query leaves such a record, so dropping it needs no warning.
                logging.WARNING if record.named else logging.INFO,
                "log %s: dropped the position of reader %r: %s. If its query comes back and misses messages, "
                "failOnDataLoss decides",
                self._storage.root,
                name,
                why,
            )
            self._records.remove(name)
            self._records.remove_hold(name)
            self._seen.pop(name, None)
        finally:
            hold.release()
        return True
