"""What a writer does before it writes to a log in object storage: makes its directory the same as the storage."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from zmq_datasource.errors import DiskFaultError, LogFormatError
from zmq_datasource.host.object_store import StoredObject
from zmq_datasource.log.claims import Confirmed, Succession
from zmq_datasource.log.files import read_file, reading, writing
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import (
    Chunk,
    parse_chunk_name,
    parse_pending_name,
    parse_state_name,
)

if TYPE_CHECKING:
    from zmq_datasource.log.stored import StoredLog
    from zmq_datasource.log.tenure import Tenure

__all__ = ["counted_chunks", "restore", "stored_chunks"]

_log = logging.getLogger(__name__)

# Requests at once; each takes tens of milliseconds before the first byte.
_DOWNLOADS = 4


def restore(storage: StoredLog, tenure: Tenure) -> None:
    """Confirm the claim, make the directory hold what the storage holds, and put there what only the directory had.

    What was sealed here and not put there when the process died is put there now, if nobody has written since. The
    claim is confirmed before anything large is read: until then readers do not know which chunks count.

    Raises:
        LogFormatError: A chunk in the middle is missing, or storage and directory contradict each other.
        DiskFaultError: The disk or the storage refuses for now.
        LogLockedError: Another machine has claimed the log meanwhile.
    """
    try:
        _restore(storage, tenure)
    except (
        FileNotFoundError
    ) as e:  # one that has lost the log, and does not know yet, deletes what nobody needs
        raise DiskFaultError(f"opening {storage}: {e}") from e


def _restore(storage: StoredLog, tenure: Tenure) -> None:
    succession = storage.tenures.succession()
    objects = storage.store.objects(storage.key("chunks"), below=True)
    stored = {chunk.name: chunk for chunk in sorted(stored_chunks(objects, succession))}
    try:
        index = ChunkIndex(stored.values())
    except LogFormatError as e:
        raise LogFormatError(f"opening {storage}: {e}") from e
    _name_pending(storage, stored, succession)
    here = {chunk.name: chunk for chunk in storage.local_chunks()}
    only_here = _only_here(storage, here, stored, index)
    _restore_states(storage, succession, tenure)
    if not succession.writers:
        storage.put_local_positions()
    first = only_here[0].first if only_here else index.end
    confirmed = Confirmed(tenure.claim, succession.newest, first)
    storage.store.put(storage.key("claims", confirmed.key), b"")
    tenure.check()
    for chunk in only_here:
        storage.put_chunk(storage.directory / chunk.name, chunk.name, tenure)
    for path, name in _usable_pending(storage, only_here[-1].end if only_here else index.end, succession):
        _log.info(
            "%s: putting chunk %s, which was sealed before this machine's last writer ended", storage, name
        )
        storage.put_chunk(path, name, tenure)
    missing = [chunk for name, chunk in stored.items() if name not in here or here[name].size != chunk.size]
    if missing:
        _log.info("%s: reading %d chunks into %s", storage, len(missing), storage.directory)
        _download(storage, missing, succession)
    tenure.check()
    _tidy(storage, tenure, objects, stored, index.earliest)


def stored_chunks(objects: Sequence[StoredObject], succession: Succession) -> Iterator[Chunk]:
    """The chunks that count among the objects of ``chunks/``."""
    for found in objects:
        claim, _, name = found.key.partition("/")
        ids = parse_chunk_name(name)
        if ids is not None and succession.writer_of(ids[0]) == claim:
            yield Chunk(*ids, found.size, found.modified)


def counted_chunks(
    objects: Sequence[StoredObject], succession: Succession, known: Collection[str]
) -> list[Chunk]:
    """The same for a reader, in order.

    Args:
        known: The names of those that have counted before.
    """
    chunks = sorted(stored_chunks(objects, succession))
    if not succession.is_settled and chunks and chunks[-1].name not in known:
        chunks.pop()  # whoever has claimed the log may not have seen it
    return chunks


def _name_pending(storage: StoredLog, stored: Mapping[str, Chunk], succession: Succession) -> None:
    """Give chunks their names that were put into the storage just before their writer died."""
    own = storage.own_claims()
    for hidden in storage.local_names():
        _, name = parse_pending_name(hidden) or ("", "")
        if name in stored and succession.writer_of(stored[name].first) in own:
            with writing(f"writing chunk {storage.directory / name}"):
                os.rename(storage.directory / hidden, storage.directory / name)


def _usable_pending(storage: StoredLog, end: int, succession: Succession) -> list[tuple[Path, str]]:
    """The chunk that was sealed here and not put there, if it still follows; others are kept under another name."""
    usable = []
    for hidden in sorted(storage.local_names()):
        claim, name = parse_pending_name(hidden) or ("", "")
        ids = parse_chunk_name(name)
        if ids is None:
            continue
        # Whoever has confirmed a claim since then has put no chunk.
        later = [writer for writer in succession.writers if writer.claim > claim]
        if ids[0] == end and all(writer.first == end for writer in later):
            usable.append((storage.directory / hidden, name))
            end = ids[1]
        else:
            _log.error(
                "%s: the ids %d to %d were received here and not put there before another machine became the writer; "
                "nobody was given them, and they are lost; what there is of them is in %s",
                storage,
                ids[0],
                ids[1] - 1,
                storage.rename_damaged(hidden),
            )
    return usable


def _only_here(
    storage: StoredLog, here: Mapping[str, Chunk], stored: Mapping[str, Chunk], index: ChunkIndex
) -> list[Chunk]:
    """The chunks that follow those in the storage; those that were deleted there are removed."""
    follow = []
    for chunk in sorted(chunk for name, chunk in here.items() if name not in stored):
        if stored and chunk.end <= index.earliest:
            storage.remove_local(chunk.name)
        elif not stored or chunk.first >= index.end:
            follow.append(chunk)
        else:
            raise LogFormatError(
                f"opening {storage}: the directory {storage.directory} has chunk {chunk.name}, and the storage has "
                "other chunks with these ids; set another walLocation"
            )
    return follow


def _download(storage: StoredLog, chunks: Sequence[Chunk], succession: Succession) -> None:
    def fetch(chunk: Chunk) -> None:
        claim = succession.writer_of(chunk.first)
        assert claim is not None, chunk
        content = storage.store.get(storage.chunk_key(claim, chunk.name))
        # Retention counts from when it was sealed.
        storage.write_local(chunk.name, content, modified=chunk.sealed_at)

    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        for _ in pool.map(fetch, chunks):
            pass


def _restore_states(storage: StoredLog, succession: Succession, tenure: Tenure) -> None:
    """Have the state files of the last writer here, and again under the new claim, for only those are looked for."""
    names = {name for name in storage.local_names() if parse_state_name(name)}
    contents = {}
    if succession.writers:
        for found in storage.store.objects(storage.key("states", succession.newest)):
            if parse_state_name(found.key):
                contents[found.key] = storage.store.get(storage.state_key(succession.newest, found.key))
        for name in names - contents.keys():
            storage.remove_local(name)
        for name, content in contents.items():
            storage.write_local(name, content)
    else:
        for name in names:
            path = storage.directory / name
            with reading(path):
                contents[name] = read_file(path)
    for name, content in contents.items():
        storage.store.put(storage.state_key(tenure.claim, name), content)


def _tidy(
    storage: StoredLog,
    tenure: Tenure,
    objects: Sequence[StoredObject],
    stored: Mapping[str, Chunk],
    earliest: int,
) -> None:
    """Delete what earlier writers have left; nothing of one whose claim is higher than ours."""
    store = storage.store
    keys = [found.key for found in store.objects(storage.key("claims"))]
    succession = Succession(keys)
    for found in objects:
        claim, _, name = found.key.partition("/")
        counts = name in stored and succession.writer_of(stored[name].first) == claim
        if claim < tenure.claim and not counts:
            store.delete(storage.chunk_key(claim, name))
    for found in store.objects(storage.key("states"), below=True):
        if found.key.partition("/")[0] < tenure.claim:
            store.delete(storage.key("states", found.key))
    needed = succession.needed(earliest)
    for key in keys:
        if key < tenure.claim and key not in needed:
            store.delete(storage.key("claims", key))
    for kind in ("alive", "deleting"):
        for found in store.objects(storage.key(kind)):
            if found.key < tenure.claim:
                store.delete(storage.key(kind, found.key))
