"""``spark.readStream``: plans batches of a log that a receiver fills.

Each running query has one process, the *source runner*, which makes all calls except ``read``. Another process makes
the same object only to pickle it for the executors. So the constructor opens nothing. The source runner opens the log
on its first call, and starts to receive on the first ``latestOffset`` or ``partitions``.
"""

from __future__ import annotations

import atexit
import logging
import math
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
    STORE_RETRY_SECONDS,
    Deletions,
    LogStorage,
    deleted_error,
    end_within_bytes,
    split_range,
)
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.spark.admission import Admission
from zmq_datasource.spark.offset_ids import OffsetIds
from zmq_datasource.spark.partition_reader import LogInputPartition, MessageRows, Rows, read_log_partition
from zmq_datasource.spark.serving import Serving
from zmq_datasource.spark.skipped import Skipped
from zmq_datasource.spark.worker import set_up_worker

if TYPE_CHECKING:
    from zmq_datasource.log import Chunk
    from zmq_datasource.monitoring.source import SourceMonitors
    from zmq_datasource.source.feeds import Feeds

_log = logging.getLogger(__name__)


class Idle(NamedTuple):
    """How long a poll waits for messages while the query is idle.

    Without new messages Spark polls every 10 ms (spark.sql.streaming.pollingDelay). While this source waits, Spark does
    not poll the query's other sources.

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
        feeds: The log partitions; None before Spark's first call, after ``stop``, and in the process that pickles this
            object.
    """

    def __init__(self, options: StreamReadOptions, rows: Rows | None = None) -> None:
        self._options = options
        self.idle = Idle()
        self._rows = rows or MessageRows(options.include_frames)
        # Only in the source runner:
        self.feeds: Feeds | None = None
        self._offsets: OffsetIds | None = None
        self._monitors: SourceMonitors | None = None
        self._admission = Admission(options)
        self._serving = Serving(options.serve_log)
        self._available_now = False
        self._targets: dict[int, int] | None = None  # where a query with Trigger.AvailableNow ends
        self._skipped = Skipped()
        self._asked: tuple[dict[str, Any], dict[int, int]] | None = None  # the newest start, and its ids
        self._idle_at = 0.0  # when a poll last found no new messages

    def _open(self, position: dict[str, Any] | None = None) -> tuple[Feeds, OffsetIds]:
        """Open the log on the first call. Returns its partitions, and the translation of offsets.

        Receiving starts only after the checkpoint's offset was compared with the log's end. Otherwise new messages
        could get ids that the checkpoint has for other messages.

        Args:
            position: The newest offset in Spark's call; None for ``initialOffset``, which gets none.
        """
        if self.feeds is None:
            # Imported here, because only the source runner receives.
            from zmq_datasource.source.feeds import Feeds  # noqa: PLC0415

            set_up_worker()
            self.feeds = Feeds(self._options)
            exit_on_signals()
            try:
                self.feeds.open(begins=position is None)
            except BaseException:
                self.feeds = None
                raise
            # Covers a SIGTERM that arrives between the end of a call and Spark's stop().
            atexit.register(self.stop)
            # At exit this runs before stop. Otherwise a SIGTERM in the first steps of stop would skip its other steps.
            atexit.register(ignore_signals)
            self._offsets = OffsetIds(self.feeds, self._options)
        assert self._offsets is not None
        return self.feeds, self._offsets

    def _receive(self, feeds: Feeds) -> SourceMonitors:
        """Start receiving on the first call. Returns the monitors."""
        if self._monitors is not None:
            return self._monitors
        try:
            feeds.start()
        except Exception:
            self.feeds = None
            raise
        from zmq_datasource.monitoring.source import SourceMonitors  # noqa: PLC0415 - see _open

        self._monitors = SourceMonitors(feeds.parts, self._options)
        return self._monitors

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
        feeds, offsets = self._open(start)
        begins = offsets.ids_of(start)
        monitors = self._receive(feeds)
        if feeds.open_new_partitions():
            offsets.add_new_partitions()
            monitors.add(feeds.parts)
            begins = offsets.ids_of(start)
        monitors.mark_finished(begins)
        # Spark calls commit only when there is data for the next batch, and a full log has no room for data. But Spark
        # asks for the next batch only after the last one is in its commit log. So the log may delete that one now.
        offsets.release(start, begins)
        if time.monotonic() - self._idle_at < self.idle.poll_seconds:
            feeds.wait_for_more(begins, self.idle.wait_seconds)
        self._asked = start, begins
        ends = self._ends(feeds, begins, limit)
        if not self._options.fail_on_data_loss:
            self._skipped.count(feeds, begins)
        if ends == begins:
            self._idle_at = time.monotonic()
        return offsets.end_offset(start, begins, ends)

    def _ends(self, feeds: Feeds, begins: dict[int, int], limit: ReadLimit) -> dict[int, int]:
        once = isinstance(limit, ReadAllAvailable)  # Trigger.Once
        if once or (self._available_now and self._targets is None):
            received = feeds.receive_for(self._options.timeout, self._options.idle_timeout)
            if once:
                return _not_before(begins, received)
            self._targets = received
        feeds.check()  # even if the batch is held back below
        wait = self._targets is None and not feeds.is_full
        waiting = sum(feed.received_end - begins[partition] for partition, feed in feeds.parts.items())
        if wait and self._admission.holds_back(waiting):
            return begins  # without cutting a chunk
        available = feeds.seal() if self._targets is None else self._targets

        def end_within(partition: int, low: int, high: int, size: int) -> tuple[int, int]:
            feed = feeds.parts[partition]
            # Without a reader's name this records no ids: ``partitions`` leaves out deleted ids and counts them.
            storage = LogStorage(feed.storage.store, partition, STORE_RETRY_SECONDS)
            deletions = Deletions(storage, feeds.log_id, self._options.fail_on_data_loss)
            return end_within_bytes(storage, feed.log.covering(low, high), low, high, size, deletions)

        def size_of(partition: int, low: int, high: int) -> int:
            return feeds.parts[partition].log.size_of(low, high)

        return self._admission.ends(begins, _not_before(begins, available), size_of, end_within, wait=wait)

    def prepareForTriggerAvailableNow(self) -> None:
        """Make the query end at the messages that are durable after ``timeout`` or ``idleTimeout``. Receives nothing
        yet: ``latestOffset`` does."""
        self._available_now = True

    @defers_signals
    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The log's end and the metrics, which Spark shows as ``sources[].latestOffset`` in the query's progress."""
        if self.feeds is None or self._offsets is None or self._monitors is None:
            return None  # receiving has not started
        ends = {partition: feed.log.durable_end for partition, feed in self.feeds.parts.items()}
        return self._offsets.offset(ends) | self._monitors.metrics()

    @defers_signals
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Divide the ids from ``start`` to ``end`` among tasks."""
        feeds, offsets = self._open(end)
        ranges, chunks = self._ranges(feeds, offsets, start, end)
        if not ranges:
            return []
        monitors = self._receive(feeds)
        # If a restarted query repeats a batch, Spark has not called latestOffset yet.
        monitors.mark_finished({partition: low for partition, (low, _) in ranges.items()})
        for partition, (low, high) in ranges.items():
            if low > high:
                raise DataLossError(
                    f"planning a batch from id {low} to id {high} of {feeds.parts[partition].storage}: it ends before "
                    "it begins; give the query a new checkpoint"
                )
        # Executors read object storage directly.
        access = None if self._options.wal_store else self._serving.access(feeds.storage, feeds.log_id)
        messages = sum(high - low for low, high in ranges.values())
        share = partial(
            LogInputPartition,
            feeds.storage.store,
            rows=self._rows,
            log_id=feeds.log_id,
            fail_on_data_loss=self._options.fail_on_data_loss,
            access=access,
            reader=feeds.reader.name,
        )
        shares: list[InputPartition] = []
        for partition, (low, high) in ranges.items():
            part = math.ceil((self._options.min_partitions or 1) * (high - low) / max(1, messages))
            most = self._options.max_bytes_per_partition
            shares += [
                share(partition, pieces) for pieces in split_range(chunks[partition], low, high, part, most)
            ]
        if not self._options.fail_on_data_loss:
            begins = {partition: low for partition, (low, _) in ranges.items()}
            self._skipped.plan(feeds, offsets.begin_of(start, end).next, begins)
        return shares

    def _ranges(
        self, feeds: Feeds, offsets: OffsetIds, start: dict[str, Any], end: dict[str, Any]
    ) -> tuple[dict[int, tuple[int, int]], dict[int, Sequence[Chunk]]]:
        """The first and the end id of a batch in each partition, without ids that are deleted, and the chunks.

        Raises:
            DataLossError: As in ``OffsetIds.ranges``; or ids were deleted since ``latestOffset``, and
                ``failOnDataLoss`` is true.
        """
        while True:
            if self._options.fail_on_data_loss and self._asked is not None and self._asked[0] == start:
                for partition, begin in self._asked[1].items():
                    feed = feeds.parts[partition]
                    if begin < feed.log.earliest:
                        raise deleted_error(feed.storage, begin, feed.log.earliest)
            ranges = offsets.ranges(start, end)
            chunks = {
                partition: feeds.parts[partition].log.covering(low, high)
                for partition, (low, high) in ranges.items()
            }
            # If another thread has deleted chunks meanwhile, translate again, which counts the deleted ids.
            if all(feeds.parts[partition].log.earliest <= low for partition, (low, _) in ranges.items()):
                return ranges, chunks

    @defers_signals
    def commit(self, end: dict[str, Any]) -> None:
        """Let the log delete the messages below ``end``, because Spark has committed them."""
        # There was a batch, perhaps only for another source of the query. So the next poll does not wait.
        self._idle_at = 0.0
        feeds, offsets = self._open(end)
        feeds.commit(offsets.committed_ids(end))

    def stop(self) -> None:
        """Drain the socket, seal the chunk and release the log. Called by Spark, on SIGTERM and at exit."""
        if self.feeds is None:
            return
        ignore_signals()  # before anything else is done
        feeds, self.feeds = self.feeds, None
        self._monitors = None
        try:
            self._serving.stop()  # first, because the next run may use the same endpoint
        finally:
            feeds.stop()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one share. Runs on an executor."""
        assert isinstance(partition, LogInputPartition), partition
        return read_log_partition(partition)


def _not_before(begins: dict[int, int], ends: dict[int, int]) -> dict[int, int]:
    """The end of a batch in each partition; its begin, if ``ends`` has an earlier id or lacks the partition."""
    return {partition: max(begin, ends.get(partition, begin)) for partition, begin in begins.items()}


class RefusedStreamReader(DataSourceStreamReader):
    """Raises the error of wrong options in each call.

    If ``streamReader`` raised it, Spark would show an ``UnboundLocalError`` of its own process instead.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise OptionError(self._why)

    initialOffset = latestOffset = partitions = read = _refuse  # noqa: N815 - Spark's names
