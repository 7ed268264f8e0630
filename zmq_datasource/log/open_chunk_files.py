"""Appends to the files of open chunks (``open_chunk``) and staged attempts (``staging``), which may become chunks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pyarrow as pa

from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import PRIVATE
from zmq_datasource.log.files import open_file, read_file, reading, sync_directory, sync_file, writing
from zmq_datasource.log.layout import TEMPORARY_PREFIX, open_chunk_name, parse_open_chunk_name
from zmq_datasource.log.store import Part

__all__ = ["OpenChunkFiles", "write_whole"]

# The limit of one system call.
_MOST_PARTS = 1024


class OpenChunkFiles:
    """Files in a directory to which one writer appends.

    Args:
        directory: The directory of the log partition, or the one below it for staged attempts.
        sync: Whether writes are forced to the disk.
    """

    def __init__(self, directory: Path, sync: bool) -> None:
        self._directory = directory
        self._sync = sync

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
            durably: Whether to force the file to the disk, unless the directory is not forced at all.

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
                if self._sync and durably:
                    sync_file(path)
                failpoints.reach("log.group.after_sync")
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(descriptor, offset)
                raise
            finally:
                os.close(descriptor)
            if self._sync and not offset:
                sync_directory(path.parent)
        return end

    def cut(self, first: int, size: int) -> None:
        """Cut an open chunk to this size."""
        path = self._directory / open_chunk_name(first)
        with writing(f"writing {path}"):
            os.truncate(path, size)

    def remove(self, name: str) -> None:
        """Delete a file after its content has become a chunk."""
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
