"""What a writer does before it writes to a log in object storage: makes its directory and the storage agree."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zmq_datasource.errors import DamagedChunkError, DiskFaultError, LogFormatError
from zmq_datasource.host import failpoints
from zmq_datasource.host.object_store import StoredObject
from zmq_datasource.log.chunk import damage_of
from zmq_datasource.log.claims import Confirmed, Succession
from zmq_datasource.log.files import read_file, reading, writing
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import (
    Chunk,
    parse_chunk_name,
    parse_pending_name,
    parse_state_name,
    state_files,
)
from zmq_datasource.log.state import carried_by
from zmq_datasource.log.storage import LogStorage

if TYPE_CHECKING:
    from zmq_datasource.log.stored import StoredLog
    from zmq_datasource.log.tenure import Tenure

__all__ = ["counted_chunks", "restore", "stored_chunks"]

_log = logging.getLogger(__name__)


def restore(storage: StoredLog, tenure: Tenure) -> dict[str, Chunk]:
    """Confirm the claim, put into the storage what only the directory has, and remove here what was deleted there.

    What was sealed here and not put there when the process died is put there now, if nobody has written since. The
    claim is confirmed before anything large is written: until then readers do not know which chunks count.

    Returns:
        The chunks that only the storage has, by name. They are not read now: messages are waiting to be received.

    Raises:
        LogFormatError: A chunk in the middle is missing, or storage and directory contradict each other.
        DiskFaultError: The disk or the storage refuses for now.
        LogLockedError: Another machine has claimed the log meanwhile.
    """
    try:
        return _restore(storage, tenure)
    except (
        FileNotFoundError
    ) as e:  # one that has lost the log, and does not know yet, deletes what nobody needs
        raise DiskFaultError(f"opening {storage}: {e}") from e


def _restore(storage: StoredLog, tenure: Tenure) -> dict[str, Chunk]:
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
    # Before the states of others take the place of ours: it is these that tell.
    pending = _usable_pending(storage, only_here[-1].end if only_here else index.end, succession)
    _restore_states(storage, succession, tenure)
    if not succession.writers:
        storage.put_local_positions()
    first = only_here[0].first if only_here else index.end
    confirmed = Confirmed(tenure.claim, succession.newest, first)
    failpoints.reach("log.claim.before_confirm")
    storage.store.put(storage.key("claims", confirmed.key), b"")
    failpoints.reach("log.claim.after_confirm")
    tenure.check()
    for chunk in only_here:
        storage.put_chunk(storage.directory / chunk.name, chunk.name, tenure)
    for path, name in pending:
        _log.info(
            "%s: putting chunk %s, which was sealed before this machine's last writer ended", storage, name
        )
        failpoints.reach("log.pending.before_put")
        storage.put_chunk(path, name, tenure)
    for name, chunk in here.items():
        if name in stored and stored[name].size != chunk.size:
            _mend(storage, chunk, succession)
    tenure.check()
    _tidy(storage, tenure, objects, stored, index.earliest)
    return _elsewhere(storage, stored)


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
        # Whoever has confirmed a claim since then has put no chunk, and has changed no state.
        later = [writer for writer in succession.writers if writer.claim > claim]
        if (
            ids[0] == end
            and all(writer.first == end for writer in later)
            and (not later or _continues_state(storage, hidden, ids[1], succession))
        ):
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


def _continues_state(storage: StoredLog, hidden: str, end: int, succession: Succession) -> bool:
    """Whether what a chunk carries changes the newest state that there is, which others have not written."""
    try:
        carried = carried_by(LogStorage(storage.root, storage.partition), hidden, end)
    except DamagedChunkError as e:
        _log.error("%s", e)
        return False
    objects = storage.store.objects(storage.key("states", succession.newest))
    theirs = state_files(found.key for found in objects)
    if not theirs or carried.base is None:
        return not theirs and carried.base is None
    # Two that go on from the same version give the same numbers; for which messages a state is tells them apart.
    return theirs[-1].version == carried.base and theirs[-1] in state_files(storage.local_names())


def _only_here(
    storage: StoredLog, here: Mapping[str, Chunk], stored: Mapping[str, Chunk], index: ChunkIndex
) -> list[Chunk]:
    """The chunks that follow those in the storage; those that were deleted there are removed."""
    follow = []
    for chunk in sorted(chunk for name, chunk in here.items() if name not in stored):
        if stored and chunk.end <= index.earliest:
            _log.info("%s: removing chunk %s, which was deleted from the storage", storage, chunk.name)
            storage.remove_local(chunk.name)
        elif not stored or chunk.first >= index.end:
            follow.append(chunk)
        else:
            raise LogFormatError(
                f"opening {storage}: the directory {storage.directory} has chunk {chunk.name}, and the storage has "
                "other chunks with these ids; set another walLocation"
            )
    return follow


def _mend(storage: StoredLog, chunk: Chunk, succession: Succession) -> None:
    """Decide which is whole: the chunk here, or the one in the storage, whose size differs."""
    path = storage.directory / chunk.name
    why = damage_of(LogStorage(storage.root, storage.partition), chunk)
    if why is not None:  # torn by a crash of the machine
        _log.warning(
            "%s; the storage has it, and what was here is in %s", why, storage.rename_damaged(chunk.name)
        )
        return
    claim = succession.writer_of(chunk.first)
    assert claim is not None, chunk
    _log.warning("%s: putting chunk %s there again, of which it has a part", storage, chunk.name)
    storage.store.upload(storage.chunk_key(claim, chunk.name), path)


def _elsewhere(storage: StoredLog, stored: Mapping[str, Chunk]) -> dict[str, Chunk]:
    """The chunks that only the storage has, of those that were there before.

    An earlier writer may have deleted the first of them meanwhile, before it knew that it was one no more.
    """
    there = {
        found.key.partition("/")[2] for found in storage.store.objects(storage.key("chunks"), below=True)
    }
    here = {chunk.name for chunk in storage.local_chunks()}
    elsewhere: dict[str, Chunk] = {}
    left = False
    for name, chunk in stored.items():  # in order
        if name in there:
            left = True
            if name not in here:
                elsewhere[name] = chunk
        elif left:
            raise DiskFaultError(f"opening {storage}: chunk {name} is not there any more")
        elif name in here:
            storage.remove_local(name)
    return elsewhere


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
