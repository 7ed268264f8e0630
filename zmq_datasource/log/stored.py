"""A log that is kept in object storage, of which a directory is this machine's part.

Below the location in the storage::

    log-1-<log id>.json                             which log this is
    0/claims/, 0/alive/                             who writes partition 0: see ``claims`` and ``tenure``
    0/chunks/<claim>/<first>-<end>.arrow            chunks, as in a directory
    0/states/<claim>/state-<version>-<end>.json     state files; those of the last writer count
    readers/<name>.json                             the records of readers, as in a directory
    reading/<name>                                  this query runs
    0/deleting/<claim>                              a deletion is under way

The rules:

* The writer seals a chunk in its directory under a hidden name, puts it into the storage, makes sure that it is still
  the writer, and only then names it and counts it as durable. So a file with a chunk's name is in the storage, too.
* A storage that does not answer is a disk that refuses (``persistence``): it is tried again, receiving pauses, and the
  high-water marks hold the sender back.
* Who becomes the writer first finds out what the storage holds (``restoring``), whoever wrote last. What its directory
  does not have is read from the storage, when somebody asks for it.
* Whoever only reads lists the storage; it needs no directory.
* Positions are in the storage, too (``stored_positions``).
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import pyarrow as pa

from zmq_datasource.errors import (
    DiskFaultError,
    LogError,
    LogFormatError,
    LogLockedError,
    OptionError,
)
from zmq_datasource.host import failpoints
from zmq_datasource.host.object_store import ObjectStore
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log.claims import NO_CLAIM, Succession
from zmq_datasource.log.files import (
    MOUNT_AGAIN,
    WriterLock,
    read_file,
    reading,
    sync_directory,
    writing,
)
from zmq_datasource.log.layout import (
    CLAIMS_NAME,
    FORMAT_VERSION,
    LOG_NAME,
    PARTITION,
    Chunk,
    StateFile,
    chunk_name,
    end_name,
    parse_chunk_name,
    parse_partition_name,
    parse_state_name,
    parse_stored_log_name,
    pending_name,
    stored_log_name,
)
from zmq_datasource.log.restoring import counted_chunks, restore
from zmq_datasource.log.storage import LogStorage, NoLogError, Part, describe_ids, other_format
from zmq_datasource.log.stored_file import open_stored
from zmq_datasource.log.stored_positions import StoredPositions
from zmq_datasource.log.tenure import SILENT_SECONDS, Tenure, tenures_of
from zmq_datasource.options.types import Location

__all__ = ["StoredLog", "UnsettledError", "object_store_at", "storage_at"]

_log = logging.getLogger(__name__)

# Two that create a log at once see each other's after so long.
_CREATING_SECONDS = 1.0
_ID_SECONDS = 10.0
# A chunk up to this size is read in one go, and where only its metadata is wanted, up to that size.
_WHOLE_BYTES, _LITTLE_BYTES = 64 << 20, 1 << 20
_END_SECONDS = 1.0
# From a claim to its confirmation are a few requests. If its maker dies in between, another one may claim the log by
# then, and does so unless nobody receives.
_SETTLING_SECONDS, _SETTLING_LOOK_SECONDS = SILENT_SECONDS + 5.0, 0.2
_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "file")
_OWN_CLAIMS = 100


def storage_at(location: str, partition: int = PARTITION, store: Location | None = None) -> LogStorage:
    """One partition of a log.

    Args:
        location: The directory.
        partition: Which partition.
        store: Where the log is kept, if that is not the directory alone.

    Raises:
        OptionError: The location is something else.
    """
    if store is None:
        return LogStorage(location, partition)
    return StoredLog(location, partition, object_store_at(store))


def object_store_at(location: Location) -> ObjectStore:
    """Object storage that is fit for a log, as far as its kind tells.

    Raises:
        OptionError: It is of another kind.
    """
    scheme, separator, _ = location.plain.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise OptionError(
            f"option walStore={location!r}: it must be a URI of object storage ({', '.join(_SCHEMES)}) that replaces "
            "an object at once"
        )
    return ObjectStore(location)


class UnsettledError(LogLockedError):
    """Somebody takes the log over, or has died while doing so: how far it goes is not known for now."""


class _View(NamedTuple):
    """What a listing of a partition has shown."""

    chunks: dict[str, Chunk]
    states: frozenset[str]


class StoredLog(StoredPositions):
    """One partition of a log in object storage; for the arguments see ``storage_at``."""

    leisure = 10.0  # requests are paid for
    deletes_for = 3.0
    always_syncs = True

    def __init__(self, location: str, partition: int, store: ObjectStore) -> None:
        super().__init__(location, partition, store)
        self.tenures = tenures_of(store, partition)
        self._elsewhere: dict[str, Chunk] = {}  # chunks that the writer's directory does not have
        self._view: _View | None = None
        self._succession: Succession | None = None
        self._newest_key: str | None = None  # of the chunk that must be there when the writer writes
        self._is_copy = False  # whether the directory is this log's
        self._id: tuple[float, str] | None = None
        self._next_end_look, self._is_ending = 0.0, False

    def __repr__(self) -> str:
        return f"StoredLog({self.root!r}, {self.partition}, {self.store!r})"

    def __str__(self) -> str:
        return f"log {self.store}" + (f", partition {self.partition}" if self.partition else "")

    def of(self, partition: int) -> Self:
        made = type(self)(self.root, partition, self.store)
        made.patience = self.patience
        return made

    def check_whole(self) -> None:
        """The storage is whole, whatever there is in the directory."""

    def chunk_key(self, claim: str, name: str) -> str:
        """The key of a chunk that the writer with this claim has put there."""
        return self.key("chunks", claim, name)

    def state_key(self, claim: str, name: str) -> str:
        """The key of a state file, likewise."""
        return self.key("states", claim, name)

    # This machine's part.

    @property
    def directory(self) -> Path:
        """Where it is."""
        return self._directory

    def local_names(self) -> set[str]:
        """The names of all files there."""
        return super().names()

    def local_chunks(self) -> Iterator[Chunk]:
        """The chunks there."""
        return super().chunks()

    def remove_local(self, name: str) -> None:
        """Delete a file there."""
        self._remove(self._directory / name)

    def write_local(self, name: str, content: bytes) -> None:
        """Make a file appear there, whole."""
        self._replace_bytes(self._directory / name, content)

    # Which log this is.

    def open_log(self, log_id: str | None = None) -> str:
        found = self._find_id()
        here = LogStorage.log_id(self) if (self._root / LOG_NAME).exists() else None
        if found is None:
            self._refuse_nameless_objects()
            if any(self._root.glob(f"*/{CLAIMS_NAME}")):
                raise LogFormatError(
                    f"opening the log in {self.store}: there is none, and the directory {self.root} is this "
                    "machine's part of a log in object storage. If the storage is a directory that was unmounted, "
                    "mount it again; else set the walStore that the log had, or another walLocation"
                )
        if found is None:
            found = self._create_id(here or log_id or uuid.uuid4().hex)
        if here not in (None, found):
            raise LogFormatError(
                f"opening the log in {self.store}: it is log {found}, and the directory {self.root} holds log {here}; "
                "set another walLocation, or another walStore"
            )
        return super().open_log(found)

    def _refuse_nameless_objects(self) -> None:
        """Refuse to make a log where there are chunks: their ids would be given to other messages.

        Raises:
            LogFormatError: There are.
        """
        found: dict[int, range] = {}
        for partition in self._stored_partitions():
            objects = self.store.objects(f"{partition}/chunks", below=True)
            ids = [ids for found in objects if (ids := parse_chunk_name(found.key.partition("/")[2]))]
            if ids:
                found[partition] = range(min(ids)[0], max(ids)[1])
        # Another process may have created the log and put chunks there while this one looked.
        if found and self._find_id() is None:
            raise LogFormatError(
                f"opening the log in {self.store}: the object {stored_log_name('<id>')} is missing, and there "
                f"are chunks ({describe_ids(found)}). Put that object there again: each checkpoint of a query of this "
                'log has the id, as "log" in its offsets, and so has log.json in walLocation. Or set another walStore '
                "and another walLocation, and for each of these queries a new checkpoint"
            )

    def _create_id(self, log_id: str) -> str:
        key = stored_log_name(log_id)
        self.store.make_root()
        self.store.put(key, json.dumps({"format": FORMAT_VERSION, "log": log_id}).encode())
        failpoints.reach("log.stored_identity.after_put")
        time.sleep(_CREATING_SECONDS)
        found = self._find_id()
        return log_id if found is None else found

    def _find_id(self) -> str | None:
        """The id of the log in the storage; the older one, if two have created it at once."""
        objects = sorted(self.store.objects(""), key=lambda found: (found.modified, found.key))
        for parsed in filter(None, (parse_stored_log_name(found.key) for found in objects)):
            version, log_id = parsed
            if version != FORMAT_VERSION:
                raise other_format(str(self.store), version, "walStore and a new walLocation")
            return log_id
        return None

    def log_id(self) -> str:
        if self._tenure is not None:
            return super().log_id()
        now = time.monotonic()
        if self._id is None or now >= self._id[0]:
            found = self._find_id()
            if found is None:
                self._refuse_nameless_objects()
                raise NoLogError(
                    f"reading {self.store}: there is no log. Start what fills it, or correct walStore"
                )
            self._id = now + _ID_SECONDS, found
        return self._id[1]

    def partitions(self) -> list[int]:
        return sorted({*super().partitions(), *self._stored_partitions()})

    def _stored_partitions(self) -> list[int]:
        names = map(parse_partition_name, self.store.directories())
        return [partition for partition in names if partition is not None]

    # Who writes it.

    def lock(self, wait: float, feed: str = "") -> WriterLock:
        deadline = time.monotonic() + wait
        # What an earlier attempt has seen of the storage holds no more.
        self._tenure, self._elsewhere, self._succession, self._view = None, {}, None, None
        self._newest_key = None
        lock = super().lock(wait, feed)
        try:
            for kind in ("chunks", "states"):
                self.store.make_directory(self.key(kind))
            highest = self._wait_for_others(deadline)
            tenure = self.tenures.begin(lock, feed, highest, self._remember)
        except BaseException:
            lock.release()
            raise
        try:
            self._elsewhere = restore(self, tenure)
            self._succession = None
        except BaseException:
            self._withdraw(tenure.claim)
            tenure.release()
            raise
        self._tenure = tenure
        return tenure

    def _withdraw(self, claim: str) -> None:
        """Take back a claim that was not confirmed, so that readers need not wait for it."""
        try:
            succession = self.tenures.succession()
            if succession.newest != claim and succession.highest == claim:
                self.store.delete(self.key("claims", f"{claim}.json"))
        except LogError as e:
            _log.debug("withdrawing claim %s: %s", claim, e)

    def _wait_for_others(self, deadline: float) -> str:
        """Wait for a writer on another machine; one that has had our directory's lock is gone. The highest claim.

        Raises:
            LogLockedError: It is alive.
        """
        highest = self.tenures.highest(anew=True)
        if highest == NO_CLAIM or highest in self.own_claims():
            return highest
        gone = self.tenures.gone(deadline - time.monotonic())
        if gone is None:
            raise LogLockedError(
                f"opening the log in {self.store}: it is held by {self.tenures.holder(highest)}. It "
                f"counts as gone when it has given no sign of life for {SILENT_SECONDS:.0f} s; stop it, or give this "
                "one a walStore of its own"
            )
        return gone

    def own_claims(self) -> list[str]:
        """The last claims of those who had this directory, oldest first."""
        path = self._directory / CLAIMS_NAME
        with suppress(FileNotFoundError), reading(path):
            return read_file(path).decode().split()
        return []

    def _remember(self, claim: str) -> None:
        self.write_local(CLAIMS_NAME, "\n".join([*self.own_claims()[-_OWN_CLAIMS:], claim]).encode())

    def writer(self) -> str | None:
        if (here := super().writer()) is not None:
            return here
        # A writer that had our directory has left its lock: it is gone, though its last sign of life is young.
        highest = self.tenures.highest()
        if highest in (NO_CLAIM, *self.own_claims()) or not self.tenures.is_held():
            return None
        return self.tenures.holder(highest)

    def feed(self) -> str:
        return self.tenures.about(self.tenures.highest()).get("feed", "")

    # What is written.

    def write_chunk(self, name: str, write: Callable[[pa.NativeFile], None], sync: bool) -> Chunk:
        tenure = self._tenure
        assert tenure is not None, "only the writer writes"
        pending = self._directory / pending_name(tenure.claim, name)
        with writing(f"writing chunk {pending}"):
            made = pending.exists()  # by an attempt that the storage refused
        if not made:
            with (
                # Forced to the disk in any case: a file with a chunk's name is taken for what the storage has.
                self._appearing(pending, f"writing chunk {pending}", True) as temporary,
                pa.OSFile(str(temporary), "wb") as file,
            ):
                write(file)
        self.put_chunk(pending, name, tenure)
        with writing(f"writing chunk {self._directory / name}"):
            return self._describe(self._directory / name)

    def put_chunk(self, path: Path, name: str, tenure: Tenure) -> None:
        """Put a chunk that is written here into the storage, and give it its name.

        Raises:
            DiskFaultError: The storage does not answer, or has lost what was in it.
            LogLockedError: Somebody else is the writer by now.
        """
        key = self.chunk_key(tenure.claim, name)
        self._check_stored(tenure)
        failpoints.reach("log.stored_chunk.before_put")
        with writing(f"reading {path}"):  # no file may be opened now; the storage's errors are ours already
            self.store.upload(key, path)
        failpoints.reach("log.stored_chunk.after_put")
        tenure.check()  # what it may have left behind is not ours to judge: the new writer may count it
        self._newest_key = key
        failpoints.reach("log.stored_chunk.after_check")
        final = self._directory / name
        with writing(f"writing chunk {final}"):
            os.rename(path, final)
            sync_directory(final.parent)

    def expect(self, newest: Chunk) -> None:
        claim = self.succession().writer_of(newest.first)
        assert claim is not None, newest
        self._newest_key = self.chunk_key(claim, newest.name)

    def _check_stored(self, tenure: Tenure) -> None:
        """Make sure that the storage still has what the writer has found or put there last.

        Raises:
            DiskFaultError: It has not: it was unmounted, or emptied; or it does not answer.
            LogLockedError: Another machine is the writer.
        """
        key = self._newest_key or self.key("claims", f"{tenure.claim}.json")
        if self.store.find(key) is None:
            tenure.check()  # another machine may have deleted it
            raise DiskFaultError(
                f"writing to the log in {self.store}: {key}, which was there, is not there any more. {MOUNT_AGAIN}"
            )

    def write_state(self, file: StateFile, content: bytes, sync: bool) -> None:
        assert self._tenure is not None, "only the writer writes"
        self._check_stored(self._tenure)
        self.store.put(self.state_key(self._tenure.claim, file.name), content)
        failpoints.reach("log.stored_state.after_put")
        self._tenure.check()
        super().write_state(file, content, sync)

    def remove_states(self, but: int | None) -> None:
        assert self._tenure is not None, "only the writer removes"
        for found in self.store.objects(self.key("states", self._tenure.claim)):
            file = parse_state_name(found.key)
            if file is not None and file.version != but:
                self.store.delete(self.state_key(self._tenure.claim, found.key))
        super().remove_states(but)

    def remove_chunk(self, name: str) -> None:
        # First there: a chunk that is only here was deleted, or has never counted.
        ids = parse_chunk_name(name)
        assert ids is not None, name
        claim = self.succession().writer_of(ids[0])
        if claim is not None:
            self.store.delete(self.chunk_key(claim, name))
        self._elsewhere.pop(name, None)
        super().remove_chunk(name)

    def write_growing(self, name: str, offset: int, parts: Sequence[Part], sync: bool) -> int:
        raise AssertionError("a chunk in object storage does not grow")

    # Receivers on executors.

    def ask_to_end(self, token: str) -> None:
        self.store.put(end_name(token), b"end")

    def is_asked_to_end(self, token: str) -> bool:
        now = time.monotonic()
        if now >= self._next_end_look:
            self._next_end_look = now + _END_SECONDS
            with suppress(LogError):  # it is asked again
                self._is_ending = self.store.find(end_name(token)) is not None
        return self._is_ending

    def remove_end(self, token: str) -> None:
        self.store.delete(end_name(token))

    # What is read.

    def succession(self) -> Succession:
        """Who has written the partition, as of the last look."""
        if self._succession is None:
            self._succession = self.tenures.succession()
        return self._succession

    def _look(self) -> _View:
        deadline = time.monotonic() + _SETTLING_SECONDS
        while True:
            chunks = self.store.objects(self.key("chunks"), below=True)
            # Asked for afterwards: it knows whoever has put one of these.
            succession = self._succession = self.tenures.succession()
            if self._view is not None or succession.is_settled or not chunks:
                break
            # Nothing has counted here yet, so nobody can say whether the newest chunk has counted elsewhere.
            if not self.tenures.is_held() or time.monotonic() >= deadline:
                raise self._unsettled(succession.highest)
            check_signals()
            time.sleep(_SETTLING_LOOK_SECONDS)
        states = self.store.objects(self.key("states", succession.newest))
        known = {} if self._view is None else self._view.chunks
        counted = counted_chunks(chunks, succession, known)
        self._view = _View({chunk.name: chunk for chunk in counted}, frozenset(s.key for s in states))
        return self._view

    def _unsettled(self, claim: str) -> UnsettledError:
        return UnsettledError(
            f"reading {self}: {self.tenures.holder(claim)} has claimed the log and not said with which id it goes on, "
            "so it is not known whether the newest chunk counts. If that process is gone, start a query or a receiver "
            "that writes this log; it settles that"
        )

    def names(self) -> set[str]:
        if self._tenure is not None:
            return {*super().names(), *self._elsewhere.copy()}
        view = self._look()
        return {*view.chunks, *view.states}

    def stamp(self) -> tuple[int, ...]:
        return super().stamp() if self._tenure is not None else ()  # it is listed once a second

    def chunks(self) -> Iterator[Chunk]:
        if self._tenure is not None:
            yield from super().chunks()
            yield from self._elsewhere.copy().values()  # another thread deletes
        else:
            yield from self._look().chunks.values()

    def find_chunk(self, first: int, end: int) -> Chunk | None:
        name = chunk_name(first, end)
        if self._tenure is not None:
            return self._elsewhere.get(name) or super().find_chunk(first, end)
        return (self._view or self._look()).chunks.get(name) or self._look().chunks.get(name)

    def open_chunk(self, name: str, whole: bool = True) -> pa.NativeFile:
        if self._tenure is not None and name not in self._elsewhere:
            return super().open_chunk(name)
        # What has its name here is in the storage, which is asked where this machine's disk refuses.
        with suppress(OSError, LogError):
            if self._tenure is None and self._has_copy():
                return super().open_chunk(name)
        ids = parse_chunk_name(name)
        assert ids is not None, name
        most = _WHOLE_BYTES if whole else _LITTLE_BYTES
        claim = self.succession().writer_of(ids[0])
        try:
            if claim is not None:
                return open_stored(self.store, self.chunk_key(claim, name), most, self.patience)
        except FileNotFoundError:
            pass  # there is another writer since that look
        self._succession = self.tenures.succession()
        newer = self._succession.writer_of(ids[0])
        if newer is None or newer == claim:
            raise FileNotFoundError(2, "no such chunk", self.path_of(name))
        return open_stored(self.store, self.chunk_key(newer, name), most, self.patience)

    def _has_copy(self) -> bool:
        """Whether the directory is a part of this log, and not of another one; it may become one at any time."""
        if not self._is_copy and (self._root / LOG_NAME).exists():
            self._is_copy = LogStorage.log_id(self) == self.log_id()
        return self._is_copy

    def path_of(self, name: str) -> str:
        if self._tenure is not None and name not in self._elsewhere:
            return super().path_of(name)
        return f"{self.store}/{self.partition}/{name}"

    def read_state(self, file: StateFile) -> bytes:
        if self._tenure is not None:
            return super().read_state(file)
        return self.store.get(self.state_key(self.succession().newest, file.name))
