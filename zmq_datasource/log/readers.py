"""Whose messages a log keeps: the positions of those who read it, as whoever deletes sees them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from zmq_datasource.errors import LogLockedError
from zmq_datasource.log.layout import PARTITION
from zmq_datasource.log.reader_files import ReaderPosition
from zmq_datasource.log.storage import LogStorage

__all__ = ["Readers"]

_log = logging.getLogger(__name__)


class Readers:
    """Of one log partition.

    Args:
        storage: Where the positions are.
        timeout: Seconds after which the position of a reader that does not run is dropped.
        clock: Seconds since the epoch; compared with the files' modification times.

    Attributes:
        own: The reader in this process, whose position is known here; it is not looked for in its file.
        retention: The longest that a reader of whom there is a position wants, in seconds, as of the last look at all.
    """

    def __init__(
        self, storage: LogStorage, timeout: float = math.inf, clock: Callable[[], float] = time.time
    ) -> None:
        self._storage = storage
        self._timeout = timeout
        self._clock = clock
        self.own: str | None = None
        self.retention = 0.0
        self._to_come: set[str] = set()

    def needed(self) -> int | None:
        """The first id that another reader than our own still needs; None if there is none.

        Raises:
            LogError: A position cannot be read, or one that is to be dropped cannot be removed.
        """
        positions = self.others()
        for name in [name for name in positions if self._is_late(name)]:
            if self._drop(name, f"it has not moved for {self._timeout:.0f} s (readerTimeout)"):
                del positions[name]
        return min((position.next for position in positions.values()), default=None)

    def others(self) -> dict[str, ReaderPosition]:
        """The positions of all readers but our own, by name.

        Every reader has a position in the partition that every log has. Who has none here has yet to come, and needs
        all of it.
        """
        positions, to_come = self._storage.positions(), set()
        if self._storage.partition != PARTITION:
            for name, position in self._storage.of(PARTITION).positions().items():
                if name not in positions:
                    positions[name] = position._replace(next=0)
                    to_come.add(name)
        self._to_come = to_come
        positions.pop(self.own or "", None)
        terms = [position.terms for position in positions.values() if position.terms is not None]
        self.retention = max((wanted.retention for wanted in terms), default=0.0)
        return positions

    def replaying(self) -> str | None:
        """The name of another reader that runs and has a ``replayEndpoint``; None if there is none.

        Raises:
            LogError: A position cannot be read.
        """
        for name, position in self.others().items():
            if position.terms is not None and position.terms.replays and self._at(name).is_reading(name):
                return name
        return None

    def give_way(self, below: int) -> bool:
        """Drop the readers that need an id below this one: the log needs room, and nobody else needs those.

        Not if one of them runs, or its user has named it, because nothing can be deleted then; and not if no reader
        runs, because nobody would gain from it.

        Returns:
            Whether nobody needs these ids any more.

        Raises:
            LogError: As ``needed``.
        """
        positions = self.others()
        slow = [name for name, position in positions.items() if position.next < below]
        if not slow or any(positions[name].named or self._at(name).is_reading(name) for name in slow):
            return False
        if self.own is None and not any(
            self._at(name).is_reading(name) for name in positions if name not in slow
        ):
            return False
        dropped = [
            self._drop(name, "the log has reached walMaxBytes, and it has no name (reader)") for name in slow
        ]
        return all(dropped)

    def _at(self, name: str) -> LogStorage:
        """Where a reader has its position, and its lock, as of the last look at all."""
        return self._storage.of(PARTITION) if name in self._to_come else self._storage

    def path_of(self, name: str) -> str:
        """Where a reader's position is, for messages."""
        return self._at(name).reader_path(name)

    def _is_late(self, name: str) -> bool:
        if math.isinf(self._timeout):
            return False
        moved = self._at(name).moved_at(name)
        return moved is not None and self._clock() - moved > self._timeout

    def _drop(self, name: str, why: str) -> bool:
        """Drop the position of a reader; False if it runs."""
        at = self._at(name)
        # A query that begins has its name in the first partition first, and in the others a moment later.
        if at.is_reading_elsewhere(name) or self._storage.of(PARTITION).is_reading(name):
            return False
        try:
            lock = at.lock_reader(name, 0.0)
        except LogLockedError:
            return False
        try:
            _log.warning(
                "log %s: what the query %r still needs is kept no longer: it does not run, and %s. When it comes back "
                "and misses something, failOnDataLoss decides",
                self._storage.root,
                name,
                why,
            )
            for partition in self._storage.partitions():  # in none of them it is missed
                self._storage.of(partition).remove_reader(name)
            at.remove_reader_lock(name)
        finally:
            lock.release()
        return True
