"""The files of staged attempts, which grow in place on this machine, and are no objects of the log's store.

Those of a log in a bucket are in a temporary directory: if that is lost, nothing in it was acknowledged, and the
senders send it again (``staging``).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import PRIVATE
from zmq_datasource.log.files import (
    add_directory,
    open_to_read,
    reading,
    sync_directory,
    sync_file,
    writing,
)
from zmq_datasource.log.layout import STAGING_NAME, TEMPORARY_PREFIX
from zmq_datasource.log.store import Part


class StagedFiles:
    """The files of staged attempts, to which one writer appends.

    Args:
        beside: The directory of the chunks; None for a log in a bucket.
    """

    def __init__(self, beside: Path | None) -> None:
        if beside is None:
            beside = Path(tempfile.mkdtemp(prefix="zmq_datasource-"))
            weakref.finalize(self, shutil.rmtree, beside, ignore_errors=True)
        self._directory = beside / STAGING_NAME

    def __str__(self) -> str:
        return str(self._directory)

    def create(self) -> None:
        """Make the directory, if it is missing. Called when the log is opened.

        No other call makes it. So nothing is staged below the mount point of a directory that was unmounted.
        """
        with writing(f"making {self}"):
            add_directory(self._directory)

    def path_of(self, name: str) -> Path:
        """The path of a file."""
        return self._directory / name

    def names(self) -> list[str]:
        """The names of all files, in order; none if there is no such directory."""
        with suppress(FileNotFoundError), reading(self._directory):
            return sorted(os.listdir(self._directory))
        return []

    def open(self, name: str) -> pa.NativeFile:
        """Open a file for reading. Raises what ``files.open_file`` does."""
        return open_to_read(self._directory / name)

    def size_of(self, name: str) -> int:
        """The size of a file.

        Raises:
            DiskFaultError: The disk refuses for now, or has lost the file.
            LogWriteError: The disk refuses.
        """
        path = self._directory / name
        with writing(f"using {path}"):
            return path.stat().st_size

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
                failpoints.reach("log.staged.before_write")
                rest = memoryview(b"".join(parts))
                end = offset + len(rest)
                while rest:
                    rest = rest[os.pwrite(descriptor, rest, end - len(rest)) :]
                failpoints.reach("log.staged.after_write")
                if durably:
                    sync_file(path)
                failpoints.reach("log.staged.after_force")
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(descriptor, offset)
                raise
            finally:
                os.close(descriptor)
            if durably and not offset:
                sync_directory(path.parent)
        return end

    def rename(self, name: str, final: str) -> None:
        """Force a file to the disk, and give it another name, durably."""
        path = self._directory / final
        with writing(f"writing {path}"):
            failpoints.reach("log.staged.before_sync")
            sync_file(self._directory / name)
            failpoints.reach("log.staged.after_sync")
            os.rename(self._directory / name, path)
            failpoints.reach("log.staged.after_rename")
            sync_directory(self._directory)

    def remove(self, name: str) -> None:
        """Delete a file, if it is there: its content has become a chunk, or is not needed."""
        failpoints.reach("log.staged.before_remove")
        path = self._directory / name
        with writing(f"removing {path}"):
            path.unlink(missing_ok=True)

    def remove_hidden(self) -> None:
        """Delete all hidden files of a crashed writer. The present writer calls this after it has recovered them."""
        with writing(f"cleaning {self._directory}"):
            for path in self._directory.glob(f"{TEMPORARY_PREFIX}*.arrow"):
                path.unlink(missing_ok=True)
