"""The files of staged attempts; see ``staging``.

They are on this machine. For a log in a bucket they are in a temporary directory: if that is lost, nothing in it was
acknowledged, and the senders send it again.
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
from zmq_datasource.log.files import (
    add_directory,
    open_file,
    open_to_read,
    reading,
    sync_directory,
    sync_file,
    writing,
)
from zmq_datasource.log.layout import STAGING_NAME, TEMPORARY_PREFIX
from zmq_datasource.log.open_chunk_files import OpenChunkFiles
from zmq_datasource.log.store import Part

__all__ = ["StagedFiles", "bytes_on_disk"]

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
        sync: Whether files are forced to the disk.
        check_log: Raises ``DiskFaultError`` while the log, and so the files beside it, is away.
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
        """Append to the hidden file of an attempt, which ends at ``offset``: see ``OpenChunkFiles.write``."""
        path = self._unfinished_path(attempt)
        if not offset:
            with writing(f"writing {path}"):
                add_directory(path.parent)
        # It is forced to the disk once, when the attempt is whole.
        return OpenChunkFiles(self._directory, sync=False).write(path.name, offset, parts)

    def finish(self, attempt: str) -> None:
        """Make the file of a whole attempt visible, durably."""
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
        return OpenChunkFiles(self._directory, self._sync), self._staged_path(attempt).name

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
