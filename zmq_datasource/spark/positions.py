"""What a streaming query's offsets mean in its log, and what is lost where they mean nothing any more."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zmq_datasource.errors import DataLossError, OptionError
from zmq_datasource.log import PARTITION, LogStorage, first_since
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.offsets import Offset
from zmq_datasource.options.types import Timestamp

if TYPE_CHECKING:
    from zmq_datasource.log import LogFollower, LogWriter
    from zmq_datasource.source.feed import Feed
    from zmq_datasource.source.feeds import Feeds

__all__ = ["Positions", "not_there", "nothing_since"]

_log = logging.getLogger(__name__)

_GO_ON = "To go on with what there is, set failOnDataLoss=false"


def nothing_since(storage: LogStorage, time: Timestamp, strategy: str, end: int) -> int:
    """Where a read begins whose ``startingTimestamp`` is later than each message of a log.

    Raises:
        OptionError: It is not to begin then.
    """
    if strategy == "latest":
        return end
    raise OptionError(
        f"startingTimestamp={time}: no message in log {storage.root} was received at that time or later. To begin with "
        "what comes from now on, set startingOffsetsByTimestampStrategy=latest"
    )


class Positions:
    """Between the JSON that Spark keeps and the ids in each partition of one log.

    Args:
        feeds: Open.
        options: ``startingOffsets`` and ``failOnDataLoss``.
    """

    def __init__(self, feeds: Feeds, options: StreamReadOptions) -> None:
        self._feeds = feeds
        self._options = options
        self._initial: dict[int, int] | None = None
        self._parts: dict[int, _PartitionLog] = {}
        self.take_up()

    def take_up(self) -> None:
        """Know the partitions that have come, too."""
        self._parts = {
            partition: self._parts.get(partition) or _PartitionLog(feed, self._options)
            for partition, feed in sorted(self._feeds.parts.items())
        }

    def offset(self, nexts: Mapping[int, int]) -> dict[str, Any]:
        """The offset for an id in each partition."""
        return Offset(self._feeds.log_id, nexts, writers=self._writers(nexts)).to_json()

    def _writers(self, nexts: Mapping[int, int]) -> dict[int, str]:
        """The writer of the message before each of these ids, where it is known."""
        found = {p: self._parts[p].log.incarnations.of(next_id - 1) for p, next_id in nexts.items()}
        return {p: writer for p, writer in found.items() if writer is not None}

    def initial(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins. Chosen once; a named reader finds the choice of its last run.

        Raises:
            OptionError: ``startingOffsets`` or ``startingTimestamp`` mean no id of this log.
            DataLossError: The same for the offset of a log, and ``failOnDataLoss`` is true.
        """
        if self._initial is None:
            found = self._feeds.reader.found
            if found is not None and found.begins:
                self._initial = self._resolve(Offset(self._feeds.log_id, found.next))
            else:
                self._initial = self._first_ids()
            self._feeds.begin(self._initial)
        return Offset(
            self._feeds.log_id, self._initial, self._initial, self._writers(self._initial)
        ).to_json()

    def _first_ids(self) -> dict[int, int]:
        position = self._feeds.parts[PARTITION].starting_position
        if position.offset is not None:
            self._check_partitions(position.offset)
            return {partition: part.first_named(position.offset) for partition, part in self._parts.items()}
        if position.time is not None:
            return self._first_since(position.time)
        if position.word == "earliest":
            return {partition: part.log.earliest for partition, part in self._parts.items()}
        return {partition: feed.resumed_at for partition, feed in self._feeds.parts.items()}

    def _first_since(self, time: Timestamp) -> dict[int, int]:
        found = {p: part.first_since(time) for p, part in self._parts.items()}
        ends = {partition: feed.resumed_at for partition, feed in self._feeds.parts.items()}
        if all(first is None for first in found.values()):
            strategy = self._options.starting_offsets_by_timestamp_strategy
            return {
                p: nothing_since(self._feeds.parts[p].storage, time, strategy, end) for p, end in ends.items()
            }
        return {p: ends[p] if first is None else first for p, first in found.items()}

    def ids_of(self, start: dict[str, Any]) -> dict[int, int]:
        """The id in each partition that an offset of the query's checkpoint means.

        Raises:
            DataLossError: It means none somewhere, and ``failOnDataLoss`` is true; or it is beyond the log's end.
        """
        return self._resolve(Offset.from_json(start))

    def _resolve(self, offset: Offset) -> dict[int, int]:
        self._check_partitions(offset)
        return {partition: part.id_of(offset) for partition, part in self._parts.items()}

    def done(self, start: dict[str, Any], begins: Mapping[int, int]) -> None:
        """Spark asks for what follows ``start``, which means ``begins``: the query needs nothing below any more."""
        if not Offset.from_json(start).at_the_beginning:
            self._feeds.commit(begins)

    def after(
        self, start: dict[str, Any], begins: Mapping[int, int], ends: Mapping[int, int]
    ) -> dict[str, Any]:
        """The offset of ``ends``; ``start`` itself, which means ``begins``, if nothing has come since.

        Spark compares their text. So a partition that is new is named once it has something.
        """
        offset = Offset.from_json(start)
        nexts = {p: end for p, end in ends.items() if p in offset.next or end > begins[p]}
        began = {p: begins[p] for p in nexts}
        is_ours = offset.log == self._feeds.log_id
        if is_ours and nexts == offset.next == began:
            return start
        # Where nothing has come the text stays. An id may be the same and mean another message: see ``_lose_line``.
        same = {p for p in nexts if is_ours and nexts[p] == offset.next.get(p) == begins[p]}
        writers = self._writers({p: next_id for p, next_id in nexts.items() if p not in same})
        writers |= {p: writer for p, writer in offset.writers.items() if p in same}
        return Offset(
            self._feeds.log_id, nexts, began if offset.at_the_beginning else None, writers
        ).to_json()

    def begin_of(self, start: dict[str, Any], end: dict[str, Any]) -> Offset:
        """The offset at which a batch begins."""
        first, last = Offset.from_json(start), Offset.from_json(end)
        if first.at_the_beginning and last.began is not None:
            # A repeated first batch: see ``options.offsets``. ``first`` was chosen again, and names other messages.
            return Offset(last.log, last.began)
        return first

    def ranges(self, start: dict[str, Any], end: dict[str, Any]) -> dict[int, tuple[int, int]]:
        """The ids in each partition that a batch was planned for; none if it was planned on another log.

        Raises:
            DataLossError: As ``ids_of``.
        """
        first, last = self.begin_of(start, end), Offset.from_json(end)
        self._check_partitions(last)
        return {
            partition: (part.id_of(first), part.id_of(last))
            for partition, part in self._parts.items()
            if partition in last.next and part.ends_here(last)
        }

    def committed(self, end: dict[str, Any]) -> dict[int, int]:
        """The ids that a committed offset says; none if it is of another log."""
        offset = Offset.from_json(end)
        return dict(offset.next) if offset.log == self._feeds.log_id else {}

    def _check_partitions(self, offset: Offset) -> None:
        """Refuse an offset that names partitions that are not there.

        Raises:
            OptionError: It does, and is of no log, but a user's own.
            DataLossError: It does, and ``failOnDataLoss`` is true.
        """
        missing = sorted(set(offset.next) - self._parts.keys())
        if not missing or offset.log not in (
            None,
            self._feeds.log_id,
        ):  # of another log, it means nothing here
            return
        if offset.log is None:
            raise not_there("startingOffsets", missing, sorted(self._parts))
        what = (
            f"reading from log {self._feeds.storage.root}: the offset names the log partitions {sorted(offset.next)}, "
            f"there are {sorted(self._parts)}"
        )
        if self._options.fail_on_data_loss:
            raise DataLossError(f"{what}. Restore what is missing. {_GO_ON}")
        self._feeds.parts[PARTITION].counters.data_losses += 1
        _log.warning("data loss: %s; going on because failOnDataLoss=false", what)


class _PartitionLog:
    """What offsets mean in one log partition.

    Args:
        source: Open.
        options: ``failOnDataLoss``, and what errors name.
    """

    def __init__(self, source: Feed, options: StreamReadOptions) -> None:
        self._source = source
        self._partition = source.storage.partition
        self._options = options
        # What was reported as lost already: Spark asks for the same range several times.
        self._lost_to = 0
        self._lost_logs: set[str] = set()

    @property
    def log(self) -> LogWriter | LogFollower:
        return self._source.log

    def first_named(self, offset: Offset) -> int:
        """The id at which a query begins whose ``startingOffsets`` are an offset; the earliest if it names none here.

        Raises:
            OptionError: The user has typed an id beyond the log's end.
            DataLossError: As ``id_of``.
        """
        if self._partition not in offset.next:
            return self.log.earliest
        next_id, end = offset.next[self._partition], self.log.durable_end
        if offset.log is None and next_id > end:
            raise OptionError(
                f"option startingOffsets: it says {next_id}, and partition {self._partition} of the log ends before "
                f"id {end}; name an id up to that, or latest"
            )
        return self.id_of(offset)

    def first_since(self, time: Timestamp) -> int | None:
        """The first message here that was received at that time or later."""
        chunks = self.log.covering(self.log.earliest, self.log.durable_end)
        storage = LogStorage(self._source.storage.store, self._partition, self._options.wal_retry_timeout)
        return first_since(storage, chunks, time)

    def id_of(self, offset: Offset) -> int:
        """The id that an offset means. A partition that the offset does not name is new to the query, as a whole.

        Raises:
            DataLossError: It means none, and ``failOnDataLoss`` is true; or it is beyond the log's end.
        """
        log = self.log
        if offset.log is not None and offset.log != log.log_id:
            self._lose_log(offset, "the offset is of log")
            return log.earliest
        next_id = offset.next.get(self._partition, 0)
        if next_id < log.earliest:
            self._lose_ids(next_id, log.earliest)
            return log.earliest
        if next_id > log.durable_end:
            # Going on would give these ids to other messages.
            raise DataLossError(
                f"reading from {self._source.storage}: the offset says {next_id}, the log ends at "
                f"{log.durable_end}; its newest chunks are gone. Restore them, or give the query a new walLocation and "
                "a new checkpoint"
            )
        writer, ours = offset.writers.get(self._partition), log.incarnations.of(next_id - 1)
        if writer is not None and ours is not None and writer != ours:
            begin = max(log.incarnations.first_of(next_id - 1), log.earliest)
            self._lose_line(begin, next_id, writer, ours)
            return begin
        return next_id

    def ends_here(self, offset: Offset) -> bool:
        """Whether a batch that ends there was planned on this log.

        Raises:
            DataLossError: It was not, and ``failOnDataLoss`` is true.
        """
        if offset.log == self.log.log_id:
            return True
        self._lose_log(offset, "the batch ends in log")
        return False

    def _lose_ids(self, first: int, end: int) -> None:
        what = f"ids {first} to {end - 1} are no longer in {self._source.storage}"
        if self._options.fail_on_data_loss:
            raise DataLossError(f"reading: {what}: {self._why_lost()}. {_GO_ON}")
        new = end - max(first, self._lost_to)
        if new > 0:
            self._lost_to = end
            self._source.counters.data_losses += 1
            self._source.counters.expired += new
            _log.warning("data loss: %s; going on because failOnDataLoss=false", what)

    def _lose_line(self, begin: int, next_id: int, writer: str, ours: str) -> None:
        what = (
            f"the ids {begin} to {next_id - 1} in {self._source.storage} are not those that this query has read: "
            f"they were written by {ours}, and the offset names {writer}. An older copy of the log was restored and "
            "received into"
        )
        if self._options.fail_on_data_loss:
            raise DataLossError(
                f"reading: {what}. Restore the log that the query has read, or give the query a new checkpoint. "
                f"{_GO_ON}"
            )
        if writer not in self._lost_logs:
            self._lost_logs.add(writer)
            self._source.counters.data_losses += 1
            _log.warning("data loss: %s; going on with id %d because failOnDataLoss=false", what, begin)

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

    def _lose_log(self, offset: Offset, what: str) -> None:
        what = f"{what} {offset.log}, and {self._source.storage.root} holds log {self.log.log_id}"
        if self._options.fail_on_data_loss:
            raise DataLossError(f"reading: {what}. {self._why_another_log()} {_GO_ON}")
        if str(offset.log) not in self._lost_logs:
            self._lost_logs.add(str(offset.log))
            self._source.counters.data_losses += 1
            _log.warning("data loss: %s; going on because failOnDataLoss=false", what)

    def _why_another_log(self) -> str:
        options = self._options
        if options.has_log:
            named = "walLocation" if options.wal_store is None else "walStore"
            return (
                f"{named} or the checkpoint was changed, or the log was removed: set back what was changed."
            )
        return (
            "Without walLocation, socketType, connect, bind and topics say where the log is, and a log that is "
            "removed with the temporary directory begins anew. If you changed one of these options, set it back, or "
            "set walLocation to the log that the checkpoint belongs to."
        )


def not_there(option: str, missing: Sequence[int], there: Sequence[int]) -> OptionError:
    """Of an option that names log partitions that the log does not have."""
    return OptionError(f"option {option}: the log has no partition {missing}, only {list(there)}; correct it")
