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
from zmq_datasource.spark.admission import Admission
from zmq_datasource.spark.partition_reader import LogInputPartition, read_log_partition
from zmq_datasource.spark.positions import Positions
from zmq_datasource.spark.worker import set_up_worker

if TYPE_CHECKING:
    from zmq_datasource.monitoring.source import SourceMonitor
    from zmq_datasource.source.feed import Feed

__all__ = ["RefusedStreamReader", "ZmqStreamReader"]

_log = logging.getLogger(__name__)

# As long as there is nothing new, Spark asks again every 10 ms (spark.sql.streaming.pollingDelay). Whoever asks again
# that soon is answered when there is something, or after this long. Another source of the query waits as long with us.
_ASKED_AGAIN_SECONDS = 0.05
_IDLE_SECONDS = 0.1


class ZmqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of one streaming query."""

    def __init__(self, options: StreamReadOptions) -> None:
        self._options = options
        # Only in the source runner:
        self._source: Feed | None = None
        self._positions: Positions | None = None
        self._monitor: SourceMonitor | None = None
        self._admission = Admission(options)
        self._persistence = Persistence(options.wal_retry_timeout)
        self._available_now = False
        self._target: int | None = None
        self._idle_at = 0.0  # when Spark last heard that there is nothing new

    def _opened(self, position: dict[str, Any] | None = None) -> tuple[Feed, Positions]:
        """What the query reads, and what offsets mean in it; opened on the first call.

        Nothing is received before a position was compared with the log's end, or new messages could get the ids of
        those that an older position is about.

        Args:
            position: The newest that Spark has said in this call; None if the query has no checkpoint.
        """
        if self._source is None:
            # The source runner alone receives; the processes that plan and read do without all of this.
            from zmq_datasource.source.feed import Feed  # noqa: PLC0415

            set_up_worker()
            self._source = Feed(self._options)
            _stop_on_sigterm()
            try:
                if position is None:
                    self._source.open()
                else:
                    self._source.open(Offset.from_json(position).reader, begins=False)
            except BaseException:
                self._source = None
                raise
            # Covers a SIGTERM that arrives between the end of a call and Spark's stop().
            atexit.register(self.stop)
            self._positions = Positions(self._source, self._options)
        assert self._positions is not None
        return self._source, self._positions

    def _receive(self, source: Feed) -> None:
        """Begin to receive, on the first call."""
        if self._monitor is not None:
            return
        try:
            source.start()
        except Exception:
            self._source = None
            raise
        from zmq_datasource.monitoring.source import SourceMonitor  # noqa: PLC0415 - see _opened

        self._monitor = SourceMonitor(source, self._options)
        self._monitor.start()

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint starts.

        Spark asks on every trigger until there is a first batch, and once more when it has
        to repeat that batch after a crash. So the answer is kept with the log until the
        engine has moved on.
        """
        source, positions = self._opened()
        first = positions.initial()
        self._receive(source)
        return positions.offset(first)

    def getDefaultReadLimit(self) -> ReadLimit:
        # Our limits are applied together in latestOffset. Any limit but ReadAllAvailable will
        # do: that one then only comes from Trigger.Once, which takes all there is.
        return ReadMaxRows(2**63 - 1)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch: everything received so far, made durable, within the limits."""
        source, positions = self._opened(start)
        begin = positions.id_of(start)
        self._receive(source)
        if self._monitor is not None:
            self._monitor.read_to(begin)
        positions.read_from(begin)
        if source.log.full or source.log.fault:
            # Spark commits a batch to the source only once there is data for the next, which a
            # full log, or a full disk, keeps out. But it asks for the next only after the last is in its own
            # commit log, so nothing below `begin` will be asked for again.
            self._persistence.insist(partial(source.commit, begin))
        if time.monotonic() - self._idle_at < _ASKED_AGAIN_SECONDS:
            source.wait_for_more(begin, _IDLE_SECONDS)
        end = self._end(source, begin, limit)
        if end == begin:
            self._idle_at = time.monotonic()
        # Whether a log that another process writes is full, is not seen from here: it gets `begin` each time.
        self._persistence.insist(partial(source.give, begin, end))
        return positions.after(start, begin, end)

    def _end(self, source: Feed, begin: int, limit: ReadLimit) -> int:
        if isinstance(limit, ReadAllAvailable):
            return max(begin, self._gather(source))
        if self._available_now and self._target is None:
            self._target = self._gather(source)
        source.check()  # also where a batch is held back
        wait = self._target is None and not (source.log.full or source.log.fault)
        if wait and self._admission.holds_back(begin, source.received_end):
            return begin  # and no chunk is cut for what will wait
        available = source.seal() if self._target is None else self._target
        return self._admission.end(
            begin,
            max(begin, available),
            lambda low, high, size: self._persistence.insist(
                lambda: end_within_bytes(source.storage, source.log.covering(low, high), low, high, size)
            ),
            wait=wait,
        )

    def prepareForTriggerAvailableNow(self) -> None:
        """What is durable after ``timeout``, or ``idleTimeout``, is the target.

        That begins when Spark says where the query is: nothing is received before.
        """
        self._available_now = True

    def _gather(self, source: Feed) -> int:
        return source.gather(self._options.timeout, self._options.idle_timeout)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Shown as ``sources[].latestOffset`` in the query's progress: the log's end and the metrics."""
        if self._source is None or self._positions is None or self._monitor is None:
            return None  # nothing is received yet
        return self._positions.offset(self._source.log.durable_end) | self._monitor.metrics()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Share the ids from ``start`` to ``end`` out among tasks."""
        source, positions = self._opened(end)
        if not positions.ends_here(end):
            return []
        low, high = positions.range(start, end)
        self._receive(source)
        if self._monitor is not None:
            self._monitor.read_to(low)  # after a restart this is the first that is heard of it
        if low > high:
            raise DataLossError(
                f"planning a batch from id {low} to id {high} of log {source.storage.root}: it ends before it begins; "
                "give the query a new checkpoint"
            )
        shares = split_range(
            source.log.covering(low, high),
            low,
            high,
            self._options.min_partitions or 1,
            self._options.max_bytes_per_partition,
        )
        return [
            LogInputPartition(str(source.storage.root), PARTITION, pieces, self._options.include_frames)
            for pieces in shares
        ]

    def commit(self, end: dict[str, Any]) -> None:
        """Spark is done with everything below ``end``."""
        self._idle_at = 0.0  # there was a batch, if only for another source: the next is not to wait for us
        source, positions = self._opened(end)
        done = positions.committed(end)
        if done is not None:
            self._persistence.insist(partial(source.commit, done))

    def stop(self) -> None:
        """Drain the socket, seal, release the log. Called by Spark, by SIGTERM and at exit."""
        if self._source is None:
            return
        if threading.current_thread() is threading.main_thread():
            # Nothing may cut this short any more; before anything else is done.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        source, self._source = self._source, None
        monitor, self._monitor = self._monitor, None
        try:
            source.stop()
        finally:
            if monitor is not None:
                monitor.stop()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one share; runs on an executor."""
        assert isinstance(partition, LogInputPartition), partition
        return read_log_partition(partition)


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
