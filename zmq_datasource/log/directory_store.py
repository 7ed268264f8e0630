"""A store in a directory, on a disk or on a shared file system."""

from __future__ import annotations

import errno
import fcntl
import filecmp
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import pyarrow as pa

from zmq_datasource.errors import DiskFaultError, KeyTakenError, LogLockedError, OptionError
from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import PRIVATE
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log.files import (
    make_directory,
    open_file,
    open_to_read,
    read_file,
    reading,
    sync_file,
    this_process,
    writing,
)
from zmq_datasource.log.store import Content, Entry
from zmq_datasource.options.types import LocalPath

_TEMPORARY = ".put-"
# A disk writes a sector as a whole or not at all.
_SECTOR_BYTES = 512
# flock has no wait with a deadline.
_LOCK_PAUSE = 0.01  # seconds


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

    def __str__(self) -> str:
        return self._path

    def path_of(self, key: str) -> str:
        return os.path.join(self._path, key)

    def create(self, *directories: str) -> None:
        with writing(f"making {self.root}"):
            for directory in ("", *directories):
                make_directory(self.root / directory)

    def list(self, prefix: str = "") -> Sequence[Entry]:
        directory = self.root / prefix
        with suppress(FileNotFoundError), reading(directory):
            while True:
                # If two names are added during a scan, it may show only the second one. But it shows every name that
                # was there before, so names that are newer than a first listing are left out.
                there = os.listdir(directory)
                newest = max(there, default="")
                found = [entry for entry in _entries(directory) if entry.name <= newest]
                if found or not there:  # otherwise all names were deleted meanwhile
                    return found
        return []

    def find(self, key: str) -> Entry | None:
        path = self.path_of(key)
        with suppress(FileNotFoundError), reading(path):
            return _entry(os.path.basename(path), os.stat(path))
        return None

    def open(self, key: str) -> pa.NativeFile:
        path = self.path_of(key)
        with reading(path):
            return open_to_read(path)

    def put_new(self, key: str, content: Content) -> None:
        path = self.root / key
        with self._synced_file(path, content) as file:
            failpoints.reach("log.store.before_link")
            try:
                os.link(file, path)
            except FileExistsError as e:
                if not _is_same(file, path):
                    raise KeyTakenError(f"writing {path}: there is such a file with other content") from e
            failpoints.reach("log.store.after_link")

    def put(self, key: str, content: bytes) -> None:
        path = self.root / key
        try:
            with self._synced_file(path, [content]) as file:
                failpoints.reach("log.store.before_rename")
                os.rename(file, path)
                failpoints.reach("log.store.after_rename")
        except DiskFaultError as e:
            if getattr(e.__cause__, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with writing(f"writing {path}"):
                if not _overwrite_in_place(path, content):
                    raise

    @contextmanager
    def _synced_file(self, path: Path, content: Content) -> Iterator[Path]:
        """Yield a temporary file with this content, for a block that names it; then force the name to the disk."""
        temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
        with writing(f"writing {path}"):
            try:
                failpoints.reach("log.store.before_write")
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
                    for part in content:
                        file.write(part)
                    file.flush()
                    failpoints.reach("log.store.after_write")
                    os.fsync(file.fileno())
                    failpoints.reach("log.store.after_sync")
                yield temporary
            finally:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
            failpoints.reach("log.store.after_unlink")
            sync_file(path.parent)

    def delete(self, key: str) -> None:
        path = self.root / key
        with writing(f"deleting {path}"):
            failpoints.reach("log.store.before_delete")
            path.unlink(missing_ok=True)
            failpoints.reach("log.store.after_delete")

    def tidy_up(self, prefix: str) -> None:
        """Tidy up a directory after killed processes: force its names to the disk, and delete temporary files.

        A living process that is putting an object there loses its temporary file. Its call fails, and it must repeat
        the call.
        """
        directory = self.root / prefix
        with writing(f"cleaning {directory}"):
            sync_file(directory)
            for path in directory.glob(f"{_TEMPORARY}*"):
                path.unlink(missing_ok=True)

    def hold(self, key: str, wait: float) -> DirectoryHold:
        deadline = time.monotonic() + wait
        path = self.root / key
        while True:
            with writing(f"holding {path}"):
                if (file := _locked_file(path)) is not None:
                    return DirectoryHold(path, file)
            # The lock may be that of a process that asks for the holder, for some microseconds.
            if (holder := self.holder(key)) is not None and time.monotonic() >= deadline:
                raise LogLockedError(f"{path} is held by {holder}")
            check_signals()
            time.sleep(_LOCK_PAUSE)

    def holder(self, key: str) -> str | None:
        path = self.root / key
        with suppress(FileNotFoundError), reading(path), open(open_file(path), "rb", buffering=0) as file:
            # flock has no question that takes no lock. Several processes may have a shared one.
            if not _flock(file, fcntl.LOCK_SH):
                return _holder_in(file.read())
        return None


class DirectoryHold:
    """A locked file. The kernel unlocks it when the process ends in any way.

    A shared file system may give the lock of a host that is cut off to another host, without telling the first one. So
    the holder writes a signature into the file, and checks it.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        content = f"{this_process()}\n{uuid.uuid4().hex}\n".encode()
        self._signature: bytes | None = content
        try:
            os.pwrite(file.fileno(), content, 0)
            os.ftruncate(file.fileno(), len(content))
        except OSError:
            # The lock holds without the name: a log that has filled its disk must be opened to be emptied.
            self._signature = None

    @property
    def lost(self) -> str | None:
        with suppress(OSError):  # the next put reports this fault
            if self._signature and (found := read_file(self._path)) != self._signature:
                return _holder_in(found)
        return None

    def release(self) -> None:
        self._file.close()


def _holder_in(content: bytes) -> str:
    return content.decode(errors="replace").partition("\n")[0] or "a process that could not write its name"


def _locked_file(path: Path) -> IO[bytes] | None:
    """Open and lock the file at a path, which is made if there is none; None if another process holds it."""
    while True:
        with ExitStack() as stack:
            # Not in append mode, in which pwrite would write at the end.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE)
            file = stack.enter_context(open(descriptor, "r+b", buffering=0))
            if not _flock(file, fcntl.LOCK_EX):
                return None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    stack.pop_all()
                    return file
        # The holder before has deleted the file.


def _flock(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _entries(directory: Path) -> Iterator[Entry]:
    with os.scandir(directory) as found:
        for entry in found:
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                # A link to nothing is listed, so that opening it fails.
                yield _entry(entry.name, entry.stat(follow_symlinks=os.path.exists(entry)))


def _entry(name: str, about: os.stat_result) -> Entry:
    return Entry(name, about.st_size, about.st_mtime)


def _is_same(file: Path, path: Path) -> bool:
    """Whether both files have the same content; False if there is nothing to read at the path."""
    try:
        return filecmp.cmp(file, path, shallow=False)
    except FileNotFoundError:  # it was deleted meanwhile, or is a link that leads nowhere
        return False


def _overwrite_in_place(path: Path, content: bytes) -> bool:
    """Overwrite a file in place, which needs no room; return False if it is missing, or too large for one sector.

    On a full disk this lets a reader record that it needs less, so that chunks can be deleted.
    """
    with suppress(FileNotFoundError), open(path, "r+b", buffering=0) as file:
        size = max(os.fstat(file.fileno()).st_size, len(content))
        if size <= _SECTOR_BYTES:
            file.write(content.ljust(size))
            os.fsync(file.fileno())
            return True
    return False
