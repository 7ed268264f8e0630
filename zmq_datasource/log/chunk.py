"""Writes and reads one chunk: record batches, each with a checksum.

A chunk's rows have no ``id``: it follows from its name, and ``read_chunk`` adds it. So reading
checks what ties rows to ids: the place in the chunk's facts, and the number of rows before each batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import xxhash

from zmq_datasource.errors import DamagedChunkError, DataLossError
from zmq_datasource.log.facts import ChunkFacts
from zmq_datasource.log.files import LENGTHS_ONLY, unreadable
from zmq_datasource.log.layout import Chunk, first_id_in
from zmq_datasource.log.retrier import retry_reading
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Part
from zmq_datasource.messages.columns import FRAMING, MESSAGE_SCHEMA
from zmq_datasource.messages.rows import number_rows

CHECKSUM = b"xxh3"


class _Memory:
    """Receives what Arrow writes, and keeps the columns' own buffers instead of copies."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._end = 0

    def write(self, part: Part) -> int:
        self._parts.append(part)
        self._end += len(part)
        return len(part)

    def tell(self) -> int:
        return self._end

    def flush(self) -> None:
        """Do nothing; Arrow calls this."""

    def take(self) -> list[Part]:
        """Return what was written since the last call."""
        parts, self._parts = self._parts, []
        return parts


def encode_chunk(batches: Iterable[pa.RecordBatch], facts: ChunkFacts) -> Iterator[Part]:
    """Encode messages (``messages.columns.MESSAGE_SCHEMA``) as the content of a chunk, an Arrow IPC file.

    Two batches at a time are in memory.

    Args:
        batches: At least one.
        facts: The chunk's facts.
    """
    memory, rest = _Memory(), iter(batches)
    first = next(rest)
    batch: pa.RecordBatch | None = first
    before = 0
    with pa.ipc.new_file(memory, MESSAGE_SCHEMA.with_metadata(first.schema.metadata)) as writer:
        while batch is not None:
            following = next(rest, None)
            beside = facts.to_metadata() if following is None else {}
            writer.write_batch(batch, custom_metadata={CHECKSUM: fingerprint(batch, before), **beside})
            before += batch.num_rows
            yield from memory.take()
            batch = following
    yield from memory.take()


def write_chunk(storage: LogStorage, batches: Iterable[pa.RecordBatch], facts: ChunkFacts) -> Chunk:
    """Write messages as a chunk. A call that failed may be repeated.

    Raises:
        LogLockedError: Another writer has given out these ids.
        LogWriteError: The store refused.
    """
    size = 0

    def content() -> Iterator[Part]:
        nonlocal size
        for part in encode_chunk(batches, facts):
            size += len(part)
            yield part

    modified = storage.put_chunk(facts.first, content())
    return Chunk(facts.first, facts.end, size, time.time(), None, modified)


def latest_of(batches: Iterable[pa.RecordBatch]) -> int:
    """The latest time in batches with rows, in microseconds since the epoch."""
    latest: int = max(pc.max(batch.column("timestamp")).value for batch in batches)
    return latest


def read_facts(storage: LogStorage, name: str) -> ChunkFacts:
    """Read the facts of a chunk.

    Raises:
        DamagedChunkError: The file is not an Arrow file, or its facts are damaged, or were written for another place.
        DiskFaultError: The file cannot be opened now.
        FileNotFoundError: The file is gone.
    """
    try:
        with storage.open_sealed(name) as file:
            return _facts_in(pa.ipc.open_file(file, options=LENGTHS_ONLY), name)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, ValueError) as e:
        raise unreadable(f"opening chunk {storage.path_of(name)}", e) from e


def _facts_in(reader: pa.ipc.RecordBatchFileReader, name: str) -> ChunkFacts:
    """The facts in the file of a chunk with this name; ValueError if they are damaged, or of another chunk."""
    if not reader.num_record_batches:
        raise ValueError("it has no rows")
    metadata = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)[1]
    return ChunkFacts.from_metadata(metadata or {}, first_id_in(name))


def read_chunk(
    storage: LogStorage, name: str, start: int, end: int, *, modified: float | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows (``messages.columns.LOG_SCHEMA``) of a chunk with ids in ``[start, end)``.

    Of the file's metadata they keep the framing.

    Args:
        modified: As in ``LogStorage.open_sealed``.

    Raises:
        DamagedChunkError: The content was changed; the error names the file and the ids.
        DiskFaultError: The chunk could not be read within the storage's ``retry_seconds``.
        DataLossError: The chunk is gone, or it ends before ``end``, so the next chunk is missing.
    """
    path, chunk_first = storage.path_of(name), first_id_in(name)
    next_id = chunk_first
    retry = partial(retry_reading, seconds=storage.retry_seconds)
    with ExitStack() as stack:
        try:
            file = stack.enter_context(retry(partial(storage.open_sealed, name, modified)))
            reader = retry(partial(pa.ipc.open_file, file))
            schema, count = reader.schema, reader.num_record_batches
            if not schema.equals(MESSAGE_SCHEMA):
                raise DamagedChunkError.of(
                    f"opening chunk {path}: its schema is not that of a chunk: {schema}"
                )
            lengths = pa.ipc.open_file(file, options=LENGTHS_ONLY)
            facts = retry(partial(_facts_in, lengths, name))
        except FileNotFoundError as e:
            raise _gone(path, start, end) from e
        except (OSError, pa.ArrowException, ValueError) as e:
            raise unreadable(f"opening chunk {path} (ids {start} to {end - 1})", e) from e
        kept = {FRAMING: schema.metadata[FRAMING]} if FRAMING in (schema.metadata or {}) else None
        for position in range(count):
            if next_id >= end:
                return
            try:
                if next_id < start:
                    skipped = retry(partial(lengths.get_batch, position)).num_rows
                    if next_id + skipped <= start:
                        next_id += skipped
                        continue
                batch, metadata = retry(partial(reader.get_batch_with_custom_metadata, position))
                first, next_id = next_id, next_id + batch.num_rows
                intact = (metadata or {}).get(CHECKSUM) == fingerprint(batch, first - chunk_first)
            except FileNotFoundError as e:
                # A bucket's object is read in parts, and may be deleted between two of them.
                raise _gone(path, start, end) from e
            except (OSError, pa.ArrowException, ValueError) as e:
                raise unreadable(f"reading batch {position} of chunk {path} (from id {next_id})", e) from e
            if not intact:
                raise DamagedChunkError.of(
                    f"reading batch {position} of chunk {path} (ids {first} to {next_id - 1}): its checksum differs; "
                    "the file was changed after it was written"
                )
            low, high = max(start - first, 0), min(end - first, batch.num_rows)
            yield number_rows(batch.replace_schema_metadata(kept).slice(low, high - low), first + low)
        if next_id < min(end, facts.end):
            raise DamagedChunkError.of(
                f"reading chunk {path}: it has the ids up to {next_id - 1}, and was written up to id {facts.end - 1}"
            )
        if next_id < end:
            raise DataLossError(
                f"reading after chunk {path}: it holds the ids up to {next_id - 1}, and the chunk with the ids from "
                f"{next_id} to {end - 1} is missing. Restore it"
            )


def damage_of(storage: LogStorage, chunk: Chunk) -> str | None:
    """Read a whole chunk, and say what is damaged; None if nothing is.

    Raises:
        DataLossError: As ``read_chunk``.
    """
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


def fingerprint(batch: pa.RecordBatch, before: int) -> bytes:
    """The checksum of a batch and its place in a file: XXH3 (64 bits, hex) over its columns' buffers.

    The place is the number of rows before the batch in the file. So a batch in the place of another one is noticed.

    The checksum covers the bytes of the rows in each buffer, without the padding, which depends on the version of
    Arrow. It covers a validity bitmap only if the column has nulls, because the file format may leave the bitmap out.
    Last, it covers the name of the framing, if the batch has one.

    Raises:
        ValueError: A buffer is shorter than the rows say, or the batch is a slice.
    """
    batch.validate()  # in a damaged file even the number of nulls may be wrong
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
    """The first ``size`` bytes of a buffer; ValueError if it is shorter."""
    held = memoryview(b"" if buffer is None else buffer)
    if not 0 <= size <= len(held):
        raise ValueError(f"a buffer has {len(held)} bytes where its rows need {size}")
    return held[:size]
