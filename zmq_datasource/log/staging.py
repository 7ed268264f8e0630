"""What was received and not committed: one file an attempt, beside the log's chunks.

``0/staging/<attempt>.arrow`` holds the rows (``messages.schemas.MESSAGE_SCHEMA``) of one attempt at one part
of a transaction, whole and on disk; its schema's metadata says of which. A file that is being
written is hidden, and is the trace of a crash if the next writer finds it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa
import pyarrow.ipc

from zmq_datasource.errors import DamagedChunkError, DiskFaultError, LogWriteError
from zmq_datasource.log.chunk import CHECKSUM, fingerprint, is_intact
from zmq_datasource.log.files import is_transient
from zmq_datasource.log.staged_files import StagedFiles, bytes_on_disk
from zmq_datasource.messages.schemas import MESSAGE_SCHEMA

__all__ = ["Part", "StagedFile", "Staging"]


_log = logging.getLogger(__name__)

# An Arrow file begins with its name, padded; the schema follows.
_MAGIC_BYTES = 8


class Part(NamedTuple):
    """What an attempt is an attempt at, how many rows it has, and their digest; None where it is not known yet."""

    producer: str
    number: int
    partition: int
    rows: int | None = None
    digest: int | None = None


class StagedFile:
    """An attempt that is being written.

    Attributes:
        rows: Written so far.
        bytes: What they take on disk.
    """

    def __init__(self, files: StagedFiles, attempt: str, part: Part) -> None:
        self._files = files
        self.attempt = attempt
        self.rows = self.bytes = 0
        schema = MESSAGE_SCHEMA.with_metadata(
            {
                "producer": part.producer,
                "number": str(part.number),
                "partition": str(part.partition),
            }
        )
        self._file = files.create(attempt)
        self._writer = pa.ipc.new_file(self._file, schema)

    def append(self, batch: pa.RecordBatch) -> None:
        with self._files.writing(self.attempt):
            self._writer.write_batch(batch, custom_metadata={CHECKSUM: fingerprint(batch, self.rows)})
            self.bytes = bytes_on_disk(self._file.tell())
        self.rows += batch.num_rows

    def finish(self) -> None:
        """Whole, on disk, and to be found by the next writer.

        Raises:
            LogWriteError: The file system refused.
        """
        with self._files.writing(self.attempt):
            self._writer.close()
            self.bytes = bytes_on_disk(self._file.tell())
            self._file.close()
        self._files.finish(self.attempt)

    def discard(self) -> None:
        """Forget it; what cannot be removed now the next writer removes."""
        with suppress(OSError):  # what could not be written is not wanted
            self._file.close()
        try:
            self._files.remove(self.attempt)
        except LogWriteError as e:
            _log.warning("%s", e)


class Staging:
    """The finished attempts of a log partition. Only for its writer; ``now`` is in monotonic seconds.

    Attributes:
        bytes: What they take on disk.
    """

    def __init__(self, files: StagedFiles) -> None:
        self._files = files
        self._parts: dict[str, Part] = {}
        self._sizes: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._parts)

    def recover(self, now: float) -> None:
        """Find what is there, and remove what was not finished or is no attempt.

        This reads only the beginning of each file, because there may be very many.
        """
        self._files.remove_unfinished()
        for attempt in self._files.names():
            try:
                head = self._files.head_of(attempt)
                metadata = pa.ipc.read_schema(pa.py_buffer(head[_MAGIC_BYTES:])).metadata
                names = metadata[b"producer"].decode(), int(metadata[b"number"]), int(metadata[b"partition"])
            except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as e:
                if is_transient(e):  # that no file can be opened now is no fault of this one
                    raise DiskFaultError(f"opening staged attempt {attempt}: {e}") from e
                # Its sender never heard that it is committed, and will send it again.
                _log.warning("removing staged attempt %s, which cannot be read: %r", attempt, e)
                self._files.remove(attempt)
                continue
            self.add(attempt, Part(*names), bytes_on_disk(self._files.size_of(attempt)), now)

    def add(self, attempt: str, part: Part, size: int, now: float) -> None:
        """Count an attempt that is whole; ``size`` is in bytes on disk."""
        self._parts[attempt], self._sizes[attempt], self._since[attempt] = part, size, now
        self.bytes += size

    def touch(self, now: float) -> None:
        """Restart an attempt's silence: its sender could not add to it meanwhile."""
        self._since = dict.fromkeys(self._since, now)

    def get(self, attempt: str) -> Part | None:
        return self._parts.get(attempt)

    def of(self, producer: str, up_to: int) -> list[str]:
        """The attempts at this producer's transactions up to a number."""
        return [a for a, part in self._parts.items() if part.producer == producer and part.number <= up_to]

    def abandoned(self, seconds: float, active: Collection[str], now: float) -> list[str]:
        """Attempts at transactions to which nothing has been added, and that nobody has committed, for so long.

        Args:
            active: Producers that are at work.
        """
        newest: dict[str, float] = {}
        for attempt, part in self._parts.items():
            newest[part.producer] = max(newest.get(part.producer, 0.0), self._since[attempt])
        before = now - seconds
        return [
            attempt
            for attempt, part in self._parts.items()
            if part.producer not in active and newest[part.producer] < before
        ]

    def rows(self, attempt: str) -> int:
        """How many rows an attempt has.

        Raises:
            DamagedChunkError: The file is not what was written.
        """
        part = self._parts[attempt]
        if part.rows is None:
            part = part._replace(rows=sum(batch.num_rows for batch in self.read(attempt)))
            self._parts[attempt] = part
        assert part.rows is not None
        return part.rows

    def read(self, attempt: str) -> list[pa.RecordBatch]:
        """The rows of an attempt, read from its file and checked.

        Raises:
            DamagedChunkError: The file is not what was written.
        """
        batches, before = [], 0
        try:
            with self._files.open(attempt) as file:
                reader = pa.ipc.open_file(file)
                for position in range(reader.num_record_batches):
                    batch, metadata = reader.get_batch_with_custom_metadata(position)
                    if not is_intact(batch, metadata, before):
                        raise ValueError(f"the checksum of batch {position} differs")
                    batches.append(batch.replace_schema_metadata(None))
                    before += batch.num_rows
        except (OSError, pa.ArrowException, ValueError) as e:
            if is_transient(e):
                raise DiskFaultError(f"opening staged attempt {attempt}: {e}") from e
            raise DamagedChunkError(f"reading staged attempt {attempt} in {self._files}: {e}") from e
        return batches

    def remove(self, attempts: list[str]) -> None:
        """Forget attempts: they are committed, aborted, or abandoned."""
        for attempt in attempts:
            if self._parts.pop(attempt, None) is not None:
                self.bytes -= self._sizes.pop(attempt)
                del self._since[attempt]
            try:
                self._files.remove(attempt)
            except LogWriteError as e:  # the next writer finds it, and what it is
                _log.warning("%s", e)

    def superseded(self) -> list[str]:
        """Attempts at a part of which there is a newer one: of use only if that one fails."""
        newest: dict[tuple[str, int, int], str] = {}
        for attempt, part in self._parts.items():
            newest[part[:3]] = attempt  # in the order in which they came
        return [attempt for attempt, part in self._parts.items() if newest[part[:3]] != attempt]
