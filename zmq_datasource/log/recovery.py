"""Opens a log for writing: takes the lock, checks and recovers its content."""

from __future__ import annotations

from typing import NamedTuple

from zmq_datasource.errors import LogLockedError
from zmq_datasource.host import failpoints
from zmq_datasource.log.chunk import read_facts
from zmq_datasource.log.files import writing
from zmq_datasource.log.head import HeadWriter
from zmq_datasource.log.index import ChunkIndex, read_index
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Hold


class OpenedLog(NamedTuple):
    """A log that this process may write.

    Attributes:
        log_id: The id of the log.
        hold: The lock of the writer.
        head: The head of the writer.
        chunks: Its chunks.
        saved: The state of the newest chunk; empty if there is none.
        past: The latest time of all rows so far, in microseconds since the epoch.
    """

    log_id: str
    hold: Hold
    head: HeadWriter
    chunks: ChunkIndex
    saved: bytes
    past: int


def open_for_writing(storage: LogStorage, lock_wait: float) -> OpenedLog:
    """Create or recover a log, and become its writer. The caller repeats the call while the disk refuses.

    Args:
        lock_wait: Seconds to wait for an earlier writer that is stopping.

    Raises:
        LogError: Another writer has the log, or it is damaged or not writable.
    """
    with writing(f"opening {storage}"):  # listing may raise errors of the system too
        storage.open_log()
        hold = storage.lock(lock_wait)
        try:
            failpoints.reach("log.recovery.after_lock")
            head = HeadWriter(storage.store)
            head.take_over()  # before anything is listed, written or deleted: see ``fence``
            return OpenedLog(storage.log_id_again(), hold, head, *_recover(storage, head))
        except BaseException:
            hold.release()
            raise


def _recover(storage: LogStorage, head: HeadWriter) -> tuple[ChunkIndex, bytes, int]:
    """Read chunks, state and time."""
    storage.tidy_up()
    try:
        index = read_index(storage)
        newest = index.newest
        storage.start_fence(head, newest)
        if newest is None:
            return index, b"", 0
        facts = read_facts(storage, newest.name)
    except FileNotFoundError as e:
        raise LogLockedError(
            f"opening {storage}: another process writes it, and has deleted chunk {e.filename}, which was the newest"
        ) from e
    return index, facts.state, facts.past
