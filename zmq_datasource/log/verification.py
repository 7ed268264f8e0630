"""Finding damage: every checksum of a log is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from zmq_datasource.errors import DamagedChunkError, DataLossError, DiskFaultError, LogError
from zmq_datasource.log.chunk import damage_of, read_facts
from zmq_datasource.log.growing import read_groups
from zmq_datasource.log.layout import growing_name
from zmq_datasource.log.listing import chunks_of, read_index
from zmq_datasource.log.reader_records import ReaderRecords
from zmq_datasource.log.state import read_saved_state
from zmq_datasource.log.storage import ChunkEntry, LogStorage

__all__ = ["Damage", "damage_at", "verify_log"]


class Damage(NamedTuple):
    """A file that is not what was written."""

    file: str
    what: str


def verify_log(storage: LogStorage, done: Callable[[str], None]) -> Iterator[Damage]:
    """Read every checksum of a log; yield the files that are damaged or missing.

    The log may be written meanwhile; what its writer deletes during the reading is no damage.

    Args:
        done: Called with the name of each file that was read.

    Raises:
        DiskFaultError: A file cannot be read now.
    """
    try:
        storage.log_id()
    except DiskFaultError:
        raise
    except LogError as e:
        yield Damage(storage.root, str(e))
    for partition in storage.partitions():
        yield from _verify_partition(storage.of(partition), done)
    records = ReaderRecords(storage)
    for name in records.names():
        yield from damage_at(records.path_of(name), lambda name=name: records.read(name))  # type: ignore[misc]
        done(records.path_of(name))


def _verify_partition(storage: LogStorage, done: Callable[[str], None]) -> Iterator[Damage]:
    yield from damage_at(storage.path_of(""), lambda: read_index(storage))
    entries = storage.chunks()
    for chunk in chunks_of(entries, _end_of(storage, entries)):
        path = storage.path_of(chunk.name)
        try:
            damage = damage_of(storage, chunk)
        except DataLossError as e:  # its writer has deleted it, or the next one is missing
            damage = None if storage.find_chunk(chunk.first) is None else str(e)
        if damage is not None:
            yield Damage(path, damage)
        done(path)
    for first in storage.open_chunks():
        path = storage.path_of(growing_name(first))
        with suppress(FileNotFoundError):  # sealed meanwhile
            content = storage.open_chunk_files().read(first)
            try:
                damaged = read_groups(content, storage.partition, first).damaged
            except DamagedChunkError as e:
                yield Damage(path, str(e))
            else:
                if damaged:
                    yield Damage(
                        path, f"the ids {damaged.start} to {damaged.stop - 1} are not what was written"
                    )
            done(path)
    yield from damage_at(storage.path_of("state"), lambda: read_saved_state(storage))


def _end_of(storage: LogStorage, entries: Sequence[ChunkEntry]) -> int:
    """Where the newest chunk ends; of one that cannot be read, the id after its first."""
    if not entries:
        return 0
    try:
        return read_facts(storage, entries[-1].first).end
    except (LogError, FileNotFoundError):
        return entries[-1].first + 1


def damage_at(path: str, read: Callable[[], object]) -> Iterator[Damage]:
    """The damage of a file, found by reading it, if there is some."""
    try:
        read()
    except DiskFaultError:
        raise
    except LogError as e:
        yield Damage(path, str(e))
