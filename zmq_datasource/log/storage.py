"""The one place that touches the file system on behalf of the log.

Local and shared POSIX file systems; ``stored`` adds object storage, with the same methods. Nothing above them knows
what a path is.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from zmq_datasource.errors import RESTORE, DiskFaultError, LogError, LogFormatError
from zmq_datasource.host import failpoints
from zmq_datasource.host.private_files import PRIVATE, make_private
from zmq_datasource.log.files import (
    MOUNT_AGAIN,
    WriterLock,
    add_directory,
    make_directory,
    open_file,
    open_to_read,
    read_file,
    read_json,
    reading,
    sync_directory,
    sync_file,
    write_synced,
    writing,
)
from zmq_datasource.log.layout import (
    CLAIMS_NAME,
    FORMAT_VERSION,
    LOCK_NAME,
    LOG_NAME,
    PARTITION,
    TEMPORARY_PREFIX,
    Chunk,
    StateFile,
    chunk_name,
    damaged_name,
    end_name,
    growing_name,
    parse_chunk_name,
    parse_growing_name,
    parse_partition_name,
    parse_pending_name,
    state_files,
)
from zmq_datasource.log.reader_files import ReaderFiles
from zmq_datasource.log.staged_files import StagedFiles

__all__ = ["LogStorage", "Part", "default_location", "describe_ids"]

# Of what is written to a file.
Part: TypeAlias = bytes | pa.Buffer
# That one call of the system takes.
_MOST_PARTS = 1024
# How long a host that was cut off may go on with an open chunk, of which nobody reads the name.
_CHECK_SECONDS = 1.0


def default_location(identity: Mapping[str, Any]) -> str:
    """The directory of a feed's log on this machine when the user names none.

    Args:
        identity: What tells feeds apart (socket type, endpoints, topics), as plain data.

    Raises:
        LogError: The parent directory in the temporary directory is not ours alone.
    """
    parent = Path(tempfile.gettempdir(), f"zmq_datasource-{os.getuid()}")
    with suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LogError(
            f"using {parent} for message logs: it must be a directory that only you can enter; "
            "correct or remove it, or set walLocation"
        )
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return str(parent / hashlib.sha256(text.encode()).hexdigest()[:16])


class NoLogError(LogFormatError):
    """There is no log in a directory or a storage."""


class LogStorage(StagedFiles, ReaderFiles):
    """One partition of a log on a POSIX file system.

    Args:
        location: Of the log: an absolute path or ``file:`` URI.
        partition: Which of its partitions.

    Attributes:
        root: Where the log is, as text: for messages, and to find it from another process.

    Raises:
        OptionError: The location is something else.
    """

    _writer_lock: WriterLock | None = None  # of this process, if it is the writer
    _next_check = 0.0
    _newest: str | None = None  # the chunk that must be there when the writer writes

    def open_log(self, log_id: str | None = None) -> str:
        """Create the log if there is none; return its id.

        Args:
            log_id: Of the one that is created; any, unless given.

        Raises:
            LogFormatError: ``log.json`` is damaged or of another format version, or it is missing and there are chunks.
            LogWriteError: The directory cannot be created or written.
        """
        with writing(f"creating the log in {self.root}"):
            make_directory(self._root)
            if not (self._root / LOG_NAME).exists():
                self._refuse_nameless_chunks()
                temporary = self._root / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
                log = {"format": FORMAT_VERSION, "log": log_id or uuid.uuid4().hex}
                write_synced(temporary, json.dumps(log).encode())
                try:
                    failpoints.reach("log.identity.before_link")
                    # A link never replaces: of two that create the log at once, one wins.
                    with suppress(FileExistsError):
                        os.link(temporary, self._root / LOG_NAME)
                finally:
                    temporary.unlink()
                failpoints.reach("log.identity.after_link")
                sync_directory(self._root)
            add_directory(self._root / str(PARTITION))
            add_directory(self._readers)
        return self.log_id()

    def _refuse_nameless_chunks(self) -> None:
        """Refuse to make a log of a directory that holds chunks: their ids would be given to other messages.

        Raises:
            LogFormatError: It does.
        """
        held = {p: _ids_in(LogStorage(self.root, p).names()) for p in LogStorage.partitions(self)}
        found = {partition: ids for partition, ids in held.items() if ids is not None}
        # Another process may have created the log and written chunks while this one looked.
        if found and not (self._root / LOG_NAME).exists():
            raise LogFormatError(
                f"opening the log in {self.root}: {LOG_NAME} is missing, and there are chunks ({describe_ids(found)}). "
                f'Restore {LOG_NAME}: it holds {{"format": {FORMAT_VERSION}, "log": "<id>"}}, and each checkpoint '
                'of a query of this log has the id, as "log" in its offsets. Or set another walLocation, and for each '
                "of these queries a new checkpoint"
            )

    def log_id(self) -> str:
        """The id in ``log.json``.

        Raises:
            NoLogError: There is no log here.
            LogFormatError: There is not one that this version reads.
        """
        path = self._root / LOG_NAME
        self.check_whole()
        try:
            data = read_json(path)
        except FileNotFoundError as e:
            self._refuse_nameless_chunks()
            raise NoLogError(
                f"reading {path}: there is no log in this directory, or it is not reachable from this machine "
                f"({socket.gethostname()}). Start what fills it (a query with connect or bind, zmq-datasource receive, "
                "a proxy), or correct walLocation, which all machines that read it must share"
            ) from e
        match data:
            case {"format": int(version), "log": str(log)} if version == FORMAT_VERSION:
                return log
            case {"format": int(version)}:
                raise LogFormatError(
                    f"reading {path}: format version {version}, this release reads {FORMAT_VERSION}; use "
                    "the release that wrote it, or another walLocation"
                )
        raise LogFormatError(f"reading {path}: it is not the description of a log. {RESTORE}")

    def log_id_again(self) -> str:
        """The id of a log that was found before.

        Raises:
            DiskFaultError: There is no log any more.
            LogFormatError: As ``log_id``.
        """
        try:
            return self.log_id()
        except NoLogError as e:
            raise DiskFaultError(f"{e}. It was there before. {MOUNT_AGAIN}") from e

    def check_whole(self) -> None:
        """Refuse a directory that is this machine's part of a log in object storage, read or written without that.

        Raises:
            LogFormatError: It is.
        """
        if os.path.exists(self._path(CLAIMS_NAME)):
            raise LogFormatError(
                f"opening {self.root}: this directory is a part of a log in object storage, which may have chunks that "
                "are not here; set walStore, or another walLocation"
            )

    def partitions(self) -> list[int]:
        """The log partitions that exist, in order.

        Raises:
            DiskFaultError: They cannot be listed now.
        """
        with suppress(FileNotFoundError), reading(self._root), os.scandir(self._root) as entries:
            names = [e.name for e in entries if e.is_dir()]
            partitions = sorted(found for found in map(parse_partition_name, names) if found is not None)
            for partition in partitions:
                self.of(partition).check_whole()
            return partitions
        return []

    def chunks(self) -> Iterator[Chunk]:
        """The sealed chunks of a partition, in no order."""
        for entry in self._entries():
            ids = parse_chunk_name(entry.name)
            if ids is None:
                continue
            try:
                with reading(entry.path):
                    found = entry.stat()
            except FileNotFoundError:
                continue  # removed by its writer since the directory was read
            yield Chunk(*ids, found.st_size, found.st_mtime)

    def find_chunk(self, first: int, end: int) -> Chunk | None:
        """The chunk with exactly these ids, if there is one."""
        try:
            return self._describe(self._directory / chunk_name(first, end))
        except FileNotFoundError:
            return None

    def open_chunk(self, name: str, whole: bool = True) -> pa.NativeFile:
        """Open a chunk for reading; FileNotFoundError if it is gone.

        Args:
            whole: Whether its rows will be read, and not its metadata alone.
        """
        return open_to_read(self._path(name))

    def path_of(self, name: str) -> str:
        """Where a file of the partition is, for messages."""
        return self._path(name)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)  # for each of many chunks; a tenth of what a Path costs

    def write_chunk(self, name: str, write: Callable[[pa.NativeFile], None], sync: bool) -> Chunk:
        """Make a chunk appear, whole, under its name.

        Args:
            write: Writes the content to the file it is given.
            sync: Whether to force content and name to the disk before returning.

        Raises:
            LogWriteError: The file system refused; nothing appeared.
        """
        final = self._directory / name
        with (
            self._appearing(final, f"writing chunk {final}", sync) as temporary,
            pa.OSFile(str(temporary), "wb") as file,
        ):
            failpoints.reach("log.chunk.before_write")
            write(file)
        self._newest = name
        with writing(f"writing chunk {final}"):
            failpoints.reach("log.chunk.after_write")
            return self._describe(final)

    @contextmanager
    def _appearing(self, final: Path, act: str, sync: bool) -> Iterator[Path]:
        """A hidden file to write, which gets its name when it is whole; of a failure nothing is left."""
        temporary = final.with_name(f"{TEMPORARY_PREFIX}{final.name}")
        with writing(act):
            self._check_writer()
            try:
                make_private(temporary)
                yield temporary
                failpoints.reach("log.file.after_write")
                if sync:
                    sync_file(temporary)
                failpoints.reach("log.file.after_sync")
                self._name(temporary, final)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
            failpoints.reach("log.file.after_rename")
            if sync:
                sync_directory(final.parent)

    def _describe(self, path: Path) -> Chunk:
        ids = parse_chunk_name(path.name)
        assert ids is not None, path
        with reading(path):
            found = path.stat()
        return Chunk(*ids, found.st_size, found.st_mtime)

    # A chunk that grows: see log.growing.

    def _growing_path(self, first: int) -> Path:
        return self._directory / growing_name(first)

    def open_growing(self, first: int) -> int:
        """A file descriptor for reading an open chunk while it grows; FileNotFoundError if it is sealed already."""
        path = self._growing_path(first)
        with reading(path):
            return open_file(path)

    def write_growing(self, name: str, offset: int, parts: Sequence[Part], sync: bool) -> int:
        """Make an open chunk, whose hidden name this is, go on with these from ``offset`` on, where it ends.

        May be repeated: what was not forced to the disk is written again, because the system may have forgotten it.

        Returns:
            Where it ends now.

        Raises:
            LogWriteError: The file system refused; the chunk ends at ``offset`` still, as far as can be.
            LogLockedError: This process is not the writer any more.
        """
        path = self._directory / name
        with writing(f"writing {path}"):
            if not offset or time.monotonic() >= self._next_check:  # a proxy writes a thousand times a second
                self._check_writer()
                self._next_check = time.monotonic() + _CHECK_SECONDS
            descriptor = os.open(path, os.O_RDWR | (0 if offset else os.O_CREAT | os.O_TRUNC), PRIVATE)
            try:
                failpoints.reach("log.group.before_write")
                end = _write_whole(descriptor, parts, offset)
                failpoints.reach("log.group.after_write")
                if sync:
                    sync_file(path)
                failpoints.reach("log.group.after_sync")
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(descriptor, offset)
                raise
            finally:
                os.close(descriptor)
            if sync and not offset:
                sync_directory(path.parent)
        return end

    def end_growing_at(self, first: int, size: int) -> None:
        """Cut an open chunk off at this place."""
        path = self._growing_path(first)
        with writing(f"writing {path}"):
            os.truncate(path, size)

    def finish_growing(self, hidden: str, name: str, sync: bool) -> Chunk:
        """Give a chunk that is whole its name, instead of a hidden one; may be repeated.

        Raises:
            LogWriteError: The file system refused.
        """
        path, final = self._directory / hidden, self._directory / name
        with writing(f"writing chunk {final}"):
            failpoints.reach("log.open_chunk.before_rename")
            if path.exists() or not final.exists():
                self._name(path, final)
            failpoints.reach("log.open_chunk.after_rename")
            if sync:
                sync_directory(final.parent)
            self._newest = name
            return self._describe(final)

    def rename_damaged(self, name: str) -> str:
        """Give a file that cannot be used a name that nobody reads; where it is now. May be repeated."""
        path = self._directory / name
        with writing(f"renaming {path}"):
            if path.exists():
                os.rename(path, path.with_name(damaged_name(name)))
            sync_directory(path.parent)
            bare = name.removeprefix(TEMPORARY_PREFIX)
            return str(max(path.parent.glob(f"{bare}.*.damaged"), key=lambda found: found.stat().st_ctime_ns))

    def growing(self) -> list[int]:
        """The first ids of the open chunks there are: one at most, unless something went wrong."""
        found = map(parse_growing_name, self.names())
        return sorted(first for first in found if first is not None)

    def read_growing(self, first: int) -> pa.Buffer:
        """The content of an open chunk whose writer is gone."""
        path = self._growing_path(first)
        with reading(path):
            return pa.py_buffer(read_file(path))

    def remove_growing(self, name: str) -> None:
        """Delete an open chunk: what it held has its name by now."""
        failpoints.reach("log.open_chunk.before_remove")
        self._remove(self._directory / name)

    def remove_chunk(self, name: str) -> None:
        """Delete a chunk; one that is gone already is fine."""
        self._remove(self._directory / name, "chunk ")

    def remove_temporaries(self) -> None:
        """Delete what a crashed writer left unfinished. Only for the holder of the lock."""
        with writing(f"cleaning {self._directory}"):
            for kind in ("arrow", "json"):
                for path in self._directory.glob(f"{TEMPORARY_PREFIX}*.{kind}"):
                    path.unlink(missing_ok=True)

    def states(self) -> list[StateFile]:
        """The state files of a partition, oldest first."""
        return state_files(self.names())

    def read_state(self, file: StateFile) -> bytes:
        """The content of a state file; FileNotFoundError if it is gone."""
        path = self._directory / file.name
        with reading(path):
            return read_file(path)

    def write_state(self, file: StateFile, content: bytes, sync: bool) -> None:
        """Make a state file appear, whole.

        Raises:
            LogWriteError: The file system refused; nothing appeared.
        """
        final = self._directory / file.name
        with self._appearing(final, f"writing {final}", sync) as temporary:
            failpoints.reach("log.state.before_write")
            temporary.write_bytes(content)
        failpoints.reach("log.state.after_write")

    def remove_states(self, but: int | None) -> None:
        """Delete all state files but that of one version."""
        for file in self.states():
            if file.version != but:
                self._remove(self._directory / file.name)

    def ask_to_end(self, token: str) -> None:
        """Tell receivers, wherever they run, that they are to end: those that were started with this token."""
        path = self._root / end_name(token)
        with writing(f"writing {path}"):
            path.touch(mode=PRIVATE)

    def is_asked_to_end(self, token: str) -> bool:
        """Whether ``ask_to_end`` was called with this token.

        The directory is listed: that a name is not there, a shared file system remembers for up to a minute.
        """
        with suppress(OSError):  # it is asked again
            return end_name(token) in os.listdir(self._root)
        return False

    def remove_end(self, token: str) -> None:
        """Forget that: they have ended."""
        self._remove(self._root / end_name(token))

    def lock(self, wait: float, feed: str = "") -> WriterLock:
        """Become the writer of a partition.

        Args:
            wait: Seconds to wait for a writer that is just stopping.
            feed: What is received, for ``feed`` to tell others.

        Raises:
            LogLockedError: Another writer holds it still; says who.
        """
        with writing(f"creating {self._directory}"):
            add_directory(self._directory)
        self._newest = None
        self._writer_lock = self._lock(
            self._directory / LOCK_NAME,
            wait,
            f"opening log {self.root}",
            "stop that query or proxy, or give this one a walLocation of its own",
            note=feed,
        )
        return self._writer_lock

    def _name(self, temporary: Path, final: Path) -> None:
        """Give a file that is whole its name, if this process is still the writer.

        Raises:
            LogLockedError: It is not.
        """
        self._check_writer()
        os.rename(temporary, final)

    def expect(self, newest: Chunk) -> None:
        """Write only where this chunk is there, or the one that is written next; for the writer, once it has looked."""
        self._newest = newest.name

    def _check_writer(self) -> None:
        """Make sure that this process is still the writer, and that the directory is still its log's.

        Raises:
            LogLockedError: Another process is the writer.
            DiskFaultError: The directory has lost what was in it.
        """
        if self._writer_lock is None:
            return
        self._writer_lock.check()
        if self._newest is not None and not os.path.exists(self._path(self._newest)):
            raise DiskFaultError(
                f"writing to log {self.root}: its newest chunk, {self._path(self._newest)}, is not there any more. "
                f"{MOUNT_AGAIN}"
            )

    def announce_deletion(self) -> bool:
        self._check_writer()
        return False

    def writer(self) -> str | None:
        """The process that writes the partition at this moment, as it says itself; None if there is none."""
        return self._lock_holder(self._directory / LOCK_NAME)

    def is_written(self) -> bool:
        """Whether a process writes the partition at this moment."""
        return self.writer() is not None

    def feed(self) -> str:
        """What the writer of the partition receives, as it said to ``lock``; of the last one, if there is none now."""
        return self._lock_note(self._directory / LOCK_NAME)


def _ids_in(names: Iterable[str]) -> range | None:
    """The ids from the first chunk to the last one among files, sealed or not; None without a chunk."""
    names = list(names)
    ids = [
        found for name in names if (found := parse_chunk_name(name) or parse_chunk_name(_of_pending(name)))
    ]
    ids += [(first, first) for name in names if (first := parse_growing_name(name)) is not None]
    return range(min(ids)[0], max(end for _, end in ids)) if ids else None


def _of_pending(name: str) -> str:
    return (parse_pending_name(name) or ("", ""))[1]


def describe_ids(found: Mapping[int, range]) -> str:
    """The ids in each log partition, in words."""
    return ", ".join(
        f"partition {partition}: ids from {ids.start} on" + (f" to {ids.stop - 1}" if ids else "")
        for partition, ids in sorted(found.items())
    )


def _write_whole(descriptor: int, parts: Sequence[Part], offset: int) -> int:
    """Write all of it from ``offset`` on; where it ends."""
    rest = deque(memoryview(part) for part in parts)
    while rest:
        written = os.pwritev(descriptor, list(islice(rest, _MOST_PARTS)), offset)
        offset += written
        while rest and written >= len(rest[0]):
            written -= len(rest.popleft())
        if written:
            rest[0] = rest[0][written:]
    return offset
