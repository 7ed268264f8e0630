"""Finding the first message of a time, without reading rows.

A clock can be set back, so ids and times do not always go up together: each chunk has its earliest and its latest time.
For the same reason no search halves the chunks by the time of the one in the middle. Instead each chunk has the latest
times of blocks of 1, 2, 4, ... chunks (``facts.PastTimes``), so that ``first_chunk_since`` skips whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zmq_datasource.errors import DataLossError
from zmq_datasource.log.chunk import read_facts
from zmq_datasource.log.facts import ChunkFacts
from zmq_datasource.log.files import patiently
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.storage import LogStorage

__all__ = ["first_chunk_since"]


def first_chunk_since(storage: LogStorage, chunks: Sequence[Chunk], time: int) -> int:
    """The position of the first chunk with a message of that time or later; ``len(chunks)`` if there is none.

    Opens about four chunks each time that their number doubles, whatever clocks did and whichever chunks were deleted
    from the front.

    Args:
        chunks: Successive chunks.
        time: Microseconds since the epoch.

    Raises:
        DamagedChunkError: A file is no chunk.
        DiskFaultError: It could not be read for as long as the storage's ``patience``.
        DataLossError: It is gone.
    """
    # All before ``at`` are earlier. The next block has 2**level chunks and begins at ``at``, which has this number.
    at = level = number = 0
    while at < len(chunks):
        size = 1 << level
        if at + size > len(chunks):
            level -= 1
            continue
        facts = _read(storage, chunks[at + size - 1])
        if level == 0:
            latest = facts.times.latest
            number = facts.past.chunks
        elif facts.past.chunks + 1 == number + size:
            latest = facts.past.and_then(facts.times.latest).latest[level]
        else:  # The count began again within this block.
            level -= 1
            continue
        if latest < time:
            at += size
            number += size
            if number % (2 * size) == 0:
                level += 1
        elif level:
            level -= 1
        else:
            return at
    return at


def _read(storage: LogStorage, chunk: Chunk) -> ChunkFacts:
    try:
        return patiently(partial(read_facts, storage, chunk.first), storage.patience)
    except FileNotFoundError as e:
        raise DataLossError(f"opening chunk {storage.path_of(chunk.name)}: it was removed meanwhile") from e
