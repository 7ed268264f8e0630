"""Finds damage by checking every checksum of a log, except those of staged attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from zmq_datasource.errors import DataLossError, DiskFaultError, LogError, LogFormatError
from zmq_datasource.log.chunk import damage_of, read_facts
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


def verify_log(storage: LogStorage, done: Callable[[str], None]) -> Iterator[Damage]:
    """Check every checksum of a log, and yield the damaged and missing files.

    The log may be written meanwhile. A file that its writer deletes meanwhile does not count as missing.

    Args:
        done: Called with the path of each checked file.

    Raises:
        DiskFaultError: A file cannot be read now.
    """
    try:
        storage.log_id()
    except DiskFaultError:
        raise
    except LogError as e:
        yield Damage(storage.root, str(e))
    yield from _verify_chunks(storage, done)
    leases = LeaseFiles(storage)
    for key in sorted(leases.entries()):
        yield from _damage_at(leases.path_of(key), lambda key=key: leases.read(key))  # type: ignore[misc]
        done(leases.path_of(key))
    yield from _damage_at(storage.store.path_of(HEAD_NAME), lambda: read_head(storage.store))
    done(storage.store.path_of(HEAD_NAME))


def _verify_chunks(storage: LogStorage, done: Callable[[str], None]) -> Iterator[Damage]:
    try:
        chunks = read_index(storage).all
    except DiskFaultError:
        raise
    except LogError as e:  # the newest chunk, or the head; what else is damaged is found file by file
        yield Damage(storage.path_of(""), str(e))
        chunks = [*(_whole(storage, chunk) for chunk in storage.chunks()), *storage.merged()]
    for chunk in chunks:
        path = storage.path_of(chunk.name)
        try:
            damage = damage_of(storage, chunk)
        except DataLossError as e:  # it is lost, or the next chunk; or it was deleted or merged meanwhile
            damage = str(e) if _is_listed(storage, chunk) else None
        if damage is not None:
            yield Damage(path, damage)
        done(path)
    yield from _damage_at(storage.path_of("state"), lambda: read_saved_state(storage))


def _whole(storage: LogStorage, chunk: Chunk) -> Chunk:
    """A sealed chunk with its end; as it was listed, with one id, if its end cannot be read."""
    with suppress(LogError, FileNotFoundError):
        return chunk._replace(end=read_facts(storage, chunk.name).end)
    return chunk


def _is_listed(storage: LogStorage, chunk: Chunk) -> bool:
    """Whether a new listing has the chunk, too."""
    with suppress(LogFormatError):
        return any(it.name == chunk.name for it in read_index(storage).covering(chunk.first, chunk.end))
    return True


def _damage_at(path: str, read: Callable[[], object]) -> Iterator[Damage]:
    """Call ``read``, and yield its error as the damage of a file."""
    try:
        read()
    except DiskFaultError:
        raise
    except LogError as e:
        yield Damage(path, str(e))
