"""A log that is kept in object storage, of which a directory is this machine's part.

Below the location in the storage::

    log-1-<log id>.json                             which log this is
    0/claims/, 0/alive/                             who writes partition 0: see ``claims`` and ``tenure``
    0/chunks/<claim>/<first>-<end>.arrow            chunks, as in a directory
    0/states/<claim>/state-<version>-<end>.json     state files; those of the last writer count
    0/readers/<name>.json, <name>.start.json        positions, as in a directory
    0/reading/<name>                                this query runs
    0/deleting/<claim>                              a deletion is under way

The rules:

* The writer seals a chunk in its directory under a hidden name, puts it into the storage, makes sure that it is still
  the writer, and only then names it and counts it as durable. So a file with a chunk's name is in the storage, too.
* A storage that does not answer is a disk that refuses (``persistence``): it is tried again, receiving pauses, and the
  high-water marks hold the sender back.
* Who becomes the writer first makes its directory the same as the storage (``restoring``), whoever wrote last.
* Whoever only reads lists the storage; it needs no directory.
* Positions are in the storage alone. The lock under which they are recorded and chunks deleted holds on one machine;
  between machines whoever deletes says so before it reads the positions, and whoever records a position looks for that
  afterwards.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

import pyarrow as pa

from zmq_datasource.errors import (
    RESTORE,
    DiskFaultError,
    LogError,
    LogFormatError,
    LogLockedError,
    OptionError,
)
from zmq_datasource.host.object_store import ObjectStore
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log.claims import NO_CLAIM, Succession
from zmq_datasource.log.files import (
    WriterLock,
    make_directory,
    read_file,
    reading,
    sync_directory,
    write_synced,
    writing,
)
from zmq_datasource.log.layout import (
    CLAIMS_NAME,
    FORMAT_VERSION,
    LOCK_WAIT_SECONDS,
    LOG_NAME,
    PARTITION,
    READERS_NAME,
    TEMPORARY_PREFIX,
    Chunk,
    StateFile,
    end_name,
    parse_chunk_name,
    parse_partition_name,
    parse_state_name,
    parse_stored_log_name,
    pending_name,
    stored_log_name,
)
from zmq_datasource.log.reader_files import ReaderPosition
from zmq_datasource.log.restoring import counted_chunks, restore
from zmq_datasource.log.storage import LogStorage, Part
from zmq_datasource.log.tenure import SILENT_SECONDS, Tenure, tenures_of
from zmq_datasource.options.types import Location

__all__ = ["StoredLog", "storage_at"]

_log = logging.getLogger(__name__)

# Two that create a log at once see each other's after so long.
_CREATING_SECONDS = 1.0
_ID_SECONDS = 10.0
_POSITIONS_SECONDS = 1.0
# A chunk up to this size is read in one go: each request takes tens of milliseconds.
_WHOLE_BYTES = 64 << 20
_END_SECONDS = 1.0
# From a claim to its confirmation are a few requests, unless its maker dies.
_SETTLING_SECONDS, _SETTLING_LOOK_SECONDS = 5.0, 0.2
# A query that runs says so three times in so many seconds.
_READING_SECONDS = 180.0
_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "file")
_DELETING, _READING = "deleting", "reading"
_OWN_CLAIMS = 100
# Between attempts to read a chunk.
_PAUSES = (0.5, 2.0, 5.0)
_JOIN_SECONDS = 5.0
_DELETION_LOOK_SECONDS = 0.2


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
    scheme, separator, _ = store.plain.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise OptionError(
            f"option walStore={store!r}: it must be a URI of object storage ({', '.join(_SCHEMES)}) that replaces "
            "an object at once"
        )
    return StoredLog(location, partition, ObjectStore(store))


class _View(NamedTuple):
    """What a listing of a partition has shown."""

    chunks: dict[str, Chunk]
    states: frozenset[str]


class StoredLog(LogStorage):
    """One partition of a log in object storage; for the arguments see ``storage_at``."""

    leisure = 10.0  # requests are paid for
    deletes_for = 3.0
    always_syncs = True

    def __init__(self, location: str, partition: int, store: ObjectStore) -> None:
        super().__init__(location, partition)
        self.store = store
        self.tenures = tenures_of(store, partition)
        self._tenure: Tenure | None = None  # of this object, if it writes
        self._view: _View | None = None
        self._succession: Succession | None = None
        self._is_copy: bool | None = None  # whether the directory is this log's
        self._id: tuple[float, str] | None = None
        self._positions: tuple[float, dict[str, ReaderPosition]] = (0.0, {})
        self._is_placing = False
        self._next_end_look, self._is_ending = 0.0, False

    def __repr__(self) -> str:
        return f"StoredLog({self.root!r}, {self.partition}, {self.store!r})"

    def __str__(self) -> str:
        return f"log {self.store}" + (f", partition {self.partition}" if self.partition else "")

    def of(self, partition: int) -> Self:
        return type(self)(self.root, partition, self.store)

    def key(self, *parts: str) -> str:
        """The key of an object of this partition."""
        return "/".join((str(self.partition), *parts))

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

    def write_local(self, name: str, content: bytes, modified: float | None = None) -> None:
        """Make a file appear there, whole.

        Args:
            modified: Its time of modification, in seconds since the epoch; now, unless given.
        """
        final = self._directory / name
        temporary = final.with_name(f"{TEMPORARY_PREFIX}{name}")
        with writing(f"writing {final}"):
            write_synced(temporary, content)
            if modified is not None:
                os.utime(temporary, (modified, modified))
            os.rename(temporary, final)
            sync_directory(final.parent)

    def put_local_positions(self) -> None:
        """Put the positions into the storage that were recorded when the log was in its directory alone."""
        for path in (self._directory / READERS_NAME).glob("*.json"):
            with reading(path):
                self.store.put(self._reader_key(path), read_file(path))

    # Which log this is.

    def open_log(self, log_id: str | None = None) -> str:
        found = self._find_id()
        here = LogStorage.log_id(self) if (self._root / LOG_NAME).exists() else None
        if found is None:
            found = self._create_id(here or log_id or uuid.uuid4().hex)
        if here not in (None, found):
            raise LogFormatError(
                f"opening the log in {self.store}: it is log {found}, and the directory {self.root} holds log {here}; "
                "set another walLocation, or another walStore"
            )
        return super().open_log(found)

    def _create_id(self, log_id: str) -> str:
        key = stored_log_name(log_id)
        self.store.put(key, json.dumps({"format": FORMAT_VERSION, "log": log_id}).encode())
        time.sleep(_CREATING_SECONDS)
        found = self._find_id()
        return log_id if found is None else found

    def _find_id(self) -> str | None:
        """The id of the log in the storage; the older one, if two have created it at once."""
        objects = sorted(self.store.objects(""), key=lambda found: (found.modified, found.key))
        for parsed in filter(None, (parse_stored_log_name(found.key) for found in objects)):
            version, log_id = parsed
            if version != FORMAT_VERSION:
                raise LogFormatError(
                    f"reading {self.store}: format version {version}, this release reads {FORMAT_VERSION}"
                )
            return log_id
        return None

    def log_id(self) -> str:
        if self._tenure is not None:
            return super().log_id()
        now = time.monotonic()
        if self._id is None or now >= self._id[0]:
            found = self._find_id()
            if found is None:
                raise LogFormatError(f"reading {self.store}: there is no log")
            self._id = now + _ID_SECONDS, found
        return self._id[1]

    def partitions(self) -> list[int]:
        stored = (
            found for name in self.store.directories() if (found := parse_partition_name(name)) is not None
        )
        return sorted({*super().partitions(), *stored})

    # Who writes it.

    def lock(self, wait: float, feed: str = "") -> WriterLock:
        deadline = time.monotonic() + wait
        lock = super().lock(wait, feed)
        try:
            highest = self._wait_for_others(deadline)
            tenure = self.tenures.begin(lock, feed, highest, self._remember)
        except BaseException:
            lock.release()
            raise
        try:
            restore(self, tenure)
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
        if self.tenures.is_held(deadline - time.monotonic()):
            holder = self.tenures.about(highest).get("holder", "a process that did not say who it is")
            raise LogLockedError(
                f"opening the log in {self.store}: it is held by {holder}. It counts as gone when it has given no sign "
                f"of life for {SILENT_SECONDS:.0f} s; stop it, or give this one a walStore of its own"
            )
        return self.tenures.highest()

    def own_claims(self) -> list[str]:
        """The last claims of those who had this directory, oldest first."""
        path = self._directory / CLAIMS_NAME
        with suppress(FileNotFoundError), reading(path):
            return read_file(path).decode().split()
        return []

    def _remember(self, claim: str) -> None:
        path = self._directory / CLAIMS_NAME
        with writing(f"writing {path}"):
            make_directory(path.parent)
            temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
            write_synced(temporary, "\n".join([*self.own_claims()[-_OWN_CLAIMS:], claim]).encode())
            os.rename(temporary, path)
            sync_directory(path.parent)

    def is_written(self) -> bool:
        if super().is_written():
            return True
        # Whoever had our directory has left its lock: it is gone, though its last sign of life is young.
        return self.tenures.highest() not in (NO_CLAIM, *self.own_claims()) and self.tenures.is_held()

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
            DiskFaultError: The storage does not answer.
            LogLockedError: Somebody else is the writer by now.
        """
        key = self.chunk_key(tenure.claim, name)
        with writing(f"reading {path}"):  # no file may be opened now; the storage's errors are ours already
            self.store.upload(key, path)
        tenure.check()  # what it may have left behind is not ours to judge: the new writer may count it
        final = self._directory / name
        with writing(f"writing chunk {final}"):
            os.rename(path, final)
            sync_directory(final.parent)

    def write_state(self, file: StateFile, content: bytes, sync: bool) -> None:
        assert self._tenure is not None, "only the writer writes"
        self.store.put(self.state_key(self._tenure.claim, file.name), content)
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
        if self._view is None:
            self._wait_until_settled()
        chunks = self.store.objects(self.key("chunks"), below=True)
        # Asked for afterwards: it knows whoever has put one of these.
        succession = self._succession = self.tenures.succession()
        states = self.store.objects(self.key("states", succession.newest))
        known = {} if self._view is None else self._view.chunks
        counted = counted_chunks(chunks, succession, known)
        self._view = _View({chunk.name: chunk for chunk in counted}, frozenset(s.key for s in states))
        return self._view

    def _wait_until_settled(self) -> None:
        """Wait for somebody who has just claimed the partition, for a moment."""
        deadline = time.monotonic() + _SETTLING_SECONDS
        while not self.tenures.succession().is_settled and time.monotonic() < deadline:
            check_signals()
            time.sleep(_SETTLING_LOOK_SECONDS)

    def names(self) -> set[str]:
        if self._tenure is not None:
            return super().names()
        view = self._look()
        return {*view.chunks, *view.states}

    def stamp(self) -> tuple[int, ...]:
        return super().stamp() if self._tenure is not None else ()  # it is listed once a second

    def chunks(self) -> Iterator[Chunk]:
        if self._tenure is not None:
            yield from super().chunks()
        else:
            yield from self._look().chunks.values()

    def find_chunk(self, first: int, end: int) -> Chunk | None:
        if self._tenure is not None:
            return super().find_chunk(first, end)
        name = Chunk(first, end, 0, 0.0).name
        return (self._view or self._look()).chunks.get(name) or self._look().chunks.get(name)

    def open_chunk(self, name: str) -> pa.NativeFile:
        if self._tenure is not None:
            return super().open_chunk(name)
        # What has its name here is in the storage, which is asked where this machine's disk refuses.
        with suppress(OSError, LogError):
            if self._has_copy():
                return super().open_chunk(name)
        ids = parse_chunk_name(name)
        assert ids is not None, name
        claim = self.succession().writer_of(ids[0])
        try:
            if claim is not None:
                return self._open_stored(self.chunk_key(claim, name))
        except FileNotFoundError:
            pass  # there is another writer since that look
        self._succession = self.tenures.succession()
        newer = self._succession.writer_of(ids[0])
        if newer is None or newer == claim:
            raise FileNotFoundError(2, "no such chunk", self.path_of(name))
        return self._open_stored(self.chunk_key(newer, name))

    def _has_copy(self) -> bool:
        """Whether the directory is a part of this log, and not of another one."""
        if self._is_copy is None:
            here = (self._root / LOG_NAME).exists()
            self._is_copy = here and LogStorage.log_id(self) == self.log_id()
        return self._is_copy

    def _open_stored(self, key: str) -> pa.NativeFile:
        for pause in _PAUSES:
            try:
                return self.store.open(key, _WHOLE_BYTES)
            except DiskFaultError as e:
                _log.info("%s; trying again", e)
                check_signals()
                time.sleep(pause)
        return self.store.open(key, _WHOLE_BYTES)

    def path_of(self, name: str) -> str:
        return super().path_of(name) if self._tenure is not None else f"{self.store}/{self.partition}/{name}"

    def read_state(self, file: StateFile) -> bytes:
        if self._tenure is not None:
            return super().read_state(file)
        return self.store.get(self.state_key(self.succession().newest, file.name))

    # Positions.

    def _reader_key(self, path: Path) -> str:
        return self.key(READERS_NAME, path.name)

    def _replace(self, path: Path, content: object) -> None:
        self.store.put(self._reader_key(path), json.dumps(content).encode())

    def _forget(self, path: Path) -> None:
        self.store.delete(self._reader_key(path))

    def _read_json(self, path: Path) -> object:
        key = self._reader_key(path)
        try:
            return json.loads(self.store.get(key))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as e:
            raise LogFormatError(f"reading {self.store}/{key}: {e}. {RESTORE}") from e

    def _reader_names(self, suffix: str) -> list[str]:
        return [
            found.key for found in self.store.objects(self.key(READERS_NAME)) if found.key.endswith(suffix)
        ]

    def reader_path(self, reader: str) -> str:
        return f"{self.store}/{self._reader_key(self._reader_path(reader))}"

    def start_path(self, reader: str) -> str:
        return f"{self.store}/{self._reader_key(self._start_path(reader))}"

    def moved_at(self, reader: str) -> float | None:
        found = self.store.find(self._reader_key(self._reader_path(reader)))
        return None if found is None else found.modified

    def hold_reader(self, reader: str, wait: float = LOCK_WAIT_SECONDS) -> WriterLock:
        lock = self.lock_reader(reader, wait)
        try:
            return _ReadingLock(self, reader, lock)
        except BaseException:
            lock.release()
            raise

    def say_reading(self, reader: str) -> None:
        """Tell other machines that a query of this name runs here."""
        self.store.put(self.key(_READING, reader), self._place.encode())

    def end_reading(self, reader: str) -> None:
        """Tell them that it has ended, unless one of the same name runs elsewhere by now."""
        key = self.key(_READING, reader)
        with suppress(FileNotFoundError):
            if self.store.get(key) == self._place.encode():
                self.store.delete(key)

    @property
    def _place(self) -> str:
        return f"{socket.gethostname()} {self.root}"

    def is_reading_elsewhere(self, reader: str) -> bool:
        key = self.key(_READING, reader)
        found = self.store.find(key)
        if found is None or time.time() - found.modified >= _READING_SECONDS:
            return False
        try:
            return self.store.get(key) != self._place.encode()
        except FileNotFoundError:
            return False

    def is_reading(self, reader: str) -> bool:
        if self.is_reading_elsewhere(reader):
            return True
        # To ask for the lock would make its file.
        return (self._directory / READERS_NAME / f"{reader}.lock").exists() and super().is_reading(reader)

    def touch_reader(self, reader: str) -> None:
        position = self.position(reader)
        if position is not None:
            self.write_reader(reader, position)

    def positions(self) -> dict[str, ReaderPosition]:
        now = time.monotonic()
        if self._is_placing or now >= self._positions[0]:
            self._positions = now + _POSITIONS_SECONDS, super().positions()
        return dict(self._positions[1])

    @contextmanager
    def placing(self, wait: float = LOCK_WAIT_SECONDS) -> Iterator[None]:
        with super().placing(wait):
            self._is_placing = True
            try:
                yield
            finally:
                self._is_placing = False

    def announce_deletion(self, below: int) -> bool:
        assert self._tenure is not None, "only the writer deletes"
        self._tenure.check()  # one that has lost the log must not delete for the other
        self.store.put(self.key(_DELETING, self._tenure.claim), json.dumps({"below": below}).encode())
        return True

    def end_deletion(self) -> None:
        assert self._tenure is not None, "only the writer deletes"
        try:
            self.store.delete(self.key(_DELETING, self._tenure.claim))
        except LogError as e:
            _log.warning("%s; a query that begins now waits for %.0f s", e, SILENT_SECONDS)

    def wait_for_deletion(self) -> bool:
        # Who has begun it and died is waited for no longer than for a writer; the next writer removes it.
        deadline = time.monotonic() + SILENT_SECONDS
        while time.monotonic() < deadline and self.store.objects(self.key(_DELETING)):
            check_signals()
            time.sleep(_DELETION_LOOK_SECONDS)
        return True  # by one that has ended, if by none that was waited for


class _ReadingLock(WriterLock):
    """Of the one query that reads under a name, as other machines see it."""

    def __init__(self, storage: StoredLog, reader: str, lock: WriterLock) -> None:
        self._storage, self._reader, self._lock = storage, reader, lock
        storage.say_reading(reader)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="zmq-reader-alive", daemon=True)
        self._thread.start()

    def check(self) -> None:
        self._lock.check()

    def release(self) -> None:
        self._ending.set()
        self._thread.join(_JOIN_SECONDS)
        try:
            self._storage.end_reading(self._reader)
        except LogError as e:
            _log.warning("%s; on other machines the query %r runs for some minutes more", e, self._reader)
        self._lock.release()

    def _go_on(self) -> None:
        while not self._ending.wait(_READING_SECONDS / 3):
            try:
                self._storage.say_reading(self._reader)
            except LogError as e:
                _log.warning("%s; it is tried again", e)
