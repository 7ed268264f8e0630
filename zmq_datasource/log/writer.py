"""The one writer of a log partition: numbers messages, seals chunks, deletes what is done.

Two threads meet here. The *receiving* thread appends batches and cuts chunks; it never
waits for the disk. The *sealing* thread, owned by the writer, writes the chunks in the order
in which they were cut (libc and Arrow release the GIL for all of the work). Anybody may ask
what is durable, commit, or read the index.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Literal, NamedTuple

import pyarrow as pa

from zmq_datasource.errors import (
    DamagedChunkError,
    DataLossError,
    LogError,
    LogFormatError,
    LogLockedError,
    LogWriteError,
)
from zmq_datasource.log.chunk import write_batches
from zmq_datasource.log.files import WriterLock, writing
from zmq_datasource.log.growing import GrowingChunk, Grown
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import Chunk, StateFile, chunk_name
from zmq_datasource.log.persistence import Persistence
from zmq_datasource.log.recovery import recover
from zmq_datasource.log.state import (
    Carried,
    SavedState,
    chunk_metadata,
    no_saved_state,
    read_saved_state,
    state_content,
)
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.schemas import number_rows

__all__ = ["LogWriter"]

_log = logging.getLogger(__name__)

# Chunks cut but not yet written. A second one lets receiving go on while the disk is at work.
_MAX_UNWRITTEN = 2
# Readers that mark their places are done with that at once.
_PLACING_SECONDS = 15.0
# How often an idle writer looks for chunks whose retention has passed.
_EXPIRY_SECONDS = 1.0
# How long a disk that refuses is waited for at the end.
_CLOSE_SECONDS = 5.0


class _Job(NamedTuple):
    """What the sealing thread does: write a state file, a chunk, both, or nothing.

    Attributes:
        first: Of the chunk.
        grows: Whether the chunk is written group by group, of which this is one.
        last: Whether the chunk ends with it.
    """

    batches: Sequence[pa.RecordBatch]
    first: int
    end: int
    done: Future[int]
    state: tuple[StateFile, bytes] | None
    metadata: Mapping[bytes, bytes]
    grows: bool
    last: bool


class LogWriter:
    """Appends to one log partition.

    Args:
        storage: Where the log is.
        chunk_bytes: Size in memory at which a chunk is cut.
        max_bytes: Size of the log at which ``full`` becomes true.
        retention: Seconds that a committed chunk stays.
        sync: Whether a chunk is forced to the disk before it counts as durable. If not, a crash of the machine may
            tear the newest ones: ``open`` sets them aside.
        retry_timeout: Seconds that the sealing thread tries again what the disk refuses for now.
        make_room: Whether chunks are deleted before their time so that it never gets there: none, those
            that are committed (``done``), or the oldest, needed or not (``any``).
        carried: Whose state the log keeps beside the rows; it is asked whenever a chunk is cut.
        clock: Seconds since the epoch; compared with the files' modification times.

    Attributes:
        torn: From ``open`` on, the ids that were sealed and that a crash of the machine has taken, if any.
    """

    def __init__(
        self,
        storage: LogStorage,
        *,
        chunk_bytes: int,
        max_bytes: int,
        retention: float = 0.0,
        sync: bool = True,
        retry_timeout: float = 0.0,
        make_room: Literal["none", "done", "any"] = "none",
        carried: Carried | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._chunk_bytes = chunk_bytes
        self._max_bytes = max_bytes
        self._retention = retention
        self._sync = sync
        self._make_room = make_room
        self._carried = carried
        self._clock = clock
        self._looked_at = math.inf
        self._persistence = Persistence(retry_timeout, self.remove_expired)
        self.torn = range(0)

        self._lock = threading.Lock()  # guards the index and the numbers after it
        self._index = ChunkIndex()
        self._committed = 0
        self._unwritten_bytes = 0
        self._doomed_bytes = 0
        self._removing = threading.Lock()  # guards the chunks that are being deleted
        self._doomed: deque[Chunk] = deque()

        # The open chunk belongs to the receiving thread.
        self._open: list[pa.RecordBatch] = []
        self._open_bytes = 0
        self._next = 0
        self._cut_to = 0
        self._begun = False  # whether some of it was written already

        self._state_version = 0
        self._base_version: int | None = None

        # What grows belongs to the sealing thread; others read how far it has come.
        self._growing: GrowingChunk | None = None
        self.grown: Grown | None = None
        self._next_expiry = 0.0

        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waiting = 0
        self._failure: LogError | None = None
        self._sealer = threading.Thread(target=self._seal_jobs, name="zmq-log-sealer", daemon=True)
        self._writer_lock: WriterLock | None = None
        self.log_id = ""
        self.saved = SavedState()

    def open(self, lock_wait: float = 0.0) -> None:
        """Create or recover the log, and become its writer.

        From then on ``saved`` is the state that the log kept last.

        Args:
            lock_wait: Seconds to wait for a previous writer that is just stopping.

        A disk that refuses is waited for, as later on.

        Raises:
            LogError: Held by another, damaged, or not writable.
        """
        self._persistence.insist(partial(self._open_log, lock_wait))
        self._sealer.start()

    def _open_log(self, lock_wait: float) -> None:
        with writing(f"opening log {self._storage.root}"):  # listing it may meet a fault, too
            self.log_id = self._storage.open_log()
            lock = self._storage.lock(lock_wait)
            try:
                self._index, self.torn = recover(self._storage, self._sync, self._persistence)
                with self._storage.placing(_PLACING_SECONDS):
                    self._check_given()
                self._storage.remove_temporaries()
                self.saved = self._saved_state()
                self._storage.remove_states(but=self.saved.base)
            except BaseException:
                lock.release()
                raise
            self._writer_lock = lock
            self._next = self._cut_to = self._index.end
            self._committed = self._index.earliest
            self._state_version, self._base_version = self.saved.version, self.saved.base

    def _check_given(self) -> None:
        """Refuse to give ids again that a query was given."""
        given, path = self._storage.given()
        if given > self._index.end:
            raise DataLossError(
                f"opening log {self._storage.root}: it ends at id {self._index.end}, and {path} says that queries were "
                f"given the ids below {given}: its newest chunks are gone (after a crash of the machine with "
                "walSync=false, or from a copy). Their ids are not given to other messages. Restore the chunks, or use "
                "a new walLocation, and for each query of this log a new checkpoint"
            )

    def _saved_state(self) -> SavedState:
        try:
            return read_saved_state(self._storage)
        except (DamagedChunkError, LogFormatError) as e:
            if self._sync:
                raise
            _log.error(
                "%s. With walSync=false a crash of the machine does that: what the log has kept of publishers' numbers "
                "and of transactions is lost, and begins anew",
                e,
            )
            return no_saved_state(self._storage)

    # The receiving thread's side.

    def append_whole(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Give messages their ids, and let no cut come between them: they appear together.

        Raises:
            LogWriteError: An earlier chunk could not be sealed, so nothing after it can be.
        """
        if self._failure is not None:
            raise self._failure
        numbered, next_id = [], self._next
        for messages in batches:
            if messages.num_rows:
                numbered.append(number_rows(messages, self._storage.partition, next_id))
                next_id += messages.num_rows
        # Nothing from here on can fail half-way.
        for batch in numbered:
            self._hold(batch)

    def append(self, messages: pa.RecordBatch) -> None:
        """Give messages (``messages.MESSAGE_SCHEMA``) their ids; cut the chunk if it is large enough.

        Raises:
            LogWriteError: An earlier chunk could not be sealed, so nothing after it can be.
        """
        self._append(messages)
        if self._open_bytes >= self._chunk_bytes:
            self.cut()

    def _append(self, messages: pa.RecordBatch) -> None:
        if self._failure is not None:
            raise self._failure
        if messages.num_rows == 0:
            return
        self._hold(number_rows(messages, self._storage.partition, self._next))

    def _hold(self, batch: pa.RecordBatch) -> None:
        self._open.append(batch)
        self._next += batch.num_rows
        self._open_bytes += batch.nbytes
        with self._lock:
            self._unwritten_bytes += batch.nbytes

    def cut(self, keep: bool = False) -> Future[int]:
        """Hand the open chunk to the sealing thread.

        Args:
            keep: Whether to keep a changed state though there are no rows.

        Returns:
            Resolves to the durable end of the log once this chunk and all before it are
            sealed; fails with LogWriteError.
        """
        return self._hand_over(last=True, keep=keep)

    def flush(self, keep: bool = False) -> Future[int]:
        """Have what was appended so far written to the open chunk, from where no crash takes it.

        Args:
            keep: As for ``cut``.

        Returns:
            Resolves to the id after the last one written; fails with LogWriteError.
        """
        return self._hand_over(last=False, keep=keep)

    def _hand_over(self, last: bool, keep: bool) -> Future[int]:
        done: Future[int] = Future()
        batches, first = self._open, self._cut_to
        state, metadata = self._state(bool(batches), keep)
        self._open = []
        self._begun = grows = self._begun or (bool(batches) and not last)
        if last:
            self._open_bytes, self._cut_to, self._begun = 0, self._next, False
        with self._lock:
            self._waiting += 1
        self._jobs.put(_Job(batches, first, self._next, done, state, metadata, grows, last))
        return done

    def _state(self, rows: bool, keep: bool) -> tuple[tuple[StateFile, bytes] | None, dict[bytes, bytes]]:
        """What to keep: as a state file, and in the chunk. It is about the rows so far, exactly."""
        carried = self._carried
        if carried is None or not (rows or (keep and carried.changed)):
            return None, {}
        state = None
        if not rows or carried.large:
            self._state_version += 1
            self._base_version = self._state_version
            file = StateFile(self._state_version, self._next)
            state = file, state_content(self._state_version, carried.full())
        if not rows:
            return state, {}
        self._state_version += 1
        return state, chunk_metadata(self._state_version, self._base_version, carried.delta())

    @property
    def fault(self) -> str | None:
        """Why the disk refuses what is to be sealed, while that is tried again."""
        return self._persistence.fault

    @property
    def failure(self) -> LogError | None:
        """Why nothing is sealed any more."""
        return self._failure

    def end_within(self, seconds: float) -> None:
        """A disk that refuses is waited for no longer than that."""
        self._persistence.end_within(seconds)

    @property
    def slow(self) -> bool:
        """Whether the disk is behind: as many chunks wait for it as memory should hold."""
        return self._waiting > _MAX_UNWRITTEN

    @property
    def full(self) -> bool:
        """Whether receiving should stop until Spark has committed more.

        The newest chunk stays for ever, because it says which id comes next; alone and
        committed it does not count, or a chunk larger than the limit would end the feed.
        """
        with self._lock:
            below = self._index.end if self._make_room == "any" else self._committed
            spent = len(self._index) == 1 and self._index.end <= below
            kept = 0 if spent else self._index.size
            return kept + self._doomed_bytes + self._growing_bytes + self._unwritten_bytes >= self._max_bytes

    # Everybody's side.

    @property
    def earliest(self) -> int:
        with self._lock:
            return self._index.earliest

    @property
    def durable_end(self) -> int:
        """The id after the last durable one."""
        with self._lock:
            return self._index.end

    @property
    def unsealed(self) -> int:
        """How many messages have an id but are not durable yet."""
        return self._next - self.durable_end

    @property
    def open_bytes(self) -> int:
        """The size in memory of what is in the open chunk so far."""
        return self._open_bytes

    @property
    def unsealed_bytes(self) -> int:
        """What those take in memory."""
        with self._lock:
            return self._unwritten_bytes

    @property
    def size(self) -> int:
        """Bytes of the chunks there are."""
        with self._lock:
            return self._index.size + self._doomed_bytes + self._growing_bytes

    @property
    def _growing_bytes(self) -> int:
        return 0 if self.grown is None else self.grown.bytes

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        with self._lock:
            return len(self._index) + len(self._doomed)

    def covering(self, start: int, end: int) -> Sequence[Chunk]:
        """The chunks that hold any id of ``[start, end)``."""
        with self._lock:
            return self._index.covering(start, end)

    def commit(self, end: int) -> None:
        """Spark will never again ask for an id below ``end``: delete what is past its retention too."""
        with self._lock:
            self._committed = max(self._committed, end)
        self.remove_expired()

    def hold_from(self, needed: int) -> None:
        """From this id on somebody needs the messages, for now; who comes may need earlier ones than before.

        Leaves the deleting to the sealing thread.
        """
        with self._lock:
            self._committed = needed

    def remove_expired(self) -> None:
        """Delete committed chunks whose retention has passed.

        A file that cannot be deleted is reported and tried again; it counts as part of the
        log's size meanwhile. Not for the receiving thread: a directory may answer slowly.
        """
        with self._removing:
            with self._lock:
                idle = not self._doomed and not self._removable(self._committed)
            if idle:
                return
            try:
                # A reader that is just coming has either found what there is and said so, or will look after this.
                with self._storage.placing(0.0):
                    self._remove(min(self._committed, self._marked()))
            except LogLockedError:
                return  # it is tried again in a moment
            except LogWriteError as e:
                _log.warning("deleting from log %s: %s", self._storage.root, e)

    def _marked(self) -> int:
        """The first id that a reader still needs."""
        try:
            return min(self._storage.readers().values(), default=self._index.end)
        except LogError as e:  # what it may still need stays
            _log.warning("%s", e)
            return self._index.earliest

    def _removable(self, done: int) -> Sequence[Chunk]:
        """The front chunks that are not needed from id ``done`` on, or whose room is needed more."""
        chunks = self._index.removable(done, self._sealed_before())
        if self._make_room != "none":
            # Room for the chunk that grows, and for what comes meanwhile.
            over = self._index.size + 5 * self._chunk_bytes - self._max_bytes
            below = done if self._make_room == "done" else self._index.end
            chunks = max(chunks, self._index.oldest(over, below), key=len)
        return chunks

    def _remove(self, done: int) -> None:
        with self._lock:
            chunks = self._removable(done)
            self._index.remove_front(len(chunks))
            self._doomed.extend(chunks)
            self._doomed_bytes += sum(chunk.size for chunk in chunks)
        # Front first, so that a crash in between leaves no hole.
        while self._doomed and (self._make_room == "any" or self._doomed[0].end <= done):
            chunk = self._doomed[0]
            try:
                self._storage.remove_chunk(chunk.name)
            except LogWriteError as e:
                _log.warning("%s", e)
                return
            self._doomed.popleft()
            with self._lock:
                self._doomed_bytes -= chunk.size

    def _sealed_before(self) -> float:
        """When a chunk must have been sealed by for its retention to be over; without one no clock is asked."""
        if not self._retention:
            return math.inf
        now = self._clock()
        if now < self._looked_at:  # it was set back, or was ahead when chunks were sealed
            self._index.sealed_by(now)
        self._looked_at = now
        return now - self._retention

    def close(self) -> None:
        """Seal what was appended, end the sealing thread and release the log.

        A disk that refuses is waited for some seconds.

        Raises:
            LogWriteError: The last messages could not be sealed.
        """
        if self._writer_lock is None:
            return
        last = self.cut(keep=True)
        self.end_within(_CLOSE_SECONDS)
        self._jobs.put(None)
        self._sealer.join()
        self._writer_lock.release()
        self._writer_lock = None
        last.result()

    # The sealing thread.

    def _seal_jobs(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_EXPIRY_SECONDS)
            except queue.Empty:
                self.remove_expired()
                continue
            if job is None:
                return
            if time.monotonic() >= self._next_expiry:  # a log that is never idle
                self._next_expiry = time.monotonic() + _EXPIRY_SECONDS
                self.remove_expired()
            try:
                job.done.set_result(self._seal(job))
            except Exception as e:
                # Ids after a hole cannot be sealed: everything later fails the same way.
                if not isinstance(e, LogError):
                    e = LogWriteError(f"sealing ids {job.first} to {job.end - 1}: {e!r}")
                self._failure = e
                job.done.set_exception(e)
            finally:
                with self._lock:
                    self._waiting -= 1

    def _seal(self, job: _Job) -> int:
        if self._failure is not None:
            raise self._failure
        if job.state is not None:
            write_state = self._storage.write_state
            self._persistence.insist(partial(write_state, *job.state, self._sync))
        chunk = self._grow(job) if job.grows else self._write(job)
        with self._lock:
            self._unwritten_bytes -= sum(batch.nbytes for batch in job.batches)
            if chunk is not None:
                self._index.append(chunk)
                self.grown = None
        if chunk is not None:
            _log.debug("sealed chunk %s, %d bytes", chunk.name, chunk.size)
            if self._make_room != "none":
                self.remove_expired()
        if job.state is not None:  # nothing needs those before it any more
            try:
                self._storage.remove_states(but=job.state[0].version)
            except LogWriteError as e:
                _log.warning("%s", e)
        return job.end

    def _write(self, job: _Job) -> Chunk | None:
        if not job.batches:
            return None
        write = partial(write_batches, batches=job.batches, metadata=job.metadata)
        name = chunk_name(job.first, job.end)
        return self._persistence.insist(partial(self._storage.write_chunk, name, write, self._sync))

    def _grow(self, job: _Job) -> Chunk | None:
        if self._growing is None:
            self._growing = GrowingChunk(self._storage, job.first)
        if job.batches:
            self._growing.append(job.batches, job.metadata)
            self._persistence.insist(partial(self._growing.write, self._sync))
            self.grown = self._growing.grown
        if not job.last:
            return None
        chunk = self._persistence.insist(partial(self._growing.finish, self._sync))
        self._growing = None
        return chunk
