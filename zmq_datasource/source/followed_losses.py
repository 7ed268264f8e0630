"""Losses that another process has noticed: a query that follows its log acts on them, as its own ``onLoss`` says."""

from __future__ import annotations

from zmq_datasource.errors import SocketError
from zmq_datasource.log import LogStorage
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.incidents import Incidents
from zmq_datasource.source.kept import tracker_of
from zmq_datasource.source.terms import is_replayed

__all__ = ["FollowedLosses"]


class FollowedLosses:
    """Of one log partition, from the first ``look`` on: what was noticed before is another run's.

    Args:
        storage: Of the partition.
        options: Of the query.
    """

    def __init__(self, storage: LogStorage, options: StreamReadOptions) -> None:
        self._storage = storage
        self._incidents = Incidents(options, None, None)
        self._begin: int | None = None
        self._done: set[int] = set()

    @property
    def failure(self) -> SocketError | None:
        """Why the query must end."""
        return self._incidents.failure

    def look(self, saved: bytes) -> None:
        """Act on the losses in the writer's state that were not there before.

        A gap that the writer still asks the publisher for is none yet.

        Raises:
            LogError: The writer's terms cannot be read.
        """
        tracker = tracker_of(saved)
        next_gap = 0 if tracker is None else tracker.gaps.next_serial
        if self._begin is None:
            self._begin = next_gap
        if tracker is None:
            return
        new = [
            gap
            for gap in tracker.gaps
            if gap.serial >= self._begin and gap.healed is None and gap.serial not in self._done
        ]
        if new and is_replayed(self._storage):
            asked = {gap.serial for key in {gap.key for gap in new} for gap in tracker.missing(key)}
            new = [gap for gap in new if gap.final or gap.serial not in asked]
        self._incidents.tracker = tracker
        self._incidents.lose(new)
        self._done = {gap.serial for gap in tracker.gaps if gap.serial in self._done} | {
            g.serial for g in new
        }

    def flush(self) -> None:
        """Log what was left out so far."""
        self._incidents.flush()
