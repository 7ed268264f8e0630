"""Keeps two writers of a log apart, without a clock and without a lock.

A chunk's key is its first id, and ``Store.put_new`` decides: the ids belong to the writer that puts their key first.
But a key is free again after its chunk was merged or deleted. So a writer A that was stopped for long enough may put a
chunk under ids that the log of the next writer B has passed: a *stray*. It counts for nobody:

* B has put the next head before it has merged or deleted anything. So A looks for the next head after each put. If
  there is none, no key was free again at the time of the put, and the chunk counts. If there is one, A never writes
  again, and acknowledges nothing of that chunk.
* A stray lies in a merged chunk, or below ``Head.deleted``. Readers drop it (``index.read_index``), and the next writer
  deletes it.
* A reader that has planned to read the chunk of that key recognises it by its modification time.

Before each put, A also looks for its own last chunk. If that is not there, the store was unmounted or emptied, and A
writes nothing to it. Two entries are the same object if their size and time of modification are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zmq_datasource.errors import DiskFaultError, LogLockedError
from zmq_datasource.log.files import MOUNT_AGAIN
from zmq_datasource.log.layout import LOG_NAME, chunk_name
from zmq_datasource.log.store import Entry, Store


class _Chunk(Protocol):
    @property
    def first(self) -> int: ...


class _Log(Protocol):
    """The part of ``LogStorage`` that a fence uses."""

    store: Store

    def key(self, name: str) -> str: ...

    def chunks(self, after: int | None = None) -> Sequence[_Chunk]: ...

    def log_id_again(self) -> str: ...


class ChecksWriter(Protocol):
    """The part of ``HeadWriter`` that a fence uses."""

    def check(self) -> None:
        """Raise LogLockedError if another writer has put a head, and DiskFaultError if this writer's head is gone."""


class Fence:
    """Checks whether another writer has taken over. Then each later check raises.

    Args:
        storage: The log.
        log_id: The id of the log that was opened.
        newest: The first id of its newest chunk; None if there is no chunk.
        head: The head of this writer.

    Raises:
        LogLockedError: There is a newer chunk, or another log.
        DiskFaultError: The newest chunk is not there.
    """

    def __init__(self, storage: _Log, log_id: str, newest: int | None, head: ChecksWriter) -> None:
        self._storage = storage
        self._log_id = log_id
        self._head = head
        self._error: LogLockedError | None = None
        self._newest = newest
        self._entry = self._find(newest)
        self._check_newest()
        if self._entry is None:
            raise self._missing_error()

    def check(self) -> None:
        """Check that the newest chunk is there. Called before anything is written or deleted.

        Raises:
            LogLockedError: Another writer has put later chunks, or made another log.
            DiskFaultError: The store has lost its content: it was unmounted or emptied.
        """
        if self._error is not None:
            raise self._error
        found = self._find(self._newest)
        if found is not None and found == self._entry:
            return
        self._check_newest()
        if found is None:
            raise self._missing_error()
        self._entry = found  # the chunk was lost, and has been restored as another object

    def advance(self, first: int) -> float | None:
        """Check that the chunk that this writer has just put counts, and make it the newest one.

        The writer repeats the call after an error.

        Returns:
            The modification time of the chunk's object.

        Raises:
            LogLockedError: Another writer has taken over.
            DiskFaultError: The store refuses for now, or has lost its content.
        """
        entry = self._find(first)  # before the check below, which then holds for this object
        self.check_head()
        self._newest, self._entry = first, entry
        return None if entry is None else entry.modified

    def check_head(self) -> None:
        """Check that no other writer has taken over. Called after each put. Raises what ``advance`` does."""
        try:
            self._head.check()
        except LogLockedError as e:
            raise self.close(e) from None

    def close(self, error: LogLockedError) -> LogLockedError:
        """Make each later ``check`` raise this error, and return the error."""
        self._error = error
        return error

    def _find(self, first: int | None) -> Entry | None:
        return self._storage.store.find(self._key(first))

    def _key(self, first: int | None) -> str:
        return LOG_NAME if first is None else self._storage.key(chunk_name(first))

    def _check_newest(self) -> None:
        storage = self._storage
        later = storage.chunks(after=self._newest)
        if storage.log_id_again() != self._log_id:
            what = "made another log"
        elif later:
            what = f"put chunks with the ids from {later[0].first} on"
        else:
            return
        raise self.close(
            LogLockedError(
                f"writing to {storage}: another process has {what} while this one was stopped. Messages that this "
                "process has received and not sealed are lost. Start it again: then it follows or takes over"
            )
        )

    def _missing_error(self) -> DiskFaultError:
        return DiskFaultError(
            f"writing to {self._storage}: {self._storage.store.path_of(self._key(self._newest))}, which was there, is "
            f"not there any more. {MOUNT_AGAIN}"
        )
