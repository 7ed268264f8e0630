"""Translates between the offsets of a streaming query and the ids of its log, and finds out what the log has lost."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import time as now
from typing import TYPE_CHECKING, Any

from zmq_datasource.errors import DataLossError, OptionError
from zmq_datasource.log import PARTITION, STORE_RETRY_SECONDS, LogStorage, first_since
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.offsets import Offset
from zmq_datasource.options.types import Timestamp

if TYPE_CHECKING:
    from zmq_datasource.log import LogFollower, LogWriter
    from zmq_datasource.source.feed import Feed
    from zmq_datasource.source.feeds import Feeds

_log = logging.getLogger(__name__)

_CONTINUE = "To continue with what the log has, set failOnDataLoss=false"


class OffsetIds:
    """Translates between Spark's offsets, which are JSON, and the ids in each partition of one log.

    Args:
        feeds: The partitions of the log; open.
        options: ``startingOffsets`` and ``failOnDataLoss``.
    """

    def __init__(self, feeds: Feeds, options: StreamReadOptions) -> None:
        self._feeds = feeds
        self._options = options
        self._initial: dict[int, int] | None = None
        self._parts: dict[int, _PartitionLog] = {}
        self._away: list[int] = []  # the missing partitions that were reported last
        self.add_new_partitions()

    def add_new_partitions(self) -> None:
        """Add the partitions that ``feeds`` has opened since the last call."""
        self._parts = {
            partition: self._parts.get(partition) or _PartitionLog(feed, self._options)
            for partition, feed in sorted(self._feeds.parts.items())
        }

    def offset(self, nexts: Mapping[int, int]) -> dict[str, Any]:
        """The offset for these next ids."""
        return Offset(self._feeds.log_id, nexts, writers=self._writers(nexts)).to_json()

    def _writers(self, nexts: Mapping[int, int]) -> dict[int, str]:
        """The writer of the message before each of these ids, if it is known."""
        found = {p: self._parts[p].log.incarnations.of(next_id - 1) for p, next_id in nexts.items()}
        return {p: writer for p, writer in found.items() if writer is not None}

    def initial(self) -> dict[str, Any]:
        """The offset where a query without a checkpoint begins. The first call chooses it.

        If the record of a named reader says where to begin (``ReaderRecord.begins_here``), the query begins there.

        Raises:
            OptionError: The log has no id for ``startingOffsets``.
            DataLossError: The log no longer has what ``startingOffsets`` names, and ``failOnDataLoss`` is true.
        """
        if self._initial is None:
            found = self._feeds.reader.found
            if found is not None and found.begins_here:
                self._initial = self._resolve(Offset(self._feeds.log_id, found.next))
            else:
                self._initial = self._first_ids()
            self._feeds.reader.begin(self._initial)
        return Offset(
            self._feeds.log_id, self._initial, self._initial, self._writers(self._initial)
        ).to_json()

    def _first_ids(self) -> dict[int, int]:
        place = self._options.starting_place
        if place.offset is not None:
            self._check_partitions(place.offset)
            return {partition: part.first_named(place.offset) for partition, part in self._parts.items()}
        if place.time is not None:
            return self._first_since(place.time)
        if place.word == "earliest":
            return {partition: part.log.earliest for partition, part in self._parts.items()}
        return {partition: feed.resumed_at for partition, feed in self._feeds.parts.items()}

    def _first_since(self, time: Timestamp) -> dict[int, int]:
        if time > now() * 1e6:
            raise OptionError(
                f"startingOffsets={time}: it is in the future, and messages that arrive before it would be read, too; "
                "name a time that has passed, or latest"
            )
        found = {p: part.first_since(time) for p, part in self._parts.items()}
        return {p: self._feeds.parts[p].resumed_at if first is None else first for p, first in found.items()}

    def ids_of(self, start: dict[str, Any]) -> dict[int, int]:
        """The next id in each partition for an offset of the query's checkpoint.

        Raises:
            DataLossError: The log no longer has the messages from the offset on, or has other messages under these ids,
                and ``failOnDataLoss`` is true; or the offset is beyond the log's end.
        """
        return self._resolve(Offset.from_json(start))

    def _resolve(self, offset: Offset) -> dict[int, int]:
        self._check_partitions(offset)
        return {partition: part.id_of(offset) for partition, part in self._parts.items()}

    def release(self, start: dict[str, Any], begins: Mapping[int, int]) -> None:
        """Let the log delete the messages below ``begins``: Spark asks for the batch after ``start``, so the batch that
        ends there is done."""
        if not Offset.from_json(start).at_the_beginning:
            self._feeds.commit(begins)

    def end_offset(
        self, start: dict[str, Any], begins: Mapping[int, int], ends: Mapping[int, int]
    ) -> dict[str, Any]:
        """The offset for ``ends``; ``start`` itself if there are no messages after it.

        Spark compares offsets as text: an offset with another text means new data. So a new partition is named only
        when it has messages. A partition that is away keeps its place, and is read on when it is back.

        Args:
            begins: The ids of ``start``, from ``ids_of``.
        """
        offset = Offset.from_json(start)
        is_ours = offset.log == self._feeds.log_id
        away = {p: next_id for p, next_id in offset.next.items() if is_ours and p not in ends}
        nexts = {p: end for p, end in ends.items() if p in offset.next or end > begins[p]} | away
        began = {p: begins[p] for p in nexts if p not in away} | away
        if is_ours and nexts == offset.next == began:
            return start
        # A partition without new messages keeps its writer, so that the text stays the same.
        same = {p for p in nexts if is_ours and nexts[p] == offset.next.get(p) == began[p]}
        writers = self._writers({p: next_id for p, next_id in nexts.items() if p not in same})
        writers |= {p: writer for p, writer in offset.writers.items() if p in same}
        return Offset(
            self._feeds.log_id, nexts, began if offset.at_the_beginning else None, writers
        ).to_json()

    def begin_of(self, start: dict[str, Any], end: dict[str, Any]) -> Offset:
        """The offset where a batch begins."""
        first, last = Offset.from_json(start), Offset.from_json(end)
        if first.at_the_beginning and last.began is not None:
            # The first batch is repeated (see ``options.offsets``). ``first`` was chosen again, and may have other ids.
            return Offset(last.log, last.began)
        return first

    def ranges(self, start: dict[str, Any], end: dict[str, Any]) -> dict[int, tuple[int, int]]:
        """The first and the end id of a batch in each partition; none if the batch was planned on another log.

        Raises:
            DataLossError: As in ``ids_of``.
        """
        first, last = self.begin_of(start, end), Offset.from_json(end)
        self._check_partitions(last)
        return {
            partition: (part.id_of(first), part.id_of(last))
            for partition, part in self._parts.items()
            if partition in last.next and part.is_of_this_log(last)
        }

    def committed_ids(self, end: dict[str, Any]) -> dict[int, int]:
        """The next ids of a committed offset; none if it is of another log."""
        offset = Offset.from_json(end)
        return dict(offset.next) if offset.log == self._feeds.log_id else {}

    def _check_partitions(self, offset: Offset) -> None:
        """Check that the log has all partitions that an offset names. Only warn if ``failOnDataLoss`` is false.

        Raises:
            OptionError: A partition is missing, and the offset is a user's.
            DataLossError: A partition is missing, and the offset is from the checkpoint.
        """
        missing = sorted(set(offset.next) - self._parts.keys())
        if not missing:
            self._away = []
            return
        if offset.log not in (None, self._feeds.log_id):  # ``id_of`` refuses the offset of another log
            return
        if offset.log is None:
            raise not_there("startingOffsets", missing, sorted(self._parts))
        what = (
            f"reading from log {self._feeds.storage.root}: the offset names the log partitions {sorted(offset.next)}, "
            f"there are {sorted(self._parts)}"
        )
        if self._options.fail_on_data_loss:
            raise DataLossError(f"{what}. Restore what is missing. {_CONTINUE}")
        if missing != self._away:
            self._away = missing
            self._feeds.parts[PARTITION].counters.data_losses += 1
            _log.warning("data loss: %s; continuing because failOnDataLoss=false", what)


class _PartitionLog:
    """Finds the ids of offsets in one log partition.

    Args:
        feed: The log partition; open.
        options: ``failOnDataLoss``, and names for errors.
    """

    def __init__(self, feed: Feed, options: StreamReadOptions) -> None:
        self._feed = feed
        self._partition = feed.storage.partition
        self._options = options
        # The losses that are reported already (Spark asks for the same range several times): the id after the last
        # lost one, and the ids of other logs and writers.
        self._lost_to = 0
        self._lost_logs: set[str] = set()

    @property
    def log(self) -> LogWriter | LogFollower:
        return self._feed.log

    def first_named(self, offset: Offset) -> int:
        """The id where a query begins if ``startingOffsets`` is an offset; the earliest id if it lacks this partition.

        Raises:
            OptionError: The offset is a user's, and beyond the log's end.
            DataLossError: As in ``id_of``.
        """
        if self._partition not in offset.next:
            return self.log.earliest
        next_id, end = offset.next[self._partition], self.log.durable_end
        if offset.log is None and next_id > end:
            raise OptionError(
                f"option startingOffsets: it is {next_id}, and partition {self._partition} of the log ends before "
                f"id {end}; name an id up to that, or latest"
            )
        return self.id_of(offset)

    def first_since(self, time: Timestamp) -> int | None:
        """The id of the first message that was received at this time or later; None if there is none."""
        chunks = self.log.covering(self.log.earliest, self.log.durable_end)
        storage = LogStorage(self._feed.storage.store, self._partition, STORE_RETRY_SECONDS)
        return first_since(storage, chunks, time)

    def id_of(self, offset: Offset) -> int:
        """The next id for an offset. A partition that the offset does not name is new to the query, and read from 0.

        Raises:
            DataLossError: The log no longer has the messages from the offset on, or has other messages under these ids,
                and ``failOnDataLoss`` is true; or the offset is beyond the log's end.
        """
        log = self.log
        if offset.log is not None and offset.log != log.log_id:
            self._report_other_log(offset, "the offset is of log")
            return log.earliest
        next_id = offset.next.get(self._partition, 0)
        if next_id < log.earliest:
            self._report_deleted(next_id, log.earliest)
            return log.earliest
        if next_id > log.durable_end:
            # If the query continued, other messages would get these ids.
            raise DataLossError(
                f"reading from {self._feed.storage}: the offset is {next_id}, and the log ends at "
                f"{log.durable_end}: its newest chunks are gone. Restore them, or give the query a new walLocation and "
                "a new checkpoint"
            )
        return self._check_writer(offset, next_id)

    def is_of_this_log(self, offset: Offset) -> bool:
        """Whether a batch with this end was planned on this log.

        Raises:
            DataLossError: It was not, and ``failOnDataLoss`` is true.
        """
        if offset.log == self.log.log_id:
            return True
        self._report_other_log(offset, "the batch ends in log")
        return False

    def _report_deleted(self, first: int, end: int) -> None:
        what = f"ids {first} to {end - 1} are no longer in {self._feed.storage}"
        if self._options.fail_on_data_loss:
            raise DataLossError(f"reading: {what}: {self._why_lost()}. {_CONTINUE}")
        new = end - max(first, self._lost_to)
        if new > 0:
            self._lost_to = end
            self._feed.counters.data_losses += 1
            self._feed.counters.expired += new
            _log.warning("data loss: %s; continuing because failOnDataLoss=false", what)

    def _check_writer(self, offset: Offset, next_id: int) -> int:
        """The id where the query continues: ``next_id``. If another writer has given out ids again that the query has
        read, the first of these."""
        log = self.log
        writer, ours = offset.writers.get(self._partition), log.incarnations.of(next_id - 1)
        if writer is None or ours is None or writer == ours:
            return next_id
        begin = max(log.incarnations.first_of(next_id - 1), log.earliest)
        what = (
            f"the ids {begin} to {next_id - 1} in {self._feed.storage} are not those that this query has read: they "
            f"were written by {ours}, and the offset names {writer}. An older copy of the log was restored and "
            "received into"
        )
        if self._options.fail_on_data_loss:
            raise DataLossError(
                f"reading: {what}. Restore the log that the query has read, or give the query a new checkpoint. "
                f"{_CONTINUE}"
            )
        if writer not in self._lost_logs:
            self._lost_logs.add(writer)
            self._feed.counters.data_losses += 1
            _log.warning("data loss: %s; continuing with id %d because failOnDataLoss=false", what, begin)
        return begin

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
        what = f"{what} {offset.log}, and {self._feed.storage.root} holds log {self.log.log_id}"
        if self._options.fail_on_data_loss:
            raise DataLossError(f"reading: {what}. {self._why_another_log()} {_CONTINUE}")
        if str(offset.log) not in self._lost_logs:
            self._lost_logs.add(str(offset.log))
            self._feed.counters.data_losses += 1
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


def not_there(option: str, missing: Sequence[int], there: Sequence[int]) -> OptionError:
    """The error for an option that names log partitions that the log does not have."""
    return OptionError(f"option {option}: the log has no partition {missing}, only {list(there)}; correct it")
