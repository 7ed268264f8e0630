"""The position of one query in a log: held under a name while it runs, and recorded for whoever deletes."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from zmq_datasource.errors import LogLockedError, LogWriteError
from zmq_datasource.log.files import WriterLock
from zmq_datasource.log.layout import LOCK_WAIT_SECONDS
from zmq_datasource.log.reader_files import ReaderPosition
from zmq_datasource.log.storage import LogStorage

__all__ = ["HeldPosition"]

_log = logging.getLogger(__name__)

# How often the position of the query that also writes the log is recorded. An older one keeps more than is needed.
_LAZY_SECONDS = 1.0
# How often the file of a position that has not moved is touched, which says that its query runs.
_TOUCH_SECONDS = 60.0
# A writer that deletes, or another reader that records its position, is done with that soon.
_PLACING_SECONDS = 30.0


def _was_given_something(storage: LogStorage, name: str) -> bool:
    """Whether a query that has begun under this name was given messages, of whichever partition."""
    for partition in storage.partitions():
        beside = storage.of(partition)
        start, recorded = beside.read_start(name), beside.position(name)
        if start is not None and recorded is not None and (recorded.given or 0) > start[0]:
            return True
    return False


class HeldPosition:
    """Of one query, which nobody else may use meanwhile; given up by ``end``, ``leave_to`` or ``discard``.

    Args:
        storage: Of the log partition.
        name: The name; None makes one that nobody has.
        named: Whether the name is its user's.
        wait: Seconds to wait for a query of this name that is just stopping.

    Attributes:
        name: Under which the position is recorded.
        given: The id after the last one that was ever given to a query of this name; None if that is not known.
        terms: Recorded with the position; to be set before ``place``.

    Raises:
        LogLockedError: Another query of this name runs.
    """

    def __init__(self, storage: LogStorage, name: str | None, named: bool, wait: float) -> None:
        self._storage = storage
        self.name = name or f"query-{uuid.uuid4().hex[:12]}"
        self._lock: WriterLock = storage.hold_reader(self.name, wait)
        try:
            self._position = storage.position(self.name)
        except BaseException:
            self._lock.release()
            raise
        self.given = None if self._position is None else self._position.given
        self._named = named or (self._position is not None and self._position.named)
        self.terms = None if self._position is None else self._position.terms
        self._recorded_at = -math.inf
        self._gave = False
        self._is_new = self._position is None  # nobody has been told the name
        # The name of the query whose beginning this is, if it was found.
        self._begun_as: str | None = None

    @classmethod
    def of_a_start(cls, storage: LogStorage, position: str) -> Self | None:
        """Begin where a query was told to begin that has ended before its first batch was done.

        Whether the query that begins now is that one again, nothing tells: it has no checkpoint. If it is, nothing of
        what has come meanwhile may be missing.

        Args:
            position: The ``startingOffsets`` by which it was told.
        """
        for name in storage.starting():
            start = storage.read_start(name)
            if start is None or start[1] != position:  # whose it is may be looking for it just now
                continue
            if storage.is_reading_elsewhere(name):
                continue
            try:
                held = cls(storage, name, False, 0.0)
            except LogLockedError:
                continue
            try:
                if (found := held._of_its_start(position)) is not None:
                    return found
            except BaseException:
                held.release()
                raise
            held.release()
        return None

    def _of_its_start(self, position: str) -> Self | None:
        """This one, or a successor of it, if its query was told to begin so and has come no further."""
        start, recorded = self._storage.read_start(self.name), self._position
        if start is None or start[1] != position or recorded is None or recorded.named:
            return None
        if _was_given_something(self._storage, self.name):
            return self._succeeded(*start)
        self._begun_as = self.name
        return self

    def _succeeded(self, first: int, position: str) -> Self:
        """Another name that begins at the same place.

        This one's position stays: if Spark has noted the batch that was given under it, it is repeated under it.
        """
        other = type(self)(self._storage, None, False, 0.0)
        try:
            other._go_on_from(self.name, first, position)
        except BaseException:
            other.release()
            raise
        self.release()
        return other

    def _go_on_from(self, reader: str, first: int, position: str) -> None:
        """Begin where that one was told to begin."""
        self._record(first, None)
        self._begun_as = reader
        self.keep()
        self._storage.write_start(self.name, first, position)
        self._storage.remove_start(reader)

    def hold_beside(self, storage: LogStorage, position: str) -> HeldPosition:
        """Hold the position of the same query in another partition; as this one was found, so is that one.

        Args:
            storage: Of the other partition.
            position: The ``startingOffsets`` of the query.
        """
        other = HeldPosition(storage, self.name, self._named, LOCK_WAIT_SECONDS)
        other._begun_as = self._begun_as
        if self._begun_as in (None, self.name):
            return other
        try:
            start = storage.read_start(self._begun_as)
            if start is not None and start[1] == position:
                other._go_on_from(self._begun_as, *start)
        except BaseException:
            other.release()
            raise
        return other

    def place(self, look: Callable[[], int]) -> None:
        """Record a position before all that there is, so that none of it is deleted from then on.

        Args:
            look: Lists the log; returns its first id.

        Raises:
            LogError: The log cannot be listed, or the disk refuses.
        """
        with self._storage.placing(_PLACING_SECONDS):
            self._record(look(), self.given)
            if self._storage.wait_for_deletion():
                self._record(look(), self.given)

    def give(self, begin: int, end: int, vouched: bool) -> None:
        """The query is about to be given the ids from ``begin`` to ``end``, and needs nothing below.

        Args:
            vouched: Whether what is given needs no record: this process writes the log, and forces chunks to the disk.
        """
        if not vouched:
            self._record(begin, max(end, self.given or 0))
        elif not self._gave:
            # A first batch that is repeated begins where this says, also if it has no rows from here: see of_a_start.
            self._record(begin, end if end > begin else self.given)
        elif self.given is not None and end > self.given:
            self._record(begin, None)
        elif self._position is not None:
            self._touch()
        self._gave = self._gave or end > begin

    def commit(self, end: int, lazily: bool, now: bool = False) -> None:
        """The query will never again ask for an id below ``end``.

        Args:
            lazily: Whether who deletes knows this without a record. Then one is made now and then, and a disk that
                refuses it costs nothing but room.
            now: Whether one is made in any case.
        """
        if not lazily:
            self._record(end, self.given)
        elif now or time.monotonic() - self._recorded_at >= max(_LAZY_SECONDS, self._storage.leisure):
            try:
                self._record(end, self.given)
            except LogWriteError as e:
                self._recorded_at = time.monotonic()  # it is tried again as late as any other
                _log.warning("recording that %r needs nothing below id %d: %s", self.name, end, e)

    def _record(self, needed: int, given: int | None) -> None:
        position = ReaderPosition(needed, given, self._named, self.terms)
        if position == self._position:
            self._touch()
            return
        self._storage.write_reader(self.name, position)
        self._position, self.given = position, given
        self._recorded_at = time.monotonic()

    def _touch(self, seconds: float = _TOUCH_SECONDS) -> None:
        """Say that the query runs, if the file says nothing newer than so many seconds."""
        if time.monotonic() - self._recorded_at >= seconds:
            self._recorded_at = time.monotonic()
            with suppress(LogWriteError):  # it is tried again
                self._storage.touch_reader(self.name)

    @property
    def is_new(self) -> bool:
        """Whether nobody has been told the name, and nothing was recorded under it before."""
        return self._is_new

    def keep(self) -> None:
        """The name is told: what is kept for it stays when the query ends."""
        self._is_new = False

    def end(self) -> None:
        """Let another query have the name, and what is kept for it; a name that was never told is forgotten."""
        try:
            if self._is_new:
                self._storage.remove_reader(self.name)
                self._storage.remove_reader_lock(self.name)
            else:
                self._touch(0.0)
        except LogWriteError as e:
            _log.warning("removing the position of %r, who was given nothing: %s", self.name, e)
        finally:
            self.release()

    def leave_to(self, reader: str) -> None:
        """The query turns out to be ``reader``: end, and have nothing kept for it here any more.

        But a beginning that is another query's stays, for it may come yet.
        """
        if self._begun_as in (None, reader):
            self.discard()
        else:
            self.end()

    def discard(self) -> None:
        """End, and have nothing kept for this name any more."""
        try:
            self._storage.remove_reader(self.name)
            self._storage.remove_reader_lock(self.name)
        finally:
            self.release()

    def release(self) -> None:
        """Let another query have the name."""
        self._lock.release()
