"""Journal first: what was received gets its id and is written; then, in order, it may be published.

What is handed to the log here is kept as it came until it is written, so that publishing reads no file.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

import pyarrow as pa

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogWriteError
from zmq_datasource.log import LOCK_WAIT_SECONDS, Carried, DirectoryStore, FilledFile, LogStorage, LogWriter
from zmq_datasource.messages.columns import data_bytes
from zmq_datasource.messages.framing import decode_plain, raw_messages
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.view import Progress

__all__ = ["Journal", "Numbered"]

_log = logging.getLogger(__name__)

# Groups that are being written while the next one gathers.
_MOST_GROUPS = 2


class Numbered(NamedTuple):
    """Raw messages that are durable, with the ids from ``first`` on."""

    first: int
    messages: RawMessages


class _Group(NamedTuple):
    written: Future[int]
    parts: list[Numbered]


class Journal:
    """The log of a proxy. Belongs to the live thread.

    Args:
        options: Where it is, and what bounds it.
        counters: Where to count.
        carried: What the log keeps beside the rows.
        notify: Called by another thread when something was written.
    """

    def __init__(
        self, options: ProxyOptions, counters: SourceCounters, carried: Carried, notify: Callable[[], None]
    ) -> None:
        self._counters = counters
        self._notify = notify
        self.storage = LogStorage(DirectoryStore(options.wal_location, options.wal_sync))
        self.log = LogWriter(
            self.storage,
            chunk_bytes=options.chunk_bytes,
            max_bytes=options.wal_max_bytes,
            retention=options.wal_retention,
            retry_timeout=options.wal_retry_timeout,
            make_room="any" if options.when_full == "discard" else "done",
            carried=carried,
        )
        self._chunk_bytes = options.chunk_bytes
        self._next = 0
        self._uncut: list[Numbered] = []
        self._groups: deque[_Group] = deque()

    def open(self) -> None:
        """Open the log for writing.

        Raises:
            LogError: Held by another, damaged, or not writable.
        """
        self.log.open(LOCK_WAIT_SECONDS)
        self._next = self.log.durable_end

    @property
    def saved(self) -> bytes:
        """What the log kept last beside its rows."""
        return self.log.saved

    def status(self) -> dict[str, int]:
        """The log's status, as plain data."""
        return {"nextId": self._next, "earliestId": self.log.earliest, "logBytes": int(self.log.size)}

    def check(self) -> None:
        """Raise why the log can take nothing any more, if that is so.

        Raises:
            LogError: The reason.
        """
        if self.log.failure is not None:
            raise self.log.failure

    def hold_from(self, first: int) -> None:
        """Keep what is not durable yet, and all from this id on: somebody still needs it."""
        self.log.hold_from(min(first, self.log.durable_end))

    def end_within(self, seconds: float) -> None:
        """From now on a disk that refuses is waited for so long."""
        self.log.end_within(seconds)

    @property
    def next_id(self) -> int:
        return self._next

    @property
    def progress(self) -> Progress:
        """How far the log has come, for the process that reads its files."""
        grown = self.log.grown  # before the others: a chunk that is sealed in between is reported as both
        return Progress(self.log.earliest, self.log.durable_end, grown)

    @property
    def full(self) -> bool:
        """Whether nothing more is to come for now."""
        return self.log.full

    @property
    def fault(self) -> str | None:
        """Why the disk refuses, while that is tried again."""
        return self.log.fault

    @property
    def busy(self) -> bool:
        """Whether enough is on its way to the disk."""
        return len(self._groups) >= _MOST_GROUPS

    @property
    def behind(self) -> bool:
        """Whether the disk is behind: a chunk's bytes wait for it, and no more should be received before it goes on."""
        return self.busy and self.log.unsealed_bytes >= self._chunk_bytes

    def append(self, messages: RawMessages, timestamp: int) -> None:
        """Number raw messages that came at ``timestamp`` (microseconds since the epoch).

        Raises:
            LogError: The log can take nothing any more.
        """
        batch = decode_plain(messages, [(timestamp, len(messages))])
        self._counters.received += len(messages)
        self._counters.bytes += data_bytes(batch.column("value"))
        self.log.append_whole([batch])
        self._note(messages)

    def _note(self, messages: RawMessages) -> None:
        self._uncut.append(Numbered(self._next, messages))
        self._next += len(messages)

    # committer.TransactionLog

    takes_files = False  # subscribers get the rows

    def append_whole(self, batches: Iterable[pa.RecordBatch], filled: FilledFile | None = None) -> None:
        """Number the rows of transactions."""
        assert filled is None, "it takes no files"
        listed = [batch for batch in batches if batch.num_rows]
        messages = [raw_messages(batch) for batch in listed]  # all or nothing: what can fail comes first
        self.log.append_whole(listed)
        for taken in messages:
            self._note(taken)

    def cut(self) -> Future[int]:
        """Have what was appended written."""
        return self.flush()

    def flush(self) -> Future[int]:
        """Have what was appended written; ``written`` gives it back then.

        The chunk ends with it if it is large enough.
        """
        written = self.log.cut() if self.log.open_bytes >= self._chunk_bytes else self.log.flush()
        self._await(written)
        return written

    def _await(self, written: Future[int]) -> None:
        self._groups.append(_Group(written, self._uncut))
        self._uncut = []
        written.add_done_callback(lambda _: self._notify())

    def flush_if_idle(self) -> None:
        """The same, unless nothing was appended, or enough is on its way."""
        if self._uncut and not self.busy:
            self.flush()

    def seal(self) -> None:
        """End the chunk, so that Spark sees it; ``written`` gives back what was not yet."""
        written = self.log.cut()
        if self._uncut:
            self._await(written)

    def written(self) -> Iterator[Numbered]:
        """What is durable and was not given back yet, in order.

        Raises:
            LogError: The disk refused.
        """
        while self._groups and self._groups[0].written.done():
            self._groups[0].written.result()
            yield from self._groups.popleft().parts

    def wait(self, seconds: float) -> None:
        """Until what is on its way is written.

        Raises:
            LogError: The disk refused, or does not answer.
        """
        try:
            for group in self._groups:
                group.written.result(seconds)
        except TimeoutError as e:
            raise LogWriteError(
                f"writing the log in {self.storage.root}: no answer for {seconds:.0f} s"
            ) from e

    def close(self) -> None:
        """Write what was appended, and release the log; says how much is lost where the disk refuses."""
        try:
            self.log.close()
        finally:
            if lost := self._next - self.log.durable_end:
                _log.error("%d received messages could not be written and are lost", lost)
