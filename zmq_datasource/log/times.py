"""When the messages of a chunk were received: kept beside its rows, so that a time is found without reading them.

A clock can be set back, so ids and times do not always go up together: each chunk has its earliest and its latest time.
For the same reason no search halves the chunks by the time of the one in the middle. Instead each chunk has the latest
times of blocks of 1, 2, 4, ... chunks (``PastTimes``), so that ``first_chunk_since`` skips whole blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import xxhash

from zmq_datasource.errors import DataLossError
from zmq_datasource.log.files import LENGTHS_ONLY, patiently, unreadable
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.storage import LogStorage

__all__ = [
    "TIMES",
    "PastTimes",
    "Times",
    "checked",
    "first_chunk_since",
    "read_past_times",
    "read_times",
    "times_of",
]

# Of a chunk in its schema's metadata; where it grew group by group, of each batch in its own.
TIMES = b"times"
# Of a chunk in its schema's metadata; where it grew group by group, in its last batch.
_PAST = b"times.past"

_CHANGED = "their checksum differs; the file was changed after it was written"


class Times(NamedTuple):
    """The earliest and the latest time at which a message was received, in microseconds since the epoch."""

    earliest: int
    latest: int

    def to_metadata(self) -> bytes:
        """Both, and the XXH3 of that: a time that has changed would hide messages."""
        return checked(b"%d,%d" % self)

    @classmethod
    def from_metadata(cls, content: bytes) -> Times:
        """Read what ``to_metadata`` wrote.

        Raises:
            ValueError: It is something else.
        """
        earliest, latest, _ = content.split(b",")
        found = cls(int(earliest), int(latest))
        if found.to_metadata() != content:
            raise ValueError(_CHANGED)
        return found


class PastTimes(NamedTuple):
    """The latest times of blocks of chunks. A block of 2**k chunks begins at a number that 2**k divides.

    Attributes:
        chunks: How many chunks are counted. The number of the next chunk.
        latest: For each k, the latest time in the last whole block of 2**k chunks, in microseconds since the epoch.
    """

    chunks: int = 0
    latest: tuple[int, ...] = ()

    def and_then(self, latest: int) -> PastTimes:
        """Count one more chunk.

        Args:
            latest: The latest time in this chunk.
        """
        chunks, levels = self.chunks + 1, list(self.latest)
        for level in range(chunks.bit_length()):
            if chunks % (1 << level):
                break
            before = levels[level : level + 1]
            levels[level : level + 1] = [latest]
            latest = max([latest, *before])
        return PastTimes(chunks, tuple(levels))

    def to_metadata(self) -> dict[bytes, bytes]:
        """What the next chunk carries."""
        return {_PAST: checked(b",".join(b"%d" % number for number in (self.chunks, *self.latest)))}

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes]) -> PastTimes | None:
        """Read what ``to_metadata`` wrote; None if there is nothing.

        Raises:
            ValueError: It is something else.
        """
        if _PAST not in metadata:
            return None
        *numbers, _ = metadata[_PAST].split(b",")
        chunks, *latest = map(int, numbers)
        found = cls(chunks, tuple(latest))
        if found.to_metadata() != {_PAST: metadata[_PAST]} or len(latest) != chunks.bit_length():
            raise ValueError(_CHANGED)
        return found


def checked(text: bytes) -> bytes:
    """An entry of metadata: the text, and its checksum (XXH3, 64 bits, hex)."""
    return text + b"," + xxhash.xxh3_64_hexdigest(text).encode()


def times_of(batches: Sequence[pa.RecordBatch]) -> Times:
    """Of the rows of batches, of which there is at least one."""
    found = [pc.min_max(batch.column("timestamp")) for batch in batches if batch.num_rows]
    return Times(min(one["min"].value for one in found), max(one["max"].value for one in found))


def read_times(storage: LogStorage, name: str) -> Times:
    """Of a chunk.

    Raises:
        DamagedChunkError: The file is no chunk.
        DiskFaultError: It could not be read for as long as the storage's ``patience``.
        DataLossError: It is gone.
    """
    return _read(storage, name)[0]


def read_past_times(storage: LogStorage, name: str) -> PastTimes:
    """Of the chunks up to this one; of none, if this chunk does not carry them. Raises what ``read_times`` does."""
    return _read(storage, name)[1] or PastTimes()


def first_chunk_since(storage: LogStorage, chunks: Sequence[Chunk], time: int) -> int:
    """The position of the first chunk with a message of that time or later; ``len(chunks)`` if there is none.

    Opens about four chunks each time that their number doubles, whatever clocks did and whichever chunks were deleted
    from the front; chunks without ``PastTimes`` one by one. Raises what ``read_times`` does.

    Args:
        chunks: Successive chunks.
        time: Microseconds since the epoch.
    """
    # All before ``at`` are earlier. The next block has 2**level chunks and begins at ``at``, which has this number.
    at = level = number = 0
    while at < len(chunks):
        size = 1 << level
        if at + size > len(chunks):
            level -= 1
            continue
        times, past = _read(storage, chunks[at + size - 1].name)
        if level == 0:
            latest = times.latest
            number = 0 if past is None else past.chunks - 1
        elif past is not None and past.chunks == number + size:
            latest = past.latest[level]
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


def _read(storage: LogStorage, name: str) -> tuple[Times, PastTimes | None]:
    """When the messages of a chunk were received, and those of all chunks up to it."""
    try:
        found, metadata = patiently(partial(_read_metadata, storage, name), storage.patience)
        before = PastTimes.from_metadata(metadata)
        times = Times(min(one.earliest for one in found), max(one.latest for one in found))
    except FileNotFoundError as e:
        raise DataLossError(f"opening chunk {storage.path_of(name)}: it was removed meanwhile") from e
    except (OSError, pa.ArrowException, KeyError, ValueError) as e:
        raise unreadable(f"reading the times of chunk {storage.path_of(name)}", e) from e
    return times, None if before is None else before.and_then(times.latest)


def _read_metadata(storage: LogStorage, name: str) -> tuple[list[Times], Mapping[bytes, bytes]]:
    with storage.open_chunk(name, whole=False) as file:
        reader = pa.ipc.open_file(file, options=LENGTHS_ONLY)
        metadata = reader.schema.metadata or {}
        if TIMES in metadata:
            return [Times.from_metadata(metadata[TIMES])], metadata
        # It grew group by group.
        batches = [
            dict(reader.get_batch_with_custom_metadata(position)[1] or {})
            for position in range(reader.num_record_batches)
        ]
        return [Times.from_metadata(batch[TIMES]) for batch in batches], batches[-1] if batches else {}
