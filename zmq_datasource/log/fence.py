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

from zmq_datasource.errors import LogLockedError
from zmq_datasource.log.files import gone
from zmq_datasource.log.head import HeadWriter, overtaken
from zmq_datasource.log.layout import LOG_NAME, Chunk, chunk_name, key_of
from zmq_datasource.log.store import Entry, Hold, Store


class Fence:
    """Checks whether another writer has taken over. Then each later check raises.

    Args:
        store: The store of the log.
        hold: The lock of this writer. It only tells earlier: safety does not depend on it.
        head: The head of this writer.
        newest: The newest chunk of the log; None if there is none.

    Raises:
        LogLockedError, DiskFaultError: As ``check``.
    """

    def __init__(self, store: Store, hold: Hold, head: HeadWriter, newest: Chunk | None) -> None:
        self._store = store
        self._hold = hold
        self._head = head
        self._error: LogLockedError | None = None
        self._key = LOG_NAME if newest is None else key_of(newest.name)
        self._entry: Entry | None = None
        self.check()

    def check(self) -> None:
        """Check that the newest chunk is there. Called before anything is written or deleted.

        Raises:
            LogLockedError: Another writer has taken over.
            DiskFaultError: The store has lost its content: it was unmounted or emptied.
        """
        if self._error is not None:
            raise self._error
        if lost := self._hold.lost:
            raise overtaken(self._store, f"this process has lost the lock, which is held by {lost}")
        found = self._store.find(self._key)
        if found is None or found != self._entry:
            self.check_head()
            if found is None:
                raise gone(f"writing to log {self._store}", self._store.path_of(self._key))
            self._entry = found  # it was lost, and has been restored as another object

    def advance(self, first: int) -> float | None:
        """Check that the chunk that this writer has just put counts, and make it the newest one.

        The writer repeats the call after an error.

        Returns:
            The modification time of the chunk's object.

        Raises:
            LogLockedError, DiskFaultError: As ``check``.
        """
        key = key_of(chunk_name(first))
        entry = self._store.find(key)  # before the check below, which then holds for this object
        self.check_head()
        self._key, self._entry = key, entry
        return None if entry is None else entry.modified

    def check_head(self) -> None:
        """Check that no other writer has taken over. Called after each put. Raises what ``check`` does."""
        try:
            self._head.check()
        except LogLockedError as e:
            raise self.close(e) from None

    def close(self, error: LogLockedError) -> LogLockedError:
        """Make each later ``check`` raise this error, and return the error."""
        self._error = error
        return error
