"""The sealing thread, which writes chunks in the order in which the receiving thread hands them over.

If the disk refuses, the write is repeated. A write that fails for good ends the sealing: ids after a hole cannot be
sealed, so every later job fails with the same error.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import pyarrow as pa

from zmq_datasource.errors import LogError, LogLockedError, LogWriteError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log.chunk import latest_of, write_chunk
from zmq_datasource.log.facts import ChunkFacts, pack
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.retention import Retention
from zmq_datasource.log.retrier import Retrier
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Hold

_log = logging.getLogger(__name__)

# How often it is checked whether chunks can be deleted.
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


class WriteJob(NamedTuple):
    """A write, or only a place in the order of writes.

    Attributes:
        rows: Rows with the ids up to ``end``.
        size: Their bytes in memory.
        first: The chunk's first id.
        end: The id after the last row.
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


class Sealer:
    """Owns the sealing thread of a log. libc and Arrow release the GIL for most of its work.

    Args:
        storage: The log.
        index: Learns which chunks were written.
        retention: Deletes chunks, in this thread.
        retrier: Repeats writes that the disk refuses.
        on_sealed: Called after each new chunk.

    Attributes:
        failure: Why nothing is sealed any more; None while sealing works.
        running: Whether the thread was started, and not ended yet.
        end_seconds: How long ``end`` waits for a disk that does not answer.
    """

    end_seconds = 120.0

    def __init__(
        self,
        storage: LogStorage,
        index: ChunkIndex,
        retention: Retention,
        retrier: Retrier,
        on_sealed: Callable[[], None] = lambda: None,
    ) -> None:
        self._storage = storage
        self._index = index
        self._retention = retention
        self._retrier = retrier
        self._on_sealed = on_sealed
        self._jobs: queue.SimpleQueue[WriteJob | None] = queue.SimpleQueue()
        # Each is counted by one thread only, so they need no lock.
        self._handed_over = self._finished = self._handed_over_bytes = self._sealed_bytes = 0
        self._past = 0
        self._faults = LimitedLog(__name__, "faults of the log")
        self._thread = threading.Thread(target=self._run, name="zmq-log-sealer", daemon=True)
        self.failure: LogError | None = None
        self.running = False

    def start(self, hold: Hold, past: int) -> None:
        """Start the thread.

        Args:
            hold: The lock of the log, which the thread releases when it ends.
            past: The latest time of all rows of the log.
        """
        self._hold, self._past, self.running = hold, past, True
        self._thread.start()

    def hand_over(self, job: WriteJob) -> None:
        """Queue a job. Only for the receiving thread."""
        self._handed_over += 1
        self._handed_over_bytes += job.size
        self._jobs.put(job)

    @property
    def unwritten(self) -> int:
        """How many queued jobs are not done."""
        return self._handed_over - self._finished

    @property
    def unsealed_bytes(self) -> int:
        """The bytes of memory of the jobs that are not in a chunk yet."""
        return self._handed_over_bytes - self._sealed_bytes

    def end(self) -> None:
        """Write the queued jobs, end the thread, and release the lock. Called once.

        Raises:
            LogWriteError: The disk does not answer. The lock remains until it does, because the thread still writes.
        """
        self._jobs.put(None)
        self._thread.join(self.end_seconds)
        self.running = False
        if self._thread.is_alive():
            raise LogWriteError(
                f"closing the log in {self._storage.root}: the disk did not answer for {self.end_seconds:.0f} s"
            )

    # The sealing thread.

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                if self._hold.lost:
                    self.tidy(self._storage.check_writer)
                self.tidy()
                continue
            if job is None:
                self.tidy(self._retention.end)
                self.tidy(self._hold.release)
                return
            self.tidy()  # for a log that is never idle
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

    def tidy(self, act: Callable[[], None] | None = None) -> None:
        """Delete what can go, or do something else that can wait. An error is only logged: sealing must continue."""
        try:
            (act or self._retention.tidy)()
        except LogLockedError as e:
            self.failure = self.failure or e
        except Exception as e:
            self._faults.fault("tidying up %s", self._storage, error=e)

    def _seal(self, job: WriteJob) -> None:
        if self.failure is not None:
            raise self.failure
        if not job.rows:
            return
        latest = job.latest
        self._past = max(self._past, latest)
        facts = ChunkFacts(job.first, job.end, latest, self._past, pack(job.state))
        chunk = self._retrier.retry(lambda: write_chunk(self._storage, job.batches(), facts))
        self._index.add(chunk)
        self._sealed_bytes += job.size
        self._on_sealed()
        _log.debug("sealed chunk %s, %d bytes", chunk.name, chunk.size)
        self.tidy()
