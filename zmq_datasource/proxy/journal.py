"""The proxy's log, as the live process fills it: messages are held in memory until a chunk is sealed."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from functools import partial

import pyarrow as pa

from zmq_datasource.host.wake_pipe import WakePipe
from zmq_datasource.log import (
    LOCK_WAIT_SECONDS,
    STORE_RETRY_SECONDS,
    Carried,
    LogStorage,
    LogWriter,
    StoredRows,
)
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.view import Progress
from zmq_datasource.source.receiver import BATCH_MESSAGES, ROUND_BYTES
from zmq_datasource.source.sealing import Held, LastSeal, seal_time

# The rows of so many rounds become one batch at most: a batch takes some KiB of memory, however few rows it has.
_MOST_ROUNDS = 256


class Journal:
    """A log that is sealed when a durable subscriber waits for it; use it in one thread.

    It is an ``acknowledged.transactions.TransactionLog``.

    Args:
        options: The place of the log, and its bounds.
        carried: The state that the log keeps beside the rows.

    Attributes:
        log: The log's writer.
        wakes: Woken when the log's thread has sealed a chunk.

    Raises:
        LogError: Another process writes the log, or it is damaged, or not writable.
    """

    def __init__(self, options: ProxyOptions, carried: Carried) -> None:
        self._chunk_bytes = options.chunk_bytes
        self._flush_interval = options.wal_flush_interval
        self._carried = carried
        self._state_bytes = 0
        # The rows of the last rounds, which have no ids yet.
        self._rounds: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        self._committed: list[pa.RecordBatch] = []
        self._held_since: float | None = None
        self.storage = LogStorage(options.wal_location)
        self.log = LogWriter(
            self.storage,
            chunk_bytes=options.chunk_bytes,
            max_bytes=options.wal_max_bytes,
            retention=options.wal_retention,
            retry_timeout=STORE_RETRY_SECONDS,
            discards=options.when_full == "discard",
            carried=self,
            keeps_unread=False,
        )
        self.log.open(LOCK_WAIT_SECONDS)
        self._last = LastSeal(0.0, 0.0, len(self.log.saved))
        self.wakes = WakePipe()

    def close(self) -> None:
        """Seal what was appended, and let another process write the log.

        Raises:
            LogError: The disk refuses.
        """
        try:
            try:
                self._append_rounds()
            finally:
                self.log.close()
        finally:
            self.wakes.close()

    def state(self) -> bytes:
        """See ``log.Carried``."""
        state = self._carried.state()
        self._state_bytes = len(state)
        return state

    @property
    def progress(self) -> Progress:
        """How far the log is, for the server process."""
        return Progress(self.log.earliest, self.log.durable_end)

    @property
    def full(self) -> bool:
        """Whether the log has no room for more rows now."""
        return self.log.full

    @property
    def next_id(self) -> int:
        """The id of the row that is appended next."""
        return self.log.next_id + self._rows

    @property
    def unsealed(self) -> int:
        """How many rows were appended and are not sealed."""
        return self.log.unsealed + self._rows

    @property
    def is_behind(self) -> bool:
        """Whether a whole chunk waits for the disk: more would only fill memory."""
        return self.log.busy and self.log.unsealed_bytes + self._bytes >= self._chunk_bytes

    def append(self, rows: pa.RecordBatch) -> None:
        """Append the rows of a round.

        Raises:
            LogError: The log cannot be written any more.
        """
        self._hold()
        self._rounds.append(rows)
        self._rows += rows.num_rows
        self._bytes += rows.get_total_buffer_size()
        if (
            len(self._rounds) >= _MOST_ROUNDS
            or self._rows >= BATCH_MESSAGES
            or self._bytes >= min(ROUND_BYTES, self._chunk_bytes)
        ):
            self._append_rounds()
            if self.log.open_bytes >= self._chunk_bytes:
                self.cut()

    def append_stored(self, rows: StoredRows) -> None:
        """Append the rows of a transaction, which come into one chunk. ``cut`` seals them."""
        self._append_rounds()
        added = list(rows.read())
        self.log.append_whole(added)
        self._committed += added
        self._hold()

    def take_committed(self) -> list[pa.RecordBatch]:
        """The rows of transactions that were appended since the last call."""
        committed, self._committed = self._committed, []
        return committed

    def _hold(self) -> None:
        if self._held_since is None:
            self._held_since = time.monotonic()

    def _append_rounds(self) -> None:
        if self._rounds:
            self.log.append_whole((pa.concat_batches(self._rounds),))
            self._rounds, self._rows, self._bytes = [], 0, 0

    def cut(self) -> Future[int]:
        """Start sealing what was appended."""
        self._append_rounds()
        began, is_empty = time.monotonic(), self._held_since is None
        done = self.log.cut()
        self._held_since = None
        done.add_done_callback(partial(self._note_sealed, began, is_empty))
        return done

    def _note_sealed(self, began: float, is_empty: bool, _: Future[int]) -> None:
        """Called in the log's thread."""
        if not is_empty:
            self._last = self._last.followed_by(began, time.monotonic() - began, self._state_bytes)
        self.wakes.wake()

    def seal_time(self, asked_end: int) -> float:
        """When to call ``cut``, monotonic; infinite if there is nothing to seal, or the disk has enough to do.

        Args:
            asked_end: A durable subscriber has asked for what follows this id, and found nothing.
        """
        if self._held_since is None or self.log.writing or self.log.fault:
            return math.inf
        held = Held(self._held_since, self.log.unsealed_bytes + self._bytes)
        return seal_time(held, self._last, self._flush_interval, asked_end >= self.log.durable_end)
