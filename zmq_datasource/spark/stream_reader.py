"""``spark.readStream``: plans batches of a log that a receiver fills.

Each running query has one process, the *source runner*, which makes all calls except ``read``. Another process makes
the same object only to pickle it for the executors. So the constructor opens nothing. The source runner opens the log
on its first call, and starts to receive on the first ``latestOffset`` or ``partitions``.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from zmq_datasource.errors import DataLossError, OptionError
from zmq_datasource.host.signals import defers_signals, exit_on_signals, ignore_signals
from zmq_datasource.log import (
    deleted_error,
    split_range,
)
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.spark.admission import batch_end
from zmq_datasource.spark.offset_ids import OffsetIds
from zmq_datasource.spark.partition_reader import LogInputPartition, MessageRows, Rows, read_log_partition
from zmq_datasource.spark.serving import Serving
from zmq_datasource.spark.worker import set_up_worker

if TYPE_CHECKING:
    from zmq_datasource.log import Chunk
    from zmq_datasource.monitoring.source import SourceMonitor
    from zmq_datasource.source.query_log import QueryLog

_log = logging.getLogger(__name__)


class Idle(NamedTuple):
    """How long a poll waits for messages while the query is idle.

    Without new messages Spark polls every 10 ms (spark.sql.streaming.pollingDelay). While this source waits, Spark does
    not poll the query's other sources. After that their last polls are too long ago for them to wait, so of the sources
    of a query one waits, and a message for another one is seen after ``wait_seconds`` at most.

    Attributes:
        poll_seconds: If Spark polls again within this time after a poll that found no messages, the poll waits.
        wait_seconds: The longest time that a poll waits.
    """

    poll_seconds: float = 0.05
    wait_seconds: float = 0.25


class ZmqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of one streaming query.

    Attributes:
        idle: How long polls wait while there are no new messages.
        log: The log; None before Spark's first call, after ``stop``, and in the process that pickles this object.
    """

    def __init__(self, options: StreamReadOptions, rows: Rows | None = None) -> None:
        self._options = options
        self.idle = Idle()
        self._rows = rows or MessageRows(options.include_frames)
        # Only in the source runner:
        self.log: QueryLog | None = None
        self._offsets: OffsetIds | None = None
        self._monitor: SourceMonitor | None = None
        self._serving = Serving(options.serve_log)
        self._available_now = False
        self._target: int | None = None  # where a query with Trigger.AvailableNow ends
        self._planned: list[Chunk] = []  # the last batch, with failOnDataLoss=false
        self._asked: tuple[dict[str, Any], int] | None = None  # the newest start, and its id
        self._idle_at = 0.0  # when a poll last found no new messages

    def _open(self, position: dict[str, Any] | None = None) -> tuple[QueryLog, OffsetIds]:
        """Open the log on the first call. Returns it, and the translation of offsets.

        Receiving starts only after the checkpoint's offset was compared with the log's end. Otherwise new messages
        could get ids that the checkpoint has for other messages.

        Args:
            position: The newest offset in Spark's call; None for ``initialOffset``, which gets none.
        """
        if self.log is None:
            # Imported here, because only the source runner receives.
            from zmq_datasource.source.query_log import QueryLog  # noqa: PLC0415

            set_up_worker()
            self.log = QueryLog(self._options)
            exit_on_signals()
            try:
                self.log.open()
            except BaseException:
                self.log = None
                raise
            # Covers a SIGTERM that arrives between the end of a call and Spark's stop().
            atexit.register(self.stop)
            # At exit this runs before stop. Otherwise a SIGTERM in the first steps of stop would skip its other steps.
            atexit.register(ignore_signals)
            self._offsets = OffsetIds(self.log, self._options)
        assert self._offsets is not None
        return self.log, self._offsets

    def _receive(self, log: QueryLog) -> SourceMonitor:
        """Start receiving on the first call. Returns the monitor."""
        if self._monitor is not None:
            return self._monitor
        try:
            log.start()
        except Exception:
            self.log = None
            raise
        from zmq_datasource.monitoring.source import SourceMonitor  # noqa: PLC0415 - see _open

        self._monitor = SourceMonitor(log, self._options)
        return self._monitor

    @defers_signals
    def initialOffset(self) -> dict[str, Any]:
        """The offset where a query without a checkpoint begins.

        Spark calls this twice for the first batch, before ``latestOffset`` and before ``partitions``, and once more
        when it repeats that batch after a crash. Receiving does not start here, because the end of a repeated batch
        must be compared with the log's end first.
        """
        _, offsets = self._open()
        return offsets.initial()

    def getDefaultReadLimit(self) -> ReadLimit:
        # latestOffset applies the options' limits. This may be any limit but ReadAllAvailable, so that a call with
        # ReadAllAvailable comes only from Trigger.Once.
        return ReadMaxRows(2**63 - 1)

    @defers_signals
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch: all messages received so far, made durable, within the limits."""
        log, offsets = self._open(start)
        begin = offsets.id_of(start)
        self._receive(log).mark_finished(begin)
        planned, self._planned = self._planned, []
        if planned:  # the batch is done
            offsets.count_lost(planned)
        # Spark calls commit only when there is data for the next batch, and a full log has no room for data. But Spark
        # asks for the next batch only after the last one is in its commit log. So the log may delete that one now.
        offsets.release(start, begin)
        if time.monotonic() - self._idle_at < self.idle.poll_seconds:
            log.wait_for_more(begin, self.idle.wait_seconds)
        self._asked = start, begin
        end = self._end(log, begin, limit)
        if end == begin:
            self._idle_at = time.monotonic()
        return offsets.end_offset(start, begin, end)

    def _end(self, log: QueryLog, begin: int, limit: ReadLimit) -> int:
        once = isinstance(limit, ReadAllAvailable)  # Trigger.Once
        if once or (self._available_now and self._target is None):
            received = log.receive_for(self._options.timeout, self._options.idle_timeout)
            if once:
                return max(begin, received)
            self._target = received
        log.check()
        available = log.seal() if self._target is None else self._target
        return batch_end(self._options, begin, available, log.contents.end_within_bytes)

    def prepareForTriggerAvailableNow(self) -> None:
        """Make the query end at the messages that are durable after ``timeout`` or ``idleTimeout``. Receives nothing
        yet: ``latestOffset`` does."""
        self._available_now = True

    @defers_signals
    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The log's end and the metrics, which Spark shows as ``sources[].latestOffset`` in the query's progress."""
        if self.log is None or self._offsets is None or self._monitor is None:
            return None  # receiving has not started
        return self._offsets.offset(self.log.contents.durable_end) | self._monitor.metrics()

    @defers_signals
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Divide the ids from ``start`` to ``end`` among tasks."""
        log, offsets = self._open(end)
        planned = self._range(log, offsets, start, end)
        if planned is None:
            return []
        low, high, chunks = planned
        # If a restarted query repeats a batch, Spark has not called latestOffset yet.
        self._receive(log).mark_finished(low)
        if low > high:
            raise DataLossError(
                f"planning a batch from id {low} to id {high} of {log.storage}: it ends before it begins; give the "
                "query a new checkpoint"
            )
        options, log_id = self._options, log.log_id
        # Executors read object storage directly.
        access = None if options.wal_store else self._serving.access(log.storage, log_id)
        share = partial(
            LogInputPartition,
            log.storage.store,
            rows=self._rows,
            log_id=log_id,
            fail_on_data_loss=options.fail_on_data_loss,
            access=access,
        )
        parts = split_range(chunks, low, high, options.min_partitions or 1)
        self._planned = [] if options.fail_on_data_loss else [piece for pieces in parts for piece in pieces]
        return [share(pieces) for pieces in parts]

    def _range(
        self, log: QueryLog, offsets: OffsetIds, start: dict[str, Any], end: dict[str, Any]
    ) -> tuple[int, int, Sequence[Chunk]] | None:
        """The first and the end id of a batch, without ids that are deleted, and the chunks; None as in ``range``.

        Raises:
            DataLossError: As in ``OffsetIds.range``; or ids were deleted since ``latestOffset``, and
                ``failOnDataLoss`` is true.
        """
        while True:
            (asked, begin), earliest = self._asked or (None, 0), log.contents.earliest
            if self._options.fail_on_data_loss and asked == start and begin < earliest:
                raise deleted_error(log.storage, begin, earliest)
            found = offsets.range(start, end)
            if found is None:
                return None
            chunks = log.contents.covering(*found)
            # If another thread has deleted chunks meanwhile, translate again, which counts the deleted ids.
            if log.contents.earliest <= found[0]:
                return *found, chunks

    @defers_signals
    def commit(self, end: dict[str, Any]) -> None:
        """Let the log delete the messages below ``end``, because Spark has committed them."""
        # There was a batch, perhaps only for another source of the query. So the next poll does not wait.
        self._idle_at = 0.0
        log, offsets = self._open(end)
        if (committed := offsets.committed_id(end)) is not None:
            log.commit(committed)

    def stop(self) -> None:
        """Drain the socket, seal the chunk and release the log. Called by Spark, on SIGTERM and at exit."""
        if self.log is None:
            return
        ignore_signals()  # before anything else is done
        log, self.log = self.log, None
        self._monitor = None
        try:
            self._serving.stop()  # first, because the next run may use the same endpoint
        finally:
            log.stop()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one share. Runs on an executor."""
        assert isinstance(partition, LogInputPartition), partition
        return read_log_partition(partition)


class RefusedStreamReader(DataSourceStreamReader):
    """Raises the error of wrong options in each call.

    If ``streamReader`` raised it, Spark would show an ``UnboundLocalError`` of its own process instead.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise OptionError(self._why)

    initialOffset = latestOffset = partitions = read = _refuse  # noqa: N815 - Spark's names
