"""Opens, reads and syncs files, and turns errors of the system into ours."""

from __future__ import annotations

import errno
import os
import socket
import stat
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
from zmq_datasource.messages.columns import MESSAGE_SCHEMA

# A file up to this size is read in one call.
_SMALL_BYTES = 256 << 10
# For reading lengths and metadata: of each batch Arrow then reads only one narrow column.
LENGTHS_ONLY = pa.ipc.IpcReadOptions(included_fields=[MESSAGE_SCHEMA.get_field_index("timestamp")])
# The advice for a directory or a storage that has lost its content.
MOUNT_AGAIN = (
    "The directory was unmounted, removed or emptied. Mount or restore it with all that was in it; nothing is written "
    "there until then"
)
# Errors that may pass: room is made, files are closed, a file system is mounted or connected again.
_TRANSIENT = frozenset(
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EMFILE", "ENFILE", "ENOMEM", "EIO", "EREMOTEIO", "EROFS", "EAGAIN"),
        *("EINTR", "EBUSY", "ENOLCK", "ENODEV", "ENXIO", "ESTALE", "ETIMEDOUT", "EHOSTDOWN"),
        *("EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED"),
        "ENOTCONN",
    )
    if hasattr(errno, name)  # macOS has no EREMOTEIO
)
_ANOTHER_USER = "; set walLocation to a directory that this user can write"
_NO_HARD_LINKS = "; set walLocation to a directory that this user can write, on a file system with hard links"
_HINTS = {
    errno.ENOENT: f". {MOUNT_AGAIN}",
    errno.ENOSPC: "; free space there, or set a smaller walMaxBytes",
    errno.EDQUOT: "; raise the quota, or set a smaller walMaxBytes",
    errno.EMFILE: "; raise the limit of open files (ulimit -n)",
    errno.EROFS: _ANOTHER_USER,
    errno.EACCES: _ANOTHER_USER,
    errno.EPERM: _NO_HARD_LINKS,
    errno.EOPNOTSUPP: _NO_HARD_LINKS,
    errno.ENOSYS: _NO_HARD_LINKS,
}


@contextmanager
def writing(act: str) -> Iterator[None]:
    """Turn the system's errors in a block that writes into ours.

    Args:
        act: The act, for the message, such as "writing PATH".

    Raises:
        DiskFaultError: An error that may pass.
        LogWriteError: Another error.
    """
    try:
        yield
    except OSError as e:
        kind = DiskFaultError if is_transient(e) or isinstance(e, FileNotFoundError) else LogWriteError
        raise kind(f"{act}: {e.strerror or e}{_HINTS.get(e.errno or 0, '')}") from e


def gone(act: str, path: str) -> DiskFaultError:
    """The error of an act that needs an object which was there, and is not there any more."""
    return DiskFaultError(f"{act}: {path}, which was there, is not there any more. {MOUNT_AGAIN}")


def this_process() -> str:
    """The name of this process in a lock that it holds, for other processes."""
    return f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T %z')}"


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn errors in a block that reads into ours. FileNotFoundError stays as it is.

    Raises:
        DiskFaultError: An error of the system that may pass.
        LogFormatError: Another error of the system, or a ValueError.
    """
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
    """Open a file for reading; return the file descriptor.

    Raises:
        OSError: It cannot be opened, or is not a file: a pipe would block, and a device has no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a directory, a pipe or a device, not a file", str(path))
    return descriptor


def read_file(path: Path | str) -> bytes:
    """Read a whole file. Raises what ``open_file`` does."""
    with open(open_file(path), "rb", buffering=0) as file:
        return file.read()


def open_to_read(path: Path | str) -> pa.NativeFile:
    """Open a file for Arrow, which reads only the parts that it needs. Raises what ``open_file`` does.

    The file is not mapped: an I/O error in a mapped file, or cutting the file, would end the process by SIGBUS.
    """
    with open(open_file(path), "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < _SMALL_BYTES:
            return pa.BufferReader(file.read())
    return pa.OSFile(str(path), "rb")


def is_transient(e: Exception) -> bool:
    """Whether this is an error of the system that may pass."""
    return isinstance(e, OSError) and e.errno in _TRANSIENT


def unreadable(act: str, e: Exception) -> LogError:
    """The error of a chunk that could not be read: a disk fault if the system's error may pass, otherwise damage."""
    return DiskFaultError(f"{act}: {e}") if is_transient(e) else DamagedChunkError.of(f"{act}: {e}")


def make_directory(path: Path) -> None:
    """Make a directory and all missing parents, durably."""
    if not path.is_dir():
        make_directory(path.parent)
        add_directory(path)


def add_directory(path: Path) -> None:
    """Make a directory durably, if it is missing. FileNotFoundError if its parent is missing."""
    if not path.is_dir():
        path.mkdir(mode=0o700, exist_ok=True)
        with suppress(PermissionError):  # a user may write to a directory that it may not read
            sync_file(path.parent)


def sync_file(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
