"""Opens a log for writing: takes the lock, checks and recovers its content."""

from __future__ import annotations

from typing import NamedTuple

from zmq_datasource.errors import LogLockedError
from zmq_datasource.host import failpoints
from zmq_datasource.log.chunk import read_facts
from zmq_datasource.log.facts import ChunkFacts
from zmq_datasource.log.fence import Fence
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
        facts: Those of the newest chunk; None if there is none.
    """

    log_id: str
    hold: Hold
    head: HeadWriter
    chunks: ChunkIndex
    facts: ChunkFacts | None


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
            log_id = storage.log_id_again()
            storage.tidy_up()
            index = read_index(storage)
            newest = index.newest
            storage.fence = Fence(storage.store, hold, head, newest)
            facts = None if newest is None else read_facts(storage, newest.name)
        except FileNotFoundError as e:
            hold.release()
            raise LogLockedError(
                f"opening {storage}: another process writes it, and has deleted the newest chunk, {e.filename}"
            ) from e
        except BaseException:
            hold.release()
            raise
    return OpenedLog(log_id, hold, head, index, facts)
