"""A query on a log that another process fills: what ``Ingest`` is to a query on a socket."""

from __future__ import annotations

import time
from typing import Literal

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.log.follower import LOOKING_SECONDS, LogFollower
from zmq_datasource.log.persistence import Persistence
from zmq_datasource.log.state import read_saved_state
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.sequences import Totals
from zmq_datasource.source.kept import read_counters
from zmq_datasource.source.log_source import SourceFacts

__all__ = ["FollowingSource"]


class FollowingSource:
    """A ``LogSource`` that reads along; opens no socket and does not keep the log from its writer.

    Args:
        options: ``walLocation`` and ``reader``.
    """

    # What a log holds that somebody else fills was received for whoever reads it.
    default_position: Literal["earliest"] = "earliest"

    def __init__(self, options: StreamReadOptions) -> None:
        assert options.wal_location is not None, "options ask for an endpoint or a log"
        self._options = options
        self.counters = SourceCounters()
        self.reader = options.reader
        self.storage = LogStorage(options.wal_location)
        self.log: LogFollower
        self._persistence = Persistence(options.wal_retry_timeout)
        self._faults = LimitedLog(__name__, "states that could not be read")
        self._kept: tuple[int, SourceCounters | None, Totals | None] = (-1, None, None)
        self._is_open = False
        self.resumed_at = 0

    def open(self) -> None:
        """Find the log, and keep what there is from being deleted until ``give`` says what is needed.

        A disk that refuses is waited for.

        Raises:
            LogFormatError: There is none.
            LogLockedError: Another query reads it under this name.
        """
        self._persistence.insist(self._open)

    def _open(self) -> None:
        self.log = LogFollower(self.storage, self.reader)
        self._lock = self.storage.lock_reader(self.reader)
        try:
            self.log.open()
        except LogError:
            self._lock.release()
            raise
        self._is_open = True
        self.resumed_at = self.log.durable_end

    def start(self) -> None:
        """Open the log, unless that is done; receiving is somebody else's."""
        if not self._is_open:
            self.open()

    @property
    def given(self) -> int | None:
        """The id after the last one that was ever given to a query of this name; None if that is not known."""
        return self.log.given

    @property
    def received_end(self) -> int:
        """The durable end of the log."""
        return self.seal()

    def seal(self) -> int:
        """The durable end of the log."""
        self.log.refresh()
        return self.log.durable_end

    def wait_for_more(self, end: int, seconds: float) -> None:
        """Look now and then whether there is something behind ``end``, for so many seconds."""
        deadline = time.monotonic() + seconds
        while self.seal() <= end and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, LOOKING_SECONDS))

    def gather(self, _timeout: float, _idle_timeout: float | None) -> int:
        """What is there is there: it is received whether a query runs or not."""
        return self.seal()

    def give(self, begin: int, end: int) -> None:
        """The query is about to be given the ids from ``begin`` to ``end``, and needs nothing below."""
        self.log.give(begin, end)

    def commit(self, end: int) -> None:
        """The query is done with what is below ``end``."""
        self.log.commit(end)

    def facts(self) -> SourceFacts:
        """What the log keeps of its writer's account, as of its newest chunk."""
        end = self.seal()  # Spark lists the log only between batches
        if self._kept[0] != end:
            try:
                saved = read_saved_state(self.storage)
                self._kept = end, *read_counters(saved.full, saved.delta)
            except LogError as e:
                self._faults.warn("%s", e)
        _, receiver, totals = self._kept
        return SourceFacts(self.counters, receiver, received=end, receives=False, totals=totals)

    def stop(self) -> None:
        """Let another query have the name."""
        self._faults.flush()
        self._lock.release()
