"""Wait until the process that receives a feed has ended, to receive in its place."""

from __future__ import annotations

import time
from collections.abc import Callable

from zmq_datasource.errors import DataLossError, DiskFaultError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import STORE_RETRY_SECONDS, LogStorage
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.receive_loop import Stopping
from zmq_datasource.source.receives import refusal

_BUCKET_SECONDS = 2.0


class Standby:
    """Waits while another process receives into a log.

    A store that refuses is waited for, up to ``STORE_RETRY_SECONDS``.

    Args:
        storage: The log.
        options: The options of the feed.

    Attributes:
        log_id: The log's id. A log with another id is never filled.
        check_seconds: How often to check whether the lock is free.
    """

    check_seconds = 0.25

    def __init__(self, storage: LogStorage, options: StreamReadOptions) -> None:
        self._storage, self._options = storage, options
        self.log_id = storage.log_id_again()
        if storage.request_interval:  # each request to a bucket costs money
            self.check_seconds = _BUCKET_SECONDS
        self._faults = LimitedLog(__name__, "faults of the store")

    def wait(self, stopping: Stopping, tick: Callable[[], None], take_over: Callable[[], bool]) -> bool:
        """Wait until ``take_over`` returns True. False if ``stopping`` is set before.

        Args:
            stopping: Ends the wait.
            tick: Called in each round.
            take_over: Receives in place of the process that has ended; returns False if another process is quicker.

        Raises:
            Exception: Receiving in its place has failed.
        """
        refusing_since: float | None = None
        while not stopping.wait(self.check_seconds):
            tick()
            try:
                if not self._is_received() and take_over():
                    return True
                refusing_since = None
            except DiskFaultError as e:
                refusing_since = refusing_since or time.monotonic()
                if time.monotonic() - refusing_since >= STORE_RETRY_SECONDS:
                    raise
                self._faults.warn("waiting to receive in place of another process: %s", e)
        return False

    def _is_received(self) -> bool:
        """Whether another process writes the log, with the same options. It must be there: a standby makes no log."""
        self.check_log(self._storage.log_id_again())
        if not self._storage.writer():
            return False
        if why := refusal(self._storage, self._options):
            raise why
        return True

    def check_log(self, found: str) -> None:
        """Raise DataLossError if the log that was found is another one than ``log_id``."""
        if found != self.log_id:
            raise DataLossError(
                f"following log {self._storage.root}: it is another log now ({found}, not {self.log_id}); give "
                "the query a new checkpoint"
            )
