"""Lists the chunks of a log partition that another process may write at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from zmq_datasource.errors import DamagedChunkError, LogFormatError
from zmq_datasource.log.chunk import read_facts
from zmq_datasource.log.facts import NO_INCARNATIONS, Incarnations
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.storage import ChunkEntry, LogStorage

__all__ = ["chunks_of", "read_index"]

# Attempts to list a partition. A chunk that was listed may be deleted before it is opened.
_LISTINGS = 10


def read_index(storage: LogStorage) -> ChunkIndex:
    """List the chunks of a log partition.

    The end of a chunk is the first id of the next one; the end of the newest chunk is in its file. Strays at the front
    are left out (see ``fence``).

    Raises:
        DamagedChunkError: The newest chunk is damaged.
        DiskFaultError: The partition cannot be listed now.
    """
    for _ in range(_LISTINGS):
        with suppress(FileNotFoundError):  # it was deleted, so there is a newer one
            return _index_of(storage, storage.chunks())
    raise LogFormatError(f"reading {storage}: its listing shows chunks that cannot be opened")


def _index_of(storage: LogStorage, entries: list[ChunkEntry]) -> ChunkIndex:
    if not entries:
        return ChunkIndex()
    newest = read_facts(storage, entries[-1].first)
    while len(entries) > 1 and _is_stray(storage, entries[0].first, newest.incarnations):
        del entries[0]
    # While an older chunk is there, the newest one was not deleted since the listing. A single chunk may have been
    # deleted, and a stray may have been opened in its place.
    if len(entries) == 1 and entries[0] not in storage.chunks():
        raise FileNotFoundError
    return ChunkIndex(chunks_of(entries, newest.end, newest.incarnations), newest.incarnations)


def _is_stray(storage: LogStorage, first: int, incarnations: Incarnations) -> bool:
    """Whether the chunk with this first id was put by a writer that had lost the log."""
    writer = incarnations.of(first)
    if writer is None:  # its writer is forgotten, because all chunks of it were deleted
        return bool(incarnations.writers)
    try:
        return read_facts(storage, first).incarnation != writer
    except DamagedChunkError:  # reading its rows reports this
        return False


def chunks_of(
    entries: Sequence[ChunkEntry], end: int, incarnations: Incarnations = NO_INCARNATIONS
) -> list[Chunk]:
    """The chunks of successive entries; ``end`` is the end of the last one."""
    ends = [*(entry.first for entry in entries[1:]), end]
    return [
        Chunk(it.first, e, it.size, it.sealed_at, incarnations.of(it.first))
        for it, e in zip(entries, ends, strict=True)
    ]
