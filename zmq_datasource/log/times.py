"""When the messages of a chunk were received: kept beside its rows, so that a time is found without reading them.

A clock can be set back, so ids and times do not always go up together: each chunk has its earliest and its latest time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import xxhash

from zmq_datasource.errors import DataLossError
from zmq_datasource.log.files import LENGTHS_ONLY, patiently, unreadable
from zmq_datasource.log.storage import LogStorage

__all__ = ["TIMES", "Times", "read_times", "times_of"]

# Of a chunk in its schema's metadata; where it grew group by group, of each batch in its own.
TIMES = b"times"


class Times(NamedTuple):
    """The earliest and the latest time at which a message was received, in microseconds since the epoch."""

    earliest: int
    latest: int

    def to_metadata(self) -> bytes:
        """Both, and the XXH3 of that: a time that has changed would hide messages."""
        text = b"%d,%d" % self
        return text + b"," + xxhash.xxh3_64_hexdigest(text).encode()

    @classmethod
    def from_metadata(cls, content: bytes) -> Times:
        """Read what ``to_metadata`` wrote.

        Raises:
            ValueError: It is something else.
        """
        earliest, latest, _ = content.split(b",")
        found = cls(int(earliest), int(latest))
        if found.to_metadata() != content:
            raise ValueError("their checksum differs; the file was changed after it was written")
        return found


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
    try:
        found = patiently(partial(_read_times, storage, name), storage.patience)
    except FileNotFoundError as e:
        raise DataLossError(f"opening chunk {storage.path_of(name)}: it was removed meanwhile") from e
    except (OSError, pa.ArrowException, KeyError, ValueError) as e:
        raise unreadable(f"reading the times of chunk {storage.path_of(name)}", e) from e
    return Times(min(one.earliest for one in found), max(one.latest for one in found))


def _read_times(storage: LogStorage, name: str) -> list[Times]:
    with storage.open_chunk(name, whole=False) as file:
        reader = pa.ipc.open_file(file, options=LENGTHS_ONLY)
        if TIMES in (reader.schema.metadata or {}):
            return [Times.from_metadata(reader.schema.metadata[TIMES])]
        # It grew group by group.
        return [
            Times.from_metadata((reader.get_batch_with_custom_metadata(position)[1] or {})[TIMES])
            for position in range(reader.num_record_batches)
        ]
