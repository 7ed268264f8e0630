"""Translates between the offsets of a streaming query and the ids of its log, and finds out what the log has lost."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import time as now
from typing import TYPE_CHECKING, Any

from zmq_datasource.errors import DataLossError, LogError, OptionError
from zmq_datasource.log import STORE_RETRY_SECONDS, Chunk, LogStorage, first_since, lost_ids
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.offsets import Offset
from zmq_datasource.options.types import Timestamp

if TYPE_CHECKING:
    from zmq_datasource.source.query_log import QueryLog

_log = logging.getLogger(__name__)

_CONTINUE = "To continue with what the log has, set failOnDataLoss=false"


class OffsetIds:
    """Translates between Spark's offsets, which are JSON, and the ids of one log.

    Args:
        log: The log; open.
        options: ``startingOffsets`` and ``failOnDataLoss``.
    """

    def __init__(self, log: QueryLog, options: StreamReadOptions) -> None:
        self._log = log
        self._options = options
        self._initial: int | None = None
        # The losses that are reported already (Spark asks for the same range several times): the id after the last
        # lost one, and the ids of other logs.
        self._lost_to = 0
        self._lost_logs: set[str] = set()

    def offset(self, next_id: int) -> dict[str, Any]:
        """The offset for this next id."""
        return Offset(self._log.log_id, next_id).to_json()

    def initial(self) -> dict[str, Any]:
        """The offset where a query without a checkpoint begins. The first call chooses it.

        If the lease of a named reader says where to begin (``Lease.begins``), the query begins there.

        Raises:
            OptionError: The log has no id for ``startingOffsets``.
            DataLossError: The log no longer has what ``startingOffsets`` names, and ``failOnDataLoss`` is true.
        """
        log_id = self._log.log_id
        if self._initial is None:
            found = self._log.reader.found
            if found is not None and found.begins:
                self._initial = self._id_of(Offset(log_id, found.next))
            else:
                self._initial = self._first_id()
            self._log.reader.begin(self._initial)
        return Offset(log_id, self._initial, self._initial).to_json()

    def _first_id(self) -> int:
        place, log = self._options.starting_place, self._log.contents
        if place.time is not None:
            return self._first_since(place.time)
        if place.offset is None:
            return self._log.begins_at if place.word == "earliest" else self._log.resumed_at
        if place.offset.log is None and place.offset.next > log.durable_end:
            raise OptionError(
                f"option startingOffsets: it is {place.offset.next}, and the log ends before id {log.durable_end}; "
                "name an id up to that, or latest"
            )
        return self._id_of(place.offset)

    def _first_since(self, time: Timestamp) -> int:
        """The id of the first message that was received at this time or later, or that comes after the start."""
        if time > now() * 1e6:
            raise OptionError(
                f"startingOffsets={time}: it is in the future, and messages that arrive before it would be read, too; "
                "name a time that has passed, or latest"
            )
        log, storage = (
            self._log.contents,
            LogStorage(self._log.storage.store, STORE_RETRY_SECONDS),
        )
        found = first_since(storage, log.covering(self._log.begins_at, log.durable_end), time)
        return self._log.resumed_at if found is None else found

    def id_of(self, start: dict[str, Any]) -> int:
        """The next id for an offset of the query's checkpoint.

        Raises:
            DataLossError: The log no longer has the messages from the offset on, and ``failOnDataLoss`` is true; or the
                offset is beyond the log's end.
        """
        return self._id_of(Offset.from_json(start))

    def _id_of(self, offset: Offset) -> int:
        log = self._log.contents
        if offset.log not in (None, log.log_id):
            self._report_other_log(offset, "the offset is of log")
            return log.earliest
        if offset.next < log.earliest:
            self._report_deleted(offset.next, log.earliest)
            return log.earliest
        if offset.next > log.durable_end:
            # If the query continued, other messages would get these ids.
            raise DataLossError(
                f"reading from {self._log.storage}: the offset is {offset.next}, and the log ends at "
                f"{log.durable_end}: its newest chunks are gone. Restore them, or give the query a new walLocation and "
                "a new checkpoint"
            )
        return offset.next

    def release(self, start: dict[str, Any], begin: int) -> None:
        """Let the log delete the messages below ``begin``: Spark asks for the batch after ``start``, so the batch that
        ends there is done."""
        if not Offset.from_json(start).at_the_beginning:
            self._log.commit(begin)

    def end_offset(self, start: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
        """The offset for ``end``; ``start`` itself if there are no messages after it, because Spark compares offsets as
        text: an offset with another text means new data.

        Args:
            begin: The id of ``start``, from ``id_of``.
        """
        offset, log_id = Offset.from_json(start), self._log.log_id
        if offset.log == log_id and offset.next == begin == end:
            return start
        return Offset(log_id, end, begin if offset.at_the_beginning else None).to_json()

    def begin_of(self, start: dict[str, Any], end: dict[str, Any]) -> Offset:
        """The offset where a batch begins."""
        first, last = Offset.from_json(start), Offset.from_json(end)
        if first.at_the_beginning and last.began is not None:
            # The first batch is repeated (see ``options.offsets``). ``first`` was chosen again, and may have other ids.
            return Offset(last.log, last.began)
        return first

    def range(self, start: dict[str, Any], end: dict[str, Any]) -> tuple[int, int] | None:
        """The first and the end id of a batch; None if the batch was planned on another log.

        Raises:
            DataLossError: As in ``id_of``.
        """
        last = Offset.from_json(end)
        if last.log != self._log.log_id:
            self._report_other_log(last, "the batch ends in log")
            return None
        return self._id_of(self.begin_of(start, end)), self._id_of(last)

    def committed_id(self, end: dict[str, Any]) -> int | None:
        """The next id of a committed offset; None if it is of another log."""
        offset = Offset.from_json(end)
        return offset.next if offset.log == self._log.log_id else None

    def _report_deleted(self, first: int, end: int) -> None:
        what = f"ids {first} to {end - 1} are no longer in {self._log.storage}"
        if self._options.fail_on_data_loss:
            raise DataLossError(f"reading: {what}: {self._why_lost()}. {_CONTINUE}")
        new = end - max(first, self._lost_to)
        if new > 0:
            self._lost_to = end
            self._log.counters.data_losses += 1
            self._log.counters.expired += new
            _log.warning("data loss: %s; continuing because failOnDataLoss=false", what)

    def count_lost(self, planned: Sequence[Chunk]) -> None:
        """Count the ids of a batch that the log did not keep until the batch was done: tasks may have skipped them."""
        log, storage = self._log, LogStorage(self._log.storage.store, STORE_RETRY_SECONDS)
        try:
            lost = lost_ids(storage, log.log_id, planned)
        except LogError as e:
            _log.warning("looking for the messages that tasks have skipped: %s", e)
            return
        if lost:
            log.counters.data_losses += 1
            log.counters.expired += sum(map(len, lost))
            _log.warning(
                "data loss: the ids %d to %d were not kept in %s until their batch was done; continuing because "
                "failOnDataLoss=false",
                *(lost[0].start, lost[-1].stop - 1, log.storage),
            )

    def _why_lost(self) -> str:
        if self._options.reader is None:
            return (
                "the query was stopped for longer than walRetention, or the log was full (whenFull=discard). With the "
                "option reader the log keeps what a stopped query needs for readerTimeout"
            )
        return (
            f"reader {self._options.reader!r} was stopped for longer than readerTimeout, or was dropped, or the log "
            "was full (whenFull=discard)"
        )

    def _report_other_log(self, offset: Offset, what: str) -> None:
        what = f"{what} {offset.log}, and {self._log.storage.root} holds log {self._log.log_id}"
        if self._options.fail_on_data_loss:
            raise DataLossError(f"reading: {what}. {self._why_another_log()} {_CONTINUE}")
        if str(offset.log) not in self._lost_logs:
            self._lost_logs.add(str(offset.log))
            self._log.counters.data_losses += 1
            _log.warning("data loss: %s; continuing because failOnDataLoss=false", what)

    def _why_another_log(self) -> str:
        options = self._options
        if options.has_log:
            named = "walLocation" if options.wal_store is None else "walStore"
            return (
                f"{named}, the checkpoint, or the sources of the query (their order, or which feed has which name()) "
                "were changed, or the log was removed: undo that."
            )
        return (
            "Without walLocation, the place of the log depends on socketType, connect, bind and topics, and a new log "
            "begins when the temporary directory is removed. If you changed one of these options, set it back, or set "
            "walLocation to the log of the checkpoint."
        )
