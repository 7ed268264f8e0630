"""The one place that touches the file system on behalf of the log.

Local and shared POSIX file systems. Another one (S3, HDFS) becomes a second class with the
same methods; nothing above this module knows what a path is.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from zmq_datasource.errors import LogError, LogFormatError, LogLockedError, LogWriteError, OptionError
from zmq_datasource.wal.layout import (
    FORMAT_VERSION,
    LOCK_NAME,
    LOG_NAME,
    READERS_NAME,
    STAGING_NAME,
    START_NAME,
    TEMPORARY_PREFIX,
    Chunk,
    StateFile,
    parse_chunk_name,
    parse_state_name,
)

__all__ = ["LogStorage", "WriterLock", "default_location"]


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


class WriterLock:
    """Held by the one writer of a log partition; released by the kernel if the process dies."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def release(self) -> None:
        self._file.close()


class LogStorage:
    """A log directory on a POSIX file system.

    Args:
        location: A path or ``file:`` URI.

    Raises:
        OptionError: The location is a URI of another scheme.
    """

    def __init__(self, location: str) -> None:
        parts = urlsplit(location)
        if parts.scheme == "file":
            location = unquote(parts.path)
        elif "://" in location:
            raise OptionError(
                f"option walLocation={location!r}: only local or shared (NFS) directories are supported, "
                "as a path or a file: URI"
            )
        self.root = Path(location).absolute()

    def __repr__(self) -> str:
        return f"LogStorage({str(self.root)!r})"

    def open_log(self) -> str:
        """Create the log if there is none; return its id.

        Raises:
            LogFormatError: ``log.json`` is damaged or of another format version.
            LogWriteError: The directory cannot be created or written.
        """
        with _writing(f"creating the log in {self.root}"):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (self.root / LOG_NAME).exists():
                temporary = self.root / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
                log = {"format": FORMAT_VERSION, "log": uuid.uuid4().hex}
                _write_synced(temporary, json.dumps(log).encode())
                try:
                    # A link never replaces: of two that create the log at once, one wins.
                    with suppress(FileExistsError):
                        os.link(temporary, self.root / LOG_NAME)
                finally:
                    temporary.unlink()
                _sync_directory(self.root)
        return self.log_id()

    def log_id(self) -> str:
        """The id in ``log.json``.

        Raises:
            LogFormatError: There is no log here, or not one this version reads.
        """
        path = self.root / LOG_NAME
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError as e:
            raise LogFormatError(
                f"reading {path}: there is no log in this directory, or it is not reachable from this machine "
                f"({socket.gethostname()}); walLocation must be a directory that the driver and every executor share"
            ) from e
        except (ValueError, OSError) as e:
            raise LogFormatError(f"reading {path}: {e}") from e
        match data:
            case {"format": int(version), "log": str(log)} if version == FORMAT_VERSION:
                return log
            case {"format": int(version)}:
                raise LogFormatError(
                    f"reading {path}: format version {version}, this release reads {FORMAT_VERSION}"
                )
        raise LogFormatError(f"reading {path}: it is not the description of a log")

    def partitions(self) -> list[int]:
        """The log partitions that exist, in order."""
        with os.scandir(self.root) as entries:
            return sorted(int(e.name) for e in entries if e.name.isdecimal() and e.is_dir())

    def chunks(self, partition: int) -> Iterator[Chunk]:
        """The sealed chunks of a partition, in no order."""
        try:
            with os.scandir(self._directory(partition)) as entries:
                for entry in entries:
                    ids = parse_chunk_name(entry.name)
                    if ids is None:
                        continue
                    try:
                        found = entry.stat()
                    except FileNotFoundError:
                        continue  # removed by its writer since the directory was read
                    yield Chunk(*ids, found.st_size, found.st_mtime)
        except FileNotFoundError:
            return

    def open_chunk(self, partition: int, name: str) -> pa.NativeFile:
        """Memory-map a chunk for reading; FileNotFoundError if it is gone."""
        return pa.memory_map(str(self.chunk_path(partition, name)))

    def chunk_path(self, partition: int, name: str) -> Path:
        """Where a chunk is, for messages."""
        return self._directory(partition) / name

    def write_chunk(
        self, partition: int, name: str, write: Callable[[pa.NativeFile], None], sync: bool
    ) -> Chunk:
        """Make a chunk appear, whole, under its name.

        Args:
            write: Writes the content to the file it is given.
            sync: Whether to force content and name to the disk before returning.

        Raises:
            LogWriteError: The file system refused; nothing appeared.
        """
        directory = self._directory(partition)
        temporary = directory / f"{TEMPORARY_PREFIX}{name}"
        final = directory / name
        with _writing(f"writing chunk {final}"):
            try:
                with pa.OSFile(str(temporary), "wb") as file:
                    write(file)
                if sync:
                    _sync_file(temporary)
                os.rename(temporary, final)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
            if sync:
                _sync_directory(directory)
            found = final.stat()
        ids = parse_chunk_name(name)
        assert ids is not None, name
        return Chunk(*ids, found.st_size, found.st_mtime)

    def remove_chunk(self, partition: int, name: str) -> None:
        """Delete a chunk; one that is gone already is fine."""
        with _writing(f"removing chunk {self.chunk_path(partition, name)}"):
            self.chunk_path(partition, name).unlink(missing_ok=True)

    def remove_temporaries(self, partition: int) -> None:
        """Delete what a crashed writer left unfinished. Only for the holder of the lock."""
        with _writing(f"cleaning {self._directory(partition)}"):
            for kind in ("arrow", "json"):
                for path in self._directory(partition).glob(f"{TEMPORARY_PREFIX}*.{kind}"):
                    path.unlink(missing_ok=True)

    def states(self, partition: int) -> list[StateFile]:
        """The state files of a partition, oldest first."""
        try:
            with os.scandir(self._directory(partition)) as entries:
                found = [parse_state_name(entry.name) for entry in entries]
        except FileNotFoundError:
            return []
        return sorted(file for file in found if file is not None)

    def state_path(self, partition: int, file: StateFile) -> Path:
        """Where a state file is, for messages."""
        return self._directory(partition) / file.name

    def read_state(self, partition: int, file: StateFile) -> bytes:
        """The content of a state file; FileNotFoundError if it is gone."""
        return self.state_path(partition, file).read_bytes()

    def write_state(self, partition: int, file: StateFile, content: bytes, sync: bool) -> None:
        """Make a state file appear, whole.

        Raises:
            LogWriteError: The file system refused; nothing appeared.
        """
        final = self.state_path(partition, file)
        temporary = final.with_name(f"{TEMPORARY_PREFIX}{final.name}")
        with _writing(f"writing {final}"):
            temporary.write_bytes(content)
            if sync:
                _sync_file(temporary)
            os.rename(temporary, final)
            if sync:
                _sync_directory(final.parent)

    def remove_states(self, partition: int, but: int | None) -> None:
        """Delete all state files but that of one version."""
        for file in self.states(partition):
            if file.version != but:
                with _writing(f"removing {self.state_path(partition, file)}"):
                    self.state_path(partition, file).unlink(missing_ok=True)

    # What is staged: see wal.staging.

    def _staged_path(self, partition: int, attempt: str) -> Path:
        return self._directory(partition) / STAGING_NAME / f"{attempt}.arrow"

    def _unfinished_path(self, partition: int, attempt: str) -> Path:
        return self._directory(partition) / STAGING_NAME / f"{TEMPORARY_PREFIX}{attempt}.arrow"

    def create_staged(self, partition: int, attempt: str) -> pa.NativeFile:
        """A file for an attempt, hidden until it is finished; one of the same name is replaced."""
        path = self._unfinished_path(partition, attempt)
        with _writing(f"creating {path}"):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            return pa.OSFile(str(path), "wb")

    @contextmanager
    def writing_staged(self, partition: int, attempt: str) -> Iterator[None]:
        """For what is written to such a file: the system's errors as ours."""
        with _writing(f"writing {self._unfinished_path(partition, attempt)}"):
            yield

    def finish_staged(self, partition: int, attempt: str, sync: bool) -> None:
        """Make an attempt appear, whole."""
        path, final = self._unfinished_path(partition, attempt), self._staged_path(partition, attempt)
        with _writing(f"writing {final}"):
            if sync:
                _sync_file(path)
            os.rename(path, final)
            if sync:
                _sync_directory(final.parent)

    def staged(self, partition: int) -> list[str]:
        """The finished attempts."""
        found = (self._directory(partition) / STAGING_NAME).glob("[0-9a-f]*.arrow")
        return sorted(path.stem for path in found)

    def staged_size(self, partition: int, attempt: str) -> int:
        """Bytes of an attempt on disk."""
        return self._staged_path(partition, attempt).stat().st_size

    def open_staged(self, partition: int, attempt: str) -> pa.NativeFile:
        """Memory-map an attempt for reading."""
        return pa.memory_map(str(self._staged_path(partition, attempt)))

    def remove_staged(self, partition: int, attempt: str) -> None:
        """Delete an attempt, finished or not."""
        for path in (self._staged_path(partition, attempt), self._unfinished_path(partition, attempt)):
            with _writing(f"removing {path}"):
                path.unlink(missing_ok=True)

    def remove_unfinished_staged(self, partition: int) -> None:
        """Delete what a crashed writer left. Only for the holder of the lock."""
        for path in (self._directory(partition) / STAGING_NAME).glob(f"{TEMPORARY_PREFIX}*.arrow"):
            with _writing(f"removing {path}"):
                path.unlink(missing_ok=True)

    def _start_path(self, partition: int, reader: str | None) -> Path:
        name = START_NAME if reader is None else f"{READERS_NAME}/{reader}.{START_NAME}"
        return self._directory(partition) / name

    def read_start(self, partition: int, reader: str | None = None) -> tuple[int, str] | None:
        """What ``write_start`` wrote: first id and reason, while the query's first batch is not done.

        Args:
            reader: Which query, of those that read a log that somebody else writes.
        """
        path = self._start_path(partition, reader)
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as e:
            raise LogFormatError(f"reading {path}: {e}") from e
        match data:
            case {"next": int(next_id), "startingOffsets": str(position)}:
                return next_id, position
        raise LogFormatError(f"reading {path}: it holds no message id")

    def write_start(self, partition: int, next_id: int, position: str, reader: str | None = None) -> None:
        """Remember, durably, the first id that a query is told, and by which ``startingOffsets``."""
        path = self._start_path(partition, reader)
        self._replace(path, {"next": next_id, "startingOffsets": position})

    def remove_start(self, partition: int, reader: str | None = None) -> None:
        """Forget it: the query's first batch is done."""
        path = self._start_path(partition, reader)
        with _writing(f"removing {path}"):
            path.unlink(missing_ok=True)

    def write_reader(self, partition: int, reader: str, next_id: int) -> None:
        """A query that does not write the log is done with everything below ``next_id``."""
        self._replace(self._directory(partition) / READERS_NAME / f"{reader}.json", {"next": next_id})

    def readers(self, partition: int) -> dict[str, int]:
        """What ``write_reader`` wrote, by reader."""
        found = {}
        for path in (self._directory(partition) / READERS_NAME).glob("*.json"):
            name = path.name.removesuffix(".json")
            if name.startswith(TEMPORARY_PREFIX) or name.endswith(".start"):
                continue
            try:
                content = json.loads(path.read_bytes())
            except FileNotFoundError:
                continue  # removed: the reader is gone for ever
            except (ValueError, OSError) as e:
                raise LogFormatError(f"reading {path}: {e}") from e
            match content:
                case {"next": int(next_id)}:
                    found[name] = next_id
                case _:
                    raise LogFormatError(f"reading {path}: it holds no position of a reader")
        return found

    def _replace(self, path: Path, content: object) -> None:
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        with _writing(f"writing {path}"):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _write_synced(temporary, json.dumps(content).encode())
            os.rename(temporary, path)
            _sync_directory(path.parent)

    def lock(self, partition: int, wait: float) -> WriterLock:
        """Become the writer of a partition.

        Args:
            wait: Seconds to wait for a writer that is just stopping.

        Raises:
            LogLockedError: Another writer holds it still; says who.
        """
        directory = self._directory(partition)
        return self._lock(
            directory / LOCK_NAME,
            wait,
            f"opening log {self.root}",
            "stop that query, or give this one a walLocation of its own",
        )

    def lock_reader(self, partition: int, reader: str) -> WriterLock:
        """Become the one query that reads along under this name.

        Raises:
            LogLockedError: Another one does; says who.
        """
        path = self._directory(partition) / READERS_NAME / f"{reader}.lock"
        return self._lock(
            path,
            15.0,
            f"reading along log {self.root} as {reader!r}",
            "give each such query a reader of its own",
        )

    def _lock(self, path: Path, wait: float, act: str, way_out: str) -> WriterLock:
        with _writing(f"creating {path.parent}"):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            file = open(path, "a+")  # noqa: SIM115 - it is held open
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as e:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    holder = file.read().strip() or "a writer that did not say who it is"
                    file.close()
                    raise LogLockedError(f"{act}: it is held by {holder}; {way_out}") from e
                time.sleep(0.05)  # flock has no wait with a deadline
            except OSError as e:
                file.close()
                raise LogWriteError(f"locking {path}: {e}") from e
        with _writing(f"writing {path}"):
            file.seek(0)
            file.truncate()
            file.write(
                f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T %z')}\n"
            )
            file.flush()
        return WriterLock(file)

    def _directory(self, partition: int) -> Path:
        return self.root / str(partition)


@contextmanager
def _writing(act: str) -> Iterator[None]:
    hints = {
        errno.ENOSPC: "; free space there, or set a smaller walMaxBytes",
        errno.EDQUOT: "; raise the quota, or set a smaller walMaxBytes",
        errno.EROFS: "; set walLocation to a directory that can be written",
        errno.EACCES: "; set walLocation to a directory that this user can write",
        errno.EPERM: "; set walLocation to a directory that this user can write",
    }
    try:
        yield
    except OSError as e:
        hint = hints.get(e.errno or 0, "")
        raise LogWriteError(f"{act}: {e.strerror or e}{hint}") from e


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_sync_directory = _sync_file
