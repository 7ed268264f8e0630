"""What a writer does before it writes: takes the lock, and makes the files that it finds a log again."""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

from zmq_datasource.errors import DamagedChunkError, DataLossError, LogFormatError
from zmq_datasource.host import failpoints
from zmq_datasource.log.chunk import damage_of
from zmq_datasource.log.files import WriterLock, writing
from zmq_datasource.log.growing import read_groups, seal_groups, write_compact
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import Chunk, end_of_damaged, growing_name
from zmq_datasource.log.persistence import Persistence
from zmq_datasource.log.state import SavedState, no_saved_state, read_saved_state
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.times import PastTimes, read_past_times

__all__ = ["Opened", "open_partition"]

_log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """A log partition that this process may write now.

    Attributes:
        log_id: Of the log.
        lock: Keeps other writers away until it is released.
        chunks: What there is.
        saved: The state that the log kept last.
        past: When the messages of the chunks were received.
    """

    log_id: str
    lock: WriterLock
    chunks: ChunkIndex
    saved: SavedState
    past: PastTimes


def open_partition(
    storage: LogStorage, lock_wait: float, feed: str, sync: bool, persistence: Persistence
) -> Opened:
    """Create or recover a log partition, and become its writer. May be repeated.

    Args:
        lock_wait: Seconds to wait for a previous writer that is just stopping.
        feed: As in ``LogStorage.lock``.
        sync: Whether chunks are forced to the disk. If not, those that a crash of the machine has torn are renamed.
        persistence: For what is written.

    Raises:
        LogError: Held by another, damaged, or not writable.
    """
    with writing(f"opening log {storage.root}"):  # listing it may meet a fault, too
        log_id = storage.open_log()
        lock = storage.lock(lock_wait, feed)
        try:
            failpoints.reach("log.recovery.after_lock")
            chunks = _recover(storage, sync, persistence)
            with storage.placing():
                _check_positions(storage, chunks.end)
            storage.remove_temporaries()
            saved = _saved_state(storage, sync)
            storage.remove_states(but=saved.base)
            past = PastTimes()
            if len(chunks):
                (newest,) = chunks.covering(chunks.end - 1, chunks.end)
                storage.expect(newest)
                past = _past_times(storage, newest)
        except BaseException:
            lock.release()
            raise
    return Opened(log_id, lock, chunks, saved, past)


def _past_times(storage: LogStorage, newest: Chunk) -> PastTimes:
    try:
        return read_past_times(storage, newest.name)
    except DamagedChunkError as e:
        _log.error("%s. The search for a timestamp opens each chunk up to this one", e)
        return PastTimes()


def _check_positions(storage: LogStorage, end: int) -> None:
    """Refuse to give out ids again that a reader has read."""
    for name, record in storage.readers().items():
        position = record.needs(storage.partition)
        if position > end:
            raise DataLossError(
                f"opening {storage}: it ends at id {end}, and reader {name!r} has read the ids below {position} "
                f"({storage.reader_path(name)}): its newest chunks are gone (after a crash of the machine with "
                "walSync=false, or from a copy). Their ids are not given to other messages. Restore the chunks, or use "
                "a new walLocation, and for each query of this log a new checkpoint"
            )


def _saved_state(storage: LogStorage, sync: bool) -> SavedState:
    try:
        return read_saved_state(storage)
    except (DamagedChunkError, LogFormatError) as e:
        if sync:
            raise
        _log.error(
            "%s. With walSync=false a crash of the machine does that: what the log has kept of publishers' numbers "
            "and of transactions is lost, and begins anew",
            e,
        )
        return no_saved_state(storage)


def _recover(storage: LogStorage, sync: bool, persistence: Persistence) -> ChunkIndex:
    """List the chunks, and make one of what a crashed writer had of one. Only for the holder of the lock.

    Raises:
        LogFormatError: A chunk in the middle is missing, or those before the open chunk are.
        DamagedChunkError: The open chunk was changed after it was written.
    """
    chunks = sorted(storage.chunks())
    try:
        end = ChunkIndex(chunks).end
    except LogFormatError as e:
        raise LogFormatError(f"opening {storage}: {e}") from e
    while chunks and not (sync or storage.always_syncs) and (why := damage_of(storage, chunks[-1])):
        chunk = chunks.pop()
        _log.error(
            "%s. With walSync=false a crash of the machine does that: the ids %d to %d are lost; what there is of "
            "them is in %s",
            why,
            chunk.first,
            chunk.end - 1,
            storage.rename_damaged(chunk.name),
        )
    # Where nothing is left, at least no id is given twice: neither now nor when the log is opened again.
    index = ChunkIndex(chunks, start=max(end, end_of_damaged(storage.names())))
    for first in storage.growing():
        _recover_growing(storage, first, index, sync, persistence)
    return index


def _recover_growing(
    storage: LogStorage, first: int, index: ChunkIndex, sync: bool, persistence: Persistence
) -> None:
    """Make a sealed chunk of one that was open when its writer ended.

    Raises:
        LogFormatError: With ``sync``: the sealed chunks before it are missing.
        DamagedChunkError: It was written for another place; with ``sync``: it was changed after it was written.
    """
    if first < index.end:  # its chunk is there
        return
    path = storage.path_of(growing_name(first))
    content = storage.read_growing(first)
    groups = read_groups(content, storage.partition, first)
    damaged = groups.damaged
    rows = sum(batch.num_rows for batch in groups.batches)
    if damaged and sync:
        raise DamagedChunkError(
            f"opening {path}: the ids from {damaged.start} on are not what was written, and some after them, up to "
            f"{damaged.stop - 1}, are: the file was changed afterwards. Restore it; or set a new walLocation; or "
            f"rename it: then its ids, {first} to {damaged.stop - 1}, are lost and given to other messages, so that "
            "whoever has read some of them must begin anew"
        )
    follows = first == index.end
    if sync and not follows:
        held = f"it holds the ids {first} to {first + rows - 1}" if rows else f"it begins at id {first}"
        raise LogFormatError(
            f"opening {path}: {held}, and the sealed chunks with the ids {index.end} to {first - 1} are missing. "
            "Restore them; or set a new walLocation, and for each query of this log a new checkpoint; or rename this "
            f"file: then the ids from {index.end} on are lost and given to other messages, so that each reader of the "
            "log must begin again"
        )
    if rows and follows:
        _log.info("log %s: recovered the ids %d to %d", storage.root, first, first + rows - 1)
        # What was damaged keeps its bytes under another name.
        seal = (
            partial(write_compact, storage, first, groups.batches, groups.metadata, sync)
            if damaged
            else partial(seal_groups, storage, first, content, groups, sync)
        )
        failpoints.reach("log.recovery.before_seal")
        index.append(persistence.insist(seal))
        failpoints.reach("log.recovery.after_seal")
    if damaged or not follows:
        _log.error(
            "opening %s: of the ids up to %d some from %d on are missing. With walSync=false a crash of the machine "
            "does that: they are lost; what there is of them is in %s",
            path,
            max(damaged.stop, first + rows) - 1,
            index.end,
            persistence.insist(partial(storage.rename_damaged, growing_name(first))),
        )
