"""The files of what is staged: see ``log.staging``.

They are on this machine, also where the log is in a bucket: in a temporary directory then. What is lost with it was not
acknowledged, and its sender sends it again.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import PRIVATE
from zmq_datasource.log.files import (
    add_directory,
    open_file,
    read_file,
    reading,
    sync_directory,
    sync_file,
    writing,
)
from zmq_datasource.log.layout import STAGING_NAME, TEMPORARY_PREFIX
from zmq_datasource.log.open_chunk_files import OpenChunkFiles, write_whole
from zmq_datasource.log.store import Part

__all__ = ["StagedFiles", "bytes_on_disk"]

_SUFFIX = ".arrow"
# More than the schema of an attempt takes, which is at the beginning of its file.
_HEAD_BYTES = 16 << 10
_BLOCK_BYTES = 4096
# An attempt is 32 hexadecimal digits.
_STAGED_NAME = re.compile(r"[0-9a-f]{32}\.arrow")


def bytes_on_disk(size: int) -> int:
    """What a file of a size takes on disk: whole blocks, and one at least."""
    return (size // _BLOCK_BYTES + 1) * _BLOCK_BYTES


class StagedFiles:
    """One file an attempt, hidden until it is whole.

    Args:
        beside: The directory of the log partition; None where the log is in a bucket.
        sync: Whether a file is forced to the disk.
        check_log: Raises ``DiskFaultError`` while the log is away, and the files beside it with it.
    """

    def __init__(
        self, beside: Path | None, sync: bool, check_log: Callable[[], object] = lambda: None
    ) -> None:
        self._sync = sync
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
        """Write these parts to the hidden file of an attempt, from ``offset`` on, where it ends. May be repeated.

        Returns:
            Where the file ends now.

        Raises:
            LogWriteError: The file system refuses. The file still ends at ``offset``, if it can be cut there.
        """
        path = self._unfinished_path(attempt)
        with writing(f"writing {path}"):
            if not offset:
                add_directory(path.parent)
            descriptor = os.open(path, os.O_RDWR | (0 if offset else os.O_CREAT | os.O_TRUNC), PRIVATE)
            try:
                return write_whole(descriptor, parts, offset)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(descriptor, offset)
                raise
            finally:
                os.close(descriptor)

    def finish(self, attempt: str) -> None:
        """Make an attempt appear, whole."""
        path, final = self._unfinished_path(attempt), self._staged_path(attempt)
        with writing(f"writing {final}"):
            failpoints.reach("log.staged.before_sync")
            if self._sync:
                sync_file(path)
            failpoints.reach("log.staged.after_sync")
            os.rename(path, final)
            failpoints.reach("log.staged.after_rename")
            if self._sync:
                sync_directory(final.parent)

    def names(self) -> list[str]:
        """The names of all finished attempts."""
        names = sorted(self._all_names())
        return [name.removesuffix(_SUFFIX) for name in names if _STAGED_NAME.fullmatch(name)]

    def _all_names(self) -> list[str]:
        with suppress(FileNotFoundError), reading(self._directory):
            return os.listdir(self._directory)
        return []

    def size_of(self, attempt: str) -> int:
        """Bytes that the file of an attempt has.

        Raises:
            LogError: The disk refused.
        """
        path = self._staged_path(attempt)
        with reading(path):
            return path.stat().st_size

    def head_of(self, attempt: str) -> bytes:
        """The beginning of the file of an attempt, which has its schema."""
        file = open_file(self._staged_path(attempt))
        try:
            return os.pread(file, _HEAD_BYTES, 0)
        finally:
            os.close(file)

    def read(self, attempt: str) -> pa.Buffer:
        """What the file of an attempt holds."""
        return pa.py_buffer(read_file(self._staged_path(attempt)))

    def appended(self, attempt: str) -> tuple[OpenChunkFiles, str]:
        """Where a finished attempt is appended to, and its name there."""
        return OpenChunkFiles(self._directory, self._sync), self._staged_path(attempt).name

    def remove(self, attempt: str) -> None:
        """Delete an attempt, finished or not."""
        _remove(self._staged_path(attempt))
        _remove(self._unfinished_path(attempt))

    def remove_unfinished(self) -> None:
        """Delete what a crashed writer left. Only for the holder of the lock."""
        for name in self._all_names():
            if name.startswith(TEMPORARY_PREFIX) and _STAGED_NAME.fullmatch(
                name.removeprefix(TEMPORARY_PREFIX)
            ):
                _remove(self._directory / name)


def _remove(path: Path) -> None:
    with writing(f"removing {path}"):
        path.unlink(missing_ok=True)
