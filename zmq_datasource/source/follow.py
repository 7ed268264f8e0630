"""A query on a log that another process fills: what ``Ingest`` is to a query on a socket."""

from __future__ import annotations

from typing import ClassVar, Literal

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogError
from zmq_datasource.log.follower import FollowedLog
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.options import StreamReadOptions

__all__ = ["Follow"]


class Follow:
    """Reads along; opens no socket and does not keep the log from its writer.

    Args:
        options: ``walLocation`` and ``reader``.
    """

    follows: ClassVar[Literal[True]] = True
    judge = None

    def __init__(self, options: StreamReadOptions) -> None:
        assert options.wal_location is not None, "options ask for an endpoint or a log"
        self._options = options
        self.counters = SourceCounters()
        self.reader = options.reader
        self.storage = LogStorage(options.wal_location)
        self.log: FollowedLog
        self._is_open = False
        self.resumed_at = 0

    def open(self) -> None:
        """Find the log, and keep what there is from being deleted until ``give`` says what is needed.

        Raises:
            LogFormatError: There is none.
            LogLockedError: Another query reads it under this name.
        """
        self.log = FollowedLog(self.storage, self.reader)
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

    def wait_for_more(self, _end: int, _seconds: float) -> None:
        """Nobody here is told when there is more: whoever asks has the directory listed."""

    def gather(self, _timeout: float, _idle_timeout: float | None) -> int:
        """What is there is there: it is received whether a query runs or not."""
        return self.seal()

    def give(self, begin: int, end: int) -> None:
        """The query is about to be given the ids from ``begin`` to ``end``, and needs nothing below."""
        self.log.give(begin, end)

    def commit(self, end: int) -> None:
        """The query is done with what is below ``end``."""
        self.log.commit(end)

    def stop(self) -> None:
        """Let another query have the name."""
        self._lock.release()
