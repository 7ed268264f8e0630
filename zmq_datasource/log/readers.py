"""Whose messages a log keeps: the positions of those who read it, as whoever deletes sees them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from zmq_datasource.errors import LogLockedError
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
    """

    def __init__(
        self, storage: LogStorage, timeout: float = math.inf, clock: Callable[[], float] = time.time
    ) -> None:
        self._storage = storage
        self._timeout = timeout
        self._clock = clock
        self.own: str | None = None

    def needed(self, full: bool = False) -> int | None:
        """The first id that another reader than our own still needs; None if there is none.

        Args:
            full: Whether the log needs room. Then a reader that does not run, and that nobody has named, gives way if
                another one runs.

        Raises:
            LogError: A position cannot be read, or one that is to be dropped cannot be removed.
        """
        positions = self._storage.positions()
        positions.pop(self.own or "", None)
        for name in [name for name in positions if self._is_late(name)]:
            if self._drop(name, f"it has not moved for {self._timeout:.0f} s (readerTimeout)"):
                del positions[name]
        while full and positions:
            name = min(positions, key=lambda name: positions[name].next)
            others = self.own is not None or any(self._runs(other) for other in positions if other != name)
            if positions[name].named or not others:  # nobody would gain from it
                break
            if not self._drop(name, "the log has reached walMaxBytes, and it has no name (reader)"):
                break
            del positions[name]
        return min((position.next for position in positions.values()), default=None)

    def _is_late(self, name: str) -> bool:
        if math.isinf(self._timeout):
            return False
        moved = self._storage.moved_at(name)
        return moved is not None and self._clock() - moved > self._timeout

    def _runs(self, name: str) -> bool:
        try:
            self._storage.lock_reader(name, 0.0).release()
        except LogLockedError:
            return True
        return False

    def _drop(self, name: str, why: str) -> bool:
        """Drop the position of a reader; False if it runs."""
        try:
            lock = self._storage.lock_reader(name, 0.0)
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
            self._storage.remove_reader(name)
            self._storage.remove_reader_lock(name)
        finally:
            lock.release()
        return True
