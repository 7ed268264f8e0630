"""A query on a log that another process fills: what ``Ingest`` is to a query on a socket."""

from __future__ import annotations

import time

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.log import REFRESH_SECONDS, LogFollower, LogStorage, read_saved_state
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.sequences import Totals
from zmq_datasource.source.followed_losses import FollowedLosses
from zmq_datasource.source.kept import read_counters
from zmq_datasource.source.source_facts import SourceFacts
from zmq_datasource.source.stop_losses import StopRecord, read_record

__all__ = ["FollowingSource"]


class FollowingSource:
    """A log partition that another process fills; opens no socket and does not keep the log from its writer.

    Args:
        storage: Of the log.
        options: Of the query.
        counters: The query's.
    """

    def __init__(self, storage: LogStorage, options: StreamReadOptions, counters: SourceCounters) -> None:
        self._losses = None if options.numbering is None else FollowedLosses(storage, options)
        self._counters = counters
        self._storage = storage
        self.log = LogFollower(storage, options.wal_retry_timeout)
        self._faults = LimitedLog(__name__, "states that could not be read")
        self._kept: tuple[int, SourceCounters | None, Totals | None] = (-1, None, None)
        self._stops, self._next_stops = StopRecord(), 0.0

    def start(self) -> None:
        """Receiving is somebody else's."""

    def check(self) -> None:
        """Raise that messages were lost which the writer has noticed, if ``onLoss`` says so.

        Raises:
            MessageLossError: See the message.
        """
        if self._losses is not None and self._losses.failure is not None:
            raise self._losses.failure

    @property
    def received_end(self) -> int:
        """The durable end of the log."""
        return self.seal()

    def seal(self) -> int:
        """The durable end of the log, as far as it is known here.

        Raises:
            LogError: It cannot be listed; where that may pass, after ``walRetryTimeout``.
        """
        self.log.refresh()
        end = self.log.durable_end
        if self._losses is not None:
            self._read_kept(end)
        return end

    def wait_for_more(self, end: int, seconds: float) -> None:
        """Look now and then whether there is something after ``end``, for so many seconds."""
        deadline = time.monotonic() + seconds
        while self.seal() <= end and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, REFRESH_SECONDS))

    def gather(self, _timeout: float, _idle_timeout: float | None) -> int:
        """What is there is there: it is received whether a query runs or not."""
        return self.seal()

    def commit(self, end: int) -> None:
        """Deleting is somebody else's, too."""

    def facts(self) -> SourceFacts:
        """What the log keeps of its writer's account, as of its newest chunk."""
        end = self.seal()  # Spark lists the log only between batches
        self._read_kept(end)
        if time.monotonic() >= self._next_stops:
            self._next_stops = time.monotonic() + REFRESH_SECONDS + self._storage.leisure
            try:
                self._stops = read_record(self._storage)
            except LogError as e:
                self._faults.warn("%s", e)
        _, receiver, totals = self._kept
        if receiver is not None:
            receiver.lost_at_stop, receiver.lossy_stops = self._stops.messages, self._stops.stops
        return SourceFacts(self._counters, receiver, received=end, receives=False, totals=totals)

    def _read_kept(self, end: int) -> None:
        """Read what the log keeps, unless that was done at this end."""
        if self._kept[0] == end:
            return
        newest = self.log.newest
        try:
            saved = read_saved_state(self._storage, None if newest is None else newest.first)
            if self._losses is not None:
                self._losses.look(saved)
            self._kept = end, *read_counters(saved)
        except LogError as e:
            self._faults.warn("%s", e)

    def stop(self) -> None:
        """Say what was left unsaid."""
        self._faults.flush()
        if self._losses is not None:
            self._losses.flush()
