"""Wait until the process that receives a feed has ended, to receive in its place."""

from __future__ import annotations

import time
from collections.abc import Callable

from zmq_datasource.errors import DataLossError, DiskFaultError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import STORE_RETRY_SECONDS, LogStorage
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.receive_loop import Stopping
from zmq_datasource.source.receives import differences, refused

_BUCKET_SECONDS = 2.0
# A process that has had the log's lock for this long counts as receiving without errors.
_STABLE_SECONDS = 2.0


class Standby:
    """Waits while another process receives into a log.

    An attempt to receive in its place that fails is repeated for a while: the port may become free a moment later than
    the log.

    Args:
        storage: The log.
        options: The options of the feed.

    Attributes:
        log_id: The log's id. A log with another id is never filled.
        check_seconds: How often to check whether the lock is free.
        takeover_seconds: How long a failing attempt is repeated.
    """

    check_seconds = 0.25
    takeover_seconds = 15.0

    def __init__(self, storage: LogStorage, options: StreamReadOptions) -> None:
        self._storage, self._options = storage, options
        self.log_id = storage.log_id_again()
        if storage.request_interval:  # each request to a bucket costs money
            self.check_seconds = _BUCKET_SECONDS
        self._faults = LimitedLog(__name__, "attempts to receive in place of another process")

    def wait(self, stopping: Stopping, tick: Callable[[], None], take_over: Callable[[], bool]) -> bool:
        """Wait until ``take_over`` returns True. False if ``stopping`` is set before.

        Args:
            stopping: Ends the wait.
            tick: Called in each round.
            take_over: Receives in place of the process that has ended; returns False if another process is quicker.

        Raises:
            ZmqDataSourceError: The attempts have failed for ``takeover_seconds``.
        """
        failing_since: float | None = None  # when the first of the failed attempts was made
        received_since: float | None = None  # when another process was first seen to receive
        while not stopping.wait(self.check_seconds):
            now = time.monotonic()
            tick()
            try:
                if self._is_received():
                    # A process whose attempt to receive fails has the lock for a moment, too.
                    received_since = received_since or now
                    if now - received_since >= _STABLE_SECONDS:
                        failing_since = None
                    continue
                received_since = None
                if take_over():
                    return True
            except Exception as e:  # an error that lasts must end receiving, or it would wait for ever
                now = time.monotonic()
                failing_since = failing_since or now
                lasting = STORE_RETRY_SECONDS if isinstance(e, DiskFaultError) else 0.0
                if now - failing_since >= max(self.takeover_seconds, lasting):
                    raise
                self._faults.warn("receiving in place of a process that has ended: %s", e)
        return False

    def _is_received(self) -> bool:
        """Whether another process writes the log, with the same options. It must be there: a standby makes no log."""
        self.check_log(self._storage.log_id_again())
        if not self._storage.writer():
            return False
        if found := differences(self._storage, self._options):
            # Repeated like a failing takeover, because the record may be older than the lock.
            raise refused(self._storage, self._options, found)
        return True

    def check_log(self, found: str) -> None:
        """Raise DataLossError if the log that was found is another one than ``log_id``."""
        if found != self.log_id:
            raise DataLossError(
                f"following log {self._storage.root}: it is another log now ({found}, not {self.log_id}); give "
                "the query a new checkpoint"
            )
