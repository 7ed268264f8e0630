"""Keeps two writers of a log apart, without a clock and without a lock.

A chunk's key is its first id, and ``Store.put_new`` decides: the ids belong to the writer that puts their key first.
But a key is free again after its chunk was deleted. So a writer that was stopped for long enough may put a chunk with
ids that the log has passed: a *stray*. No reader uses a stray, because of the order in which chunks are deleted:

* Chunks are deleted from the oldest on, and the newest one stays. So the newest chunk in a store always counts.
* After its put, a chunk counts if it is the newest, or if the chunk before it is still the same object. While that
  older chunk is there, no later key has become free, because older chunks are deleted first.
* A stray has newer chunks behind it. The writer that has put a stray finds them, and never writes again.

Two entries are the same object if their size and time of modification are equal. An equal key does not prove it: a
stray of a third writer may have taken the key.
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


class Fence:
    """Checks by a writer's newest chunk whether another writer has taken over. Then each later check raises.

    Args:
        storage: The log.
        log_id: The id of the log that was opened.
        newest: The first id of its newest chunk; None if there is no chunk.

    Raises:
        LogLockedError: There is a newer chunk, or another log.
        DiskFaultError: The newest chunk is not there.
    """

    def __init__(self, storage: _Log, log_id: str, newest: int | None) -> None:
        self._storage = storage
        self._log_id = log_id
        self._error: LogLockedError | None = None
        self._newest = newest
        self._entry = self._find(newest)
        self._check_newest(newest)
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
        self._check_newest(self._newest)
        if found is None:
            raise self._missing_error()
        self._entry = found  # the chunk was lost, and has been restored as another object

    def advance(self, first: int) -> None:
        """Check that the chunk that this writer has just put counts, and make it the newest one.

        The writer repeats the call after an error.

        Raises:
            LogLockedError: The chunk does not count, or that is not certain.
            DiskFaultError: The store refuses for now.
        """
        entry = self._find(first)  # before the check below, which then holds for this object
        if self._newest is None or self._find(self._newest) != self._entry:
            self._check_newest(first)
        self._newest, self._entry = first, entry

    def close(self, error: LogLockedError) -> LogLockedError:
        """Make each later ``check`` raise this error, and return the error."""
        self._error = error
        return error

    def _find(self, first: int | None) -> Entry | None:
        return self._storage.store.find(self._key(first))

    def _key(self, first: int | None) -> str:
        return LOG_NAME if first is None else self._storage.key(chunk_name(first))

    def _check_newest(self, first: int | None) -> None:
        storage = self._storage
        later = storage.chunks(after=first)
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
