"""``spark.read``: a bounded read of a live socket, of a log, or of a log's gap table."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DataLossError
from zmq_datasource.log import ChunkIndex, first_since, read_index, read_saved_state, split_range
from zmq_datasource.messages.columns import LOG_SCHEMA
from zmq_datasource.messages.rows import number_rows
from zmq_datasource.options import BatchReadOptions
from zmq_datasource.options.offsets import Place
from zmq_datasource.source.facts import read_gaps
from zmq_datasource.source.location import log_storage
from zmq_datasource.source.receiver import ROUND_MESSAGES, Receiver
from zmq_datasource.spark.partition_reader import (
    RETRY_SECONDS,
    LogInputPartition,
    MessageRows,
    Rows,
    read_log_partition,
)
from zmq_datasource.spark.worker import set_up_worker

_log = logging.getLogger(__name__)

# A task that Spark sends to an executor may have 128 MiB (spark.rpc.message.maxSize), and carries its messages.
_PARTITION_BYTES = 16 << 20
_MOST_RECEIVED_BYTES = 256 << 20

_GAPS_SCHEMA = pa.schema(
    [
        ("publisher", pa.string()),
        ("topic", pa.string()),
        ("endpoint", pa.string()),
        ("epoch", pa.int32()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("messages", pa.int64()),
        ("noticed", pa.timestamp("us", tz="UTC")),
    ]
)
GAPS_DDL = (
    "publisher STRING, topic STRING, endpoint STRING, epoch INT, first BIGINT, last BIGINT, "
    "messages BIGINT, noticed TIMESTAMP"
)


class _ReceivedPartition(InputPartition):
    """Received messages, as an Arrow IPC stream. The partition itself carries them to its task."""

    def __init__(self, messages: Sequence[pa.RecordBatch]) -> None:
        schema = messages[0].schema if messages else LOG_SCHEMA
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as stream:
            for batch in messages:
                stream.write_batch(batch)
        super().__init__(sink.getvalue().to_pybytes())

    def __repr__(self) -> str:
        return f"_ReceivedPartition({len(self.value)} bytes)"


class ZmqLiveReader(DataSourceReader):
    """Receives for a bounded time, on the driver, when Spark plans the first action on what ``load`` returned.

    Spark keeps the partitions for later actions, and may run a task of one action twice: to sample for ``orderBy``, or
    because it has failed. A task that received would find other messages the second time, or none. So the messages are
    received once, before the tasks, and the partitions carry them.

    Args:
        options: Where and how long to receive.
        rows: Makes Spark's rows of messages.
        most_bytes: Receiving ends when the messages have this many bytes, because Spark keeps them in its memory.
    """

    def __init__(
        self, options: BatchReadOptions, rows: Rows | None = None, most_bytes: int = _MOST_RECEIVED_BYTES
    ) -> None:
        self._options = options
        self._rows = rows or MessageRows(options.include_frames)
        self._most_bytes = most_bytes

    def partitions(self) -> Sequence[InputPartition]:
        """Receive until ``maxMessages``, ``timeout`` or ``idleTimeout``. Ids count from 0."""
        set_up_worker()
        partitions: list[InputPartition] = []
        group: list[pa.RecordBatch] = []
        group_bytes = total = 0
        with closing(self._receive()) as received:
            for batch in received:
                group.append(batch)
                group_bytes += batch.nbytes
                total += batch.nbytes
                if group_bytes >= _PARTITION_BYTES:
                    partitions.append(_ReceivedPartition(group))
                    group, group_bytes = [], 0
                if total >= self._most_bytes:
                    _log.warning(
                        "a batch read of a socket ends at %d MiB of messages, which Spark keeps in memory; set "
                        "maxMessages or a shorter timeout, or read a longer time into a log (readStream, or "
                        "zmq-datasource receive)",
                        self._most_bytes >> 20,
                    )
                    break
        if group or not partitions:
            partitions.append(_ReceivedPartition(group))
        return partitions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of the messages of a partition: the same ones each time."""
        assert isinstance(partition, _ReceivedPartition), partition
        return self._rows.of(pa.ipc.open_stream(partition.value))

    def _receive(self) -> Generator[pa.RecordBatch, None, None]:
        options = self._options
        most = options.max_messages if options.max_messages is not None else 2**63
        counters = SourceCounters()
        next_id = 0
        with Receiver(options, counters) as receiver:
            now = time.monotonic()  # opening takes time, in which nothing can arrive
            deadline, idle_from = now + options.timeout, now
            while next_id < most and now < deadline:
                taken = receiver.receive(min(most - next_id - receiver.pending, ROUND_MESSAGES))
                now = time.monotonic()
                if taken:
                    idle_from = now
                idle = options.idle_timeout is not None and now - idle_from >= options.idle_timeout
                if idle:
                    break
                if receiver.batch_ready or next_id + receiver.pending >= most:
                    messages = self._take(receiver, most - next_id)
                    yield number_rows(messages, next_id)
                    next_id += messages.num_rows
            if receiver.pending and next_id < most:
                yield number_rows(self._take(receiver, most - next_id), next_id)
            receiver.report_absent()
            if receiver.intake.tracker is not None:
                _log.info("read %s %s", counters, receiver.intake.tracker.totals)

    def _take(self, receiver: Receiver, most: int) -> pa.RecordBatch:
        messages = receiver.take()
        if receiver.failure is not None:
            raise receiver.failure
        return messages.slice(0, min(most, messages.num_rows))


class ZmqLogReader(DataSourceReader):
    """Reads a log in parallel, without a socket. The log may be written at the same time.

    It takes no filters (``pushFilters``), because Spark 4.3 would use the filtered plan in the next action on the same
    DataFrame, too, even if that action has no filters. That action would miss rows.
    """

    def __init__(self, options: BatchReadOptions, rows: Rows | None = None) -> None:
        self._options = options
        self._rows = rows or MessageRows(options.include_frames)
        self._storage = log_storage(options)
        self._storage.retry_seconds = RETRY_SECONDS

    def partitions(self) -> Sequence[InputPartition]:
        options, storage = self._options, self._storage
        log_id, index = storage.log_id(), read_index(storage)
        start = self._id_of(options.starting_offsets or Place("earliest"), log_id, index)
        end = self._id_of(options.ending_offsets or Place("latest"), log_id, index, is_end=True)
        share = partial(
            LogInputPartition,
            storage.store,
            rows=self._rows,
            log_id=log_id,
            fail_on_data_loss=options.fail_on_data_loss,
        )
        parts = split_range(index.covering(start, end), start, end, options.min_partitions or 1)
        return [share(pieces) for pieces in parts or [[]]]

    def _id_of(self, place: Place, log_id: str, index: ChunkIndex, is_end: bool = False) -> int:
        """The id of a place in the log.

        Raises:
            DataLossError: The log does not have the id of the place, and ``failOnDataLoss`` is true.
        """
        if place.time is not None:
            found = first_since(self._storage, index.all, place.time)
            return index.durable_end if found is None else found
        if place.offset is None:
            return index.earliest if place.word == "earliest" else index.durable_end
        offset, root = place.offset, self._storage.root
        if offset.log not in (None, log_id):
            problem = f"the offset is of log {offset.log}, and {root} holds log {log_id}"
            instead = index.durable_end if is_end else index.earliest
        elif not index.earliest <= offset.next <= index.durable_end:
            held = (
                "is empty" if index.earliest == index.durable_end else f"ends before id {index.durable_end}"
            )
            option = "endingOffsets" if is_end else "startingOffsets"
            problem = f"{option} is {offset.next}, and log {root} begins at id {index.earliest} and {held}"
            instead = min(max(offset.next, index.earliest), index.durable_end)
        else:
            return offset.next
        if self._options.fail_on_data_loss:
            raise DataLossError(f"reading: {problem}; to read what the log has, set failOnDataLoss=false")
        set_up_worker()
        _log.warning("data loss: %s; reading what the log has because failOnDataLoss=false", problem)
        return instead

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LogInputPartition), partition
        return read_log_partition(partition)


class ZmqGapReader(DataSourceReader):
    """Reads the gap table of a log (``view=gaps``). The log may be written at the same time."""

    def __init__(self, options: BatchReadOptions) -> None:
        self._storage = log_storage(options)

    def partitions(self) -> Sequence[InputPartition]:
        self._storage.log_id()  # raises an error if there is no log that can be read
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One row for each gap, oldest first."""
        set_up_worker()
        self._storage.log_id()  # a directory that is out of reach would look like a log without gaps
        yield pa.RecordBatch.from_pylist(read_gaps(read_saved_state(self._storage)), _GAPS_SCHEMA)
