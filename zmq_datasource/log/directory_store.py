"""A store in a directory, on a disk or on a shared file system."""

from __future__ import annotations

import errno
import fcntl
import filecmp
import os
import random
import stat
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import pyarrow as pa

from zmq_datasource.errors import DiskFaultError, KeyTakenError, LogLockedError, OptionError
from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import PRIVATE, make_private
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log.files import (
    MOUNT_AGAIN,
    make_directory,
    open_file,
    open_to_read,
    read_file,
    reading,
    sync_directory,
    this_process,
    writing,
)
from zmq_datasource.log.layout import HEAD_NAME
from zmq_datasource.log.store import Content, Entry
from zmq_datasource.options.types import LocalPath

_HIDDEN = "."
# A head is put on a full disk, too, so that the log can be opened and emptied.
_RESERVE, _RESERVE_BYTES = ".reserve", 64 << 10
TEMPORARY = ".put-"
# A disk writes a sector as a whole or not at all.
_SECTOR_BYTES = 512
# How often the holder of a key checks its file.
_CHECK_SECONDS = 1.0
# flock has no wait with a deadline.
_LOCK_PAUSE = 0.05  # seconds
# The longest pause after which a lock that another process only looks at is tried again. A look takes some µs.
_LOOK_PAUSE = 0.001  # seconds


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
            for directory in ("", *directories):
                make_directory(self.root / directory)
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        """Make the reserve, if it is not there and the disk has room for it."""
        reserve = self.root / _RESERVE
        with suppress(OSError):
            if reserve.exists() and reserve.stat().st_size == _RESERVE_BYTES:
                return
            try:
                make_private(reserve)
                reserve.write_bytes(bytes(_RESERVE_BYTES))
            except OSError:
                _remove(reserve)

    def list(self, prefix: str = "", after: str = "") -> Sequence[Entry]:
        directory = self.root / prefix
        try:
            with reading(directory):
                while True:
                    # If two names are added during a scan, it may show only the second one. But it shows every name
                    # that was there before, so names that are newer than a first listing are left out.
                    there = [name for name in os.listdir(directory) if _is_listed(name, after)]
                    newest = max(there, default="")
                    found = [entry for entry in _entries(directory, after) if entry.name <= newest]
                    if found or not there:  # otherwise all names were deleted meanwhile
                        return found
        except FileNotFoundError:
            self._check_root()
            return []

    def find(self, key: str) -> Entry | None:
        path = self.path_of(key)
        try:
            with reading(path):
                return _entry(os.path.basename(path), os.stat(path))
        except FileNotFoundError:
            self._check_root()
            return None

    def open(self, key: str, whole: bool = True) -> pa.NativeFile:
        path = self.path_of(key)
        try:
            with reading(path):
                return open_to_read(path)
        except FileNotFoundError:
            self._check_root()
            raise

    def put_new(self, key: str, content: Content) -> None:
        path, reserve = self.root / key, self.root / _RESERVE
        try:
            self._put_new(path, content)
        except DiskFaultError as e:
            if not _is_full(e) or not key.startswith(HEAD_NAME) or not reserve.exists():
                raise
            _remove(reserve)
            self._put_new(path, content)

    def _put_new(self, path: Path, content: Content) -> None:
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
            if not _is_full(e):
                raise
            with writing(f"writing {path}"):
                if not _overwrite_in_place(path, content):
                    raise

    @contextmanager
    def _synced_file(self, path: Path, content: Content) -> Iterator[Path]:
        """Yield a file with this content, for a block that gives it its name; then force the name to the disk.

        Without a file of the caller it is a temporary one beside its name, which is deleted after the block.
        """
        with writing(f"writing {path}"), ExitStack() as stack:
            if isinstance(content, Path):
                yield content
            else:
                temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
                stack.callback(_remove, temporary)
                failpoints.reach("log.store.before_write")
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
                    for part in content:
                        file.write(part)
                    file.flush()
                    failpoints.reach("log.store.after_write")
                    os.fsync(file.fileno())
                    failpoints.reach("log.store.after_sync")
                yield temporary
            stack.close()
            failpoints.reach("log.store.after_unlink")
            sync_directory(path.parent)

    def delete(self, key: str) -> None:
        path = self.root / key
        with writing(f"deleting {path}"):
            failpoints.reach("log.store.before_delete")
            try:
                path.unlink()
            except FileNotFoundError:
                self._check_root()
            else:
                self._keep_reserve()  # a head may have needed it
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
        with writing(f"cleaning {directory}"):
            for path in directory.glob(f"{TEMPORARY}*"):
                path.unlink(missing_ok=True)

    def _check_root(self) -> None:
        """Raise an error if the whole store is away. Called when an object is not found."""
        if not self.exists():
            raise DiskFaultError(f"using the log in {self.root}: this directory is not there. {MOUNT_AGAIN}")

    def hold(self, key: str, wait: float) -> DirectoryHold:
        deadline = time.monotonic() + wait
        path = self.root / key
        while True:
            with writing(f"holding {path}"):
                if (file := _locked_file(path)) is not None:
                    return DirectoryHold(path, file)
            if time.monotonic() >= deadline:
                raise LogLockedError(f"{path} is held by {self._last_holder(key)}")
            check_signals()
            time.sleep(_LOCK_PAUSE)

    def holder(self, key: str) -> str | None:
        path = self.root / key
        try:
            with reading(path), open(open_file(path), "rb", buffering=0) as file:
                if not _flock(file, fcntl.LOCK_SH):
                    return _holder_in(file.read())
        except FileNotFoundError:
            self._check_root()
        return None

    def _last_holder(self, key: str) -> str:
        """The name of the last process that has held a key."""
        path = self.root / key
        try:
            with reading(path):
                return _holder_in(read_file(path))
        except FileNotFoundError:
            self._check_root()
        return _holder_in(b"")


class DirectoryHold:
    """A locked file. The kernel unlocks it when the process ends in any way.

    A shared file system may give the lock of a host that is cut off to another host, without telling the first one. So
    the holder writes a signature into the file, and checks it.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._next_check = 0.0
        self._lost: str | None = None
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
        now = time.monotonic()
        if self._signature and self._lost is None and now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            with suppress(OSError):  # the next put reports this fault
                found = read_file(self._path)
                if found != self._signature:
                    self._lost = _holder_in(found)
        return self._lost

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
            if not _lock(file):
                return None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    stack.pop_all()
                    return file
        # The holder before has deleted the file.


def _lock(file: IO[bytes]) -> bool:
    """Lock a file; return False if another process holds it.

    ``holder`` asks with a shared lock, because flock has no question that takes none. So a lock that is refused, and is
    not held by one process alone, is free.
    """
    while not _flock(file, fcntl.LOCK_EX):
        if not _flock(file, fcntl.LOCK_SH):
            return False
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(random.uniform(0, _LOOK_PAUSE))  # random, so that two processes do not meet again
    return True


def _flock(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_full(e: DiskFaultError) -> bool:
    """Whether the disk or the quota is full."""
    return getattr(e.__cause__, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


def _is_listed(name: str, after: str) -> bool:
    return name > after and not name.startswith(_HIDDEN)


def _entries(directory: Path, after: str) -> Iterator[Entry]:
    with os.scandir(directory) as found:
        for entry in found:
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                if _is_listed(entry.name, after):
                    # A link to nothing is listed, so that opening it fails.
                    yield _entry(entry.name, entry.stat(follow_symlinks=os.path.exists(entry)))


def _entry(name: str, about: os.stat_result) -> Entry:
    if stat.S_ISDIR(about.st_mode):
        return Entry(name, 0, 0.0, True)
    return Entry(name, about.st_size, about.st_mtime, False)


def _is_same(file: Path, path: Path) -> bool:
    """Whether both files have the same content; False if there is nothing to read at the path."""
    try:
        return filecmp.cmp(file, path, shallow=False)
    except FileNotFoundError:  # it was deleted meanwhile, or is a link that leads nowhere
        return False


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


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
