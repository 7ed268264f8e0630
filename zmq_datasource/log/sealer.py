"""The thread that writes what the receiving thread hands over, in that order: state files, groups, chunks.

What the disk refuses is tried again. What cannot be written ends it: ids after a hole cannot be sealed, so everything
that is handed over later fails in the same way.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from zmq_datasource.errors import LogError, LogLockedError, LogWriteError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.log.chunk import write_chunk
from zmq_datasource.log.contents import Contents
from zmq_datasource.log.files import WriterLock
from zmq_datasource.log.growing import GrowingChunk
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.persistence import Persistence
from zmq_datasource.log.retention import Retention
from zmq_datasource.log.state import StateRecord
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.times import PastTimes, times_of

__all__ = ["Job", "Sealer"]

_log = logging.getLogger(__name__)

# How often chunks are looked for whose retention has passed.
_EXPIRY_SECONDS = 1.0
# How long a disk that does not answer at all is waited for at the end.
_END_SECONDS = 120.0


class Job(NamedTuple):
    """What is to be written: a state file, rows, both, or nothing.

    Attributes:
        batches: Rows, which have the ids up to ``end``.
        size: Their bytes in memory.
        first: The chunk's first id.
        end: The id after the last row.
        done: Resolves to ``end``.
        state: What to keep beside the rows.
        grows: Whether the chunk is written group by group, of which this is one.
        last: Whether the chunk ends with it.
    """

    batches: Sequence[pa.RecordBatch]
    size: int
    first: int
    end: int
    done: Future[int]
    state: StateRecord
    grows: bool
    last: bool


class Sealer:
    """Owns the sealing thread of a log partition; libc and Arrow release the GIL for most of its work.

    Args:
        storage: Where to write.
        contents: Where to say what was written.
        retention: Asked now and then to delete.
        persistence: How long a disk that refuses is tried.
        sync: Whether a chunk is forced to the disk before it counts as durable.

    Attributes:
        failure: Why nothing is sealed any more.
    """

    def __init__(
        self,
        storage: LogStorage,
        contents: Contents,
        retention: Retention,
        persistence: Persistence,
        sync: bool,
    ) -> None:
        self._storage = storage
        self._contents = contents
        self._retention = retention
        self._persistence = persistence
        self._sync = sync
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # Each counted by one thread: so there is no lock.
        self._handed_over = self._finished = 0
        self._growing: GrowingChunk | None = None
        # Of the chunks that are sealed, and the latest times of the groups of the open one.
        self._past = PastTimes()
        self._latest: list[int] = []
        self._faults = LimitedLog(__name__, "faults of the log")
        self._next_expiry = 0.0
        self._lock: WriterLock | None = None
        self._thread = threading.Thread(target=self._run, name="zmq-log-sealer", daemon=True)
        self.failure: LogError | None = None

    def start(self, lock: WriterLock, past: PastTimes) -> None:
        """Begin to write, and hold the partition's lock for as long as the thread lives.

        Args:
            past: Of the chunks that there are.
        """
        self._past = past
        self._thread.start()
        self._lock = lock

    @property
    def running(self) -> bool:
        """Whether the sealing thread was started and has not ended."""
        return self._lock is not None

    def hand_over(self, job: Job) -> None:
        """Have this written after all before it. Only for the receiving thread."""
        self._handed_over += 1
        self._jobs.put(job)

    @property
    def unwritten(self) -> int:
        """How many jobs were handed over and are not done."""
        return self._handed_over - self._finished

    def end(self, last_act: Callable[[], None] = lambda: None, seconds: float = _END_SECONDS) -> None:
        """Write what was handed over, end the thread and release the lock, unless that is done.

        Args:
            last_act: Called before the lock is released.
            seconds: How long to wait for the disk.

        Raises:
            LogWriteError: The disk does not answer. The lock stays until the process ends: the disk may answer yet.
        """
        if self._lock is None:
            return
        self._jobs.put(None)
        self._thread.join(seconds)
        lock, self._lock = self._lock, None
        if self._thread.is_alive():
            raise LogWriteError(
                f"closing the log in {self._storage.root}: the disk did not answer for {seconds:.0f} s"
            )
        try:
            last_act()
        finally:
            lock.release()

    # The sealing thread.

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_EXPIRY_SECONDS)
            except queue.Empty:
                self._look_whether_lost()
                self._tidy(self._retention.remove_expired)
                continue
            if job is None:
                return
            if time.monotonic() >= self._next_expiry:  # a log that is never idle
                self._next_expiry = time.monotonic() + _EXPIRY_SECONDS
                self._tidy(self._retention.remove_expired)
            try:
                job.done.set_result(self._seal(job))
            except Exception as e:
                if not isinstance(e, LogError):
                    e = LogWriteError(f"sealing ids {job.first} to {job.end - 1}: {e!r}")
                self.failure = e
                job.done.set_exception(e)
            finally:
                self._finished += 1
            if self._growing is not None and self.failure is None:
                self._tidy(partial(self._growing.tidy, self._sync))

    def _tidy(self, act: Callable[[], None]) -> None:
        """Do what can be done later: whatever prevents it now, the messages must be sealed."""
        try:
            act()
        except Exception as e:
            self._faults.fault("tidying up %s", self._storage, error=e)

    def _look_whether_lost(self) -> None:
        """One that has nothing to write is to hear of it, too, when another process has taken the log."""
        if self.failure is None and self._lock is not None and (lost := self._lock.lost):
            self.failure = LogLockedError(lost)

    def _seal(self, job: Job) -> int:
        if self.failure is not None:
            raise self.failure
        state = job.state.file
        if state is not None:
            write_state = self._storage.write_state
            self._persistence.insist(partial(write_state, state, job.state.content, self._sync))
        if job.batches:
            self._latest.append(times_of(job.batches).latest)
        if job.grows:
            self._grow(job)
        elif job.batches:
            self._write(job)
        if state is not None:  # nothing needs those before it any more
            try:
                self._storage.remove_states(but=state.version)
            except LogWriteError as e:
                _log.warning("%s", e)
        return job.end

    def _metadata(self, job: Job) -> Mapping[bytes, bytes]:
        """What the rows of a job are written with."""
        return {**job.state.metadata, **self._past.to_metadata()}

    def _write(self, job: Job) -> None:
        write = partial(write_chunk, self._storage, job.first, job.batches, self._metadata(job), self._sync)
        self._sealed(job.size, self._persistence.insist(write))

    def _grow(self, job: Job) -> None:
        growing = self._growing = self._growing or GrowingChunk(self._storage, job.first)
        if job.batches:
            growing.append(job.batches, self._metadata(job))
            self._persistence.insist(partial(growing.write, self._sync))
            self._contents.grow(job.size, growing.grown)
        if job.last:
            chunk = self._persistence.insist(partial(growing.finish, self._sync))
            self._growing = None
            self._sealed(0, chunk)

    def _sealed(self, size: int, chunk: Chunk) -> None:
        self._contents.seal(size, chunk)
        self._past = self._past.and_then(max(self._latest))
        self._latest.clear()
        _log.debug("sealed chunk %s, %d bytes", chunk.name, chunk.size)
        self._tidy(self._retention.make_room)
