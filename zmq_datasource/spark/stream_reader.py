"""``spark.readStream``: offsets and ranges of a log that a receiver fills.

One process per running query, the *source runner*, makes every call except ``read`` on the
object that ``ZmqDataSource.streamReader`` returned. Another process makes the same object
only to pickle it for the executors. So the constructor opens nothing, and the first call of
the source runner starts the receiver.
"""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from zmq_datasource.errors import DataLossError, OptionError
from zmq_datasource.log.layout import PARTITION
from zmq_datasource.log.persistence import Persistence
from zmq_datasource.log.reader import end_within_bytes, split_range
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.offsets import Offset
from zmq_datasource.options.types import Position
from zmq_datasource.spark.admission import Admission
from zmq_datasource.spark.partition_reader import LogInputPartition, read_log_partition
from zmq_datasource.spark.worker import set_up_worker

if TYPE_CHECKING:
    from zmq_datasource.monitoring.source import SourceMonitor
    from zmq_datasource.source.follow import Follow
    from zmq_datasource.source.ingest import Ingest

__all__ = ["RefusedStreamReader", "ZmqStreamReader"]

_log = logging.getLogger(__name__)

# As long as there is nothing new, Spark asks again every 10 ms (spark.sql.streaming.pollingDelay). Whoever asks again
# that soon is answered when there is something, or after this long. Another source of the query waits as long with us.
_ASKED_AGAIN_SECONDS = 0.05
_IDLE_SECONDS = 0.05


class ZmqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of one streaming query."""

    def __init__(self, options: StreamReadOptions) -> None:
        self._options = options
        # Only in the source runner:
        self._ingest: Ingest | Follow | None = None
        self._monitor: SourceMonitor | None = None
        self._admission = Admission(options)
        self._persistence = Persistence(options.wal_retry_timeout)
        self._initial: int | None = None
        self._first_batch_done = False
        self._available_now = False
        self._target: int | None = None
        self._idle_at = 0.0  # when Spark was last told that there is nothing new
        # What was told to be lost already: Spark asks for the same range several times.
        self._lost_to = 0
        self._lost_logs: set[str] = set()

    def _opened(self) -> Ingest | Follow:
        """The log, of a receiver or one that somebody else fills; opened on the first call.

        Nothing is received before a position was compared with the log's end, or new messages could get the ids of
        those that an older position is about.
        """
        if self._ingest is None:
            # The source runner alone receives; the processes that plan and read do without all of this.
            from zmq_datasource.source.follow import Follow  # noqa: PLC0415
            from zmq_datasource.source.ingest import Ingest  # noqa: PLC0415

            set_up_worker()
            live = self._options.connect or self._options.bind
            self._ingest = Ingest(self._options) if live else Follow(self._options)
            _stop_on_sigterm()
            # Covers a SIGTERM that arrives between the end of a call and Spark's stop().
            atexit.register(self.stop)
            try:
                if self._ingest.follows:
                    self._persistence.insist(self._ingest.open)
                else:  # it waits by itself
                    self._ingest.open()
            except Exception:
                self._ingest = None
                raise
        return self._ingest

    def _receive(self, ingest: Ingest | Follow) -> None:
        """Begin to receive, on the first call."""
        if self._monitor is not None:
            return
        try:
            ingest.start()
        except Exception:
            self._ingest = None
            raise
        from zmq_datasource.monitoring.source import SourceMonitor  # noqa: PLC0415 - see _opened

        self._monitor = SourceMonitor(ingest, self._options)
        self._monitor.start()

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint starts.

        Spark asks on every trigger until there is a first batch, and once more when it has
        to repeat that batch after a crash. So the answer is kept with the log until the
        engine has moved on.
        """
        ingest = self._opened()
        if self._initial is None:
            # What a log holds that somebody else fills was received for whoever reads it.
            default = "earliest" if ingest.follows else "latest"
            position = self._options.starting_offsets or Position(default, None)
            first = self._kept_start(ingest, str(position))
            if first is None:
                first = self._starting_position(ingest, position)
                write = partial(ingest.storage.write_start, first, str(position), ingest.reader)
                self._persistence.insist(write)
            self._persistence.insist(partial(ingest.give, first, first))
            self._initial = first
        self._receive(ingest)
        return self._offset(ingest, self._initial)

    def _starting_position(self, ingest: Ingest | Follow, position: Position) -> int:
        if position.offset is not None:
            return self._resolve(ingest, position.offset)
        return ingest.log.earliest if position.word == "earliest" else ingest.resumed_at

    def _kept_start(self, ingest: Ingest | Follow, position: str) -> int | None:
        """What a query was told that has not finished its first batch; None if that is of no use now."""
        kept = ingest.storage.read_start(ingest.reader)
        # Told by another startingOffsets, it was told to another query.
        if kept is None or kept[1] != position:
            return None
        if kept[0] >= ingest.log.earliest:
            return self._resolve(ingest, Offset(ingest.log.log_id, {PARTITION: kept[0]}))
        # Whether this is that query again, nothing tells.
        self._lose_ids(
            ingest,
            kept[0],
            ingest.log.earliest,
            "a query was told to begin there and has not finished its first batch (for a query that is to begin anew, "
            f"remove {ingest.storage.start_path(ingest.reader)})",
        )
        return None

    def getDefaultReadLimit(self) -> ReadLimit:
        # Our limits are applied together in latestOffset. Any limit but ReadAllAvailable will
        # do: that one then only comes from Trigger.Once, which takes all there is.
        return ReadMaxRows(2**63 - 1)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch: everything received so far, made durable, within the limits."""
        ingest = self._opened()
        begin = self._checked(ingest, start)
        self._receive(ingest)
        if self._monitor is not None:
            self._monitor.read_to(begin)
        self._end_first_batch(ingest, begin)
        if ingest.log.full or ingest.log.fault:
            # Spark commits a batch to the source only once there is data for the next, which a
            # full log, or a full disk, keeps out. But it asks for the next only after the last is in its own
            # commit log, so nothing below `begin` will be asked for again.
            self._persistence.insist(partial(ingest.commit, begin))
        if time.monotonic() - self._idle_at < _ASKED_AGAIN_SECONDS:
            ingest.wait_for_more(begin, _IDLE_SECONDS)
        end = self._end(ingest, begin, limit)
        if end == begin:
            self._idle_at = time.monotonic()
        # Whether a log that another process writes is full, is not seen from here: it is told `begin` each time.
        self._persistence.insist(partial(ingest.give, begin, end))
        return self._offset(ingest, end)

    def _end(self, ingest: Ingest | Follow, begin: int, limit: ReadLimit) -> int:
        if isinstance(limit, ReadAllAvailable):
            return max(begin, self._gather(ingest))
        if self._available_now and self._target is None:
            self._target = self._gather(ingest)
        wait = self._target is None and not (ingest.log.full or ingest.log.fault)
        if wait and self._admission.holds_back(begin, ingest.received_end):
            return begin  # and no chunk is cut for what will wait
        available = ingest.seal() if self._target is None else self._target
        return self._admission.end(
            begin,
            max(begin, available),
            lambda low, high, size: self._persistence.insist(
                lambda: end_within_bytes(ingest.storage, ingest.log.covering(low, high), low, high, size)
            ),
            wait=wait,
        )

    def _end_first_batch(self, ingest: Ingest | Follow, begin: int) -> None:
        """Once the engine asks from another place, its first batch is done and never repeated."""
        if not self._first_batch_done and begin != self._initial:
            self._persistence.insist(partial(ingest.storage.remove_start, ingest.reader))
            self._first_batch_done = True

    def prepareForTriggerAvailableNow(self) -> None:
        """What is durable after ``timeout``, or ``idleTimeout``, is the target.

        That begins when Spark says where the query is: nothing is received before.
        """
        self._available_now = True

    def _gather(self, ingest: Ingest | Follow) -> int:
        return ingest.gather(self._options.timeout, self._options.idle_timeout)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Shown as ``sources[].latestOffset`` in the query's progress: the log's end and the metrics."""
        if self._ingest is None or self._monitor is None:
            return None  # nothing is received yet
        return self._offset(self._ingest, self._ingest.log.durable_end) | self._monitor.metrics()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Share the ids from ``start`` to ``end`` out among tasks."""
        ingest = self._opened()
        until = Offset.from_json(end)
        if until.log != ingest.log.log_id:
            self._lose_log(ingest, until, "the batch ends in log")
            return []
        low, high = self._checked(ingest, start), self._checked(ingest, end)
        self._receive(ingest)
        if self._monitor is not None:
            self._monitor.read_to(low)  # after a restart this is the first that is heard of it
        if low > high:
            raise DataLossError(
                f"planning a batch from id {low} to id {high} of log {ingest.storage.root}: it ends before it begins; "
                "give the query a new checkpoint"
            )
        shares = split_range(
            ingest.log.covering(low, high),
            low,
            high,
            self._options.min_partitions or 1,
            self._options.max_bytes_per_partition,
        )
        return [
            LogInputPartition(str(ingest.storage.root), PARTITION, pieces, self._options.include_frames)
            for pieces in shares
        ]

    def commit(self, end: dict[str, Any]) -> None:
        """Spark is done with everything below ``end``."""
        self._idle_at = 0.0  # there was a batch, if only for another source: the next is not to wait for us
        ingest = self._opened()
        offset = Offset.from_json(end)
        if offset.log == ingest.log.log_id:
            self._persistence.insist(partial(ingest.commit, offset.next[PARTITION]))

    def stop(self) -> None:
        """Drain the socket, seal, release the log. Called by Spark, by SIGTERM and at exit."""
        if self._ingest is None:
            return
        if threading.current_thread() is threading.main_thread():
            # Nothing may cut this short any more; before anything else is done.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        ingest, self._ingest = self._ingest, None
        monitor, self._monitor = self._monitor, None
        try:
            ingest.stop()
        finally:
            if monitor is not None:
                monitor.stop()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one share; runs on an executor."""
        assert isinstance(partition, LogInputPartition), partition
        return read_log_partition(partition)

    def _offset(self, ingest: Ingest | Follow, next_id: int) -> dict[str, Any]:
        return Offset(ingest.log.log_id, {PARTITION: next_id}).to_json()

    def _checked(self, ingest: Ingest | Follow, told: dict[str, Any]) -> int:
        """The id that an offset of the query's checkpoint means.

        Raises:
            DataLossError: As ``_resolve``; or the log is a copy that is older than the checkpoint.
        """
        offset = Offset.from_json(told)
        next_id, given = self._resolve(ingest, offset), ingest.given
        if offset.log == ingest.log.log_id and given is not None and offset.next[PARTITION] > given:
            assert ingest.reader is not None, "only who reads along knows what it was given"
            path = ingest.storage.reader_path(ingest.reader)
            raise DataLossError(
                f"reading from log {ingest.storage.root}: the offset says {offset.next[PARTITION]}, and {path} says "
                f"that this reader was only ever given the ids below {given}: the log is an older copy, and other "
                "messages may have been given those ids since. Restore the newer log, or give the query a new "
                "checkpoint. If the query only had another name (reader) meanwhile, remove that file"
            )
        return next_id

    def _resolve(self, ingest: Ingest | Follow, offset: Offset) -> int:
        """The id that an offset means in our log.

        Raises:
            DataLossError: It means none, and ``failOnDataLoss`` is true.
        """
        log, root = ingest.log, ingest.storage.root
        if offset.log is not None and offset.log != log.log_id:
            self._lose_log(ingest, offset, "the offset is of log")
            return log.earliest
        unknown = set(offset.next) - {PARTITION}
        if unknown or PARTITION not in offset.next:
            raise DataLossError(
                f"reading from log {root}: the offset names log partitions {sorted(offset.next)}, there is {PARTITION}"
            )
        next_id = offset.next[PARTITION]
        if next_id < log.earliest:
            self._lose_ids(ingest, next_id, log.earliest)
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
        ingest: Ingest | Follow,
        first: int,
        end: int,
        why: str = "the query was stopped for longer than the log kept them",
    ) -> None:
        what = f"ids {first} to {end - 1} are no longer in log {ingest.storage.root}"
        if self._options.fail_on_data_loss:
            raise DataLossError(f"reading: {what}: {why}. {_GO_ON}")
        new = end - max(first, self._lost_to)
        if new > 0:
            self._lost_to = end
            ingest.counters.data_losses += 1
            ingest.counters.expired += new
            _log.warning("data loss: %s; going on because failOnDataLoss=false", what)

    def _lose_log(self, ingest: Ingest | Follow, offset: Offset, what: str) -> None:
        what = f"{what} {offset.log}, and {ingest.storage.root} holds log {ingest.log.log_id}"
        if self._options.fail_on_data_loss:
            raise DataLossError(f"reading: {what}. {self._why_another_log()} {_GO_ON}")
        if str(offset.log) not in self._lost_logs:
            self._lost_logs.add(str(offset.log))
            ingest.counters.data_losses += 1
            _log.warning("data loss: %s; going on because failOnDataLoss=false", what)

    def _why_another_log(self) -> str:
        if self._options.wal_location is not None:
            return "walLocation or the checkpoint was changed, or the log was removed: set back what was changed."
        return (
            "Without walLocation, socketType, connect, bind and topics say where the log is, and a log that is "
            "removed with the temporary directory begins anew. If you changed one of these options, set it back, or "
            "set walLocation to the log that the checkpoint belongs to."
        )


_GO_ON = "To go on with what there is, set failOnDataLoss=false"


class RefusedStreamReader(DataSourceStreamReader):
    """Says why a query cannot start.

    If ``streamReader`` itself raised, Spark's own process would end with an ``UnboundLocalError`` and show that.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def initialOffset(self) -> dict[str, Any]:
        raise OptionError(self._why)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        raise OptionError(self._why)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        raise OptionError(self._why)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise OptionError(self._why)


def _stop_on_sigterm() -> None:
    """Turn SIGTERM, with which Spark ends this process, into an exit that runs ``stop``."""

    def leave(signum: int, _frame: object) -> None:
        raise SystemExit(128 + signum)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
