"""A store in a directory, on a disk or on a shared file system."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pyarrow as pa

from zmq_datasource.errors import DiskFaultError, KeyTakenError, LogLockedError, LogWriteError, OptionError
from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import PRIVATE
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log.files import (
    MOUNT_AGAIN,
    add_directory,
    make_directory,
    open_file,
    open_to_read,
    read_file,
    reading,
    sync_directory,
    sync_file,
    this_process,
    writing,
)
from zmq_datasource.log.store import Content, Entry, Holding, Part
from zmq_datasource.options.types import LocalPath

_log = logging.getLogger(__name__)

_HIDDEN = "."
_TEMPORARY = re.compile(r"\.put-[0-9a-f]{32}")
# A disk writes a sector as a whole or not at all.
_SECTOR_BYTES = 512
_COMPARED_BYTES = 1 << 20
# Attempts to list a directory. All of its names may disappear during a listing.
_LISTINGS = 10
# How often the holder of a key checks its file.
_CHECK_SECONDS = 1.0
# flock has no wait with a deadline.
_LOCK_PAUSE = 0.05  # seconds
# For a lock on a full disk, where its holder could not write its name.
_NAMELESS = "a process that could not write its name"


class DirectoryStore:
    """A directory as a ``Store``.

    A new object is written to a temporary file, forced to the disk, and then linked to its name. So a name appears only
    with the whole content, and the file system refuses the second of two links to one name.

    Args:
        root: The directory.

    Attributes:
        root: The directory.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        try:
            self.root = Path(LocalPath.read(os.fspath(root)))
        except ValueError as e:
            raise OptionError(f"option walLocation={str(root)!r}: {e}") from None
        # A follower looks up names all the time, and strings are faster to join than paths.
        self._path = str(self.root)

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self)!r})"

    def __str__(self) -> str:
        return self._path

    def path_of(self, key: str) -> str:
        return os.path.join(self._path, key)

    def exists(self) -> bool:
        with suppress(FileNotFoundError), reading(self._path):
            return stat.S_ISDIR(os.stat(self._path).st_mode)
        return False

    def create(self, *directories: str) -> None:
        with writing(f"making {self.root}"):
            make_directory(self.root)
            for directory in directories:
                make_directory(self.root / directory)

    def list(self, prefix: str = "", after: str = "") -> Sequence[Entry]:
        directory = self.root / prefix
        try:
            for _ in range(_LISTINGS):
                # If two names are added during a scan, it may show only the second one. But it shows every name that
                # was there before, so names that are newer than a first listing are left out.
                with reading(directory):
                    there = [name for name in os.listdir(directory) if _is_listed(name, after)]
                newest = max(there, default="")
                found = [entry for entry in self._entries(directory, after) if entry.name <= newest]
                if found or not there:  # otherwise all names were deleted meanwhile
                    return found
            return []
        except FileNotFoundError:
            self._check_root()
            return []

    def _entries(self, directory: Path, after: str) -> Iterator[Entry]:
        with reading(directory), os.scandir(directory) as found:
            for entry in found:
                if not _is_listed(entry.name, after):
                    continue
                try:
                    is_directory, about = entry.is_dir(), entry.stat()
                except FileNotFoundError:
                    if entry.is_symlink():  # a link to nothing is listed, so that opening it fails
                        yield Entry(entry.name, 0, 0.0, False)
                    continue  # it was deleted meanwhile
                if is_directory:
                    yield Entry(entry.name, 0, 0.0, True)
                else:
                    yield Entry(entry.name, about.st_size, about.st_mtime, False)

    def find(self, key: str) -> Entry | None:
        path = self.path_of(key)
        try:
            with reading(path):
                about = os.stat(path)
        except FileNotFoundError:
            self._check_root()
            return None
        return Entry(os.path.basename(path), about.st_size, about.st_mtime, False)

    def directory_of(self, prefix: str) -> Path:
        """The directory of the keys with this prefix."""
        return self.root / prefix

    def open(self, key: str, whole: bool = True) -> pa.NativeFile:
        path = self.path_of(key)
        try:
            with reading(path):
                return open_to_read(path)
        except FileNotFoundError:
            self._check_root()
            raise

    def put_new(self, key: str, content: Content) -> None:
        path = self.root / key
        if isinstance(content, Path):
            self._link_new(content, path)
            return
        with self._temporary_file(path, content) as temporary:
            failpoints.reach("log.store.before_link")
            while not _link(temporary, path):
                try:
                    same = _has_content(path, content)
                except FileNotFoundError as e:
                    if path.is_symlink():
                        raise LogWriteError(
                            f"writing {path}: there is a link, and no file where it leads"
                        ) from e
                    continue  # it was deleted, so the name is free again
                if not same:
                    raise KeyTakenError(f"writing {path}: there is such a file with other content")
                sync_file(path)  # the earlier call may have failed before this
                break
            failpoints.reach("log.store.after_link")

    def _link_new(self, file: Path, path: Path) -> None:
        """Link a file of this file system to a second name, which must be free."""
        with writing(f"writing {path}"):
            failpoints.reach("log.store.before_link")
            if not _link(file, path) and not _is_same(file, path):
                raise KeyTakenError(f"writing {path}: there is such a file with other content")
            failpoints.reach("log.store.after_link")
            sync_directory(path.parent)

    def put(self, key: str, content: bytes) -> None:
        path = self.root / key
        try:
            with self._temporary_file(path, [content]) as temporary:
                failpoints.reach("log.store.before_rename")
                os.rename(temporary, path)
                failpoints.reach("log.store.after_rename")
        except DiskFaultError as e:
            code = getattr(e.__cause__, "errno", None)
            if code not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with writing(f"writing {path}"):
                if not _overwrite_in_place(path, content):
                    raise

    @contextmanager
    def _temporary_file(self, path: Path, parts: Sequence[Part]) -> Iterator[Path]:
        """Write a temporary file beside a path for a block that links or renames it; delete it afterwards."""
        temporary = path.with_name(f".put-{uuid.uuid4().hex}")
        with writing(f"writing {path}"):
            try:
                failpoints.reach("log.store.before_write")
                self._add_directory(path.parent)
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
                with open(descriptor, "wb") as file:
                    for part in parts:
                        file.write(part)
                    file.flush()
                    failpoints.reach("log.store.after_write")
                    os.fsync(descriptor)
                    failpoints.reach("log.store.after_sync")
                yield temporary
            finally:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
            failpoints.reach("log.store.after_unlink")
            sync_directory(path.parent)

    def _add_directory(self, directory: Path) -> None:
        """Make a missing directory of a key, but not one directly in the root: only ``create`` makes these."""
        if directory.parent not in (self.root, self.root.parent):
            add_directory(directory)

    def delete(self, key: str) -> None:
        path = self.root / key
        with writing(f"deleting {path}"):
            failpoints.reach("log.store.before_delete")
            try:
                path.unlink()
            except FileNotFoundError:
                self._check_root()
            failpoints.reach("log.store.after_delete")

    def uncache(self, key: str) -> None:
        """Let the system drop an object from its memory, so that reading it uses the disk. It may have no effect."""
        if sys.platform == "linux":
            with suppress(OSError), open(open_file(self.root / key), "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def clean(self, prefix: str = "") -> None:
        """Delete temporary files of killed processes in a directory.

        A living process that is putting an object there loses its temporary file. Its call fails, and it must repeat
        the call.
        """
        directory = self.root / prefix
        with suppress(FileNotFoundError), reading(directory):
            for name in os.listdir(directory):
                if _TEMPORARY.fullmatch(name):
                    with writing(f"deleting {directory / name}"):
                        (directory / name).unlink(missing_ok=True)

    def _check_root(self) -> None:
        """Raise an error if the whole store is away. Called when an object is not found."""
        if not self.exists():
            raise DiskFaultError(f"using the log in {self.root}: this directory is not there. {MOUNT_AGAIN}")

    def hold(self, key: str, wait: float, note: str = "") -> DirectoryHold:
        deadline = time.monotonic() + wait
        path = self.root / key
        warned = False
        file = self._lock_file(path)
        try:
            while not _is_locked(file, path):
                if not _is_at(file, path):  # its holder has deleted the file
                    file.close()
                    file = self._lock_file(path)
                    continue
                if time.monotonic() >= deadline:
                    raise LogLockedError(f"{path} is held by {_name_in(_content(file))}")
                if not warned:
                    warned = True
                    _log.info("%s: another process holds it; waiting for up to %.0f s", path, wait)
                check_signals()
                time.sleep(_LOCK_PAUSE)
            return DirectoryHold(path, file, _sign(file, path, note))
        except BaseException:
            file.close()
            raise

    def _lock_file(self, path: Path) -> IO[bytes]:
        with writing(f"holding {path}"):
            self._add_directory(path.parent)
            # Not in append mode, in which pwrite would write at the end.
            return open(os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE), "r+b", buffering=0)

    def holder(self, key: str) -> Holding | None:
        path = self.root / key
        try:
            with reading(path), open(_open_to_lock(path), "rb", buffering=0) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    content = _content(file)
                    return Holding(_name_in(content), _note_in(content))
        except FileNotFoundError:
            self._check_root()
        return None

    def note(self, key: str) -> str:
        path = self.root / key
        try:
            with reading(path):
                return _note_in(read_file(path))
        except FileNotFoundError:
            self._check_root()
        return ""


class DirectoryHold:
    """A locked file. The kernel unlocks it when the process ends in any way.

    A shared file system may give the lock of a host that is cut off to another host, without telling the first one. So
    the holder writes a signature into the file, and checks it.
    """

    def __init__(self, path: Path, file: IO[bytes], signature: bytes) -> None:
        self._path, self._file, self._signature = path, file, signature
        self._next_check = 0.0
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        now = time.monotonic()
        if self._signature and self._lost is None and now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            with suppress(OSError):  # the next put reports this fault
                found = read_file(self._path)
                if found != self._signature:
                    self._lost = _name_in(found)
        return self._lost

    def release(self) -> None:
        self._file.close()


def _is_locked(file: IO[bytes], path: Path) -> bool:
    """Try to lock a file; return whether this process has the lock of the file that is now at the path."""
    with writing(f"holding {path}"):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return _is_at(file, path)


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    with suppress(FileNotFoundError), reading(path):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _sign(file: IO[bytes], path: Path, note: str) -> bytes:
    """Write this process's name and the note into a locked file; return the content, or nothing if the disk refuses."""
    content = f"{this_process()}\n{note}\n{uuid.uuid4().hex}\n".encode()
    try:
        # Overwrites the old content, which works on a full disk too.
        os.pwrite(file.fileno(), content, 0)
        os.ftruncate(file.fileno(), len(content))
    except OSError as e:
        # The lock holds without the name, and a log that has filled its disk must be opened to be emptied.
        _log.warning("writing the name of this process into the lock %s: %s", path, e.strerror)
        return b""
    return content


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _name_in(content: bytes) -> str:
    return content.decode(errors="replace").partition("\n")[0] or _NAMELESS


def _note_in(content: bytes) -> str:
    return "".join(content.decode(errors="replace").splitlines()[1:2])


def _open_to_lock(path: Path) -> int:
    try:
        return os.open(
            path, os.O_RDWR
        )  # a shared file system does not lock a file that is only open for reading
    except PermissionError:
        return os.open(path, os.O_RDONLY)
    except OSError as e:
        if e.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY)


def _is_listed(name: str, after: str) -> bool:
    return name > after and not name.startswith(_HIDDEN)


def _link(temporary: Path, path: Path) -> bool:
    """Link a file to its name; return False if the name is taken."""
    try:
        os.link(temporary, path)
    except FileNotFoundError:
        if not path.exists():
            raise
        return False
    except FileExistsError:
        return False
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        raise LogWriteError(
            f"writing {path}: {e.strerror}; the file system must have hard links: set another walLocation"
        ) from e
    return True


def _is_same(file: Path, path: Path) -> bool:
    """Whether both paths name the same file."""
    return file.exists() and os.path.samefile(file, path)


def _has_content(path: Path, parts: Sequence[Part]) -> bool:
    """Whether a file has exactly this content; FileNotFoundError if there is none."""
    views = [
        memoryview(part).cast("B") for part in parts
    ]  # in one format, because views of different formats are never equal
    with open(open_file(path), "rb") as file:
        if os.fstat(file.fileno()).st_size != sum(view.nbytes for view in views):
            return False
        return all(
            file.read(len(part := view[begin : begin + _COMPARED_BYTES])) == part
            for view in views
            for begin in range(0, view.nbytes, _COMPARED_BYTES)
        )


def _overwrite_in_place(path: Path, content: bytes) -> bool:
    """Overwrite a file in place, which needs no room; return False if it is missing, or too large for one sector.

    On a full disk this lets a reader record that it needs less, so that chunks can be deleted.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except FileNotFoundError:
        return False
    try:
        size = max(os.fstat(descriptor).st_size, len(content))
        if size > _SECTOR_BYTES:
            return False
        os.pwrite(descriptor, content.ljust(size), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True
