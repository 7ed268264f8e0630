"""The one writer of a log partition: counts messages, cuts chunks.

Two threads meet here. The *receiving* thread appends batches and cuts chunks (this module); it never
waits for the disk. The *sealing* thread (``sealer``) writes the chunks in the order in which they were cut, and deletes
what is done (``retention``). What both know of the log, and what anybody may ask, is in ``contents``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

import pyarrow as pa

from zmq_datasource.errors import LogError
from zmq_datasource.log.chunk_file import FilledFile
from zmq_datasource.log.contents import Contents
from zmq_datasource.log.readers import Readers
from zmq_datasource.log.recovery import Opened, open_partition
from zmq_datasource.log.retention import MakeRoom, Retention
from zmq_datasource.log.retrier import Retrier
from zmq_datasource.log.sealer import Job, Sealer
from zmq_datasource.log.state import Carried
from zmq_datasource.log.storage import LogStorage

__all__ = ["LogWriter"]

# Chunks for the disk: one that is being written, and one that is next.
_ENOUGH_UNWRITTEN = 2


class LogWriter(Contents):
    """Appends to one log partition. A log with several partitions has a writer for each.

    Args:
        storage: Where the partition is.
        chunk_bytes: Size in memory at which a chunk is cut.
        max_bytes: Size of the partition at which ``full`` becomes true.
        retention: Seconds that a committed chunk stays.
        retry_timeout: Seconds for which ``open`` and the sealing thread repeat what the store refuses for now.
        make_room: Whether chunks are deleted before their time: see ``Retention``.
        carried: Whose state the log keeps beside the rows; it is asked whenever rows are handed over.
        readers: Who else needs the messages; those of whom there is a record, unless given.
        clock: Seconds since the epoch; compared with the files' modification times.
        written: Called by the sealing thread with rows that are durable now: their first id, and the batches.

    Attributes:
        retention: Deletes what nobody needs any more.
        log_id: From ``open`` on, the id of the log.
        saved: From ``open`` on, the state that the log kept last; empty if there is none.
        open_bytes: The size of the open chunk, as far as it has come.
        takes_files: Whether rows may come in a file.
        close_seconds: How long ``close`` waits for a disk that refuses.
    """

    takes_files = True
    close_seconds = 5.0

    def __init__(
        self,
        storage: LogStorage,
        *,
        chunk_bytes: int,
        max_bytes: int,
        retention: float = 0.0,
        retry_timeout: float = 0.0,
        make_room: MakeRoom = "none",
        carried: Carried | None = None,
        readers: Readers | None = None,
        readers_decide: bool = False,
        clock: Callable[[], float] = time.time,
        written: Callable[[int, Sequence[pa.RecordBatch]], None] = lambda first, batches: None,
    ) -> None:
        super().__init__()
        self._storage = storage
        self._chunk_bytes = chunk_bytes
        self.retention = Retention(
            storage,
            self,
            seconds=retention,
            max_bytes=max_bytes,
            chunk_bytes=chunk_bytes,
            make_room=make_room,
            readers=readers,
            readers_decide=readers_decide,
            clock=clock,
        )
        self._retrier = Retrier(retry_timeout, self.retention.remove_expired)
        self._sealer = Sealer(storage, self, self.retention, self._retrier, written)
        self._carried = carried
        self.log_id = ""
        self.saved = b""

        # The open chunk; its batches are those that were not handed over.
        self._first = self._next = 0
        self.open_bytes = self._batches_bytes = 0
        self._batches: list[pa.RecordBatch] = []
        self._filled: FilledFile | None = None  # comes before them
        self._grows = False  # whether some of it was handed over already

    def open(
        self,
        lock_wait: float = 0.0,
        feed: str = "",
        check: Callable[[], None] = lambda: None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Create or recover the partition, and become its writer. A store that refuses for now is waited for.

        If this raises, the lock is free, and it may be called again.

        Args:
            lock_wait: Seconds to wait for a previous writer that is just stopping.
            feed: As in ``LogStorage.lock``.
            check: Refuses to open the log, by an error. Called before the lock is taken, so that a process that is
                refused writes nothing; and with the lock held, because two processes may open the log at one time.
            prepare: Reads and writes what is beside the chunks, with the lock held. May be repeated.

        Raises:
            LogError: Held by another, damaged, or not writable.
        """
        opened = self._retrier.retry(partial(self._take, lock_wait, feed, check, prepare))
        self.log_id, self.saved = opened.log_id, opened.saved
        chunks = opened.chunks
        incarnations = chunks.incarnations.and_then(chunks.end, uuid.uuid4().hex[:8], chunks.earliest)
        self.replace(chunks)
        self.incarnations = incarnations
        self.retention.begin(chunks.earliest)
        self._first = self._next = chunks.end
        self._sealer.start(opened.hold, opened.past, incarnations)

    def _take(
        self, lock_wait: float, feed: str, check: Callable[[], None], prepare: Callable[[], None]
    ) -> Opened:
        check()
        opened = open_partition(self._storage, lock_wait, feed)
        try:
            check()
            prepare()
        except BaseException:
            opened.hold.release()
            raise
        return opened

    def close(self, last_act: Callable[[], None] = lambda: None) -> None:
        """Seal what was appended, end the sealing thread and release the partition.

        A disk that refuses is waited for some seconds.

        Args:
            last_act: Called when nothing more will be sealed, and the partition is still held.

        Raises:
            LogWriteError: The last messages could not be sealed.
        """
        if not self._sealer.running:
            return
        last = self.cut()
        self.end_within(self.close_seconds)
        self._sealer.end(last_act)
        last.result()

    # The receiving thread's side.

    def append(self, messages: pa.RecordBatch) -> None:
        """Give messages (``messages.schemas.MESSAGE_SCHEMA``) their ids; cut the chunk if it is large enough.

        Raises:
            LogWriteError: An earlier chunk could not be sealed, so nothing after it can be.
        """
        self.append_whole((messages,))
        if self.open_bytes >= self._chunk_bytes:
            self.cut()

    def append_whole(self, batches: Iterable[pa.RecordBatch], filled: FilledFile | None = None) -> None:
        """Give messages their ids, and let no cut come between them: they appear together.

        Args:
            filled: More messages, which come before these; a chunk begins with them, and their file becomes that chunk.

        Raises:
            LogWriteError: An earlier chunk could not be sealed, so nothing after it can be.
        """
        if self._sealer.failure is not None:
            raise self._sealer.failure
        if filled is not None and self._next > self._first:
            self.cut()
        added = [messages for messages in batches if messages.num_rows]
        # As much as nbytes, for none is a slice, and far quicker.
        size = sum(messages.get_total_buffer_size() for messages in added)
        # Nothing from here on can fail half-way.
        if filled is not None:
            self._filled = filled
            self._next += filled.rows
            size += filled.file.size
        self._batches += added
        self._next += sum(messages.num_rows for messages in added)
        self._batches_bytes += size
        self.open_bytes += size
        self.count_appended(size)

    def cut(self) -> Future[int]:
        """Hand the open chunk to the sealing thread.

        Returns:
            Resolves to the durable end of the log once this chunk and all before it are
            sealed; fails with LogWriteError.
        """
        done = self._hand_over(last=True)
        self._first, self.open_bytes, self._grows = self._next, 0, False
        return done

    def flush(self) -> Future[int]:
        """Have what was appended so far written to the open chunk, from where no crash takes it.

        Returns:
            Resolves to the id after the last one written; fails with LogWriteError.
        """
        return self._hand_over(last=False)

    def _hand_over(self, last: bool) -> Future[int]:
        done: Future[int] = Future()
        batches, size, filled = self._batches, self._batches_bytes, self._filled
        assert last or filled is None, "a file becomes a chunk at once"
        has_rows = bool(batches) or filled is not None
        state = self._carried.state() if has_rows and self._carried is not None else b""
        self._batches, self._batches_bytes, self._filled = [], 0, None
        self._grows = self._grows or (bool(batches) and not last)
        job = Job(batches, size, self._first, self._next, done, state, self._grows, last, filled)
        self._sealer.hand_over(job)
        return done

    @property
    def full(self) -> bool:
        """Whether receiving should stop until Spark has committed more."""
        return self.retention.full

    @property
    def writing(self) -> bool:
        """Whether something is on its way to the disk."""
        return self._sealer.unwritten > 0

    @property
    def busy(self) -> bool:
        """Whether the disk has enough to do: what comes now had better be gathered into one chunk."""
        return self._sealer.unwritten >= _ENOUGH_UNWRITTEN

    @property
    def slow(self) -> bool:
        """Whether the disk is behind: as much waits for it as memory should hold."""
        return (
            self._sealer.unwritten > _ENOUGH_UNWRITTEN
            and self.unsealed_bytes >= (1 + _ENOUGH_UNWRITTEN) * self._chunk_bytes
        )

    @property
    def fault(self) -> str | None:
        """Why the disk refuses what is to be sealed, while that is tried again."""
        return self._retrier.fault

    @property
    def failure(self) -> LogError | None:
        """Why nothing is sealed any more."""
        return self._sealer.failure

    def end_within(self, seconds: float) -> None:
        """A disk that refuses is waited for no longer than that."""
        self._retrier.end_within(seconds)

    # Everybody's side.

    def commit(self, end: int) -> None:
        """Spark will never again ask for an id below ``end``: delete what is past its retention too."""
        self.retention.commit(end)

    @property
    def next_id(self) -> int:
        """The id of the message that is appended next."""
        return self._next

    @property
    def unsealed(self) -> int:
        """How many messages have an id but are not durable yet."""
        return self._next - self.durable_end
