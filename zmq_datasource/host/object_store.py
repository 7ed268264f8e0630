"""Object storage: whole objects that are put, read, listed and deleted, on any file system that pyarrow knows."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa

from zmq_datasource.errors import DiskFaultError, LogWriteError, OptionError
from zmq_datasource.host import failpoints
from zmq_datasource.host.locations import directory_of, make_directory, make_file, without_secrets
from zmq_datasource.options.types import Location

__all__ = ["ObjectStore", "StoredObject"]

# An object of these appears when it is whole. Elsewhere a file is there as soon as it is begun.
_APPEAR_WHOLE = {"s3", "gcs", "abfs"}
# What repeating does not mend, in the words of AWS and of those who imitate it.
_LASTING = (
    "ACCESS_DENIED",
    "NO_SUCH_BUCKET",
    "INVALID_ACCESS_KEY_ID",
    "SIGNATURE_DOES_NOT_MATCH",
    "INVALID_CLIENT_TOKEN",
)


class StoredObject(NamedTuple):
    """An object as a listing shows it.

    Attributes:
        key: Its key below the listed prefix.
        size: In bytes.
        modified: Seconds since the epoch, by the storage's clock.
    """

    key: str
    size: int
    modified: float


class ObjectStore:
    """The objects below one location; a key is a path relative to it. Any thread and process may use it.

    What was put must be seen by every listing and every read that begin afterwards, as S3 and GCS promise.

    Raises:
        DiskFaultError: On any use, if the storage does not answer, or refuses for now.
        LogWriteError: On any use, if it refuses for a reason that does not pass.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self._system: Any = None
        self._root = ""

    def __str__(self) -> str:
        return str(self.location).partition("?")[0].rstrip("/")  # a key comes behind it

    def __repr__(self) -> str:
        return f"ObjectStore({str(self)!r})"

    def __reduce__(self) -> tuple[type[Self], tuple[Location]]:
        return type(self), (self.location,)  # each process has a connection of its own

    def put(self, key: str, content: bytes | pa.Buffer) -> None:
        """Make an object appear, whole; one of the same key is replaced.

        Where the storage is a directory, what is above the object's own one must be there: see ``make_directory``.
        """
        with self._using(f"writing {self}/{key}") as system:
            failpoints.reach("host.object.before_write")
            path = f"{self._root}/{key}"
            if system.type_name in _APPEAR_WHOLE:
                _write(system, path, content)
                return
            hidden = posixpath.join(posixpath.dirname(path), f".{posixpath.basename(path)}")
            self._add_directory(system, key, posixpath.dirname(path))
            _write(system, hidden, content)
            if system.type_name == "local":
                _force(hidden)
            failpoints.reach("host.object.before_move")
            system.move(hidden, path)
            failpoints.reach("host.object.after_move")
            if system.type_name == "local":
                _force(posixpath.dirname(path))

    def make_root(self) -> None:
        """Make the location, where it is a directory; for what nothing was put into yet."""
        with self._using(f"making {self}") as system:
            if system.type_name not in _APPEAR_WHOLE:
                make_directory(system, self._root)

    def make_directory(self, prefix: str) -> None:
        """Make a directory for keys with this prefix, in a location that must be there; object storage needs none."""
        with self._using(f"making {self}/{prefix}") as system:
            if system.type_name not in _APPEAR_WHOLE:
                path = self._root
                for part in prefix.split("/"):
                    path = f"{path}/{part}"
                    self._add_directory(system, prefix, path)

    def _add_directory(self, system: Any, key: str, path: str) -> None:
        """Make a directory, unless it is there, in one that must be there: what was unmounted is not begun again.

        Raises:
            DiskFaultError: That one is not there.
        """
        if path == self._root:
            there = os.path.isdir(path)
        else:
            try:
                system.create_dir(path, recursive=False)
                there = True
            except FileNotFoundError:
                there = False
        if not there:
            raise DiskFaultError(
                f"writing {self}/{key}: the directory {path} is not there, and is not made again. If it was unmounted, "
                "mount it again"
            )

    def upload(self, key: str, path: Path) -> None:
        """Make an object of a file, which is read before anything is put: of a file with an I/O error nothing is."""
        self.put(key, path.read_bytes())

    def get(self, key: str) -> bytes:
        """The content of an object; FileNotFoundError if there is none."""
        with (
            self._using(f"reading {self}/{key}") as system,
            system.open_input_stream(f"{self._root}/{key}") as file,
        ):
            return bytes(file.read())

    def open(self, key: str, whole: int) -> pa.NativeFile:
        """Open an object for reading at any place; FileNotFoundError if there is none.

        Args:
            whole: Up to so many bytes are read at once. Read the rest within ``reading``.
        """
        with self._using(f"reading {self}/{key}") as system:
            file = system.open_input_file(f"{self._root}/{key}")
            if file.size() > whole:
                return file
            with file:
                return pa.BufferReader(file.read_buffer())

    @contextmanager
    def reading(self, key: str) -> Iterator[None]:
        """Around each use of what ``open`` has opened: its errors are those of this class then."""
        with self._using(f"reading {self}/{key}"):
            yield

    def objects(self, prefix: str, *, below: bool = False) -> list[StoredObject]:
        """The objects in a directory; with ``below`` also those in the directories in it. In no order."""
        found = [
            info for info in self._infos(prefix, below) if info.is_file and not info.base_name.startswith(".")
        ]
        above = len(f"{self._root}/{prefix}".rstrip("/")) + 1
        return [StoredObject(info.path[above:], info.size, info.mtime.timestamp()) for info in found]

    def directories(self) -> list[str]:
        """The names of the directories."""
        return [info.base_name for info in self._infos("", False) if not info.is_file]

    def find(self, key: str) -> StoredObject | None:
        """What a listing shows of one object; None if there is none."""
        from pyarrow import fs  # noqa: PLC0415

        with self._using(f"looking for {self}/{key}") as system:
            info = system.get_file_info(f"{self._root}/{key}")
            if info.type != fs.FileType.File:
                return None
            return StoredObject(key, info.size, info.mtime.timestamp())

    def delete(self, key: str) -> None:
        """Delete an object; one that is gone already is fine."""
        with self._using(f"deleting {self}/{key}") as system:
            try:
                system.delete_file(f"{self._root}/{key}")
            except FileNotFoundError:
                return

    def _infos(self, prefix: str, below: bool) -> list[Any]:
        from pyarrow import fs  # noqa: PLC0415

        with self._using(f"listing {self}/{prefix}") as system:
            directory = f"{self._root}/{prefix}".rstrip("/")
            selector = fs.FileSelector(directory, recursive=below, allow_not_found=True)
            return list(system.get_file_info(selector))

    def _one_request_for_a_small_object(self) -> Location:
        """pyarrow makes three of it on S3, unless told otherwise."""
        plain = self.location.plain
        if not plain.startswith("s3://") or "allow_delayed_open" in plain:
            return self.location
        return Location(f"{plain}{'&' if '?' in plain else '?'}allow_delayed_open=true")

    def _open(self) -> None:
        try:
            system, root = directory_of(self._one_request_for_a_small_object())
        except ValueError as e:
            raise OptionError(
                f"object storage {self.location!r}: {without_secrets(e, self.location)}"
            ) from None
        self._root = root.rstrip("/")
        self._system = system  # last: another thread may look

    @contextmanager
    def _using(self, act: str) -> Iterator[Any]:
        try:
            if self._system is None:
                self._open()
            yield self._system
        except (FileNotFoundError, OptionError):
            raise
        except (OSError, ValueError, pa.ArrowException) as e:
            why = without_secrets(e, self.location)
            kind = LogWriteError if any(word in why for word in _LASTING) else DiskFaultError
            raise kind(f"{act}: {why}") from None


def _force(path: str) -> None:
    """Have the disk hold a file, or the names in a directory: what was put must outlive the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(system: Any, path: str, content: bytes | pa.Buffer) -> None:
    make_file(system, path)
    with system.open_output_stream(path) as file:
        file.write(content)
