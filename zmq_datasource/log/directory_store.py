"""A store that is a directory, on a disk or on a shared file system."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pyarrow as pa

from zmq_datasource.errors import DiskFaultError, LogLockedError, LogWriteError, OptionError
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
from zmq_datasource.log.store import Content, Entry, Holding, KeyTakenError, Part
from zmq_datasource.options.types import LogLocation

__all__ = ["DirectoryStore"]

_log = logging.getLogger(__name__)

_HIDDEN = "."
_TEMPORARY = re.compile(r"\.put-[0-9a-f]{32}")
# What a disk writes at once, or not at all.
_SECTOR_BYTES = 512
_COMPARED_BYTES = 1 << 20
# So often a directory is listed whose names all go away meanwhile.
_LISTINGS = 10
# How often the holder of a key reads the file again.
_LOOKING_SECONDS = 1.0
# flock has no wait with a deadline.
_LOCK_PAUSE = 0.05
# The holder of a lock on a full disk could not write its name into the file.
_NAMELESS = "a process that could not write its name"


class DirectoryStore:
    """A directory as a ``Store``.

    A new object is a private temporary file that is forced to the disk and then linked to its name. So a name is there
    only with the whole content, and of two links to one name the file system refuses the second.

    Args:
        root: The directory.
        sync: Whether ``put_new`` forces an object to the disk. Without it a crash of the machine may tear the object.

    Attributes:
        root: The directory.
        sync: As given.
    """

    def __init__(self, root: str | os.PathLike[str], sync: bool = True) -> None:
        try:
            self.root = Path(LogLocation.read(os.fspath(root)))
        except ValueError as e:
            raise OptionError(f"option walLocation={str(root)!r}: {e}") from e
        self.sync = sync
        self._path = str(
            self.root
        )  # a follower asks for names all the time, and strings are joined sooner than paths

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
                # A directory is no list: of two names that are added meanwhile it may show the second one alone. But
                # each name that was there before is shown, so what is new since is left out.
                with reading(directory):
                    there = [name for name in os.listdir(directory) if _is_listed(name, after)]
                newest = max(there, default="")
                found = [entry for entry in self._entries(directory, after) if entry.name <= newest]
                if found or not there:  # else all were deleted meanwhile
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
                    if entry.is_symlink():  # opening it fails, and is not left out
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
        with self._written(path, content, self.sync) as temporary:
            failpoints.reach("log.store.before_link")
            while not _linked(temporary, path):
                try:
                    same = _holds(path, content)
                except FileNotFoundError as e:
                    if path.is_symlink():
                        raise LogWriteError(
                            f"writing {path}: there is a link, and no file where it leads"
                        ) from e
                    continue  # it was deleted meanwhile
                if not same:
                    raise KeyTakenError(f"writing {path}: there is such a file with other content")
                if self.sync:  # the earlier call may have ended before that
                    sync_file(path)
                break
            failpoints.reach("log.store.after_link")

    def _link_new(self, file: Path, path: Path) -> None:
        """Give a file in this file system a second name, which must be free."""
        with writing(f"writing {path}"):
            failpoints.reach("log.store.before_link")
            if not _linked(file, path) and not _is_same(file, path):
                raise KeyTakenError(f"writing {path}: there is such a file with other content")
            failpoints.reach("log.store.after_link")
            if self.sync:
                sync_directory(path.parent)

    def put(self, key: str, content: bytes) -> None:
        path = self.root / key
        try:
            with self._written(path, [content], True) as temporary:
                failpoints.reach("log.store.before_rename")
                os.rename(temporary, path)
                failpoints.reach("log.store.after_rename")
        except DiskFaultError as e:
            code = getattr(e.__cause__, "errno", None)
            if code not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with writing(f"writing {path}"):
                if not _overwritten(path, content):
                    raise

    @contextmanager
    def _written(self, path: Path, parts: Sequence[Part], sync: bool) -> Iterator[Path]:
        """Write a temporary file beside a path; after the block, which gives it its name, it is gone."""
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
                    if sync:
                        os.fsync(descriptor)
                        failpoints.reach("log.store.after_sync")
                yield temporary
            finally:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
            failpoints.reach("log.store.after_unlink")
            if sync:
                sync_directory(path.parent)

    def _add_directory(self, directory: Path) -> None:
        """Make the last directory above a key, if it is missing; one directly in the root only ``create`` makes."""
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

    def clean(self, prefix: str = "") -> None:
        """Delete the temporary files in a directory, which processes that were killed have left there.

        A process that is about to put an object there fails, and repeats its call.
        """
        directory = self.root / prefix
        with suppress(FileNotFoundError), reading(directory):
            for name in os.listdir(directory):
                if _TEMPORARY.fullmatch(name):
                    with writing(f"deleting {directory / name}"):
                        (directory / name).unlink(missing_ok=True)

    def _check_root(self) -> None:
        """Tell an object that is not there from a store that is away.

        Raises:
            DiskFaultError: The root is missing.
        """
        if not self.exists():
            raise DiskFaultError(f"using the log in {self.root}: this directory is not there. {MOUNT_AGAIN}")

    def hold(self, key: str, wait: float, note: str = "") -> DirectoryHold:
        deadline = time.monotonic() + wait
        path = self.root / key
        warned = False
        file = self._lock_file(path)
        try:
            while not _is_locked(file, path):
                if not _is_at(file, path):  # its holder has removed the file
                    file.close()
                    file = self._lock_file(path)
                    continue
                if time.monotonic() >= deadline:
                    raise LogLockedError(f"{path} is held by {_who(_content(file))}")
                if not warned:
                    warned = True
                    _log.info("%s: another process holds it; waiting for up to %.0f s", path, wait)
                check_signals()
                time.sleep(_LOCK_PAUSE)
            return DirectoryHold(path, file, _signed(file, path, note))
        except BaseException:
            file.close()
            raise

    def _lock_file(self, path: Path) -> IO[bytes]:
        with writing(f"holding {path}"):
            self._add_directory(path.parent)
            # Not for appending, which would write after what is there.
            return open(os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE), "r+b", buffering=0)

    def holder(self, key: str) -> Holding | None:
        path = self.root / key
        try:
            with reading(path), open(_open_to_lock(path), "rb", buffering=0) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    content = _content(file)
                    return Holding(_who(content), _note(content))
        except FileNotFoundError:
            self._check_root()
        return None

    def note(self, key: str) -> str:
        path = self.root / key
        try:
            with reading(path):
                return _note(read_file(path))
        except FileNotFoundError:
            self._check_root()
        return ""


class DirectoryHold:
    """A locked file. The kernel releases it when the process ends, however it ends.

    A shared file system gives the lock of a host that is cut off to another host, and the first is not told. So the
    holder writes a signature into the file, and reads it again.
    """

    def __init__(self, path: Path, file: IO[bytes], signature: bytes) -> None:
        self._path, self._file, self._signature = path, file, signature
        self._next_look = 0.0
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        now = time.monotonic()
        if self._signature and self._lost is None and now >= self._next_look:
            self._next_look = now + _LOOKING_SECONDS
            with suppress(OSError):  # the next object that is put meets it, too
                found = read_file(self._path)
                if found != self._signature:
                    self._lost = _who(found)
        return self._lost

    def release(self) -> None:
        self._file.close()


def _is_locked(file: IO[bytes], path: Path) -> bool:
    """Try to lock a file; whether this process has it, and the file is still at its path."""
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


def _signed(file: IO[bytes], path: Path, note: str) -> bytes:
    """Write into a locked file which process has it; what is written, or nothing if the disk refuses."""
    content = f"{this_process()}\n{note}\n{uuid.uuid4().hex}\n".encode()
    try:
        # Over the old content, which a full disk takes too.
        os.pwrite(file.fileno(), content, 0)
        os.ftruncate(file.fileno(), len(content))
    except OSError as e:
        # The lock holds without it, and a log that has filled its disk must be opened to be emptied.
        _log.warning("writing %s, which says who holds the lock: %s", path, e.strerror)
        return b""
    return content


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _who(content: bytes) -> str:
    return content.decode(errors="replace").partition("\n")[0] or _NAMELESS


def _note(content: bytes) -> str:
    return "".join(content.decode(errors="replace").splitlines()[1:2])


def _open_to_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR)  # a shared file system locks no file that is open for reading alone
    except PermissionError:
        return os.open(path, os.O_RDONLY)
    except OSError as e:
        if e.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY)


def _is_listed(name: str, after: str) -> bool:
    return name > after and not name.startswith(_HIDDEN)


def _linked(temporary: Path, path: Path) -> bool:
    """Give a file its name; False if the name is taken."""
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
    """Whether a file has this name, too."""
    return file.exists() and os.path.samefile(file, path)


def _holds(path: Path, parts: Sequence[Part]) -> bool:
    """Whether a file has just this content; FileNotFoundError if there is none."""
    views = [memoryview(part).cast("B") for part in parts]  # Arrow's are of another format, and never equal
    with open(open_file(path), "rb") as file:
        if os.fstat(file.fileno()).st_size != sum(view.nbytes for view in views):
            return False
        return all(
            file.read(len(part := view[begin : begin + _COMPARED_BYTES])) == part
            for view in views
            for begin in range(0, view.nbytes, _COMPARED_BYTES)
        )


def _overwritten(path: Path, content: bytes) -> bool:
    """Replace a file where it is, which takes no room; only one so small that a disk writes it as a whole.

    A full disk may wait for just this: what a reader needs no more can be deleted once it has said so.
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
