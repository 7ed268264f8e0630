"""A log that another process writes, as a reader sees it: listed now and then, never locked."""

from __future__ import annotations

import threading
import time

from zmq_datasource.errors import DataLossError
from zmq_datasource.log.contents import ReadableLog
from zmq_datasource.log.listing import ChunkListing
from zmq_datasource.log.reader_files import ReaderPosition
from zmq_datasource.log.storage import LogStorage

__all__ = ["LOOKING_SECONDS", "LogFollower"]

LOOKING_SECONDS = 0.05
# A writer that deletes, or another reader that records its position, is done with that soon.
_PLACING_SECONDS = 30.0


class LogFollower(ReadableLog):
    """A log partition that another process writes.

    Args:
        reader: Names who reads, for the writer to know what may be deleted.
    """

    full, fault = False, None  # the writer's affair
    unsealed = unsealed_bytes = 0  # and so is what is not there yet

    def __init__(self, storage: LogStorage, reader: str) -> None:
        super().__init__()
        self._storage = storage
        self._reader = reader
        self._listing = ChunkListing(storage, self._contents)
        self._looking = threading.Lock()  # Spark's calls and the metrics' thread meet here
        self._next_look = 0.0
        self._position: ReaderPosition | None = None
        self.log_id = storage.log_id()

    def open(self) -> None:
        """Record a position before all that there is, so that none of it is deleted meanwhile; then list it.

        Raises:
            LogError: There is no log, or its files are not what was written.
        """
        with self._storage.placing(_PLACING_SECONDS):
            self._position = self._storage.position(self._reader)
            self._look()
            self._write_position(self.earliest, self.given)

    @property
    def given(self) -> int | None:
        """The id after the last one that was ever given to a query of this name; None if that is not known."""
        return None if self._position is None else self._position.given

    def refresh(self) -> None:
        """Look for what has changed, if the last look is not quite new.

        One thread at a time: of two listings at once, the one that began first could be the last to be kept.
        """
        with self._looking:
            if time.monotonic() >= self._next_look:
                self._look()

    def _look(self) -> None:
        began = time.monotonic()
        found = self._storage.log_id()
        if found != self.log_id:
            raise DataLossError(
                f"reading along log {self._storage.root}: it was made anew ({found}, not {self.log_id}); give the "
                "query a new checkpoint"
            )
        self._listing.refresh()
        self._next_look = began + LOOKING_SECONDS

    def commit(self, end: int) -> None:
        """This reader will never again ask for an id below ``end``."""
        self._write_position(end, self.given)

    def give(self, begin: int, end: int) -> None:
        """This reader is about to be given the ids from ``begin`` to ``end``, and needs nothing below."""
        self._write_position(begin, max(end, self.given or 0))

    def _write_position(self, needed: int, given: int | None) -> None:
        position = ReaderPosition(needed, given)
        if position != self._position:
            self._storage.write_reader(self._reader, *position)
            self._position = position
