"""What a streaming query's offsets mean in its log, and what is lost where they mean nothing any more."""

from __future__ import annotations

import logging
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

__all__ = ["Positions", "nothing_since"]

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
    """Between the JSON that Spark keeps and the ids of one log.

    Args:
        source: Open.
        options: ``startingOffsets`` and ``failOnDataLoss``.
    """

    def __init__(self, source: Feed, options: StreamReadOptions) -> None:
        self._source = source
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

    def offset(self, next_id: int) -> dict[str, Any]:
        """The offset that Spark gets for an id."""
        return Offset(self._source.log.log_id, {PARTITION: next_id}, self._source.reader).to_json()

    def after(self, start: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
        """The offset of ``end``; where nothing has come since ``start``, which means ``begin``, that one.

        Spark compares their text, and one that an earlier release has written names no reader.
        """
        offset = Offset.from_json(start)
        return (
            start
            if end == begin == offset.next.get(PARTITION) and self._is_ours(offset)
            else self.offset(end)
        )

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
            return self._resolve(position.offset)
        if position.time is not None:
            return self._first_since(position.time)
        return self._source.log.earliest if position.word == "earliest" else self._source.resumed_at

    def _first_since(self, time: Timestamp) -> int:
        source = self._source
        log = source.log
        first = first_since(source.storage, log.covering(log.earliest, log.durable_end), time)
        if first is not None:
            return first
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
            return self._resolve(Offset(log.log_id, {PARTITION: kept[0]}))
        # Whether this is that query again, nothing tells.
        self._lose_ids(
            kept[0],
            log.earliest,
            "a query was given this beginning and has not finished its first batch (for a query that is to begin anew, "
            f"remove {storage.start_path(reader)})",
        )
        return None

    def id_of(self, position: dict[str, Any]) -> int:
        """The id that an offset of the query's checkpoint means.

        Raises:
            DataLossError: It means none, and ``failOnDataLoss`` is true; or the log is a copy that is older than the
                checkpoint.
        """
        source, offset = self._source, Offset.from_json(position)
        next_id, given = self._resolve(offset), source.given
        # What was given under another name, that one's position says: this query may have had to leave it to another.
        same = self._is_ours(offset) and offset.reader in (None, source.reader)
        if same and given is not None and offset.next[PARTITION] > given:
            path = source.storage.reader_path(source.reader)
            raise DataLossError(
                f"reading from log {source.storage.root}: the offset says {offset.next[PARTITION]}, and {path} says "
                f"that this reader was only ever given the ids below {given}: the log is an older copy, and other "
                "messages may have been given those ids since. Restore the newer log, or give the query a new "
                "checkpoint. If the query only had another name (reader) meanwhile, remove that file"
            )
        return next_id

    def range(self, start: dict[str, Any], end: dict[str, Any]) -> tuple[int, int]:
        """The ids that a batch was planned for.

        Raises:
            DataLossError: As ``id_of``.
        """
        source, reader = self._source, Offset.from_json(end).reader
        told = self._told is not None and Offset.from_json(start).reader == self._told
        if told and reader not in (None, self._told):
            # A first batch that an earlier run of this query has planned and not finished. Spark had no offset yet by
            # which it could be recognised, and was told another beginning. Where it began, its position says.
            assert reader is not None
            kept = source.storage.position(reader) if self._repeated is None else None
            if kept is not None:
                self._repeated = Offset(source.log.log_id, {PARTITION: kept.next})
                if source.go_on_as(reader):
                    self._initial = kept.next
            if self._repeated is not None:  # Spark may ask again, and the position moves
                return self._resolve(self._repeated), self.id_of(end)
        return self.id_of(start), self.id_of(end)

    def ends_here(self, position: dict[str, Any]) -> bool:
        """Whether a batch that ends there was planned on this log.

        Raises:
            DataLossError: It was not, and ``failOnDataLoss`` is true.
        """
        offset = Offset.from_json(position)
        if self._is_ours(offset):
            return True
        self._lose_log(offset, "the batch ends in log")
        return False

    def committed(self, position: dict[str, Any]) -> int | None:
        """The id that a committed offset says; None if it is of another log."""
        offset = Offset.from_json(position)
        return offset.next[PARTITION] if self._is_ours(offset) else None

    def _is_ours(self, offset: Offset) -> bool:
        return offset.log == self._source.log.log_id

    def _resolve(self, offset: Offset) -> int:
        """The id that an offset means in our log.

        Raises:
            DataLossError: It means none, and ``failOnDataLoss`` is true.
        """
        log, root = self._source.log, self._source.storage.root
        if offset.log is not None and offset.log != log.log_id:
            self._lose_log(offset, "the offset is of log")
            return log.earliest
        unknown = set(offset.next) - {PARTITION}
        if unknown or PARTITION not in offset.next:
            raise DataLossError(
                f"reading from log {root}: the offset names log partitions {sorted(offset.next)}, there is {PARTITION}"
            )
        next_id = offset.next[PARTITION]
        if next_id < log.earliest:
            self._lose_ids(next_id, log.earliest)
            return log.earliest
        if next_id > log.durable_end:
            # Going on would give these ids to other messages.
            raise DataLossError(
                f"reading from log {root}: the offset says {next_id}, the log ends at {log.durable_end}; its newest "
                "chunks are gone. Restore them, or give the query a new walLocation and a new checkpoint"
            )
        return next_id

    def _lose_ids(
        self,
        first: int,
        end: int,
        why: str = "the query was stopped for longer than the log kept them",
    ) -> None:
        what = f"ids {first} to {end - 1} are no longer in log {self._source.storage.root}"
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
