"""What a writer does with the files that it finds, before it writes."""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

from zmq_datasource.errors import DamagedChunkError
from zmq_datasource.log.chunk import read_chunk
from zmq_datasource.log.growing import read_groups, seal_groups, write_compact
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import Chunk, growing_name
from zmq_datasource.log.persistence import Persistence
from zmq_datasource.log.storage import LogStorage

__all__ = ["Recovered", "recover"]

_log = logging.getLogger(__name__)


class Recovered(NamedTuple):
    """What there is.

    Attributes:
        torn: The ids that had been given out and are not there any more; empty unless the machine crashed. As many
            as are known: a name that is gone tells nothing.
    """

    chunks: ChunkIndex
    torn: range


def recover(storage: LogStorage, sync: bool, persistence: Persistence) -> Recovered:
    """List the chunks, and make one of what a crashed writer had of one. Only for the holder of the lock.

    Args:
        sync: Whether chunks are forced to the disk. If not, those that a crash of the machine has torn are set aside.
        persistence: For what is written.

    Raises:
        LogFormatError: A chunk in the middle is missing.
        DamagedChunkError: The open chunk was changed after it was written.
    """
    chunks = sorted(storage.chunks())
    end = ChunkIndex(chunks).end
    while chunks and not sync and (why := _damage(storage, chunks[-1])):
        chunk = chunks.pop()
        _log.error(
            "%s. With walSync=false a crash of the machine does that: the ids %d to %d are lost; what there is of "
            "them is in %s",
            why,
            chunk.first,
            chunk.end - 1,
            storage.set_aside(chunk.name),
        )
    index = ChunkIndex(chunks, 0 if chunks else end)
    for first in storage.growing():
        end = max(end, _recover_growing(storage, first, index, sync, persistence))
    return Recovered(index, range(index.end, max(end, index.end)))


def _damage(storage: LogStorage, chunk: Chunk) -> str | None:
    try:
        for _ in read_chunk(storage, chunk.name, chunk.first, chunk.end):
            pass
    except DamagedChunkError as e:
        return str(e)
    return None


def _recover_growing(
    storage: LogStorage, first: int, index: ChunkIndex, sync: bool, persistence: Persistence
) -> int:
    """Make a chunk of an open one; the end of the ids that it had."""
    if first < index.end:  # its chunk is there
        return index.end
    path = storage.growing_path(first)
    content = storage.read_growing(first)
    groups = read_groups(content, first)
    damaged = groups.damaged
    rows = sum(batch.num_rows for batch in groups.batches)
    if damaged and sync:
        raise DamagedChunkError(
            f"opening {path}: the ids from {damaged.start} on are not what was written, and some behind them, up to "
            f"{damaged.stop - 1}, are: the file was changed afterwards. Restore it; or set a new walLocation; or "
            f"rename it: then its ids, {first} to {damaged.stop - 1}, are lost and given to other messages, so that "
            "whoever has read some of them must begin anew"
        )
    follows = first == index.end
    if rows and follows:
        _log.info("log %s: recovered the ids %d to %d", storage.root, first, first + rows - 1)
        # What was damaged is set aside as it is.
        seal = (
            partial(write_compact, storage, groups.batches, groups.metadata, sync)
            if damaged
            else partial(seal_groups, storage, first, content, groups, sync)
        )
        index.append(persistence.insist(seal))
    if damaged or not follows:
        end: int = max(damaged.stop, first + rows)
        _log.error(
            "opening %s: of the ids up to %d some from %d on are missing. With walSync=false a crash of the machine "
            "does that: they are lost; what there is of them is in %s",
            path,
            end - 1,
            index.end,
            persistence.insist(partial(storage.set_aside, growing_name(first))),
        )
        return end
    return index.end
