"""Writes a chunk's file batch by batch. Until ``end`` and ``put`` it lacks only its last batch, footer and name.

There are three kinds: an open chunk and its compact copy (``open_chunk``), and a staged attempt (``staging``).
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
from zmq_datasource.log.local_files import LocalFiles
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Part
from zmq_datasource.messages.columns import MESSAGE_SCHEMA

_log = logging.getLogger(__name__)

# Each batch takes about a kilobyte, and 50 µs of its reader.
_SMALL_BATCH_BYTES = 64 << 10
# So many batches, or bytes, are copied into one at a time. That takes about 1 ms, for which the next group waits.
_PIECE_BATCHES, _PIECE_BYTES = 256, 1 << 20


class Encoder:
    """Encodes a chunk's file batch by batch.

    Args:
        schema: ``MESSAGE_SCHEMA``, with metadata for a staged attempt.

    Attributes:
        rows: The rows so far.
    """

    def __init__(self, schema: pa.Schema = MESSAGE_SCHEMA) -> None:
        self._memory = Memory()
        self._writer = pa.ipc.new_file(self._memory, schema)
        self._closed = False
        self.rows = 0

    @property
    def size(self) -> int:
        """The bytes so far, including those that were taken."""
        return self._memory.tell()

    def append(self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> None:
        """Add a batch with its checksum and this metadata."""
        custom = {CHECKSUM: fingerprint(batch, self.rows), **metadata}
        self._writer.write_batch(batch.replace_schema_metadata(None), custom_metadata=custom)
        self.rows += batch.num_rows

    def end(self, metadata: Mapping[bytes, bytes]) -> None:
        """Add a last batch without rows, with this metadata, and the footer; do nothing if that is done."""
        if not self._closed:
            self.append(NO_ROWS, metadata)
            self._writer.close()
            self._closed = True

    def take(self) -> list[Part]:
        """Return the bytes since the last call."""
        return self._memory.take()


class ChunkFile:
    """A chunk's file under a hidden name, until it is whole.

    If the disk refuses, the call may be repeated. The bytes are then written again from memory at the same place,
    because after a failed fsync it is unknown which of them the system still has.

    Args:
        files: The directory.
        name: Its name until then: hidden, or that of a finished attempt (``staging``).
        encoder: Encodes the file.

    Attributes:
        size: The bytes on the disk.
    """

    def __init__(self, files: LocalFiles, name: str, encoder: Encoder | None = None) -> None:
        self._files = files
        self._name = name
        self._encoder = encoder or Encoder()
        self._unwritten: list[Part] = []
        self.size = 0

    def append(self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> None:
        """Add a batch with its checksum and this metadata; ``write`` makes it durable."""
        self._encoder.append(batch, metadata)

    def write(self, durably: bool = True) -> None:
        """Write the batches since the last call. They are durable when this returns, unless ``durably`` is false.

        Raises:
            LogWriteError: The file system refused.
        """
        self._unwritten += self._encoder.take()
        if self._unwritten:
            self.size = self._files.write(self._name, self.size, self._unwritten, durably)
        self._unwritten = []

    def rename(self, name: str) -> None:
        """Force the file to the disk, and give it another name, durably."""
        self._files.rename(self._name, name)
        self._name = name

    def end(self, facts: ChunkFacts, state: Mapping[bytes, bytes]) -> None:
        """Write the last batch and the footer. ``put`` follows.

        Args:
            facts: The chunk's facts. The last batch has no rows, so that no earlier batch passes for it.
            state: The writer's state (``state_metadata``), in the same batch.

        Raises:
            LogWriteError: The file system refused.
        """
        self._encoder.end({**facts.to_metadata(), **state})
        self.write()

    def finish(self, storage: LogStorage, facts: ChunkFacts, state: Mapping[bytes, bytes]) -> Chunk:
        """Call ``end`` and ``put``. A repeated call completes an interrupted one."""
        self.end(facts, state)
        return self.put(storage, facts)

    def put(self, storage: LogStorage, facts: ChunkFacts) -> Chunk:
        """Make the file a chunk, after ``end``.

        Raises:
            LogLockedError: Another writer has given out its ids.
            LogWriteError: The file system refused.
        """
        storage.put_chunk(facts.first, self._files.path_of(self._name))
        self.remove()
        return Chunk(facts.first, facts.end, self.size, time.time(), facts.incarnation)

    def remove(self) -> None:
        """Delete the file under its hidden name. If that fails, the next writer deletes it."""
        try:
            self._files.remove(self._name)
        except LogWriteError as e:
            _log.warning("%s", e)


class FilledFile(NamedTuple):
    """A file with rows that can become a chunk.

    Attributes:
        file: The file; more rows may be appended.
        rows: The number of rows.
        times: The times at which the rows were received.
    """

    file: ChunkFile
    rows: int
    times: Times


class CompactFile:
    """A copy of an open chunk in fewer batches; ``finish`` makes the copy the sealed chunk.

    It is written in pieces, because copying a whole chunk at its end would delay the next group by 30 ms. It only makes
    later reads faster: so if the disk refuses, it is given up, and the chunk keeps its small batches.
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
        """Write the pending batches if there are enough; return False if the disk has refused."""
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
        """Make it the chunk; return None if the disk has refused to write it.

        Raises:
            LogLockedError: Another writer has given out its ids.
            LogWriteError: The file system refused to make it the chunk. It may have become the chunk all the same.
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
        """Delete the file."""
        if self._file.size:
            self._file.remove()


def is_small(batches: Sequence[pa.RecordBatch]) -> bool:
    """Whether batches are so small, on average, that they are better written as one."""
    # Not nbytes, which is the same for batches that are not slices, and takes 50 ms for a thousand of them.
    size: int = sum(batch.get_total_buffer_size() for batch in batches)
    return size < len(batches) * _SMALL_BATCH_BYTES
