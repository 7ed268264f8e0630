"""Finds damage by checking every checksum of a log, except those of staged attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from zmq_datasource.errors import DataLossError, DiskFaultError, LogError
from zmq_datasource.log.chunk import damage_of
from zmq_datasource.log.head import read_head
from zmq_datasource.log.index import read_index
from zmq_datasource.log.layout import HEAD_NAME, Chunk
from zmq_datasource.log.leases import LeaseFiles
from zmq_datasource.log.state import read_saved_state
from zmq_datasource.log.storage import LogStorage


class Damage(NamedTuple):
    """A damaged or missing file, and what is wrong with it."""

    file: str
    what: str


def verify_log(storage: LogStorage) -> Iterator[Damage]:
    """Check every checksum of a log, and yield the damaged and missing files.

    The log may be written meanwhile. A file that its writer deletes meanwhile does not count as missing.

    Raises:
        DiskFaultError: A file cannot be read now.
    """
    leases = LeaseFiles(storage)
    records: list[tuple[str, Callable[[], object]]] = [
        (storage.root, storage.log_id),
        *((leases.path_of(key), partial(leases.read, key)) for key in sorted(leases.entries())),
        (storage.store.path_of(HEAD_NAME), partial(read_head, storage.store)),
        (storage.path_of("state"), partial(read_saved_state, storage)),
        (storage.path_of(""), partial(read_index, storage)),
    ]
    for path, read in records:
        try:
            read()
        except DiskFaultError:
            raise
        except LogError as e:
            yield Damage(path, str(e))
    for chunk in _chunks(storage):
        try:
            damage = damage_of(storage, chunk)
        except DataLossError as e:  # it is lost, or the next chunk; or it was deleted or merged meanwhile
            damage = str(e) if chunk.name in {it.name for it in _chunks(storage)} else None
        if damage is not None:
            yield Damage(storage.path_of(chunk.name), damage)


def _chunks(storage: LogStorage) -> Sequence[Chunk]:
    """The chunks that count. If the newest one or the head is damaged, all that are there, as if each had one id."""
    try:
        return read_index(storage).all
    except DiskFaultError:
        raise
    except LogError:
        return [*storage.chunks(), *storage.merged()]
