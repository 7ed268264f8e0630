"""The files of attempts, each with the rows of one attempt at a part of a transaction, until the rows are committed.

They are in the directory ``staging`` beside the chunks of the log. Those of a log in a bucket are in a temporary
directory: if that is lost, nothing in it was acknowledged, and the senders send it again.

The rules:

* A file has a record for each data message: two numbers (the bytes that follow, and their checksum), and the rows as
  an Arrow IPC message. The checksum is seeded with the number of rows before, so a record has one place only.
* The end of a file has the figures of the attempt as JSON, and then two numbers of the same kind. So a restart reads
  only the end of each file.
* A file is hidden until it is whole and on the disk. If the next writer finds a hidden one, its writer has crashed.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pyarrow as pa
import xxhash

from zmq_datasource.errors import DamagedChunkError, DiskFaultError
from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import PRIVATE
from zmq_datasource.log import Times, add_directory, is_transient, open_file, sync_file, writing
from zmq_datasource.messages.columns import MESSAGE_SCHEMA

_DIRECTORY, _HIDDEN = "staging", "."
_NAME = re.compile("[0-9a-f]{32}")
_NUMBERS = struct.Struct("<QQ")
_BLOCK_BYTES = 4096


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """A finished attempt: which part of which transaction it is for, and what it has.

    Attributes:
        value_bytes: The bytes of the rows' values.
        times: The earliest and latest time at which a row was received.
    """

    producer: str
    number: int
    partition: int
    rows: int
    digest: int
    value_bytes: int
    times: Times


def bytes_on_disk(size: int) -> int:
    """The room that a file takes on disk: whole blocks, and at least one."""
    return (size // _BLOCK_BYTES + 1) * _BLOCK_BYTES


class AttemptFiles:
    """The files of one receiver.

    Args:
        beside: The directory of the chunks; None for a log in a bucket.
    """

    def __init__(self, beside: Path | None) -> None:
        if beside is None:
            beside = Path(tempfile.mkdtemp(prefix="zmq_datasource-"))
            weakref.finalize(self, shutil.rmtree, beside, ignore_errors=True)
        self._directory = beside / _DIRECTORY

    def recover(self) -> Iterator[tuple[str, Attempt | None, int]]:
        """Make the directory, delete unfinished files, and yield the attempts of the writer before, with their sizes.

        No other method makes the directory. So nothing is written below the mount point of a directory that was
        unmounted. An attempt whose end is damaged has no figures.

        Raises:
            LogWriteError: The file system refuses.
        """
        with writing(f"opening {self._directory}"):
            add_directory(self._directory)
            names = sorted(os.listdir(self._directory))
            for name in names:
                if name[:1] == _HIDDEN and _NAME.fullmatch(name[1:]):
                    (self._directory / name).unlink(missing_ok=True)
        for attempt in filter(_NAME.fullmatch, names):
            path = self._directory / attempt
            with writing(f"reading {path}"):
                try:
                    with open(open_file(path), "rb") as file:
                        yield attempt, self._end_of(file.fileno())[1], os.fstat(file.fileno()).st_size
                except (OSError, ValueError, struct.error) as e:
                    if is_transient(e):
                        raise
                    yield attempt, None, 0

    def append(self, attempt: str, size: int, rows: pa.RecordBatch, before: int) -> int:
        """Append rows to the file of an attempt. After an error the call may be repeated with the same arguments.

        Args:
            size: The bytes of the file, from an earlier call; 0 for a new file.
            before: The rows of the file.

        Returns:
            The bytes of the file.

        Raises:
            LogWriteError: The file system refuses.
        """
        message = memoryview(rows.serialize())
        checksum = xxhash.xxh3_64_intdigest(message, before)
        return self._write(attempt, size, b"".join((_NUMBERS.pack(len(message), checksum), message)))

    def finish(self, attempt: str, size: int, figures: Attempt) -> int:
        """Complete a file, force it to the disk, and show it. Takes long. Returns its bytes.

        Raises:
            LogWriteError: The file system refuses. The file is then of no use.
        """
        text = msgspec.json.encode(figures)
        numbers = _NUMBERS.pack(len(text), xxhash.xxh3_64_intdigest(text, figures.rows))
        hidden, path = self._hidden(attempt), self._directory / attempt
        end = self._write(attempt, size, text + numbers)
        with writing(f"writing {path}"):
            failpoints.reach("acknowledged.file.before_sync")
            sync_file(hidden)
            failpoints.reach("acknowledged.file.after_sync")
            os.rename(hidden, path)
            failpoints.reach("acknowledged.file.after_rename")
            sync_file(self._directory)
        return end

    def _write(self, attempt: str, size: int, content: bytes) -> int:
        path = self._hidden(attempt)
        with writing(f"writing {path}"):
            descriptor = os.open(path, os.O_WRONLY | (0 if size else os.O_CREAT | os.O_TRUNC), PRIVATE)
            try:
                failpoints.reach("acknowledged.file.before_write")
                rest, end = memoryview(content), size + len(content)
                while rest:
                    rest = rest[os.pwrite(descriptor, rest, end - len(rest)) :]
                failpoints.reach("acknowledged.file.after_write")
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise
            finally:
                os.close(descriptor)
        return end

    def read(self, attempt: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a finished attempt, one data message at a time, checked.

        Raises:
            DamagedChunkError: The file is damaged.
            DiskFaultError: The disk refuses for now, or has lost the file: the log is away.
        """
        path = self._directory / attempt
        try:
            with open(open_file(path), "rb") as file:
                end, figures = self._end_of(file.fileno())
                before = 0
                while file.tell() < end:
                    length, checksum = _NUMBERS.unpack(file.read(_NUMBERS.size))
                    message = file.read(min(length, end))
                    if xxhash.xxh3_64_intdigest(message, before) != checksum:
                        raise ValueError(f"the checksum of the rows after {before} rows differs")
                    rows = pa.ipc.read_record_batch(pa.py_buffer(message), MESSAGE_SCHEMA)
                    before += rows.num_rows
                    yield rows
                if before != figures.rows:
                    raise ValueError(f"it has {before} rows, and was finished with {figures.rows}")
        except (OSError, ValueError, struct.error) as e:
            if is_transient(e) or isinstance(e, FileNotFoundError):
                raise DiskFaultError(f"reading attempt {path}: {e}") from e
            raise DamagedChunkError(f"reading attempt {path}: {e}") from e

    def _end_of(self, descriptor: int) -> tuple[int, Attempt]:
        """Where the rows of a file end, and the figures that follow.

        Raises:
            OSError, ValueError, struct.error: They cannot be read.
        """
        at = os.fstat(descriptor).st_size - _NUMBERS.size
        length, checksum = _NUMBERS.unpack(os.pread(descriptor, _NUMBERS.size, max(at, 0)))
        if length > at:
            raise ValueError("its end is missing")
        text = os.pread(descriptor, length, at - length)
        figures = msgspec.json.decode(text, type=Attempt)
        if xxhash.xxh3_64_intdigest(text, figures.rows) != checksum:
            raise ValueError("the checksum of its end differs")
        return at - length, figures

    def remove(self, attempt: str) -> None:
        """Delete the file of an attempt, finished or not, if there is one.

        Raises:
            LogWriteError: The file system refuses.
        """
        failpoints.reach("acknowledged.file.before_remove")
        with writing(f"removing {self._directory / attempt}"):
            self._hidden(attempt).unlink(missing_ok=True)
            (self._directory / attempt).unlink(missing_ok=True)

    def _hidden(self, attempt: str) -> Path:
        return self._directory / f"{_HIDDEN}{attempt}"
