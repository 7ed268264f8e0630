"""The writer of a log: gives messages their ids, cuts chunks, writes them, and keeps the log in order.

Three threads use it:

* The *receiving* thread appends batches and cuts chunks. It never waits for the disk.
* The *sealing* thread writes the chunks in the order in which they were cut. If the disk refuses, it repeats the write.
  A write that fails for good ends the sealing: ids after a hole cannot be sealed, so each later chunk fails with the
  same error.
* The *keeping* thread deletes what no reader needs (``retention``), and merges small chunks (``merging``).

The state that they share, and any thread may read, is in ``index.ChunkIndex``.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from zmq_datasource.errors import LogError, LogLockedError, LogWriteError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log.chunk import latest_of, write_chunk
from zmq_datasource.log.facts import ChunkFacts, pack
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.leases import Lease
from zmq_datasource.log.merging import Merger
from zmq_datasource.log.recovery import OpenedLog, open_for_writing
from zmq_datasource.log.retention import Retention
from zmq_datasource.log.retrier import Retrier
from zmq_datasource.log.silence import Leases
from zmq_datasource.log.state import CarriedState
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Hold

T = TypeVar("T")

_log = logging.getLogger(__name__)

# One chunk that is being written, and the next one.
_ENOUGH_UNWRITTEN = 2
# How often the keeping thread checks whether something is to be done.
_TICK_SECONDS = 0.25


class StoredRows(NamedTuple):
    """Rows that are read while their chunk is written, so that they are never in memory together.

    Attributes:
        rows: How many they are; at least one.
        latest: The latest time at which one was received, in microseconds since the epoch.
        read: Yields them. Called again if the chunk is written again. A DiskFaultError is repeated like one of the
            store; after any other error nothing is sealed any more.
    """

    rows: int
    latest: int
    read: Callable[[], Iterable[pa.RecordBatch]]


class _Job(NamedTuple):
    """A chunk to write; without rows, only a place in the order of writes.

    Attributes:
        rows: Rows with the ids from ``first`` up to ``end``.
        size: Their bytes in memory.
        done: Resolves to ``end``.
        state: The writer's state after these rows. The sealing thread compresses it, so that receiving does not wait.
    """

    rows: Sequence[pa.RecordBatch | StoredRows]
    size: int
    first: int
    end: int
    done: Future[int]
    state: bytes

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Read the rows."""
        for rows in self.rows:
            if isinstance(rows, StoredRows):
                yield from rows.read()
            else:
                yield rows

    @property
    def latest(self) -> int:
        """The latest time of the rows."""
        return max(it.latest if isinstance(it, StoredRows) else latest_of([it]) for it in self.rows)


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
        failure: Why nothing is sealed any more; None while sealing works.
        on_sealed: Called, by the sealing thread, after each new chunk.
        close_seconds: How long ``close`` repeats writes that the disk refuses.
        end_seconds: How long ``close`` waits for a disk that does not answer.
        merge_seconds: How often chunks to merge are looked for; in a bucket more rarely.
    """

    close_seconds = 5.0
    end_seconds = 120.0
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
        self._carried = carried
        self._leases = Leases(storage, keeps_unread=keeps_unread)
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
        self._retrier = Retrier(retry_timeout)
        self._merger = Merger(storage, self, chunk_bytes)
        self._faults = LimitedLog(__name__, "faults of the log")
        self.on_sealed: Callable[[], None] = lambda: None
        self.log_id = ""
        self.saved = b""
        self.state_bytes = 0
        self.failure: LogError | None = None

        # The chunk that is being filled.
        self._first = self._next = 0
        self.open_bytes = 0
        self._rows: list[pa.RecordBatch | StoredRows] = []

        # The chunks that are to be written. Each number is counted by one thread only, so they need no lock.
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._handed_over = self._finished = self._handed_over_bytes = self._sealed_bytes = 0
        self._past = 0
        self._sealer: threading.Thread | None = None
        self._woken, self._sealed_all = threading.Event(), threading.Event()

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
        self.log_id = opened.log_id
        if opened.facts is not None:
            self.saved, self._past = opened.facts.state, opened.facts.past
        self.state_bytes = len(self.saved)
        self._first = self._next = self.durable_end
        keeper = threading.Thread(target=self._keep, args=(opened.hold,), name="zmq-log-keeper", daemon=True)
        ending = opened.hold, keeper
        self._sealer = threading.Thread(
            target=self._seal_all, args=ending, name="zmq-log-sealer", daemon=True
        )
        keeper.start()
        self._sealer.start()

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

    def close(self) -> None:
        """Seal all messages, end the threads, and release the log.

        Writes that the disk refuses are repeated for some seconds.

        Raises:
            LogError: The last messages could not be sealed. If the disk does not answer, the lock remains until it
                does, because a thread still writes.
        """
        if (sealer := self._sealer) is None:
            return
        self._sealer = None
        self._merger.is_ending = True
        last = self.cut()
        self.end_within(self.close_seconds)
        self._jobs.put(None)
        sealer.join(self.end_seconds)
        if sealer.is_alive():
            raise LogWriteError(
                f"closing the log in {self._storage.root}: the disk did not answer for {self.end_seconds:.0f} s"
            )
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
        if self.failure is not None:
            raise self.failure
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
        self._handed_over += 1
        self._handed_over_bytes += size
        self._jobs.put(_Job(rows, size, self._first, self._next, done, state))
        self._rows, self._first, self.open_bytes = [], self._next, 0
        return done

    @property
    def full(self) -> bool:
        """Whether receiving must pause until readers need less."""
        return self.retention.full

    @property
    def _unwritten(self) -> int:
        """How many chunks wait to be written, or are being written."""
        return self._handed_over - self._finished

    @property
    def writing(self) -> bool:
        """Whether the sealing thread has something to write."""
        return self._unwritten > 0

    @property
    def busy(self) -> bool:
        """Whether the disk has enough to do, so that new messages are better gathered in one chunk."""
        return self._unwritten >= _ENOUGH_UNWRITTEN

    @property
    def slow(self) -> bool:
        """Whether as much waits for the disk as memory should hold."""
        return (
            self._unwritten > _ENOUGH_UNWRITTEN
            and self.unsealed_bytes >= (1 + _ENOUGH_UNWRITTEN) * self._chunk_bytes
        )

    @property
    def fault(self) -> str | None:
        """Why the disk refuses at present; None if it does not."""
        return self._retrier.fault

    def end_within(self, seconds: float) -> None:
        """Limit the time for which writes are repeated that the disk refuses."""
        self._retrier.end_within(seconds)

    # For any thread.

    @property
    def needed(self) -> int:
        """The lowest id that a reader still needs, as seen a moment ago."""
        return self.retention.needed

    @property
    def leases(self) -> list[tuple[Lease, float]]:
        """All leases, as seen a moment ago, and for how many seconds each has been silent."""
        return self._leases.all

    @property
    def unsealed_bytes(self) -> int:
        """The bytes of messages that are in memory only."""
        return self.open_bytes + self._handed_over_bytes - self._sealed_bytes

    @property
    def unsealed(self) -> int:
        """How many messages have an id but are not in a sealed chunk yet."""
        return self._next - self.durable_end

    # The sealing thread. libc and Arrow release the GIL for most of its work.

    def _seal_all(self, hold: Hold, keeper: threading.Thread) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._seal(job)
            except Exception as e:
                if not isinstance(e, LogError):
                    e = LogWriteError(f"sealing ids {job.first} to {job.end - 1}: {e!r}")
                self.failure = e
                self._finished += 1
                job.done.set_exception(e)
            else:
                self._finished += 1  # before the result: a thread that gets the result may queue the next job
                job.done.set_result(job.end)
        self._sealed_all.set()
        self._woken.set()
        keeper.join()
        self._attempt(self.retention.end)
        self._attempt(hold.release)

    def _seal(self, job: _Job) -> None:
        if self.failure is not None:
            raise self.failure
        if not job.rows:
            return
        latest = job.latest
        self._past = max(self._past, latest)
        facts = ChunkFacts(job.first, job.end, latest, self._past, pack(job.state))
        chunk = self._retrier.retry(lambda: write_chunk(self._storage, job.batches(), facts))
        self.add(chunk)
        self._sealed_bytes += job.size
        self.on_sealed()
        _log.debug("sealed chunk %s, %d bytes", chunk.name, chunk.size)
        if self.retention.needs_room:
            self._woken.set()

    # The keeping thread.

    def _keep(self, hold: Hold) -> None:
        pause = max(self.merge_seconds, self._storage.request_interval)
        next_merge = time.monotonic() + pause
        while not self._sealed_all.is_set() and self.failure is None:
            if not self._woken.wait(_TICK_SECONDS) and hold.lost:
                self._attempt(self._storage.check_writer)
            self._woken.clear()
            self._attempt(self.retention.tidy)
            if time.monotonic() >= next_merge:
                if self._attempt(self._merger.step):
                    self._woken.set()  # there may be more
                else:
                    next_merge = time.monotonic() + pause

    def _attempt(self, act: Callable[[], T]) -> T | None:
        """Do what can wait. An error is only logged: sealing must continue."""
        try:
            return act()
        except LogLockedError as e:
            self.failure = self.failure or e
        except Exception as e:
            self._faults.fault("tidying up %s", self._storage, error=e)
        return None
