"""A log that another process fills."""

from __future__ import annotations

import threading
import time

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogError, SocketError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import (
    REFRESH_SECONDS,
    STORE_RETRY_SECONDS,
    LogFollower,
    LogStorage,
    read_saved_state,
)
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.sequences import Totals
from zmq_datasource.source.facts import SourceFacts, read_counters, saved_tracker
from zmq_datasource.source.incidents import Incidents
from zmq_datasource.source.location import is_replayed


class FollowingSource:
    """Reads a log that another process fills (the writer). Opens no socket, and does not take the log's lock.

    A ``Feed`` has either this or an ``Ingest``, and calls the same methods; but here ``refresh``, and there ``seal``.
    """

    def __init__(
        self,
        storage: LogStorage,
        options: StreamReadOptions,
        counters: SourceCounters,
        retry_seconds: float = STORE_RETRY_SECONDS,
    ) -> None:
        self._losses = None if options.numbering is None else _FollowedLosses(storage, options)
        self._counters = counters
        self._storage = storage
        self.log = LogFollower(storage, retry_seconds)
        self._faults = LimitedLog(__name__, "states that could not be read")
        self._reading = threading.Lock()
        # From the newest saved state that was read: the end of the log then, the writer's counters and its totals.
        self._saved: tuple[int, SourceCounters | None, Totals | None] = (-1, None, None)

    def start(self) -> None:
        """Do nothing: another process receives."""

    def check(self) -> None:
        """Raise an error if this query has ``onLoss=fail``, and the writer has noticed losses while this query ran.

        Raises:
            MessageLossError: Messages were lost.
        """
        if self._losses is not None and self._losses.failure is not None:
            raise self._losses.failure

    @property
    def received_end(self) -> int:
        """The durable end of the log."""
        return self.refresh()

    def refresh(self) -> int:
        """List new chunks. Returns the durable end of the log that they show. (Only the writer makes messages durable.)

        Raises:
            LogError: The log cannot be listed. A fault that may pass is raised only after ``retry_seconds``.
        """
        self.log.refresh()
        end = self.log.durable_end
        if self._losses is not None:
            self._read_saved(end)
        return end

    def wait_for_more(self, end: int, seconds: float) -> None:
        """Wait until the durable end is beyond ``end``, for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.refresh() <= end and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, REFRESH_SECONDS))

    def receive_for(self, _timeout: float, _idle_timeout: float | None) -> int:
        """Return the durable end at once: only the writer receives."""
        return self.refresh()

    def commit(self, end: int) -> None:
        """Do nothing: only the writer deletes chunks."""

    def facts(self) -> SourceFacts:
        """The figures of the writer when it sealed the newest chunk, and the counters of this query."""
        end = self.refresh()  # during a long batch Spark asks for no offset, so nothing else lists new chunks
        self._read_saved(end)
        _, receiver, totals = self._saved
        return SourceFacts(self._counters, receiver, received=end, receives=False, totals=totals)

    def _read_saved(self, end: int) -> None:
        """Read the writer's saved state if ``end`` has changed since the last reading, and act on its losses."""
        with self._reading:  # the threads of the query and of its monitor read
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

    def act_on_losses(self, saved: bytes) -> SocketError | None:
        """Act on the losses in the last state of a writer that has ended, before this process receives.

        Returns:
            Why the query must end; None if it need not.

        Raises:
            LogError: The writer's note on whether it uses a replay cannot be read.
        """
        if self._losses is None:
            return None
        with self._reading:
            self._losses.act_on(saved)
        return self._losses.failure

    def stop(self) -> None:
        """Log how many warnings the rate limit has left out."""
        self._faults.flush()
        if self._losses is not None:
            self._losses.flush()


class _FollowedLosses:
    """Applies the query's ``onLoss`` to losses that the writer notices while the query runs."""

    def __init__(self, storage: LogStorage, options: StreamReadOptions) -> None:
        self._storage = storage
        self._incidents = Incidents(options, None)
        self._first_serial: int | None = None  # a gap with a smaller serial number is older than the query
        self._reported: set[int] = set()  # the serial numbers of the gaps that were reported

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
            requested = {gap.serial for key in {gap.key for gap in new} for gap in tracker.missing(key)}
            new = [gap for gap in new if gap.final or gap.serial not in requested]
        self._incidents.tracker = tracker
        self._incidents.report_lost(new)
        # Forget gaps that have left the table, so that the set stays as small as the table.
        self._reported = {gap.serial for gap in tracker.gaps if gap.serial in self._reported}
        self._reported |= {gap.serial for gap in new}

    def flush(self) -> None:
        """Log how many warnings the rate limit has left out."""
        self._incidents.flush()
