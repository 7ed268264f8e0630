"""Read a log that another process fills. ``FollowingSource`` has the methods of ``Ingest``, but receives nothing."""

from __future__ import annotations

import time

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogError, SocketError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.log import REFRESH_SECONDS, LogFollower, LogStorage, read_saved_state
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.sequences import Totals
from zmq_datasource.source.facts import SourceFacts, read_counters, saved_tracker
from zmq_datasource.source.incidents import Incidents
from zmq_datasource.source.location import is_replayed
from zmq_datasource.source.stop_losses import StopRecord, read_record

__all__ = ["FollowingSource"]


class FollowingSource:
    """Reads a log partition that another process fills (the writer). Opens no socket, and does not take the log's lock.

    Args:
        storage: The partition.
        options: The options of the query.
        counters: The counters of the query.
    """

    def __init__(self, storage: LogStorage, options: StreamReadOptions, counters: SourceCounters) -> None:
        self._losses = None if options.numbering is None else _FollowedLosses(storage, options)
        self._counters = counters
        self._storage = storage
        self.log = LogFollower(storage, options.wal_retry_timeout)
        self._faults = LimitedLog(__name__, "states that could not be read")
        # The newest saved state that was read: the end of the log at that time, the writer's counters and totals.
        self._saved: tuple[int, SourceCounters | None, Totals | None] = (-1, None, None)
        self._stops, self._next_stops = StopRecord(), 0.0  # and when to read the record of stops again

    def start(self) -> None:
        """Do nothing: another process receives."""

    def check(self) -> None:
        """Raise an error if the writer has noticed losses while this query ran, and its ``onLoss`` is ``fail``.

        Raises:
            MessageLossError: Messages were lost.
        """
        if self._losses is not None and self._losses.failure is not None:
            raise self._losses.failure

    @property
    def received_end(self) -> int:
        """The durable end of the log."""
        return self.seal()

    def seal(self) -> int:
        """Look for new chunks, and return the durable end of the log as this process knows it. Only the writer seals.

        Raises:
            LogError: The log cannot be listed. A fault that may pass is raised only after ``walRetryTimeout``.
        """
        self.log.refresh()
        end = self.log.durable_end
        if self._losses is not None:
            self._read_saved(end)
        return end

    def wait_for_more(self, end: int, seconds: float) -> None:
        """Wait until the durable end is beyond ``end``, for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.seal() <= end and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, REFRESH_SECONDS))

    def receive_for(self, _timeout: float, _idle_timeout: float | None) -> int:
        """Return the durable end at once: only the writer receives."""
        return self.seal()

    def commit(self, end: int) -> None:
        """Do nothing: only the writer deletes chunks."""

    def facts(self) -> SourceFacts:
        """The figures of the writer when it sealed the newest chunk, and the counters of this query."""
        end = self.seal()  # a long batch asks for no offset, so nothing else looks for new chunks
        self._read_saved(end)
        if time.monotonic() >= self._next_stops:
            self._next_stops = time.monotonic() + REFRESH_SECONDS + self._storage.leisure
            try:
                self._stops = read_record(self._storage)
            except LogError as e:
                self._faults.warn("%s", e)
        _, receiver, totals = self._saved
        if receiver is not None:
            receiver.lost_at_stop, receiver.lossy_stops = self._stops.messages, self._stops.stops
        return SourceFacts(self._counters, receiver, received=end, receives=False, totals=totals)

    def _read_saved(self, end: int) -> None:
        """Read the writer's saved state if ``end`` has changed since the last reading, and act on its losses."""
        if self._saved[0] == end:
            return
        newest = self.log.newest
        try:
            saved = read_saved_state(self._storage, None if newest is None else newest.first)
            if self._losses is not None:
                self._losses.act_on(saved)
            self._saved = end, *read_counters(saved)
        except LogError as e:
            self._faults.warn("%s", e)

    def stop(self) -> None:
        """Log how many warnings the rate limit has left out."""
        self._faults.flush()
        if self._losses is not None:
            self._losses.flush()


class _FollowedLosses:
    """Applies the query's ``onLoss`` to losses that the writer of a partition notices while the query runs.

    Args:
        storage: The partition.
        options: The options of the query.
    """

    def __init__(self, storage: LogStorage, options: StreamReadOptions) -> None:
        self._storage = storage
        self._incidents = Incidents(options, None, None)
        self._first_serial: int | None = None  # gaps with a smaller one are older than the query
        self._reported: set[int] = set()

    @property
    def failure(self) -> SocketError | None:
        """Why the query must end."""
        return self._incidents.failure

    def act_on(self, saved: bytes) -> None:
        """Report the new losses in the writer's saved state.

        A gap that a replay may still fill is not reported yet.

        Raises:
            LogError: The writer's note on whether it uses a replay cannot be read.
        """
        tracker = saved_tracker(saved)
        next_serial = 0 if tracker is None else tracker.gaps.next_serial
        if self._first_serial is None:
            self._first_serial = next_serial
        if tracker is None:
            return
        new = [
            gap
            for gap in tracker.gaps
            if gap.serial >= self._first_serial and gap.healed is None and gap.serial not in self._reported
        ]
        if new and is_replayed(self._storage):
            asked = {gap.serial for key in {gap.key for gap in new} for gap in tracker.missing(key)}
            new = [gap for gap in new if gap.final or gap.serial not in asked]
        self._incidents.tracker = tracker
        self._incidents.report_lost(new)
        # Forget gaps that have left the table, so that the set stays as small as the table.
        self._reported = {gap.serial for gap in tracker.gaps if gap.serial in self._reported}
        self._reported |= {gap.serial for gap in new}

    def flush(self) -> None:
        """Log how many warnings the rate limit has left out."""
        self._incidents.flush()
