"""Opens a log for writing: takes the lock, checks and recovers its content."""

from __future__ import annotations

import logging
from typing import NamedTuple

from zmq_datasource.errors import DamagedChunkError, LogFormatError, LogLockedError
from zmq_datasource.host import failpoints
from zmq_datasource.log.chunk import read_facts
from zmq_datasource.log.files import sync_directory, writing
from zmq_datasource.log.head import HeadWriter
from zmq_datasource.log.index import ChunkIndex, read_index
from zmq_datasource.log.layout import chunk_name, open_chunk_name
from zmq_datasource.log.open_chunk import read_groups, seal_groups
from zmq_datasource.log.state import read_saved_state
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Hold

_log = logging.getLogger(__name__)


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
        log_id = storage.open_log()
        hold = storage.lock(lock_wait)
        try:
            failpoints.reach("log.recovery.after_lock")
            head = HeadWriter(storage)
            head.take_over()  # before anything is listed, written or deleted: see ``fence``
            return OpenedLog(log_id, hold, head, *_recover(storage, log_id, head))
        except BaseException:
            hold.release()
            raise


def _recover(storage: LogStorage, log_id: str, head: HeadWriter) -> tuple[ChunkIndex, bytes, int]:
    """Seal the open chunk of a crashed writer, and read chunks, state and time."""
    if storage.directory is not None:
        # A killed writer may have linked a chunk without forcing its name to the disk.
        sync_directory(storage.directory)
    try:
        index = read_index(storage)
        storage.start_fence(log_id, index.newest.first if len(index) else None, head)
        if storage.directory is not None:
            for first in storage.open_chunks():
                _recover_open_chunk(storage, first, index)
            storage.open_chunk_files().remove_hidden()
        storage.remove_temporaries()
        if not len(index):
            return index, b"", 0
        newest = index.newest.first
        facts, saved = read_facts(storage, chunk_name(newest)), read_saved_state(storage, newest)
    except FileNotFoundError as e:
        raise LogLockedError(
            f"opening {storage}: another process writes it, and has deleted chunk {e.filename}, which was the newest"
        ) from e
    return index, saved, facts.past


def _recover_open_chunk(storage: LogStorage, first: int, index: ChunkIndex) -> None:
    """Seal the open chunk of a crashed writer, and add it to the index.

    Raises:
        LogFormatError: Sealed chunks before it are missing.
        DamagedChunkError: It was written for another place, or changed later.
    """
    if first < index.end:  # it is sealed already
        return
    path = storage.path_of(open_chunk_name(first))
    content = storage.open_chunk_files().read_chunk(first)
    try:
        groups = read_groups(content, first)
    except DamagedChunkError as e:
        raise DamagedChunkError(f"opening {path}: {e}") from e
    damaged = groups.damaged
    rows = sum(batch.num_rows for batch in groups.batches)
    if damaged:
        raise DamagedChunkError(
            f"opening {path}: the ids from {damaged.start} on are not what was written, and some after them, up to "
            f"{damaged.stop - 1}, are: the file was changed afterwards. Restore it; or set a new walLocation; or "
            f"rename it: then its ids, {first} to {damaged.stop - 1}, are lost and given to other messages, so that "
            "each reader of the log must begin again"
        )
    if first != index.end:
        held = f"it holds the ids {first} to {first + rows - 1}" if rows else f"it begins at id {first}"
        raise LogFormatError(
            f"opening {path}: {held}, and the sealed chunks with the ids {index.end} to {first - 1} are missing. "
            "Restore them; or set a new walLocation, and for each query of this log a new checkpoint; or rename this "
            f"file: then the ids from {index.end} on are lost and given to other messages, so that each reader of the "
            "log must begin again"
        )
    if groups.facts is not None:
        _log.info("%s: recovered the ids %d to %d", storage, first, first + rows - 1)
        failpoints.reach("log.recovery.before_seal")
        index.append(seal_groups(storage, first, content, groups))
        failpoints.reach("log.recovery.after_seal")
