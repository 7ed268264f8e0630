"""Staged attempts: the messages of transactions that are not committed, in one file each (``local_files`` says where).

``0/staging/<attempt>.arrow`` has the rows (``messages.columns.MESSAGE_SCHEMA``) of one attempt at one part of a
transaction; the metadata of its schema names the part. A file that is being written is hidden. If the next writer finds
a hidden file, its writer has crashed.

The rules:

* The file is a chunk's file (``chunk_file``) without its end. A batch without rows ends the attempt. So a large file
  can become a chunk by a link, without being written twice: only the end of a chunk is appended.
* Bytes after that batch are not part of the attempt. So a crash during the append does not change the attempt.
* Only the process that has written a file appends to it. The next writer reads files that it finds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.ipc

from zmq_datasource.errors import DamagedChunkError, DiskFaultError, LogWriteError
from zmq_datasource.log.chunk import MAGIC_BYTES, NO_ROWS, is_intact, times_of
from zmq_datasource.log.chunk_file import ChunkFile, Encoder, FilledFile
from zmq_datasource.log.facts import Times
from zmq_datasource.log.files import is_transient
from zmq_datasource.log.layout import TEMPORARY_PREFIX
from zmq_datasource.log.local_files import StagedFiles
from zmq_datasource.messages.columns import MESSAGE_SCHEMA, data_bytes

_log = logging.getLogger(__name__)

# An attempt has 32 hexadecimal digits.
_NAME = re.compile(r"([0-9a-f]{32})\.arrow")
_BLOCK_BYTES = 4096


class TransactionPart(NamedTuple):
    """A part of a transaction, and the figures of an attempt at it.

    Attributes:
        producer, number, partition: The part: of which producer's transaction, and of which partition of a DataFrame.
        rows, digest, value_bytes: The figures; None if not known yet.
    """

    producer: str
    number: int
    partition: int
    rows: int | None = None
    digest: int | None = None
    value_bytes: int | None = None


class StagedFile:
    """The file of an attempt that is being received.

    ``append`` and ``end`` encode in memory. ``write`` writes what they have encoded, and is repeated if the disk
    refuses it. ``finish`` makes the whole file durable.

    Attributes:
        value_bytes: The bytes of the rows' values.
        is_ended: Whether ``end`` was called.
        least_chunk_bytes: A smaller file is read at the commit, so that several transactions share a chunk. Eight of
            1 MiB then take half as long as eight chunks; eight of 2 MiB would take twice as long.
    """

    least_chunk_bytes = 2 << 20

    def __init__(self, files: StagedFiles, attempt: str, part: TransactionPart) -> None:
        self._files, self._attempt = files, attempt
        metadata = {"producer": part.producer, "number": str(part.number), "partition": str(part.partition)}
        self._encoder = Encoder(MESSAGE_SCHEMA.with_metadata(metadata))
        self._file = ChunkFile(files, _hidden(attempt), self._encoder)
        self._times: Times | None = None
        self.value_bytes = 0
        self.is_ended = False

    @property
    def rows(self) -> int:
        """The rows so far."""
        return self._encoder.rows

    @property
    def bytes(self) -> int:
        """The bytes that the file takes on disk; 0 before the first rows."""
        return _bytes_on_disk(self._encoder.size) if self.rows else 0

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows, for ``write``."""
        if batch.num_rows:
            times = times_of([batch])
            self._times = times if self._times is None else self._times.union(times)
            self.value_bytes += data_bytes(batch.column("value"))
            self._file.append(batch, {})

    def end(self) -> None:
        """Add the batch without rows that ends the attempt, for ``write``. Does nothing the second time."""
        if not self.is_ended:
            self.is_ended = True
            self._file.append(NO_ROWS, {})

    def write(self) -> None:
        """Write the bytes that were encoded since the last call.

        Raises:
            LogWriteError: The file system refuses. After a ``DiskFaultError`` the call may be repeated.
        """
        self._file.write(durably=False)

    def finish(self) -> FilledFile | None:
        """Force the file to the disk, where the next writer finds it. Call it after ``end`` and ``write``.

        Returns:
            The file, if it can become a chunk; None if it is small.

        Raises:
            LogWriteError: The file system refuses. The file is then of no use.
        """
        self._file.rename(_name(self._attempt))
        if self._times is None or self._encoder.size < self.least_chunk_bytes:
            return None
        return FilledFile(self._file, self.rows, self._times)

    def discard(self) -> None:
        """Delete the file. If that fails, the next writer deletes it."""
        _remove(self._files, self._attempt)


class _Staged(NamedTuple):
    """A finished attempt.

    Attributes:
        part: The part of a transaction.
        size: The room on disk.
        since: When it was finished or found, in monotonic seconds.
        filled: Its file, if it can become a chunk.
    """

    part: TransactionPart
    size: int
    since: float
    filled: FilledFile | None


class Staging:
    """The finished attempts of a log, for its writer. ``now`` is in monotonic seconds.

    Attributes:
        bytes: Their room on disk.
    """

    def __init__(self, files: StagedFiles) -> None:
        self._files = files
        self._staged: dict[str, _Staged] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._staged)

    def recover(self, now: float, is_committed: Callable[[str, int], bool] = lambda *_: False) -> None:
        """Find the attempts of an earlier writer, and delete unfinished, damaged and committed ones.

        This reads only the beginning of each file, because there may be very many files.

        Args:
            is_committed: Whether a transaction, given by its producer and number, is committed.
        """
        self._files.create()
        self._files.remove_hidden()
        for attempt in [match[1] for match in map(_NAME.fullmatch, self._files.names()) if match]:
            try:
                with self._files.open(_name(attempt)) as source:
                    metadata = _stream(source).schema.metadata
                part = TransactionPart(
                    metadata[b"producer"].decode(), int(metadata[b"number"]), int(metadata[b"partition"])
                )
            except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as e:
                if is_transient(e):  # the system's fault, and not damage
                    raise DiskFaultError(f"opening staged attempt {attempt}: {e}") from e
                # If it was not committed, its sender sends it again.
                _log.warning("removing staged attempt %s, which cannot be read: %r", attempt, e)
                self._files.remove(_name(attempt))
                continue
            self.add(attempt, part, _bytes_on_disk(self._files.size_of(_name(attempt))), now)
            if is_committed(part.producer, part.number):
                self.remove([attempt])

    def add(
        self, attempt: str, part: TransactionPart, size: int, now: float, filled: FilledFile | None = None
    ) -> None:
        """Add a finished attempt, with its room on disk; ``filled`` can become a chunk."""
        self._staged[attempt] = _Staged(part, size, now, filled)
        self.bytes += size

    def get(self, attempt: str) -> TransactionPart | None:
        staged = self._staged.get(attempt)
        return None if staged is None else staged.part

    def attempts_of(self, producer: str, up_to: int) -> list[str]:
        """The attempts at a producer's transactions up to a number."""
        parts = [(attempt, staged.part) for attempt, staged in self._staged.items()]
        return [attempt for attempt, part in parts if part.producer == producer and part.number <= up_to]

    def abandoned(self, seconds: float, active: Collection[str], now: float) -> list[str]:
        """The attempts of producers that have added nothing for ``seconds``.

        Args:
            active: Producers that are connected; their attempts are not included.
        """
        newest = {
            staged.part.producer: staged.since for staged in self._staged.values()
        }  # in order of arrival
        silent = {producer for producer, since in newest.items() if since < now - seconds} - {*active}
        return [attempt for attempt, staged in self._staged.items() if staged.part.producer in silent]

    def rows(self, attempt: str) -> int:
        """How many rows an attempt has.

        Raises:
            DamagedChunkError: The file is damaged.
        """
        staged = self._staged[attempt]
        rows = staged.part.rows
        if rows is None:
            rows = sum(batch.num_rows for batch in self._batches(attempt))
            self._staged[attempt] = staged._replace(part=staged.part._replace(rows=rows))
        return rows

    def file_of(self, attempt: str) -> FilledFile | None:
        """The file of an attempt, if it can become a chunk without being read; None if it must be read.

        Raises:
            DamagedChunkError: The file has another size than was written.
            DiskFaultError: The disk refuses for now, or has lost the file: the log is away.
        """
        filled = self._staged[attempt].filled
        if filled is not None:
            found = self._files.size_of(_name(attempt))
            if found != filled.file.size:
                raise self._damaged(attempt, f"it has {found} bytes, and {filled.file.size} were written")
        return filled

    def read(self, attempt: str) -> list[pa.RecordBatch]:
        """The rows of an attempt, read from its file and checked.

        Raises:
            DamagedChunkError: The file is damaged.
        """
        return list(self._batches(attempt))

    def extend(self, filled: FilledFile, attempt: str) -> FilledFile:
        """Append the rows of an attempt to another one's file; that file is forced to the disk again as a chunk.

        One batch at a time is in memory. After an error the file is of no use as a chunk (``file_of`` returns None); it
        still has the other attempt.

        Raises:
            DamagedChunkError: The file of the attempt is damaged.
            LogWriteError: The file system refuses.
        """
        file, rows, times = filled
        for other, staged in self._staged.items():
            if staged.filled is not None and staged.filled.file is file:
                self._staged[other] = staged._replace(filled=None)
        for batch in self._batches(attempt):
            file.append(batch, {})
            file.write(durably=False)
            rows, times = rows + batch.num_rows, times.union(times_of([batch]))
        return FilledFile(file, rows, times)

    def _batches(self, attempt: str) -> Iterator[pa.RecordBatch]:
        try:
            with self._files.open(_name(attempt)) as source:
                yield from _read_batches(source)
        except Exception as e:  # Arrow's reader of streams answers damage with errors of many kinds
            if is_transient(e) or isinstance(e, FileNotFoundError):  # without the file, the log is away
                raise DiskFaultError(f"reading staged attempt {attempt}: {e}") from e
            raise self._damaged(attempt, str(e)) from e

    def _damaged(self, attempt: str, why: str) -> DamagedChunkError:
        return DamagedChunkError(f"reading staged attempt {attempt} in {self._files}: {why}")

    def remove(self, attempts: list[str]) -> None:
        """Delete attempts that are committed, aborted or abandoned."""
        for attempt in attempts:
            if (staged := self._staged.pop(attempt, None)) is not None:
                self.bytes -= staged.size
            _remove(self._files, attempt)

    def superseded(self) -> list[str]:
        """Attempts at a part that has a newer attempt; they are only useful if the newer one fails."""
        newest = {staged.part[:3]: attempt for attempt, staged in self._staged.items()}  # in order of arrival
        return [attempt for attempt, staged in self._staged.items() if newest[staged.part[:3]] != attempt]


def _name(attempt: str) -> str:
    return f"{attempt}.arrow"


def _hidden(attempt: str) -> str:
    return f"{TEMPORARY_PREFIX}{attempt}.arrow"


def _bytes_on_disk(size: int) -> int:
    """The room that a file takes on disk: whole blocks, and at least one."""
    return (size // _BLOCK_BYTES + 1) * _BLOCK_BYTES


def _remove(files: StagedFiles, attempt: str) -> None:
    """Delete the file of an attempt, finished or not. The next writer finds it otherwise, and sees that it is done."""
    try:
        for name in (_name(attempt), _hidden(attempt)):
            files.remove(name)
    except LogWriteError as e:
        _log.warning("%s", e)


def _stream(source: pa.NativeFile) -> pa.ipc.RecordBatchStreamReader:
    source.seek(MAGIC_BYTES)
    return pa.ipc.open_stream(source)


def _read_batches(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    before = 0
    reader = _stream(source)
    if not reader.schema.equals(MESSAGE_SCHEMA):
        raise ValueError(f"its schema is another one: {reader.schema}")
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            raise ValueError("its end is missing") from None
        if not is_intact(batch, metadata, before):
            raise ValueError(f"the checksum of the batch after {before} rows differs")
        if not batch.num_rows:
            return
        yield batch.replace_schema_metadata(None)
        before += batch.num_rows
