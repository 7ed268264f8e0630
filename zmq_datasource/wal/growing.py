"""A chunk that is durable before it is whole: written group by group, then closed and renamed.

An Arrow IPC file is a stream of record batches with a footer behind it. So a chunk can be written as
its messages come, under the hidden name ``.open-<first id>.arrow``: what it lacks until it is sealed
is the footer and its name. The rules:

* A *group* is what was appended at once. Its last batch is marked, and carries the writer's state
  (``wal.state``) that is about the rows up to there.
* After a crash whole groups count, and what is behind the last one does not: nobody was told of it.
* The writer's next run makes an ordinary chunk of them. Only another process on the same machine
  (``GrowingTail``) reads the file before.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.ipc

from zmq_datasource.errors import LogFormatError
from zmq_datasource.messages import LOG_SCHEMA
from zmq_datasource.wal.chunk import CHECKSUM, fingerprint, write_batches
from zmq_datasource.wal.layout import Chunk, chunk_name
from zmq_datasource.wal.storage import LogStorage

__all__ = ["GrowingChunk", "GrowingTail", "Grown", "read_groups", "write_compact"]

_GROUP_END = b"group.end"
# A batch of its own costs a message about a kilobyte. A chunk of so many, all so small, is written again when it is
# sealed, in one piece.
_MANY_BATCHES, _SMALL_BATCH_BYTES = 8, 64 << 10
_MOST_COMPACT_BYTES = 256 << 20
# What an Arrow file begins with, before the stream.
_MAGIC_BYTES = 8


class Grown(NamedTuple):
    """How far an open chunk has come: its first id, its bytes, and the id after its last message."""

    first: int
    bytes: int
    end: int


class GrowingChunk:
    """The open chunk of a log partition. Belongs to the sealing thread.

    Args:
        first: Its first id.

    Raises:
        LogWriteError: The file system refuses.
    """

    def __init__(self, storage: LogStorage, partition: int, first: int) -> None:
        self._storage = storage
        self._partition = partition
        self._first = first
        self._end = first
        # While they are small: what a compact chunk is made of.
        self._small: list[pa.RecordBatch] | None = []
        self._metadata: Mapping[bytes, bytes] = {}
        self._file = storage.create_growing(partition, first)
        with storage.writing_growing(partition, first):
            self._writer = pa.ipc.new_file(self._file, LOG_SCHEMA)

    @property
    def grown(self) -> Grown:
        return Grown(self._first, 0 if self._file.closed else self._file.tell(), self._end)

    def append(self, batches: Sequence[pa.RecordBatch], metadata: Mapping[bytes, bytes], sync: bool) -> None:
        """Write a group; it is durable when this returns.

        Raises:
            LogWriteError: The file system refused; the chunk must not be used any more.
        """
        with self._storage.writing_growing(self._partition, self._first):
            for batch in batches:
                custom = {CHECKSUM: fingerprint(batch)}
                if batch is batches[-1]:
                    custom |= {**metadata, _GROUP_END: b"1"}
                self._writer.write_batch(batch.replace_schema_metadata(None), custom_metadata=custom)
        if sync:
            self._storage.sync_growing(self._partition, self._first)
        self._end += sum(batch.num_rows for batch in batches)
        self._metadata = metadata
        if self._small is not None:
            self._small += batches
            if sum(batch.nbytes for batch in batches) >= len(batches) * _SMALL_BATCH_BYTES:
                self._small = None

    def finish(self, sync: bool) -> Chunk:
        """Make it an ordinary chunk; of one with many small groups, as from a slow feed, a compact one.

        Raises:
            LogWriteError: The file system refused.
        """
        with self._storage.writing_growing(self._partition, self._first):
            self._writer.close()
            self._file.close()
        name = chunk_name(self._first, self._end)
        if self._small is None or len(self._small) < _MANY_BATCHES:
            return self._storage.finish_growing(self._partition, self._first, name, sync)
        chunk = write_compact(self._storage, self._partition, self._small, self._metadata, sync)
        self._storage.remove_growing(self._partition, self._first)
        return chunk


def write_compact(
    storage: LogStorage,
    partition: int,
    batches: Sequence[pa.RecordBatch],
    metadata: Mapping[bytes, bytes],
    sync: bool,
) -> Chunk:
    """Write the batches of a chunk, which are a chunk's size in all, as one.

    Raises:
        LogWriteError: The file system refused; nothing appeared.
    """
    if sum(batch.nbytes for batch in batches) < _MOST_COMPACT_BYTES:
        batches = [pa.concat_batches(batches)]
    first, end = batches[0].column("id")[0].as_py(), batches[-1].column("id")[-1].as_py() + 1
    return storage.write_chunk(
        partition,
        chunk_name(first, end),
        functools.partial(write_batches, batches=batches, metadata=metadata),
        sync,
    )


def read_groups(content: pa.Buffer) -> tuple[list[pa.RecordBatch], Mapping[bytes, bytes]]:
    """The whole groups of an unfinished chunk, and the metadata of the last one."""
    whole: list[pa.RecordBatch] = []
    pending: list[pa.RecordBatch] = []
    metadata: Mapping[bytes, bytes] = {}
    try:
        reader = pa.ipc.open_stream(content.slice(_MAGIC_BYTES))
        while reader.schema.equals(LOG_SCHEMA):
            batch, custom = reader.read_next_batch_with_custom_metadata()
            if custom is None or custom.get(CHECKSUM) != fingerprint(batch):
                break
            pending.append(batch)
            if _GROUP_END in custom:
                whole += pending
                pending = []
                metadata = {k: v for k, v in custom.items() if k not in (CHECKSUM, _GROUP_END)}
    except Exception:
        # Torn, or damaged, which Arrow's reader of streams answers with errors of many kinds. What is
        # behind the last whole group was never told to anybody.
        pass
    return whole, metadata


class GrowingTail:
    """Reads an open chunk while another process writes it.

    Holds what it has read; what the chunk had before is in memory too, up to its size.

    Args:
        first: Its first id.

    Raises:
        FileNotFoundError: It is sealed already, and has its name.
    """

    def __init__(self, storage: LogStorage, partition: int, first: int) -> None:
        self._descriptor = os.open(storage.growing_path(partition, first), os.O_RDONLY)
        self._read = _MAGIC_BYTES
        self.first = self.end = first
        self.batches: list[pa.RecordBatch] = []

    def read_to(self, size: int) -> None:
        """Take in what was written up to this size of the file, which a group ends.

        Raises:
            LogFormatError: It is not what a writer writes.
        """
        if size <= self._read:
            return
        content = bytearray()
        while len(content) < size - self._read:
            part = os.pread(self._descriptor, size - self._read - len(content), self._read + len(content))
            if not part:
                raise LogFormatError(
                    f"reading the open chunk from id {self.first}: it is shorter than it was said to be"
                )
            content += part
        self._read = size
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(content))
        for message in messages:
            if message.type == "record batch":
                batch = pa.ipc.read_record_batch(message, LOG_SCHEMA)
                self.batches.append(batch)
                self.end += batch.num_rows

    def close(self) -> None:
        os.close(self._descriptor)
