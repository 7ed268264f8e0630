"""The open chunk of a proxy: it is durable group by group, before it is a whole chunk.

An Arrow IPC file is a stream of record batches with a footer at the end. So a chunk can be written as its messages
arrive, under the hidden name ``.open-<first id>.arrow``. Until it is sealed it lacks only the footer and its name.
The rules:

* A *group* is the messages of one append. The metadata of its last batch has the group's first id, the facts
  (``facts``) and the writer's whole state (``state``) for the rows up to there.
* A sealed chunk that was written so ends with a batch without rows, which has facts and state without a first id. So
  a damaged footer cannot hide groups.
* After a crash whole groups count. The bytes after the last one do not, because no message of them was published. But
  a whole group after a damaged one shows that the file was changed later: its ids may have been published.
* If the disk refuses, the bytes are written again from memory at the same place: after a failed fsync it is unknown
  which of them the system still has.
* The writer's next run makes an ordinary chunk of the file. Before that only another process of the same machine reads
  it (``OpenChunkTail``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.ipc

from zmq_datasource.errors import DamagedChunkError, LogFormatError
from zmq_datasource.log.chunk import (
    CHECKSUM,
    MAGIC_BYTES,
    NO_ROWS,
    Memory,
    fingerprint,
    is_intact,
    write_chunk,
)
from zmq_datasource.log.chunk_file import ChunkFile
from zmq_datasource.log.facts import GROUP_FIRST, ChunkFacts
from zmq_datasource.log.files import reading
from zmq_datasource.log.layout import Chunk, open_chunk_name
from zmq_datasource.log.state import state_of
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.columns import MESSAGE_SCHEMA
from zmq_datasource.messages.rows import number_rows

# Each message of the stream begins with these bytes, at a multiple of this number.
_CONTINUATION, _ALIGNMENT = b"\xff\xff\xff\xff", 8
# How often the writer checks that it still holds the log. A host that was cut off may write for this long.
_CHECK_SECONDS = 1.0


class Grown(NamedTuple):
    """The durable part of an open chunk: its first id, its bytes, and the id after its last message."""

    first: int
    bytes: int
    end: int


class OpenChunk:
    """Writes the open chunk of a log. For the sealing thread.

    A call that the disk has refused may be repeated.
    """

    def __init__(self, storage: LogStorage, first: int) -> None:
        self._storage = storage
        self._first = first
        self._end = self._written_end = first
        self._next_check = 0.0
        self._file = ChunkFile(storage.open_chunk_files(), open_chunk_name(first))
        # As of the last group.
        self._facts: ChunkFacts | None = None
        self._state: Mapping[bytes, bytes] = {}

    @property
    def grown(self) -> Grown:
        """The durable part."""
        return Grown(self._first, self._file.size, self._written_end)

    def append(
        self, batches: Sequence[pa.RecordBatch], facts: ChunkFacts, state: Mapping[bytes, bytes]
    ) -> None:
        """Add a group; ``write`` makes it durable.

        Args:
            facts: The chunk's facts, including this group.
        """
        begin, self._end = self._end, facts.end
        self._facts, self._state = facts, state
        for batch in batches[:-1]:
            self._file.append(batch, {})
        self._file.append(batches[-1], {**facts.to_metadata(), **state, GROUP_FIRST: b"%d" % begin})

    def write(self) -> None:
        """Write the groups since the last call. They are durable when this returns.

        Raises:
            LogWriteError: The file system refused.
            LogLockedError: This process is not the writer any more.
        """
        if time.monotonic() >= self._next_check:  # not each time: a proxy writes a thousand times a second
            self._storage.check_writer()
            self._next_check = time.monotonic() + _CHECK_SECONDS
        self._file.write()
        self._written_end = self._end

    def finish(self) -> Chunk:
        """Make it an ordinary chunk.

        Raises:
            LogLockedError: Another writer has given out its ids.
            LogWriteError: The file system refused.
        """
        assert self._facts is not None, "there is no group"
        return self._file.finish(self._storage, self._facts, self._state)


class Groups(NamedTuple):
    """The content of an open chunk.

    Attributes:
        batches: The batches of its whole groups.
        written: The metadata of each of these batches.
        facts: The facts of the last whole group; None if there is none.
        damaged: The ids from the first damaged group to the last whole group after it; empty if no whole group follows,
            as after a crash.
    """

    batches: list[pa.RecordBatch]
    written: list[Mapping[bytes, bytes]]
    facts: ChunkFacts | None
    damaged: range


def read_groups(content: pa.Buffer, first: int) -> Groups:
    """Read the groups of an open chunk.

    Args:
        first: The first id in its name.

    Raises:
        DamagedChunkError: The groups were written for another place.
    """
    whole: list[pa.RecordBatch] = []
    pending: list[pa.RecordBatch] = []
    written: list[Mapping[bytes, bytes]] = []
    facts: ChunkFacts | None = None
    end = next_id = first
    read_to = MAGIC_BYTES
    elsewhere: ValueError | None = None
    try:
        source = pa.BufferReader(content)
        source.seek(MAGIC_BYTES)
        reader = pa.ipc.open_stream(source)
        while reader.schema.equals(MESSAGE_SCHEMA):
            batch, custom = reader.read_next_batch_with_custom_metadata()
            if not is_intact(batch, custom, next_id - first):
                break
            next_id += batch.num_rows
            pending.append(batch)
            written.append(custom)
            if GROUP_FIRST in custom:
                found = ChunkFacts.from_metadata(custom)
                try:
                    found.check_place(first)
                except ValueError as e:
                    elsewhere = e
                    break
                if found.end != next_id:
                    break
                whole += pending
                pending = []
                facts = found
                end, read_to = next_id, source.tell()
    except Exception:
        # Arrow's reader raises errors of many kinds for a torn or damaged stream.
        pass
    if elsewhere is not None:
        raise DamagedChunkError.of(str(elsewhere))
    behind = max(_ends_of_later_groups(content, read_to, end), default=end)
    return Groups(whole, written[: len(whole)], facts, range(end, behind))


def seal_groups(storage: LogStorage, first: int, content: pa.Buffer, groups: Groups) -> Chunk:
    """Make an ordinary chunk of the open chunk of a crashed writer. A repeated call completes an interrupted one.

    The file itself becomes the chunk, so that only the footer needs room: the writer may have ended because the disk
    was full.

    Args:
        groups: The content, with at least one group.

    Raises:
        LogWriteError: The file system refused.
    """
    facts, state = groups.facts, state_of(groups.written[-1])
    assert facts is not None, "there is no group"
    # Arrow encodes the content once more, in memory, to know the places that the footer needs.
    memory = Memory()
    with pa.ipc.new_file(memory, MESSAGE_SCHEMA) as writer:
        for batch, written in zip(groups.batches, groups.written, strict=True):
            writer.write_batch(batch, custom_metadata=written)
        encoded = b"".join(memory.take())
        end = {CHECKSUM: fingerprint(NO_ROWS, facts.end - first), **facts.to_metadata(), **state}
        writer.write_batch(NO_ROWS, custom_metadata=end)
    if content.slice(0, len(encoded)).to_pybytes() != encoded:
        # Another release of Arrow has written the file.
        return write_chunk(storage, groups.batches, facts, state)
    files = storage.open_chunk_files()
    rest = memory.take()
    if storage.find_chunk(first) is None:  # otherwise an earlier call has done this
        files.cut(first, len(encoded))
        files.write(open_chunk_name(first), len(encoded), rest)
    modified = storage.put_chunk(first, files.path_of(open_chunk_name(first)))
    return Chunk(first, facts.end, len(encoded) + sum(map(len, rest)), time.time(), None, modified)


def _ends_of_later_groups(content: pa.Buffer, read_to: int, end: int) -> Iterator[int]:
    """The ends of whole groups that begin after the id ``end``, found anywhere in the rest of the file."""
    every = content.to_pybytes() if read_to < content.size else b""
    at = every.find(_CONTINUATION, read_to)
    while at >= 0:
        size = int.from_bytes(every[at + 4 : at + 8], "little", signed=True)
        if at % _ALIGNMENT == 0 and 0 < size < len(every) - at:
            found = _group_at(content, at)
            if found is not None and found[0] > end:
                yield found[1]
        at = every.find(_CONTINUATION, at - at % _ALIGNMENT + _ALIGNMENT)


def _group_at(content: pa.Buffer, at: int) -> tuple[int, int] | None:
    """The first id and the end of a group, if its last batch is at this place; None otherwise."""
    try:
        source = pa.BufferReader(content)
        source.seek(at)
        message = pa.ipc.read_message(source)
        reader = pa.ipc.open_stream(
            pa.py_buffer(MESSAGE_SCHEMA.serialize().to_pybytes() + message.serialize().to_pybytes())
        )
        batch, custom = reader.read_next_batch_with_custom_metadata()
        if custom is None or GROUP_FIRST not in custom:
            return None
        begin, facts = int(custom[GROUP_FIRST]), ChunkFacts.from_metadata(custom)
        if not is_intact(batch, custom, facts.end - batch.num_rows - facts.first):
            return None
    except Exception:  # no message begins here, or it is damaged
        return None
    return begin, facts.end


class OpenChunkTail:
    """Reads an open chunk while another process writes it, and keeps its rows in memory.

    Attributes:
        batches: The rows that were read.

    Raises:
        FileNotFoundError: The chunk is sealed.
    """

    def __init__(self, storage: LogStorage, first: int) -> None:
        self._descriptor = storage.open_chunk_files().open_chunk(first)
        self._read = MAGIC_BYTES
        self._next = self.first = first
        self.batches: list[pa.RecordBatch] = []

    def read_to(self, size: int) -> None:
        """Read up to this size of the file, which is the end of a group.

        Raises:
            DiskFaultError: The disk refused. The call may be repeated.
            LogFormatError: The file is shorter than that.
        """
        if size <= self._read:
            return
        content, filled = memoryview(bytearray(size - self._read)), 0
        while filled < len(content):
            with reading(f"the open chunk from id {self.first}"):
                count = os.preadv(self._descriptor, [content[filled:]], self._read + filled)
            if not count:
                raise LogFormatError(
                    f"reading the open chunk from id {self.first}: it is shorter than it was said to be"
                )
            filled += count
        self._read = size
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(content))
        for message in messages:
            if message.type == "record batch":
                batch = pa.ipc.read_record_batch(message, MESSAGE_SCHEMA)
                self.batches.append(number_rows(batch, self._next))
                self._next += batch.num_rows

    def close(self) -> None:
        os.close(self._descriptor)
