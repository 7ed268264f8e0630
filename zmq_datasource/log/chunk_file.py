"""The file of a chunk, written while its batches come: what it lacks until the end is the footer and its name.

The file of an open chunk, a compact one beside it, and the file of a staged attempt (``log.staging``) are such files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.ipc

from zmq_datasource.errors import LogError, LogWriteError
from zmq_datasource.log.chunk import CHECKSUM, NO_ROWS, Memory, fingerprint
from zmq_datasource.log.facts import ChunkFacts, Times
from zmq_datasource.log.layout import Chunk, compact_name
from zmq_datasource.log.open_chunk_files import OpenChunkFiles
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Part
from zmq_datasource.messages.schemas import MESSAGE_SCHEMA

__all__ = ["ChunkFile", "CompactFile", "Encoder", "FilledFile", "is_small"]

_log = logging.getLogger(__name__)

# A batch of its own costs a message about a kilobyte, and its reader 50 µs.
_SMALL_BATCH_BYTES = 64 << 10
# What is made one batch at a time. Both take about a millisecond, for which the next group waits.
_PIECE_BATCHES, _PIECE_BYTES = 256, 1 << 20


class Encoder:
    """Makes the bytes of a chunk's file of its batches, as they come.

    Args:
        schema: ``MESSAGE_SCHEMA``; its metadata says what the file was made for.

    Attributes:
        rows: Of the batches so far.
    """

    def __init__(self, schema: pa.Schema = MESSAGE_SCHEMA) -> None:
        self._memory = Memory()
        self._writer = pa.ipc.new_file(self._memory, schema)
        self._closed = False
        self.rows = 0

    @property
    def size(self) -> int:
        """How many bytes there are so far, taken or not."""
        return self._memory.tell()

    def append(self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> None:
        """Add a batch, with its checksum and this metadata."""
        custom = {CHECKSUM: fingerprint(batch, self.rows), **metadata}
        self._writer.write_batch(batch.replace_schema_metadata(None), custom_metadata=custom)
        self.rows += batch.num_rows

    def end(self, metadata: Mapping[bytes, bytes]) -> None:
        """Add a last batch, of no rows, with this metadata, and the footer, unless that is done."""
        if not self._closed:
            self.append(NO_ROWS, metadata)
            self._writer.close()
            self._closed = True

    def take(self) -> list[Part]:
        """What has come since the last call."""
        return self._memory.take()


class ChunkFile:
    """A chunk's file under the name that it has until it is whole.

    What writes to the disk may be called again if the disk has refused it: it is written again from memory, at the
    same place, because after a failed fsync nobody knows what the system still holds of it.

    Args:
        files: Where it is.
        name: The name.
        encoder: What was taken of it is in the file already; None for a new file.

    Attributes:
        size: Bytes that are on the disk.
    """

    def __init__(self, files: OpenChunkFiles, name: str, encoder: Encoder | None = None) -> None:
        self._files = files
        self._name = name
        self._encoder = encoder or Encoder()
        self._unwritten: list[Part] = []
        self.size = 0 if encoder is None else encoder.size

    def append(self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> None:
        """Add a batch, with its checksum and this metadata; ``write`` makes it durable."""
        self._encoder.append(batch, metadata)

    def write(self) -> None:
        """Write what was appended.

        Raises:
            LogWriteError: The file system refused.
        """
        self._unwritten += self._encoder.take()
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
        self._encoder.end({**facts.to_metadata(), **state})
        self.write()

    def finish(self, storage: LogStorage, facts: ChunkFacts, state: Mapping[bytes, bytes]) -> Chunk:
        """Do ``end`` and ``put``. May be repeated."""
        self.end(facts, state)
        return self.put(storage, facts)

    def put(self, storage: LogStorage, facts: ChunkFacts) -> Chunk:
        """Make the file, which has its end, a chunk.

        Raises:
            LogLockedError: Another writer has given out its ids.
            LogWriteError: The file system refused.
        """
        storage.put_chunk(facts.first, self._files.path_of(self._name))
        self.remove()
        return Chunk(facts.first, facts.end, self.size, time.time(), facts.incarnation)

    def remove(self) -> None:
        """Delete the file under this name, if there is one. What cannot be deleted now, the next writer deletes."""
        try:
            self._files.remove(self._name)
        except LogWriteError as e:
            _log.warning("%s", e)


class FilledFile(NamedTuple):
    """Rows that are on the disk already, in a file that is to become a chunk.

    Attributes:
        file: Where more rows may be appended.
        rows: How many it has.
        times: When they were received.
    """

    file: ChunkFile
    rows: int
    times: Times


class CompactFile:
    """The same rows as an open chunk in fewer batches, written beside it, piece by piece, to take its place.

    Piece by piece, because to do it for a whole chunk when it ends would let the next group wait 30 ms. It is for
    those who read later, so what the disk refuses is not tried again: then the chunk stays as it has grown.

    Args:
        first: The chunk's first id.
    """

    def __init__(self, storage: LogStorage, first: int) -> None:
        self._file = ChunkFile(storage.open_chunk_files(), compact_name(first))
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
        return self._file.put(self._storage, facts)

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
