"""Writes a chunk's file batch by batch. Until ``end`` and ``put`` it lacks only its last batch, footer and name.

It is the file of a staged attempt (``staging``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

import pyarrow as pa
import pyarrow.ipc

from zmq_datasource.errors import LogWriteError
from zmq_datasource.log.chunk import CHECKSUM, NO_ROWS, Memory, fingerprint
from zmq_datasource.log.facts import ChunkFacts, Times
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.local_files import StagedFiles
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Part
from zmq_datasource.messages.columns import MESSAGE_SCHEMA

_log = logging.getLogger(__name__)


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

    def __init__(self, files: StagedFiles, name: str, encoder: Encoder | None = None) -> None:
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
        modified = storage.put_chunk(facts.first, self._files.path_of(self._name))
        self.remove()
        return Chunk(facts.first, facts.end, self.size, time.time(), None, modified)

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
