"""The files of a log that grow in place on this machine, and are no objects of its store.

Open chunks are in the log's directory (``open_chunk``). Staged attempts of a log in a bucket are in a temporary
directory: if that is lost, nothing in it was acknowledged, and the senders send it again (``staging``).
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pyarrow as pa

from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import PRIVATE
from zmq_datasource.log.files import (
    add_directory,
    open_file,
    open_to_read,
    read_file,
    reading,
    sync_directory,
    sync_file,
    writing,
)
from zmq_datasource.log.layout import STAGING_NAME, TEMPORARY_PREFIX, open_chunk_name, parse_open_chunk_name
from zmq_datasource.log.store import Part

# The limit of one system call.
_MOST_PARTS = 1024


class OpenChunkFiles:
    """Files in a directory to which one writer appends.

    Args:
        directory: The directory of the log partition, or the one below it for staged attempts.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path_of(self, name: str) -> Path:
        """The path of a file."""
        return self._directory / name

    def firsts(self) -> list[int]:
        """The first ids of the open chunks: at most one, if nothing went wrong."""
        with suppress(FileNotFoundError), reading(self._directory):
            found = map(parse_open_chunk_name, os.listdir(self._directory))
            return sorted(first for first in found if first is not None)
        return []

    def open(self, first: int) -> int:
        """Open an open chunk for reading; return a file descriptor. FileNotFoundError if the chunk is sealed."""
        path = self._directory / open_chunk_name(first)
        with reading(path):
            return open_file(path)

    def read(self, first: int) -> pa.Buffer:
        """Read an open chunk. FileNotFoundError if it is sealed."""
        path = self._directory / open_chunk_name(first)
        with reading(path):
            return pa.py_buffer(read_file(path))

    def write(self, name: str, offset: int, parts: Sequence[Part], durably: bool = True) -> int:
        """Append to a file, which ends at ``offset``. After an error the caller repeats the call with the same offset.

        Args:
            durably: Whether to force the file to the disk.

        Returns:
            The new end.

        Raises:
            LogWriteError: The file system refused. The file is cut to ``offset`` again if possible.
        """
        path = self._directory / name
        with writing(f"writing {path}"):
            descriptor = os.open(path, os.O_RDWR | (0 if offset else os.O_CREAT | os.O_TRUNC), PRIVATE)
            try:
                failpoints.reach("log.group.before_write")
                end = write_whole(descriptor, parts, offset)
                failpoints.reach("log.group.after_write")
                if durably:
                    sync_file(path)
                failpoints.reach("log.group.after_sync")
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(descriptor, offset)
                raise
            finally:
                os.close(descriptor)
            if durably and not offset:
                sync_directory(path.parent)
        return end

    def cut(self, first: int, size: int) -> None:
        """Cut an open chunk to this size."""
        path = self._directory / open_chunk_name(first)
        with writing(f"writing {path}"):
            os.truncate(path, size)

    def remove(self, name: str) -> None:
        """Delete a file, after its content has become a chunk or a compact copy was given up."""
        failpoints.reach("log.open_chunk.before_remove")
        path = self._directory / name
        with writing(f"removing {path}"):
            path.unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Delete the files of a crashed writer. The present writer calls this after it has recovered them."""
        with writing(f"cleaning {self._directory}"):
            for path in self._directory.glob(f"{TEMPORARY_PREFIX}*.arrow"):
                path.unlink(missing_ok=True)


def write_whole(descriptor: int, parts: Sequence[Part], offset: int) -> int:
    """Write all parts to a file from ``offset`` on; return the end."""
    rest = deque(memoryview(part) for part in parts)
    while rest:
        written = os.pwritev(descriptor, list(islice(rest, _MOST_PARTS)), offset)
        offset += written
        while rest and written >= len(rest[0]):
            written -= len(rest.popleft())
        if written:
            rest[0] = rest[0][written:]
    return offset


_SUFFIX = ".arrow"
# More than the schema at the beginning of an attempt's file takes.
_HEAD_BYTES = 16 << 10
_BLOCK_BYTES = 4096
# An attempt has 32 hexadecimal digits.
_STAGED_NAME = re.compile(r"[0-9a-f]{32}\.arrow")


def bytes_on_disk(size: int) -> int:
    """The room that a file takes on disk: whole blocks, and at least one."""
    return (size // _BLOCK_BYTES + 1) * _BLOCK_BYTES


class StagedFiles:
    """One file for each attempt, hidden until it is whole.

    Args:
        beside: The directory of the log partition; None for a log in a bucket.
        check_log: Raises ``DiskFaultError`` while the log, and so the files beside it, is away.
    """

    def __init__(self, beside: Path | None, check_log: Callable[[], object] = lambda: None) -> None:
        self.check_log = check_log
        if beside is None:
            beside = Path(tempfile.mkdtemp(prefix="zmq_datasource-"))
            weakref.finalize(self, shutil.rmtree, beside, ignore_errors=True)
        self._directory = beside / STAGING_NAME

    def __str__(self) -> str:
        return str(self._directory)

    def _staged_path(self, attempt: str) -> Path:
        return self._directory / f"{attempt}{_SUFFIX}"

    def _unfinished_path(self, attempt: str) -> Path:
        return self._directory / f"{TEMPORARY_PREFIX}{attempt}{_SUFFIX}"

    def write(self, attempt: str, offset: int, parts: Sequence[Part]) -> int:
        """Append to the hidden file of an attempt, which ends at ``offset``: see ``OpenChunkFiles.write``."""
        path = self._unfinished_path(attempt)
        if not offset:
            with writing(f"writing {path}"):
                add_directory(path.parent)
        # It is forced to the disk once, when the attempt is whole.
        return OpenChunkFiles(self._directory).write(path.name, offset, parts, durably=False)

    def finish(self, attempt: str) -> None:
        """Make the file of a whole attempt visible, durably."""
        path, final = self._unfinished_path(attempt), self._staged_path(attempt)
        with writing(f"writing {final}"):
            failpoints.reach("log.staged.before_sync")
            sync_file(path)
            failpoints.reach("log.staged.after_sync")
            os.rename(path, final)
            failpoints.reach("log.staged.after_rename")
            sync_directory(final.parent)

    def names(self) -> list[str]:
        """All finished attempts, in order."""
        names = sorted(self._all_names())
        return [name.removesuffix(_SUFFIX) for name in names if _STAGED_NAME.fullmatch(name)]

    def _all_names(self) -> list[str]:
        with suppress(FileNotFoundError), reading(self._directory):
            return os.listdir(self._directory)
        return []

    def size_of(self, attempt: str) -> int:
        """The size of an attempt's file.

        Raises:
            LogError: The disk refused.
        """
        path = self._staged_path(attempt)
        with reading(path):
            return path.stat().st_size

    def head_of(self, attempt: str) -> bytes:
        """The beginning of an attempt's file, which has its schema."""
        file = open_file(self._staged_path(attempt))
        try:
            return os.pread(file, _HEAD_BYTES, 0)
        finally:
            os.close(file)

    def open(self, attempt: str) -> pa.NativeFile:
        """Open an attempt's file for reading."""
        return open_to_read(self._staged_path(attempt))

    def file_to_append(self, attempt: str) -> tuple[OpenChunkFiles, str]:
        """The directory and name with which to append to a finished attempt."""
        return OpenChunkFiles(self._directory), self._staged_path(attempt).name

    def remove(self, attempt: str) -> None:
        """Delete an attempt, finished or not."""
        _remove(self._staged_path(attempt))
        _remove(self._unfinished_path(attempt))

    def remove_unfinished(self) -> None:
        """Delete the unfinished files of a crashed writer. The holder of the lock calls this."""
        for name in self._all_names():
            if name.startswith(TEMPORARY_PREFIX) and _STAGED_NAME.fullmatch(
                name.removeprefix(TEMPORARY_PREFIX)
            ):
                _remove(self._directory / name)


def _remove(path: Path) -> None:
    with writing(f"removing {path}"):
        path.unlink(missing_ok=True)
