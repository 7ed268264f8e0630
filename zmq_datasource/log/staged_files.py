"""The files of what is staged: see ``log.staging``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from zmq_datasource.log.files import PartitionFiles, make_directory, sync_directory, sync_file, writing
from zmq_datasource.log.layout import STAGING_NAME, TEMPORARY_PREFIX

__all__ = ["StagedFiles"]


class StagedFiles(PartitionFiles):
    """One file an attempt, hidden until it is whole."""

    def _staged_path(self, attempt: str) -> Path:
        return self._directory / STAGING_NAME / f"{attempt}.arrow"

    def _unfinished_path(self, attempt: str) -> Path:
        return self._directory / STAGING_NAME / f"{TEMPORARY_PREFIX}{attempt}.arrow"

    def create_staged(self, attempt: str) -> pa.NativeFile:
        """A file for an attempt, hidden until it is finished; one of the same name is replaced."""
        path = self._unfinished_path(attempt)
        with writing(f"creating {path}"):
            make_directory(path.parent)
            return pa.OSFile(str(path), "wb")

    @contextmanager
    def writing_staged(self, attempt: str) -> Iterator[None]:
        """For what is written to such a file: the system's errors as ours."""
        with writing(f"writing {self._unfinished_path(attempt)}"):
            yield

    def finish_staged(self, attempt: str, sync: bool) -> None:
        """Make an attempt appear, whole."""
        path, final = self._unfinished_path(attempt), self._staged_path(attempt)
        with writing(f"writing {final}"):
            if sync:
                sync_file(path)
            os.rename(path, final)
            if sync:
                sync_directory(final.parent)

    def staged(self) -> list[str]:
        """The names of all finished attempts."""
        found = (self._directory / STAGING_NAME).glob("[0-9a-f]*.arrow")
        return sorted(path.stem for path in found)

    def staged_size(self, attempt: str) -> int:
        """Bytes of an attempt on disk."""
        return self._staged_path(attempt).stat().st_size

    def open_staged(self, attempt: str) -> pa.NativeFile:
        """Memory-map an attempt for reading."""
        return pa.memory_map(str(self._staged_path(attempt)))

    def remove_staged(self, attempt: str) -> None:
        """Delete an attempt, finished or not."""
        self._remove(self._staged_path(attempt))
        self._remove(self._unfinished_path(attempt))

    def remove_unfinished_staged(self) -> None:
        """Delete what a crashed writer left. Only for the holder of the lock."""
        for path in (self._directory / STAGING_NAME).glob(f"{TEMPORARY_PREFIX}*.arrow"):
            self._remove(path)
