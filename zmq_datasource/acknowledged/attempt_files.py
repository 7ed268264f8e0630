"""The files of attempts, each with the rows of one attempt at a part of a transaction, until the rows are committed.

They are in the directory ``staging`` of the log. Those of a log in a bucket are in a temporary
directory: if that is lost, nothing in it was acknowledged, and the senders send it again.

The rules:

* A file has a record for each data message: two numbers (the bytes that follow, and their checksum), and the rows as
  an Arrow IPC message. The checksum is seeded with the number of rows before, so a record has one place only.
* The end of a file has the figures of the attempt as JSON, and then two numbers of the same kind. So a restart reads
  only the end of each file.
* A file is hidden until it is whole and on the disk. If the next writer finds a hidden one, its writer has crashed.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from zmq_datasource.errors import DamagedChunkError, DiskFaultError, LogWriteError
from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import PRIVATE
from zmq_datasource.log import add_directory, is_transient, open_file, sync_file, writing
from zmq_datasource.messages.columns import MESSAGE_SCHEMA, data_bytes

_log = logging.getLogger(__name__)

_DIRECTORY, _HIDDEN = "staging", "."
_NAME = re.compile("[0-9a-f]{32}")
_NUMBERS = struct.Struct("<QQ")


class Stored(NamedTuple):
    """What the file of an attempt has.

    Attributes:
        producer, number, partition: The part of a transaction that the attempt is for.
        messages, rows: How many data messages and rows.
        value_bytes: The bytes of their values.
        latest: The latest time at which a row was received, in microseconds since the epoch.
        size: The bytes of the file.
    """

    producer: str
    number: int
    partition: int
    messages: int = 0
    rows: int = 0
    value_bytes: int = 0
    latest: int = 0
    size: int = 0

    @property
    def transaction(self) -> tuple[str, int]:
        """The transaction that the attempt is for."""
        return self[:2]

    @property
    def part(self) -> tuple[str, int, int]:
        """The part of that transaction."""
        return self[:3]


class AttemptFiles:
    """The files of one receiver.

    Args:
        beside: The directory of the log; None for a log in a bucket.
    """

    def __init__(self, beside: Path | None) -> None:
        if beside is None:
            beside = Path(tempfile.mkdtemp(prefix="zmq_datasource-"))
            weakref.finalize(self, shutil.rmtree, beside, ignore_errors=True)
        self._directory = beside / _DIRECTORY

    def recover(self) -> Iterator[tuple[str, Stored]]:
        """Make the directory, and yield the attempts of the writer before. Delete those that are not whole.

        No other method makes the directory. So nothing is written below the mount point of a directory that was
        unmounted.

        Raises:
            LogWriteError: The file system refuses.
        """
        with writing(f"opening {self._directory}"):
            add_directory(self._directory)
            names = [
                name for name in os.listdir(self._directory) if _NAME.fullmatch(name.removeprefix(_HIDDEN))
            ]
        for name in sorted(names):
            path = self._directory / name
            with writing(f"recovering {path}"):
                try:
                    if name.startswith(_HIDDEN):
                        raise ValueError("its writer has crashed before its end")
                    with open(open_file(path), "rb") as file:
                        stored = _end_of(file.fileno())[1]
                except (OSError, ValueError, struct.error) as e:
                    if is_transient(e):
                        raise
                    _log.warning(
                        "removing %s: %s. If it was not committed, its sender sends it again", path, e
                    )
                    path.unlink()
                    continue
            yield name, stored

    def append(self, name: str, stored: Stored, rows: pa.RecordBatch) -> Stored:
        """Append the rows of a data message to the file of an attempt. After an error the call may be repeated.

        Raises:
            LogWriteError: The file system refuses.
        """
        message = memoryview(rows.serialize())
        checksum = xxhash.xxh3_64_intdigest(message, stored.rows)
        size = self._write(name, stored.size, _NUMBERS.pack(len(message), checksum), message)
        return stored._replace(
            messages=stored.messages + 1,
            rows=stored.rows + rows.num_rows,
            value_bytes=stored.value_bytes + data_bytes(rows.column("value")),
            latest=max(stored.latest, pc.max(rows.column("timestamp")).value or 0),
            size=size,
        )

    def finish(self, name: str, stored: Stored) -> Stored:
        """Complete a file, force it to the disk, and show it. Takes long.

        Raises:
            DiskFaultError: The disk refuses for now. The call may be repeated.
            LogWriteError: The file system refuses. The file is then of no use: after a failed sync it is unknown which
                bytes the system still has.
        """
        text = msgspec.json.encode(stored)
        numbers = _NUMBERS.pack(len(text), xxhash.xxh3_64_intdigest(text))
        hidden, path = self._hidden(name), self._directory / name
        size = self._write(name, stored.size, text, numbers)
        try:
            failpoints.reach("acknowledged.file.before_sync")
            sync_file(hidden)
            failpoints.reach("acknowledged.file.after_sync")
            os.rename(hidden, path)
            failpoints.reach("acknowledged.file.after_rename")
            sync_file(self._directory)
        except OSError as e:
            raise LogWriteError(f"writing {path}: {e}") from e
        return stored._replace(size=size)

    def _write(self, name: str, size: int, *parts: bytes | memoryview) -> int:
        """Write after the first ``size`` bytes of a file, in place of what a failed call has left."""
        path = self._hidden(name)
        with writing(f"writing {path}"), open(path, "r+b" if size else "wb", opener=_open_private) as file:
            failpoints.reach("acknowledged.file.before_write")
            file.truncate(size)
            file.seek(size)
            for part in parts:
                file.write(part)
            file.flush()
            failpoints.reach("acknowledged.file.after_write")
            return file.tell()

    def read(self, names: Iterable[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of finished attempts, one data message at a time, checked.

        Raises:
            DamagedChunkError: A file is damaged.
            DiskFaultError: The disk refuses for now, or has lost a file: the log is away.
        """
        for name in names:
            path = self._directory / name
            try:
                with open(open_file(path), "rb") as file:
                    end, stored = _end_of(file.fileno())
                    before = 0
                    while file.tell() < end:
                        length, checksum = _NUMBERS.unpack(file.read(_NUMBERS.size))
                        message = file.read(min(length, end))
                        if xxhash.xxh3_64_intdigest(message, before) != checksum:
                            raise ValueError(f"the checksum of the rows after {before} rows differs")
                        rows = pa.ipc.read_record_batch(pa.py_buffer(message), MESSAGE_SCHEMA)
                        before += rows.num_rows
                        yield rows
                    if before != stored.rows:
                        raise ValueError(f"it has {before} rows, and was finished with {stored.rows}")
            except (OSError, ValueError, struct.error) as e:
                if is_transient(e) or isinstance(e, FileNotFoundError):
                    raise DiskFaultError(f"reading attempt {path}: {e}") from e
                raise DamagedChunkError(
                    f"reading attempt {path}: {e}. It is not committed: remove it, and start the receiver again. Its "
                    "sender sends the transaction again"
                ) from e

    def remove(self, name: str) -> None:
        """Delete the file of an attempt, finished or not, if there is one.

        Raises:
            LogWriteError: The file system refuses.
        """
        failpoints.reach("acknowledged.file.before_remove")
        with writing(f"removing {self._directory / name}"):
            self._hidden(name).unlink(missing_ok=True)
            (self._directory / name).unlink(missing_ok=True)

    def _hidden(self, name: str) -> Path:
        return self._directory / f"{_HIDDEN}{name}"


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE)


def _end_of(descriptor: int) -> tuple[int, Stored]:
    """Where the rows of a file end, and what it has.

    Raises:
        OSError, ValueError, struct.error: They cannot be read.
    """
    at = os.fstat(descriptor).st_size - _NUMBERS.size
    length, checksum = _NUMBERS.unpack(os.pread(descriptor, _NUMBERS.size, max(at, 0)))
    if length > at:
        raise ValueError("its end is missing")
    text = os.pread(descriptor, length, at - length)
    if xxhash.xxh3_64_intdigest(text) != checksum:
        raise ValueError("the checksum of its end differs")
    return at - length, msgspec.json.decode(text, type=Stored)._replace(size=at + _NUMBERS.size)
