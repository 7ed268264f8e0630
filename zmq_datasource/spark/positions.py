"""What a streaming query's offsets mean in its log, and what is lost where they mean nothing any more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from zmq_datasource.errors import DataLossError, OptionError
from zmq_datasource.log.layout import PARTITION
from zmq_datasource.log.persistence import Persistence
from zmq_datasource.log.reader import first_since
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.offsets import Offset
from zmq_datasource.options.types import Position, Timestamp

if TYPE_CHECKING:
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
        self._parts: dict[int, _Position] = {}
        self.take_up()

    def take_up(self) -> None:
        """Positions in partitions that have come, too."""
        came_later = bool(self._parts)
        for partition, feed in self._feeds.parts.items():
            if partition not in self._parts:
                self._parts[partition] = position = _Position(feed, self._options, self._some_have_since)
                if came_later:
                    position.begin_with_all()
        self._parts = dict(sorted(self._parts.items()))

    def _some_have_since(self, time: Timestamp) -> bool:
        """Whether a partition has a message of that time or later."""
        return any(position.first_since(time) is not None for position in self._parts.values())

    def offset(self, nexts: Mapping[int, int]) -> dict[str, Any]:
        """The offset that Spark gets for an id in each partition."""
        return Offset(self._feeds.log_id, nexts, self._feeds.reader).to_json()

    def after(
        self, start: dict[str, Any], begins: Mapping[int, int], ends: Mapping[int, int]
    ) -> dict[str, Any]:
        """The offset of ``ends``; where nothing has come since ``start``, which means ``begins``, that one.

        Spark compares their text. So a partition that is new is named once it has something.
        """
        offset = Offset.from_json(start)
        nexts = {p: end for p, end in ends.items() if p in offset.next or end > begins[p]}
        same = (
            offset.log == self._feeds.log_id
            and nexts == offset.next
            and nexts == {p: begins[p] for p in nexts}
        )
        return start if same else self.offset(nexts)

    def initial(self) -> dict[int, int]:
        """Where a query without a checkpoint starts; kept with the log until ``read_from`` another place.

        Raises:
            DataLossError: ``startingOffsets`` means no id, and ``failOnDataLoss`` is true.
        """
        if self._options.starting_offsets is not None and self._options.starting_offsets.offset is not None:
            self._check_partitions(self._options.starting_offsets.offset)
        return {partition: position.initial() for partition, position in self._parts.items()}

    def ids_of(self, start: dict[str, Any]) -> dict[int, int]:
        """The id in each partition that an offset of the query's checkpoint means.

        Raises:
            DataLossError: It means none somewhere, and ``failOnDataLoss`` is true; or the log is a copy that is older
                than the checkpoint.
        """
        offset = Offset.from_json(start)
        self._check_partitions(offset)
        return {partition: position.id_of(offset) for partition, position in self._parts.items()}

    def read_from(self, begins: Mapping[int, int]) -> None:
        """The engine asks from there: see ``_Position.read_from``."""
        for partition, begin in begins.items():
            self._parts[partition].read_from(begin)

    def ranges(self, start: dict[str, Any], end: dict[str, Any]) -> dict[int, tuple[int, int]]:
        """The ids in each partition that a batch was planned for; of another log none.

        Raises:
            DataLossError: As ``ids_of``.
        """
        first, last = Offset.from_json(start), Offset.from_json(end)
        self._check_partitions(last)
        found = {
            partition: position.range(first, last)
            for partition, position in self._parts.items()
            if partition in last.next and position.ends_here(last)
        }
        self._feeds.share_name()
        return found

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


class _Position:
    """Of one query in one partition of its log.

    Args:
        source: Open.
        options: ``startingOffsets`` and ``failOnDataLoss``.
        some_have_since: Whether any partition has a message of a time or later.
    """

    def __init__(
        self, source: Feed, options: StreamReadOptions, some_have_since: Callable[[Timestamp], bool]
    ) -> None:
        self._some_have_since = some_have_since
        self._source = source
        self._partition = source.storage.partition
        self._options = options
        self._persistence = Persistence(options.wal_retry_timeout)
        self._initial: int | None = None
        self._told: str | None = None  # the name in the beginning that Spark was told
        # Where the first batch begins, if it is repeated under another name.
        self._repeated: Offset | None = None
        self._asked = False  # for the beginning, since the last time that the engine asked from somewhere
        self._first_batch_done = False
        # What was reported as lost already: Spark asks for the same range several times.
        self._lost_to = 0
        self._lost_logs: set[str] = set()

    def initial(self) -> int:
        """Where a query without a checkpoint starts; kept with the log until ``read_from`` another place.

        Raises:
            DataLossError: ``startingOffsets`` means no id, and ``failOnDataLoss`` is true.
        """
        self._asked = True
        if self._initial is None:
            source = self._source
            position = source.starting_position
            first = self._kept_start(str(position))
            if first is None:
                first = self._first_of(position)
                self._persistence.insist(
                    partial(source.storage.write_start, source.reader, first, str(position))
                )
            self._persistence.insist(partial(source.give, first, first))
            self._initial, self._told = first, source.reader
        return self._initial

    def begin_with_all(self) -> None:
        """The partition has come while the query runs: all of it is new, whatever ``startingOffsets`` says.

        If the first batch is not done, it is kept like any other beginning.
        """
        source = self._source
        self._initial, self._told = source.log.earliest, source.reader
        self._persistence.insist(
            partial(source.storage.write_start, source.reader, self._initial, str(source.starting_position))
        )
        self._asked = True

    def read_from(self, begin: int) -> None:
        """Once the engine asks from another place, its first batch is done and never repeated.

        So it is once the engine asks again without having asked for the beginning: a first batch may have no rows.
        """
        if not self._first_batch_done and (begin != self._initial or not self._asked):
            self._persistence.insist(partial(self._source.storage.remove_start, self._source.reader))
            self._first_batch_done = True
        self._asked = False

    def _first_of(self, position: Position) -> int:
        if position.offset is not None:
            named, end = self._partition in position.offset.next, self._source.log.durable_end
            if named and position.offset.log is None and position.offset.next[self._partition] > end:
                raise OptionError(
                    f"option startingOffsets: it says {position.offset.next[self._partition]}, and partition "
                    f"{self._partition} of the log ends before id {end}; name an id up to that, or latest"
                )
            return self._resolve(position.offset) if named else self._source.log.earliest
        if position.time is not None:
            return self._first_since(position.time)
        return self._source.log.earliest if position.word == "earliest" else self._source.resumed_at

    def first_since(self, time: Timestamp) -> int | None:
        """The first message here that was received at that time or later."""
        log = self._source.log
        chunks = log.covering(log.earliest, log.durable_end)
        return self._persistence.insist(partial(first_since, self._source.storage, chunks, time))

    def _first_since(self, time: Timestamp) -> int:
        source = self._source
        first = self.first_since(time)
        if first is not None:
            return first
        if self._some_have_since(time):
            return source.resumed_at
        return nothing_since(
            source.storage, time, self._options.starting_offsets_by_timestamp_strategy, source.resumed_at
        )

    def _kept_start(self, position: str) -> int | None:
        """What a query was given that has not finished its first batch; None if that is of no use now."""
        log, storage, reader = self._source.log, self._source.storage, self._source.reader
        kept = storage.read_start(reader)
        # Given under another startingOffsets, it was given to another query.
        if kept is None or kept[1] != position:
            return None
        if kept[0] >= log.earliest:
            return self._resolve(Offset(log.log_id, {self._partition: kept[0]}))
        # Whether this is that query again, nothing tells.
        self._lose_ids(
            kept[0],
            log.earliest,
            "a query was given this beginning and has not finished its first batch (for a query that is to begin anew, "
            f"remove {storage.start_path(reader)})",
        )
        return None

    def id_of(self, offset: Offset) -> int:
        """The id that an offset of the query's checkpoint means.

        Raises:
            DataLossError: It means none, and ``failOnDataLoss`` is true; or the log is a copy that is older than the
                checkpoint.
        """
        source = self._source
        next_id, given, said = self._resolve(offset), source.given, offset.next.get(self._partition)
        # What was given under another name, that one's position says: this query may have had to leave it to another.
        same = self._is_ours(offset) and offset.reader in (None, source.reader)
        if same and given is not None and said is not None and said > given:
            path = source.storage.reader_path(source.reader)
            raise DataLossError(
                f"reading from {source.storage}: the offset says {said}, and {path} says "
                f"that this reader was only ever given the ids below {given}: the log is an older copy, and other "
                "messages may have been given those ids since. Restore the newer log, or give the query a new "
                "checkpoint. If the query only had another name (reader) meanwhile, remove that file"
            )
        return next_id

    def range(self, start: Offset, end: Offset) -> tuple[int, int]:
        """The ids that a batch was planned for.

        Raises:
            DataLossError: As ``id_of``.
        """
        source, reader = self._source, end.reader
        told = self._told is not None and start.reader == self._told
        if told and reader not in (None, self._told):
            # A first batch that an earlier run of this query has planned and not finished. Spark had no offset yet by
            # which it could be recognised, and was told another beginning. Where it began, its position says.
            assert reader is not None
            kept = source.storage.position(reader) if self._repeated is None else None
            if kept is not None:
                # One without any rows may have left its name to another query, which has come further since.
                begin = min(kept.next, end.next.get(self._partition, kept.next))
                self._repeated = Offset(source.log.log_id, {self._partition: begin})
                if begin == kept.next and source.go_on_as(reader):
                    self._initial = begin
            if self._repeated is not None:  # Spark may ask again, and the position moves
                return self._resolve(self._repeated), self.id_of(end)
        return self.id_of(start), self.id_of(end)

    def ends_here(self, offset: Offset) -> bool:
        """Whether a batch that ends there was planned on this log.

        Raises:
            DataLossError: It was not, and ``failOnDataLoss`` is true.
        """
        if self._is_ours(offset):
            return True
        self._lose_log(offset, "the batch ends in log")
        return False

    def _is_ours(self, offset: Offset) -> bool:
        return offset.log == self._source.log.log_id

    def _resolve(self, offset: Offset) -> int:
        """The id that an offset means in our log.

        Raises:
            DataLossError: It means none, and ``failOnDataLoss`` is true.
        """
        log = self._source.log
        if offset.log is not None and offset.log != log.log_id:
            self._lose_log(offset, "the offset is of log")
            return log.earliest
        next_id = offset.next.get(self._partition, 0)  # one that has come since: all of it is new
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
        return next_id

    def _lose_ids(
        self,
        first: int,
        end: int,
        why: str = "the query was stopped for longer than the log kept them",
    ) -> None:
        what = f"ids {first} to {end - 1} are no longer in {self._source.storage}"
        if self._options.fail_on_data_loss:
            raise DataLossError(f"reading: {what}: {why}. {_GO_ON}")
        new = end - max(first, self._lost_to)
        if new > 0:
            self._lost_to = end
            self._source.counters.data_losses += 1
            self._source.counters.expired += new
            _log.warning("data loss: %s; going on because failOnDataLoss=false", what)

    def _lose_log(self, offset: Offset, what: str) -> None:
        what = f"{what} {offset.log}, and {self._source.storage.root} holds log {self._source.log.log_id}"
        if self._options.fail_on_data_loss:
            raise DataLossError(f"reading: {what}. {self._why_another_log()} {_GO_ON}")
        if str(offset.log) not in self._lost_logs:
            self._lost_logs.add(str(offset.log))
            self._source.counters.data_losses += 1
            _log.warning("data loss: %s; going on because failOnDataLoss=false", what)

    def _why_another_log(self) -> str:
        if self._options.wal_location is not None:
            return "walLocation or the checkpoint was changed, or the log was removed: set back what was changed."
        return (
            "Without walLocation, socketType, connect, bind and topics say where the log is, and a log that is "
            "removed with the temporary directory begins anew. If you changed one of these options, set it back, or "
            "set walLocation to the log that the checkpoint belongs to."
        )


def not_there(option: str, missing: Sequence[int], there: Sequence[int]) -> OptionError:
    """Of an option that names log partitions that the log does not have."""
    return OptionError(f"option {option}: the log has no partition {missing}, only {list(there)}; correct it")
