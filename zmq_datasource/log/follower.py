"""A log that another process writes, as a reader sees it: listed now and then, never locked."""

from __future__ import annotations

import threading
import time

from zmq_datasource.errors import DataLossError
from zmq_datasource.log.contents import ReadableLog
from zmq_datasource.log.listing import ChunkListing
from zmq_datasource.log.storage import LogStorage

__all__ = ["LOOKING_SECONDS", "LogFollower"]

LOOKING_SECONDS = 0.05


class LogFollower(ReadableLog):
    """A log partition that another process writes."""

    full, fault = False, None  # the writer's affair
    unsealed = unsealed_bytes = 0  # and so is what is not there yet

    def __init__(self, storage: LogStorage) -> None:
        super().__init__()
        self._storage = storage
        self._listing = ChunkListing(storage, self._contents)
        self._looking = threading.Lock()  # Spark's calls and the metrics' thread meet here
        self._next_look = 0.0
        self.log_id = storage.log_id()

    def refresh(self) -> None:
        """Look for what has changed, if the last look is not quite new.

        One thread at a time: of two listings at once, the one that began first could be the last to be kept.
        """
        with self._looking:
            if time.monotonic() >= self._next_look:
                self._look()

    def look(self) -> None:
        """List the log as it is now."""
        with self._looking:
            self._look(anew=True)

    def _look(self, anew: bool = False) -> None:
        began = time.monotonic()
        found = self._storage.log_id_again()
        if found != self.log_id:
            raise DataLossError(
                f"reading along log {self._storage.root}: it was made anew ({found}, not {self.log_id}); give the "
                "query a new checkpoint"
            )
        self._listing.refresh(anew)
        self._next_look = began + LOOKING_SECONDS
