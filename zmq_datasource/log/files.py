"""What the parts of the log's storage stand on: paths, locks, whole writes, errors of the system as ours."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import socket
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self, TypeVar

import pyarrow as pa
import pyarrow.ipc

from zmq_datasource.errors import (
    RESTORE,
    DamagedChunkError,
    DiskFaultError,
    LogError,
    LogFormatError,
    LogLockedError,
    LogWriteError,
    OptionError,
)
from zmq_datasource.host import failpoints
from zmq_datasource.host.private_files import PRIVATE, make_private
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log.layout import DEAD_LETTERS_NAME, PARTITION, TEMPORARY_PREFIX
from zmq_datasource.messages.schemas import MESSAGE_SCHEMA
from zmq_datasource.options.types import LogLocation

__all__ = [
    "LENGTHS_ONLY",
    "MOUNT_AGAIN",
    "PartitionFiles",
    "WriterLock",
    "add_directory",
    "is_transient",
    "make_directory",
    "open_file",
    "open_to_read",
    "patiently",
    "read_file",
    "read_json",
    "reading",
    "sync_directory",
    "sync_file",
    "this_process",
    "unreadable",
    "write_synced",
    "writing",
]


_log = logging.getLogger(__name__)

T = TypeVar("T")

# Between attempts to read.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
# A file up to this size is read in one call.
_SMALL_BYTES = 256 << 10
# For a file whose rows are not wanted: of each batch Arrow reads the length, the metadata and one narrow column.
LENGTHS_ONLY = pa.ipc.IpcReadOptions(included_fields=[MESSAGE_SCHEMA.get_field_index("timestamp")])
# What a disk writes at once, or not at all.
_SECTOR_BYTES = 512
# What to do about a directory or a storage that has lost what was in it.
MOUNT_AGAIN = (
    "The directory was unmounted, removed or emptied. Mount or restore it with all that was in it; nothing is written "
    "there until then"
)
# The holder of a lock on a full disk could not write its name into it.
_NAMELESS = "a process that could not write its name"
# What may pass: somebody makes room, closes files, mounts or connects again.
_TRANSIENT = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EROFS),
        *(errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOLCK, errno.ENODEV, errno.ENXIO),
        *(
            errno.ESTALE,
            errno.ETIMEDOUT,
            errno.EHOSTDOWN,
            errno.EHOSTUNREACH,
            errno.ENETDOWN,
            errno.ENETUNREACH,
        ),
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN),
        *((errno.EREMOTEIO,) if sys.platform == "linux" else ()),
    }
)


class WriterLock:
    """Held by the one writer of a log partition; released by the kernel if the process dies."""

    def __init__(self, file: IO[str], path: Path, signature: bytes = b"") -> None:
        self._file = file
        self._path = path
        self._signature = signature

    @property
    def lost(self) -> str | None:
        """How it was lost, as far as its holder has noticed without being asked."""
        return None

    def check(self) -> None:
        """Make sure that no other process holds it, and that its file is there.

        A shared file system gives the lock of a host that is cut off to another, and the first does not notice.

        Raises:
            LogLockedError: Another process has taken it since.
            DiskFaultError: Its file cannot be read now, or is gone with the directory.
        """
        if not self._signature:  # the disk was full
            return
        try:
            with reading(self._path):
                found = read_file(self._path)
        except FileNotFoundError:
            raise DiskFaultError(
                f"writing to the log of {self._path}: this file, by which the process holds the log, is not there any "
                f"more. {MOUNT_AGAIN}"
            ) from None
        if found != self._signature:
            holder = found.decode(errors="replace").partition("\n")[0] or "another process"
            raise LogLockedError(
                f"writing to the log of {self._path}: this process has lost the lock, which is held by {holder}. "
                "What it has received and not sealed is lost; start it again, and it follows or takes over"
            )

    def release(self) -> None:
        self._file.close()


class PartitionFiles:
    """The directory of one log partition; for its arguments see ``LogStorage``.

    Attributes:
        patience: For so many seconds reading a chunk is tried again where the disk refuses or object storage does not
            answer. Whoever can try it again by itself has none.
        leisure: Seconds between two times that something is done which can wait; 0 where it costs nothing.
        deletes_for: Seconds after which a round of deletions makes way for readers that wait.
        always_syncs: Whether a file with a chunk's name is whole, whatever ``sync`` was.
    """

    patience = 0.0
    leisure = 0.0
    deletes_for = math.inf
    always_syncs = False

    def __init__(self, location: str, partition: int = PARTITION) -> None:
        self.partition = partition
        try:
            self._root = Path(LogLocation.read(location))
        except ValueError as e:
            raise OptionError(f"option walLocation={location!r}: {e}") from e
        self.root = str(self._root)
        self._directory = self._root / str(partition)

    @property
    def dead_letters(self) -> str:
        """The directory for messages that did not fit, if the user names none."""
        return str(self._directory / DEAD_LETTERS_NAME)

    def __repr__(self) -> str:
        return f"LogStorage({self.root!r}, {self.partition})"

    def __str__(self) -> str:
        return f"log {self.root}" + (f", partition {self.partition}" if self.partition else "")

    def of(self, partition: int) -> Self:
        """Another partition of the same log."""
        made = type(self)(self.root, partition)
        made.patience = self.patience
        return made

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """What is in the directory; nothing if there is none yet."""
        with suppress(FileNotFoundError), reading(self._directory), os.scandir(self._directory) as entries:
            yield from entries

    def names(self) -> set[str]:
        """The names in the directory; none if there is none yet."""
        with suppress(FileNotFoundError), reading(self._directory):
            return set(os.listdir(self._directory))
        return set()

    def stamp(self) -> tuple[int, ...]:
        """What is another whenever a name has come or gone, as finely as the file system tells the time."""
        with suppress(FileNotFoundError), reading(self._directory):
            found = self._directory.stat()
            # The time of modification can be set back by whoever restores a directory.
            return found.st_ino, found.st_mtime_ns, found.st_ctime_ns
        return ()

    def _add_directory(self, path: Path) -> None:
        """Make a directory in the partition's. All others are made when the log is opened, and never again.

        So a log whose disk was unmounted is not begun below the mount point.
        """
        if path.parent == self._directory:
            add_directory(path)

    def _remove(self, path: Path, what: str = "") -> None:
        """Delete a file; one that is gone already is fine."""
        with writing(f"removing {what}{path}"):
            path.unlink(missing_ok=True)

    def _replace(self, path: Path, content: object) -> None:
        self._replace_bytes(path, json.dumps(content).encode())

    def _replace_bytes(self, path: Path, content: bytes) -> None:
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        with writing(f"writing {path}"):
            self._add_directory(path.parent)
            try:
                failpoints.reach("log.small_file.before_write")
                write_synced(temporary, content)
                failpoints.reach("log.small_file.after_sync")
                os.rename(temporary, path)
            except OSError as e:
                with suppress(OSError):
                    temporary.unlink()
                if e.errno not in (errno.ENOSPC, errno.EDQUOT) or not _overwritten(path, content):
                    raise
            failpoints.reach("log.small_file.after_rename")
            sync_directory(path.parent)

    def _lock(
        self, path: Path, wait: float, act: str, way_out: str, sign: bool = True, note: str = ""
    ) -> WriterLock:
        """Hold the lock of a file.

        Args:
            wait: Seconds to wait for its holder.
            sign: Whether to write into it who holds it.
            note: What else to write into it, in one line; ``_lock_note`` reads it.
        """
        deadline = time.monotonic() + wait
        warned = False
        file = self._lock_file(path)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(file, path):
                    break
                file.close()  # whoever held it has removed the file
                file = self._lock_file(path)
            except BlockingIOError as e:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    holder = file.readline().strip() or _NAMELESS
                    file.close()
                    raise LogLockedError(f"{act}: it is held by {holder}; {way_out}") from e
                if not warned:
                    warned = True
                    _log.info("%s: another process holds it; waiting for up to %.0f s", act, wait)
                check_signals()
                time.sleep(0.05)  # flock has no wait with a deadline
            except OSError as e:
                file.close()
                raise LogWriteError(f"locking {path}: {e}") from e
        if not sign:
            return WriterLock(file, path)
        try:
            # Over what is there, which a full disk takes too.
            text = f"{this_process()}\n{note}\n{uuid.uuid4().hex}\n".encode()
            os.pwrite(file.fileno(), text, 0)
            os.ftruncate(file.fileno(), len(text))
        except OSError as e:
            # The lock holds without it, and a log that has filled its disk must be opened to be emptied.
            _log.warning("writing %s, which says who holds the lock: %s", path, e.strerror)
            text = b""
        return WriterLock(file, path, text)

    def _lock_holder(self, path: Path) -> str | None:
        """The process that has the lock of a file, as it says itself; None if there is none. Makes no file.

        Raises:
            DiskFaultError, LogFormatError: The file cannot be read.
        """
        try:
            with reading(path):
                descriptor = _open_to_lock(path)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.readline().decode(errors="replace").strip() or _NAMELESS
        return None

    def _lock_file(self, path: Path) -> IO[str]:
        with writing(f"creating {path.parent}"):
            self._add_directory(path.parent)
            # Not for appending, which would write after what is there.
            return open(os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE), "r+")

    def _lock_note(self, path: Path) -> str:
        """What the last holder of a lock has written into it; empty if it has not.

        Raises:
            DiskFaultError, LogFormatError: It cannot be read.
        """
        with suppress(FileNotFoundError), reading(path):
            return "".join(read_file(path).decode(errors="replace").splitlines()[1:2])
        return ""


def _open_to_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR)  # a shared file system locks no file that is open for reading alone
    except PermissionError:
        return os.open(path, os.O_RDONLY)
    except OSError as e:
        if e.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY)


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


@contextmanager
def writing(act: str) -> Iterator[None]:
    hints = {
        errno.ENOENT: f". {MOUNT_AGAIN}",
        errno.ENOSPC: "; free space there, or set a smaller walMaxBytes",
        errno.EDQUOT: "; raise the quota, or set a smaller walMaxBytes",
        errno.EMFILE: "; raise the limit of open files (ulimit -n)",
        errno.EROFS: "; set walLocation to a directory that can be written",
        errno.EACCES: "; set walLocation to a directory that this user can write",
        errno.EPERM: "; set walLocation to a directory that this user can write",
    }
    try:
        yield
    except OSError as e:
        hint = hints.get(e.errno or 0, "")
        passes = is_transient(e) or isinstance(e, FileNotFoundError)
        kind = DiskFaultError if passes else LogWriteError
        raise kind(f"{act}: {e.strerror or e}{hint}") from e


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


def this_process() -> str:
    """Who holds a lock, for those who wait for it."""
    return f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T %z')}"


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """For what is read: what is no file of a log's, and a fault of the system that may pass, as errors of ours."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as e:
        kind = DiskFaultError if is_transient(e) else LogFormatError
        hint = "; let this user read it" if isinstance(e, PermissionError) else ""
        raise kind(f"reading {path}: {e.strerror or e}{hint}") from e
    except ValueError as e:
        raise LogFormatError(f"reading {path}: {e}. {RESTORE}") from e


def open_file(path: Path | str) -> int:
    """A file descriptor for reading a file.

    Raises:
        OSError: It cannot be opened, or is no file: a pipe would be waited for, and a device has no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a directory, a pipe or a device, not a file", str(path))
    return descriptor


def read_file(path: Path | str) -> bytes:
    """The content of a file; errors as ``open_file``."""
    with open(open_file(path), "rb", buffering=0) as file:
        return file.read()


def open_to_read(path: Path | str) -> pa.NativeFile:
    """Open a file for Arrow, which reads of it only what it needs; errors as ``open_file``.

    The file is never mapped: an I/O error under a mapping, or a file that is cut meanwhile, ends the process by SIGBUS.
    """
    with open(open_file(path), "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < _SMALL_BYTES:
            return pa.BufferReader(file.read())
    return pa.OSFile(str(path), "rb")


def read_json(path: Path) -> object:
    """What a file holds.

    Raises:
        FileNotFoundError: There is none.
        DiskFaultError, LogFormatError: It cannot be read, or is not JSON.
    """
    try:
        with reading(path):
            return json.loads(read_file(path))
    except RecursionError as e:
        raise LogFormatError(f"reading {path}: it is nested too deeply. {RESTORE}") from e


def is_transient(e: Exception) -> bool:
    """Whether this is a fault of the system that may pass."""
    return isinstance(e, OSError) and e.errno in _TRANSIENT


def unreadable(act: str, e: Exception) -> LogError:
    """The error for a chunk that could not be read. That no file can be opened now is no fault of this one."""
    return DiskFaultError(f"{act}: {e}") if is_transient(e) else DamagedChunkError.of(f"{act}: {e}")


def patiently(ask: Callable[[], T], seconds: float) -> T:
    """Try again what the system or a storage refuses for now, for so many seconds; once at least."""
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        try:
            return ask()
        except (DiskFaultError, OSError) as e:
            if not (isinstance(e, DiskFaultError) or is_transient(e)) or time.monotonic() >= deadline:
                raise
            _log.info("%s; trying again", e)
            check_signals()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def make_directory(path: Path) -> None:
    """Make a directory and those above it, as far as they are missing, so that a crash of the machine keeps them."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    with suppress(PermissionError):  # one may be allowed to write there, and not to read
        sync_directory(path.parent)


def add_directory(path: Path) -> None:
    """Make a directory, unless it is there, in one that must be there.

    Raises:
        FileNotFoundError: That one is not there.
    """
    if path.is_dir():
        return
    path.mkdir(mode=0o700, exist_ok=True)
    sync_directory(path.parent)


def write_synced(path: Path, content: bytes) -> None:
    make_private(path)
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_directory = sync_file
