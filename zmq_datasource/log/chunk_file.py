"""The file of a chunk, written while its batches come: what it lacks until the end is the footer and its name."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.ipc

from zmq_datasource.errors import LogError, LogWriteError
from zmq_datasource.log.chunk import CHECKSUM, NO_ROWS, Memory, fingerprint
from zmq_datasource.log.facts import ChunkFacts
from zmq_datasource.log.layout import Chunk, compact_name
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Part
from zmq_datasource.messages.schemas import MESSAGE_SCHEMA

__all__ = ["ChunkFile", "CompactFile", "is_small"]

_log = logging.getLogger(__name__)

# A batch of its own costs a message about a kilobyte, and its reader 50 µs.
_SMALL_BATCH_BYTES = 64 << 10
# What is made one batch at a time. Both take about a millisecond, for which the next group waits.
_PIECE_BATCHES, _PIECE_BYTES = 256, 1 << 20


class ChunkFile:
    """A chunk's file under the hidden name that it has until it is whole.

    What writes to the disk may be called again if the disk has refused it: it is written again from memory, at the
    same place, because after a failed fsync nobody knows what the system still holds of it.

    Args:
        name: The hidden name.

    Attributes:
        size: Bytes that are on the disk.
    """

    def __init__(self, storage: LogStorage, name: str) -> None:
        self._storage = storage
        self._files = storage.open_chunk_files()
        self._name = name
        self._memory = Memory()
        self._writer = pa.ipc.new_file(self._memory, MESSAGE_SCHEMA)
        self._rows = 0
        self._unwritten: list[Part] = []
        self._closed = False
        self.size = 0

    def append(self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> None:
        """Add a batch, with its checksum and this metadata; ``write`` makes it durable."""
        custom = {CHECKSUM: fingerprint(batch, self._rows), **metadata}
        self._writer.write_batch(batch.replace_schema_metadata(None), custom_metadata=custom)
        self._rows += batch.num_rows

    def write(self) -> None:
        """Write what was appended.

        Raises:
            LogWriteError: The file system refused.
        """
        self._unwritten += self._memory.take()
        if self._unwritten:
            self.size = self._files.write(self._name, self.size, self._unwritten)
        self._unwritten = []

    def end(self, facts: ChunkFacts, state: Mapping[bytes, bytes]) -> None:
        """Write the end and the footer; ``put`` is next.

        Args:
            facts: What the chunk says of itself. A batch of no rows has it, so that no batch before passes for the
                last one.
            state: Its writer's (``log.state``), in the same place.

        Raises:
            LogWriteError: The file system refused.
        """
        if not self._closed:
            self.append(NO_ROWS, {**facts.to_metadata(), **state})
            self._writer.close()
            self._closed = True
        self.write()

    def put(self, facts: ChunkFacts) -> Chunk:
        """Make the file, which has its end, a chunk.

        Raises:
            LogLockedError: Another writer has given out its ids.
            LogWriteError: The file system refused.
        """
        self._storage.put_chunk(facts.first, self._files.path_of(self._name))
        self.remove()
        return Chunk(facts.first, facts.end, self.size, time.time(), facts.incarnation)

    def remove(self) -> None:
        """Delete the file under this name, if there is one. What cannot be deleted now, the next writer deletes."""
        try:
            self._files.remove(self._name)
        except LogWriteError as e:
            _log.warning("%s", e)


class CompactFile:
    """The same rows as an open chunk in fewer batches, written beside it, piece by piece, to take its place.

    Piece by piece, because to do it for a whole chunk when it ends would let the next group wait 30 ms. It is for
    those who read later, so what the disk refuses is not tried again: then the chunk stays as it has grown.

    Args:
        first: The chunk's first id.
    """

    def __init__(self, storage: LogStorage, first: int) -> None:
        self._file = ChunkFile(storage, compact_name(first))
        self._first = first
        self._storage = storage
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0

    def append(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Add a group, for ``write``."""
        self._pending += batches
        self._pending_bytes += sum(batch.get_total_buffer_size() for batch in batches)

    def write(self) -> bool:
        """Write what has gathered, if it is enough; False if the disk has refused it."""
        if len(self._pending) < _PIECE_BATCHES and self._pending_bytes < _PIECE_BYTES:
            return True
        try:
            self._write()
        except (LogError, pa.ArrowException) as e:
            self._give_up(e)
            return False
        return True

    def _write(self) -> None:
        if self._pending:
            batch = pa.concat_batches(self._pending)
            self._file.append(batch, {})
            self._pending, self._pending_bytes = [], 0
        self._file.write()

    def finish(self, facts: ChunkFacts, state: Mapping[bytes, bytes]) -> Chunk | None:
        """Make it the chunk; None if the disk has refused what was to be written.

        Raises:
            LogLockedError: Another writer has given out its ids.
            LogWriteError: The file system refused to make it the chunk, or has made it one all the same.
        """
        try:
            self._write()
            self._file.end(facts, state)
        except (LogError, pa.ArrowException) as e:
            self._give_up(e)
            return None
        return self._file.put(facts)

    def _give_up(self, why: Exception) -> None:
        _log.warning(
            "log %s: the chunk from id %d on keeps its many small batches: %s",
            self._storage.root,
            self._first,
            why,
        )
        self.remove()

    def remove(self) -> None:
        """Delete what was written of it."""
        if self._file.size:
            self._file.remove()


def is_small(batches: Sequence[pa.RecordBatch]) -> bool:
    """Whether these are better written as one: whether they are small, on average.

    (By the size of their buffers: ``nbytes`` is the same for what is no slice, and for a thousand batches takes 50 ms.)
    """
    size: int = sum(batch.get_total_buffer_size() for batch in batches)
    return size < len(batches) * _SMALL_BATCH_BYTES
