"""One chunk: record batches to file content and back, each with its checksum.

A chunk's rows have no ``partition`` and no ``id``: both follow from its name, and ``read_chunk`` adds them. So what
keeps rows at their ids is checked: the chunk's ``Place``, and the number of rows before each batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol

import pyarrow as pa
import pyarrow.ipc
import xxhash

from zmq_datasource.errors import DamagedChunkError, DataLossError
from zmq_datasource.log.files import LENGTHS_ONLY, patiently, unreadable
from zmq_datasource.log.layout import Chunk, chunk_name, parse_chunk_name
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.times import TIMES, checked, times_of
from zmq_datasource.messages.rows import number_rows
from zmq_datasource.messages.schemas import FRAMING, MESSAGE_SCHEMA

__all__ = [
    "CHECKSUM",
    "OpensChunks",
    "Place",
    "damage_of",
    "fingerprint",
    "is_intact",
    "read_chunk",
    "read_metadata",
    "write_batches",
    "write_chunk",
]

CHECKSUM = b"xxh3"
_PLACE = b"place"


class Place(NamedTuple):
    """Where the rows of a chunk belong: to the ids ``[first, end)`` of a log partition."""

    partition: int
    first: int
    end: int

    def __str__(self) -> str:
        return f"the ids {self.first} to {self.end - 1} of partition {self.partition}"

    def to_metadata(self) -> dict[bytes, bytes]:
        """What a chunk carries: so one that was renamed, or copied to another partition, is noticed."""
        return {_PLACE: checked(b"%d,%d,%d" % self)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes]) -> Place:
        """Read what ``to_metadata`` wrote.

        Raises:
            ValueError: It is something else.
        """
        content = metadata.get(_PLACE, b"")
        try:
            partition, first, end, _ = content.split(b",")
            found = cls(int(partition), int(first), int(end))
        except ValueError:
            found = None
        if found is None or found.to_metadata() != {_PLACE: content}:
            raise ValueError("what it says of its ids is missing or was changed after it was written")
        return found

    def check(self, metadata: Mapping[bytes, bytes]) -> None:
        """Refuse a chunk that has this place, and was written for another.

        Raises:
            ValueError: It was.
        """
        written = Place.from_metadata(metadata)
        if written != self:
            raise ValueError(
                f"it has the place of {self}, and was written as {written}; the file was renamed or copied"
            )


class OpensChunks(Protocol):
    """Where chunks are read: a directory (``LogStorage``), or what stands for one.

    Attributes:
        partition: Of the log.
        patience: For so many seconds a chunk that cannot be opened now is tried again.
    """

    partition: int
    patience: float

    def open_chunk(self, name: str, whole: bool = True) -> pa.NativeFile:
        """Open a chunk for reading, most of it unless ``whole`` is false; FileNotFoundError if it is gone."""

    def path_of(self, name: str) -> str:
        """Where it is, for messages."""


def write_chunk(
    storage: LogStorage,
    first: int,
    batches: Sequence[pa.RecordBatch],
    metadata: Mapping[bytes, bytes],
    sync: bool,
) -> Chunk:
    """Make a chunk of messages (``messages.schemas.MESSAGE_SCHEMA``).

    Args:
        first: The id of the first one.

    Raises:
        LogWriteError: The file system refused; nothing appeared.
    """
    place = Place(storage.partition, first, first + sum(batch.num_rows for batch in batches))
    write = partial(write_batches, batches=batches, metadata={**metadata, **place.to_metadata()})
    return storage.write_chunk(chunk_name(place.first, place.end), write, sync)


def write_batches(
    file: pa.NativeFile,
    batches: Sequence[pa.RecordBatch],
    metadata: Mapping[bytes, bytes] = MappingProxyType({}),
) -> None:
    """Write messages as one Arrow IPC file.

    Args:
        metadata: Put into the file's schema, beside what the batches' own schema has.
    """
    times = {TIMES: times_of(batches).to_metadata()}
    schema = MESSAGE_SCHEMA.with_metadata({**(batches[0].schema.metadata or {}), **times, **metadata})
    before = 0
    with pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch, custom_metadata={CHECKSUM: fingerprint(batch, before)})
            before += batch.num_rows


def read_metadata(storage: LogStorage, name: str) -> Mapping[bytes, bytes]:
    """What a chunk carries beside its rows: in its schema, or where it grew group by group, in its last batch.

    Raises:
        DamagedChunkError: The file is no Arrow file.
        DiskFaultError: It cannot be opened now.
        FileNotFoundError: It is gone.
    """
    try:
        with storage.open_chunk(name, whole=False) as file:
            return _metadata_of(pa.ipc.open_file(file, options=LENGTHS_ONLY))
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as e:
        raise unreadable(f"opening chunk {storage.path_of(name)}", e) from e


def _metadata_of(reader: pa.ipc.RecordBatchFileReader) -> Mapping[bytes, bytes]:
    metadata = reader.schema.metadata
    if metadata or not reader.num_record_batches:
        return metadata or {}
    return dict(reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)[1] or {})


def read_chunk(
    storage: OpensChunks, name: str, start: int, end: int, *, whole: bool = True
) -> Iterator[pa.RecordBatch]:
    """Yield the rows (``messages.schemas.LOG_SCHEMA``) of a chunk with ids in ``[start, end)``.

    Args:
        whole: Whether most of it will be read.

    Raises:
        DamagedChunkError: The content is not what was written; names the file and the ids.
        DiskFaultError: It could not be read for as long as the storage's ``patience``.
        DataLossError: The file is gone.
    """
    path = storage.path_of(name)
    ids = parse_chunk_name(name)
    assert ids is not None, name
    place = Place(storage.partition, *ids)
    next_id = place.first
    with ExitStack() as stack:
        try:
            file, reader = patiently(lambda: _open(storage, name, whole), storage.patience)
            stack.enter_context(file)
            schema, count = reader.schema, reader.num_record_batches
            if not schema.equals(MESSAGE_SCHEMA):
                raise DamagedChunkError.of(
                    f"opening chunk {path}: its schema is not that of a chunk: {schema}"
                )
            # Where the last batch has the metadata, its rows are not read for that.
            spare = next_id >= start and schema.metadata
            lengths = reader if spare else pa.ipc.open_file(file, options=LENGTHS_ONLY)
            place.check(patiently(partial(_metadata_of, lengths), storage.patience))
        except FileNotFoundError as e:
            raise _gone(path, start, end) from e
        except (OSError, pa.ArrowException, ValueError) as e:
            raise unreadable(f"opening chunk {path} (ids {start} to {end - 1})", e) from e
        # Of the file's metadata a row needs no more; the state of a writer may be large.
        kept = {FRAMING: schema.metadata[FRAMING]} if FRAMING in (schema.metadata or {}) else None
        for position in range(count):
            if next_id >= end:
                return
            try:
                if next_id < start:
                    skipped = patiently(partial(lengths.get_batch, position), storage.patience).num_rows
                    if next_id + skipped <= start:
                        next_id += skipped
                        continue
                read = partial(reader.get_batch_with_custom_metadata, position)
                batch, metadata = patiently(read, storage.patience)
                first, next_id = next_id, next_id + batch.num_rows
                intact = is_intact(batch, metadata, first - place.first)
            except FileNotFoundError as e:  # an object is read in parts
                raise _gone(path, start, end) from e
            except (OSError, pa.ArrowException, ValueError) as e:
                raise unreadable(f"reading batch {position} of chunk {path} (from id {next_id})", e) from e
            if not intact:
                raise DamagedChunkError.of(
                    f"reading batch {position} of chunk {path} (ids {first} to {next_id - 1}): its checksum differs; "
                    "the file was changed after it was written"
                )
            low, high = max(start - first, 0), min(end - first, batch.num_rows)
            rows = batch.replace_schema_metadata(kept).slice(low, high - low)
            yield number_rows(rows, storage.partition, first + low)
        if next_id < end:
            raise DamagedChunkError.of(
                f"reading chunk {path}: it ends at id {next_id}, its name says {place.end}"
            )


def _open(storage: OpensChunks, name: str, whole: bool) -> tuple[pa.NativeFile, pa.ipc.RecordBatchFileReader]:
    file = storage.open_chunk(name, whole)
    try:
        return file, pa.ipc.open_file(file)
    except BaseException:
        file.close()
        raise


def damage_of(storage: OpensChunks, chunk: Chunk) -> str | None:
    """Why a chunk is not what was written, found by reading all of it; None if it is."""
    try:
        for _ in read_chunk(storage, chunk.name, chunk.first, chunk.end):
            pass
    except DamagedChunkError as e:
        return str(e)
    return None


def _gone(path: str, start: int, end: int) -> DataLossError:
    return DataLossError(
        f"opening chunk {path}: it does not exist (ids {start} to {end - 1}). The log's writer deleted it, or it was "
        "removed, or walLocation is not a directory that this machine shares with the driver. Keep chunks for longer "
        "with walRetention, where the log is written; restore what was removed; share walLocation, or have the driver "
        "serve the log to a streaming read with serveLog=tcp://*:PORT"
    )


def is_intact(batch: pa.RecordBatch, metadata: Mapping[bytes, bytes] | None, before: int) -> bool:
    """Whether a batch is what was written with this metadata behind ``before`` rows of its file.

    Raises:
        ValueError: As ``fingerprint``.
    """
    return metadata is not None and metadata.get(CHECKSUM) == fingerprint(batch, before)


def fingerprint(batch: pa.RecordBatch, before: int) -> bytes:
    """The checksum of a batch and its place in a file: XXH3 (64 bits, hex) over its columns' buffers.

    The place is how many rows the file has before it, and not an id. So a batch that takes the place of another one is
    noticed, and a file may become a chunk under whatever id is next.

    Each buffer counts as far as the rows reach, because how much padding follows is up to
    the Arrow version that wrote or read it. A column without nulls counts without its
    validity bitmap, which the file format may leave out. Last comes the name of the framing by
    which frames come back, if the batch has one.

    Raises:
        ValueError: A buffer is shorter than the rows say, or the batch is a slice.
    """
    batch.validate()  # of a damaged file even the number of nulls may be none
    digest = xxhash.xxh3_64()
    digest.update(before.to_bytes(8, "little"))
    digest.update(batch.num_rows.to_bytes(8, "little"))
    for column in batch.columns:
        _feed(digest, column)
    digest.update((batch.schema.metadata or {}).get(FRAMING, b""))
    return digest.hexdigest().encode()


def _feed(digest: xxhash.xxh3_64, array: pa.Array) -> None:
    if array.offset:
        raise ValueError("a slice of an array has no fingerprint")
    rows = len(array)
    digest.update(array.null_count.to_bytes(8, "little"))
    buffers = array.buffers()
    if array.null_count:
        digest.update(_first(buffers[0], (rows + 7) // 8))
    if rows == 0:
        return
    kind = array.type
    if pa.types.is_list(kind):
        digest.update(_first(buffers[1], 4 * (rows + 1)))
        _feed(digest, array.values)
    elif pa.types.is_binary(kind) or pa.types.is_string(kind):
        offsets = _first(buffers[1], 4 * (rows + 1))
        digest.update(offsets)
        digest.update(_first(buffers[2], int.from_bytes(offsets[-4:], "little", signed=True)))
    else:
        digest.update(_first(buffers[1], rows * kind.bit_width // 8))


def _first(buffer: pa.Buffer | None, size: int) -> memoryview:
    held = memoryview(b"" if buffer is None else buffer)
    if not 0 <= size <= len(held):
        raise ValueError(f"a buffer has {len(held)} bytes where its rows need {size}")
    return held[:size]
