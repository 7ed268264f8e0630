"""Decides what happens to ids that the log's writer has deleted between the planning of a read and the read itself.

The writer deletes from the front, if the log is full (``whenFull=discard``), or if no query needs the ids and
``walRetention`` has passed. A missing chunk counts as deleted if the log begins after it, and as lost if the log begins
before it. With ``failOnDataLoss=false`` reading continues after it in both cases, but only if the log is there and has
the same id: an unmounted directory remains an error.
"""

from __future__ import annotations

import logging
from functools import partial

from zmq_datasource.errors import DataLossError, LogError
from zmq_datasource.log.listing import read_index
from zmq_datasource.log.reader_records import ReaderRecords
from zmq_datasource.log.retrier import retry_reading
from zmq_datasource.log.storage import LogStorage

__all__ = ["Deletions", "begin_of", "deleted"]

_log = logging.getLogger(__name__)


def deleted(storage: LogStorage, first: int, end: int) -> DataLossError:
    """The error of a read whose ids ``[first, end)`` the log's writer has deleted since the read was planned."""
    return DataLossError(
        f"reading: {_what(storage, first, end)}. Raise walMaxBytes or walRetention where the log is written. To go on "
        "with the ids that are left, set failOnDataLoss=false"
    )


def _what(storage: LogStorage, first: int, end: int) -> str:
    return (
        f"the writer of {storage} deleted the ids {first} to {end - 1} between the planning of the batch and the "
        "reading, because the log was full (whenFull=discard) or their retention had passed"
    )


def begin_of(storage: LogStorage, log_id: str) -> int | None:
    """The first id of a partition; None if another log is in its place, or there is no chunk.

    Raises:
        LogError: There is no log, or it cannot be listed, or a chunk in the middle is missing.
    """
    if storage.log_id() != log_id:
        return None
    index = read_index(storage)
    return index.earliest if len(index) else None  # the writer never deletes the newest chunk


class Deletions:
    """Skips deleted ids for one read, or fails it.

    Args:
        storage: The partition.
        log_id: The id of the log for which the read was planned.
        fails: The option ``failOnDataLoss``.
        reader: The query's name. Skipped ids are recorded for it, so that the process that plans the query's batches
            counts them. None records nothing.
    """

    def __init__(self, storage: LogStorage, log_id: str, fails: bool, reader: str | None = None) -> None:
        self._storage = storage
        self._log_id = log_id
        self._fails = fails
        self._reader = reader

    def skip(self, first: int, chunk_end: int, end: int, gone: DataLossError) -> int:
        """Return the id from which to continue. Called when the ids from ``first`` to ``chunk_end`` are gone.

        Args:
            first: The first missing id.
            chunk_end: The end of its chunk.
            end: The end of the whole read.
            gone: The error that reading the chunk has raised.

        Raises:
            DataLossError: Without the log, ``gone``. With ``failOnDataLoss``, ``gone`` if the chunk is lost, and
                ``deleted`` if the writer has deleted it.
        """
        begin = self._begin(gone)
        is_deleted = begin >= chunk_end
        if self._fails and not is_deleted:
            raise gone
        if self._fails:
            raise deleted(self._storage, first, min(begin, end)) from gone
        skipped = min(begin, end) if is_deleted else chunk_end
        _log.warning(
            "data loss: %s; continuing after these ids because failOnDataLoss=false",
            _what(self._storage, first, skipped) if is_deleted else gone,
        )
        if self._reader is not None:
            try:
                self._record(self._reader, first, skipped)
            except LogError as e:
                _log.error("%s. dataLosses and messagesExpired do not count these ids", e)
        return skipped

    def _begin(self, gone: DataLossError) -> int:
        """The first id that the log has now.

        Raises:
            DataLossError: ``gone``, if the log is not there, is another one, or has no chunk.
        """
        try:
            begin = self._ask()
        except LogError as e:
            raise gone from e
        if begin is None:
            raise gone
        return begin

    def _ask(self) -> int | None:
        return retry_reading(partial(begin_of, self._storage, self._log_id), self._storage.retry_seconds)

    def _record(self, reader: str, first: int, end: int) -> None:
        ReaderRecords(self._storage).write_skipped(reader, first, end)
