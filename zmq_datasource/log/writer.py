"""The writer of a log: gives messages their ids, and cuts chunks.

Three threads use it. The *receiving* thread appends batches and cuts chunks (this module); it never waits for the
disk. The *sealing* thread (``sealer``) writes the chunks in the order in which they were cut, and deletes old ones
(``retention``). The *merging* thread makes larger chunks of small ones (``merging``). The state that they share, and
any thread may read, is in ``index.ChunkIndex``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import msgspec
import pyarrow as pa

from zmq_datasource.errors import LogError
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.leases import Lease
from zmq_datasource.log.merging import Merger
from zmq_datasource.log.recovery import OpenedLog, open_for_writing
from zmq_datasource.log.retention import Retention
from zmq_datasource.log.retrier import Retrier
from zmq_datasource.log.sealer import Sealer, StoredRows, WriteJob
from zmq_datasource.log.silence import Leases
from zmq_datasource.log.state import CarriedState
from zmq_datasource.log.storage import LogStorage

# One chunk that is being written, and the next one.
_ENOUGH_UNWRITTEN = 2


class LogWriter(ChunkIndex):
    """Appends to a log.

    Args:
        storage: The log.
        chunk_bytes: The size in memory at which a chunk is cut.
        max_bytes: The size of the log at which ``full`` becomes true.
        retention: Seconds for which a chunk is kept.
        retry_timeout: Seconds for which ``open`` and the sealing thread repeat what the store refuses for now.
        discards: Whether the oldest chunks make room, needed or not: see ``Retention``.
        carried: Gives the state that the log keeps, at each cut.
        keeps_unread: See ``Leases``.
        clock: Returns seconds since the epoch, for comparison with modification times.

    Attributes:
        retention: Deletes chunks that are not needed any more.
        log_id: The id of the log, after ``open``.
        saved: The state of the newest chunk, after ``open``; empty if there is none.
        state_bytes: The bytes of the state in the chunk that was cut last.
        open_bytes: The bytes of the chunk that is being filled.
        on_sealed: Called, by the sealing thread, after each new chunk.
        close_seconds: How long ``close`` repeats writes that the disk refuses.
        merge_seconds: How often chunks to merge are looked for; in a bucket more rarely.
    """

    close_seconds = 5.0
    merge_seconds = 1.0

    def __init__(
        self,
        storage: LogStorage,
        *,
        chunk_bytes: int,
        max_bytes: int,
        retention: float = 0.0,
        retry_timeout: float = 0.0,
        discards: bool = False,
        carried: CarriedState | None = None,
        keeps_unread: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._storage = storage
        self._chunk_bytes = chunk_bytes
        self._leases = Leases(storage, retention, keeps_unread=keeps_unread)
        self.retention = Retention(
            storage,
            self,
            self._leases,
            seconds=retention,
            max_bytes=max_bytes,
            chunk_bytes=chunk_bytes,
            discards=discards,
            unsealed_bytes=lambda: self.unsealed_bytes,
            clock=clock,
        )
        self._retrier = Retrier(retry_timeout, self._make_room)
        self._sealer = Sealer(storage, self, self.retention, self._retrier, self._tell_sealed)
        self._merger = Merger(storage, self, chunk_bytes)
        self._carried = carried
        self.on_sealed: Callable[[], None] = lambda: None
        self.log_id = ""
        self.saved = b""
        self.state_bytes = 0

        # The chunk that is being filled.
        self._first = self._next = 0
        self.open_bytes = 0
        self._rows: list[pa.RecordBatch | StoredRows] = []

    def open(
        self,
        lock_wait: float = 0.0,
        receives: Callable[[dict[str, str], int], dict[str, str]] = lambda before, end: {},
    ) -> None:
        """Create or recover the log, and become its writer. Repeated while the store refuses for now.

        After an error the lock is free, and the call may be repeated.

        Args:
            lock_wait: Seconds to wait for an earlier writer that is stopping.
            receives: Takes what the last writer has received (``Head.receives``), and the end of the log. Returns what
                this writer receives, or raises an error to refuse the log. May be called again.

        Raises:
            LogError: Another writer has the log, or it is damaged or not writable.
            DataLossError: A reader has read ids that the log does not have.
        """
        opened = self._retrier.retry(partial(self._open, lock_wait, receives))
        self.log_id, self.saved = opened.log_id, opened.saved
        self.state_bytes = len(self.saved)
        self._first = self._next = opened.chunks.durable_end
        self._sealer.start(opened.hold, opened.past)
        self._merger.start(self.merge_seconds)

    def _open(self, lock_wait: float, receives: Callable[[dict[str, str], int], dict[str, str]]) -> OpenedLog:
        opened = open_for_writing(self._storage, lock_wait)
        try:
            before = opened.head.head
            ours = receives(before.receives, opened.chunks.durable_end)
            if ours != before.receives:
                opened.head.write(msgspec.structs.replace(before, receives=ours))
            self.replace(opened.chunks)
            self.retention.begin(opened.head)
        except BaseException:
            opened.hold.release()
            raise
        return opened

    def _tell_sealed(self) -> None:
        self.on_sealed()  # as it is set by then

    def _make_room(self) -> None:
        if self._sealer.running:
            self._sealer.tidy()

    def close(self) -> None:
        """Seal all messages, end the sealing thread, and release the log.

        Writes that the disk refuses are repeated for some seconds.

        Raises:
            LogError: The last messages could not be sealed.
        """
        if not self._sealer.running:
            return
        self._merger.end()
        last = self.cut()
        self.end_within(self.close_seconds)
        self._sealer.end()
        last.result()

    # The receiving thread's side.

    def append(self, messages: pa.RecordBatch) -> None:
        """Append messages (``messages.columns.MESSAGE_SCHEMA``), and cut the chunk if it is large enough.

        Raises:
            LogError: An earlier chunk could not be sealed, so no later one can.
        """
        # The same as nbytes, because no batch is a slice, and much faster.
        self._add(messages, messages.num_rows, messages.get_total_buffer_size())
        if self.open_bytes >= self._chunk_bytes:
            self.cut()

    def append_stored(self, rows: StoredRows) -> None:
        """Append messages that are read while their chunk is written; they come into one chunk. Raises as above."""
        self._add(rows, rows.rows, 0)

    def _add(self, rows: pa.RecordBatch | StoredRows, count: int, size: int) -> None:
        if self._sealer.failure is not None:
            raise self._sealer.failure
        if count:
            self._rows.append(rows)
            self._next += count
            self.open_bytes += size

    def cut(self) -> Future[int]:
        """Hand the chunk that is being filled to the sealing thread.

        Returns:
            Resolves to the durable end of the log once this chunk and all before it are sealed; fails with LogError.
        """
        done: Future[int] = Future()
        rows, size = self._rows, self.open_bytes
        state = self._carried.state() if rows and self._carried is not None else b""
        self.state_bytes = len(state) if rows else self.state_bytes
        self._sealer.hand_over(WriteJob(rows, size, self._first, self._next, done, state))
        self._rows, self._first, self.open_bytes = [], self._next, 0
        return done

    @property
    def full(self) -> bool:
        """Whether receiving must pause until readers need less."""
        return self.retention.full

    @property
    def writing(self) -> bool:
        """Whether the sealing thread has something to write."""
        return self._sealer.unwritten > 0

    @property
    def busy(self) -> bool:
        """Whether the disk has enough to do, so that new messages are better gathered in one chunk."""
        return self._sealer.unwritten >= _ENOUGH_UNWRITTEN

    @property
    def slow(self) -> bool:
        """Whether as much waits for the disk as memory should hold."""
        return (
            self._sealer.unwritten > _ENOUGH_UNWRITTEN
            and self.unsealed_bytes >= (1 + _ENOUGH_UNWRITTEN) * self._chunk_bytes
        )

    @property
    def fault(self) -> str | None:
        """Why the disk refuses at present; None if it does not."""
        return self._retrier.fault

    @property
    def failure(self) -> LogError | None:
        """Why nothing is sealed any more; None while sealing works."""
        return self._sealer.failure

    def end_within(self, seconds: float) -> None:
        """Limit the time for which writes are repeated that the disk refuses."""
        self._retrier.end_within(seconds)

    # For any thread.

    @property
    def needed(self) -> int:
        """The lowest id that a reader still needs, as seen a moment ago."""
        return self.retention.needed

    @property
    def slowest(self) -> Lease | None:
        """The lease that needs the lowest id, as seen a moment ago; None if there is no lease."""
        return self._leases.slowest

    @property
    def leases(self) -> list[tuple[Lease, float]]:
        """All leases, as seen a moment ago, and for how many seconds each has been silent."""
        return self._leases.all

    @property
    def unsealed_bytes(self) -> int:
        """The bytes of messages that are in memory only."""
        return self.open_bytes + self._sealer.unsealed_bytes

    @property
    def unsealed(self) -> int:
        """How many messages have an id but are not in a sealed chunk yet."""
        return self._next - self.durable_end
