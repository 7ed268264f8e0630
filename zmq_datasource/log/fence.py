"""What keeps two writers of a log partition apart. No clock and no lock does.

A chunk's key is its first id, and ``Store.put_new`` decides: the writer that puts a key first has given out those ids.
But a key is free again when its chunk was deleted. So a writer that was stopped for long enough may put a chunk under
ids that the log has behind it: a *stray*. It counts for nobody, because of the order in which chunks are deleted:

* Chunks are deleted from the oldest on, and the newest one stays. So the newest chunk in a store always counts.
* A writer has put a chunk that counts if, after that, the chunk is the newest, or the one before it is still the same
  object. For as long as that one was there, neither it nor a chunk behind it had been deleted.
* A stray has newer chunks behind it. A writer that has put one finds them, and never writes again.

The same object is one with the same size and time of modification: in its place may be a stray of a third writer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmq_datasource.errors import DiskFaultError, LogLockedError
from zmq_datasource.log.files import MOUNT_AGAIN
from zmq_datasource.log.layout import LOG_NAME, chunk_name
from zmq_datasource.log.store import Entry

if TYPE_CHECKING:
    from zmq_datasource.log.storage import LogStorage

__all__ = ["Fence"]


class Fence:
    """The newest chunk of a writer; by what becomes of it the writer learns that it is fenced.

    Args:
        storage: The partition.
        log_id: Of the log that was opened.
        newest: The first id of its newest chunk; None if there is no chunk.

    Raises:
        LogLockedError: There is a newer one, or another log.
        DiskFaultError: It is not there.
    """

    def __init__(self, storage: LogStorage, log_id: str, newest: int | None) -> None:
        self._storage = storage
        self._log_id = log_id
        self._closed: LogLockedError | None = None
        self._newest = newest
        self._entry = self._find(newest)
        self._check_newest(newest)
        if self._entry is None:
            raise self._lost()

    def check(self) -> None:
        """Make sure that the newest chunk is there, before anything is written or deleted.

        Raises:
            LogLockedError: Another writer has gone on without this one.
            DiskFaultError: The store has lost what was in it: it was unmounted or emptied.
        """
        if self._closed is not None:
            raise self._closed
        found = self._find(self._newest)
        if found is not None and found == self._entry:
            return
        self._check_newest(self._newest)
        if found is None:
            raise self._lost()
        self._entry = found  # it was lost and restored

    def move(self, first: int) -> None:
        """Make sure that a chunk counts that was put just now; it is the newest one then. May be repeated.

        Raises:
            LogLockedError: It does not count, or may not.
            DiskFaultError: As ``check``.
        """
        entry = self._find(first)  # before it is known that it counts, so that this is the object that counts
        if self._newest is None or self._find(self._newest) != self._entry:
            self._check_newest(first)
        self._newest, self._entry = first, entry

    def close(self, error: LogLockedError) -> LogLockedError:
        """Let this writer write and delete nothing from now on; return the error, which ``check`` raises."""
        self._closed = error
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
                f"writing to {storage}: another process has {what} while this one was stopped. What this process has "
                "received and not sealed is lost; start it again, and it follows or takes over"
            )
        )

    def _lost(self) -> DiskFaultError:
        return DiskFaultError(
            f"writing to {self._storage}: {self._storage.store.path_of(self._key(self._newest))}, which was there, is "
            f"not there any more. {MOUNT_AGAIN}"
        )
