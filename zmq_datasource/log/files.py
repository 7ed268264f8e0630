"""What the parts of the log's storage stand on: paths, locks, whole writes, errors of the system as ours."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from zmq_datasource.errors import (
    RESTORE,
    DamagedChunkError,
    DiskFaultError,
    LogError,
    LogFormatError,
    LogWriteError,
)
from zmq_datasource.messages.schemas import MESSAGE_SCHEMA

__all__ = [
    "LENGTHS_ONLY",
    "MOUNT_AGAIN",
    "add_directory",
    "is_transient",
    "make_directory",
    "open_file",
    "open_to_read",
    "read_file",
    "reading",
    "sync_directory",
    "sync_file",
    "this_process",
    "unreadable",
    "writing",
]


# A file up to this size is read in one call.
_SMALL_BYTES = 256 << 10
# For a file whose rows are not wanted: of each batch Arrow reads the length, the metadata and one narrow column.
LENGTHS_ONLY = pa.ipc.IpcReadOptions(included_fields=[MESSAGE_SCHEMA.get_field_index("timestamp")])
# What to do about a directory or a storage that has lost what was in it.
MOUNT_AGAIN = (
    "The directory was unmounted, removed or emptied. Mount or restore it with all that was in it; nothing is written "
    "there until then"
)
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


def is_transient(e: Exception) -> bool:
    """Whether this is a fault of the system that may pass."""
    return isinstance(e, OSError) and e.errno in _TRANSIENT


def unreadable(act: str, e: Exception) -> LogError:
    """The error for a chunk that could not be read. That no file can be opened now is no fault of this one."""
    return DiskFaultError(f"{act}: {e}") if is_transient(e) else DamagedChunkError.of(f"{act}: {e}")


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


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_directory = sync_file
