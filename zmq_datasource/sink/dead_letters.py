"""A sink's dead letters: rows that were not sent, with the reason, as Parquet files on any file system of pyarrow.

``spark.read.parquet(location)`` reads them. Each task stages files below ``_staging``, which Spark does not read
(``StagedDeadLetters``). The commit of the batch moves the files of its successful tasks to ``query=<id>/batch=<n>``,
in place of the files from an earlier run of the batch (``commit_dead_letters``). So each dead letter is there once,
however often Spark repeats tasks and batches.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import NamedTuple, Self

import pyarrow as pa

from zmq_datasource.errors import DeadLetterError
from zmq_datasource.host import failpoints
from zmq_datasource.host.locations import directory_of, make_directory, without_secrets, write_parquet
from zmq_datasource.messages.schemas import FRAMES
from zmq_datasource.options.types import Location

__all__ = ["Row", "StagedDeadLetters", "abort_dead_letters", "commit_dead_letters"]

_log = logging.getLogger(__name__)


class Row(NamedTuple):
    """A row that was not sent: topic and value, or frames."""

    topic: bytes | None
    value: bytes | None
    frames: list[bytes] | None


_ROW_SCHEMA = pa.schema(
    [
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("reason", pa.string()),
        ("topic", pa.binary()),
        ("value", pa.binary()),
        ("frames", FRAMES),
        ("partition", pa.int32()),
    ]
)
_STAGED_BYTES = 8 << 20


class StagedDeadLetters:
    """Writes the dead letters of one task to staged files; use it in a ``with`` block.

    If there is no dead letter, no file is written. If the block ends with an error, its files are deleted.

    Args:
        location: The option ``deadLetterLocation``.
        query, batch, partition: The task, by the ids of its query, micro-batch and partition.

    Attributes:
        names: The names of the staged files, for ``commit_dead_letters``.
    """

    def __init__(self, location: Location, query: str, batch: int, partition: int) -> None:
        self._location = location
        self._query, self._batch, self._partition = query, batch, partition
        self._rows: list[dict[str, object]] = []
        self._bytes = 0
        self.names: list[str] = []

    def __enter__(self) -> Self:
        return self

    def add(self, row: Row, reason: str) -> None:
        """Keep a row with the reason why it was not sent. It is in a file when the ``with`` block has ended.

        Raises:
            DeadLetterError: The file system has refused an operation.
        """
        self._rows.append(
            {
                "timestamp": time.time_ns() // 1000,
                "reason": reason,
                **row._asdict(),
                "partition": self._partition,
            }
        )
        self._bytes += len(row.topic or b"") + len(row.value or b"") + sum(map(len, row.frames or ())) + 200
        if self._bytes >= _STAGED_BYTES:
            self._write()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            if self._rows:
                self._write()
        except DeadLetterError:
            self._discard()
            raise

    def _discard(self) -> None:
        """Delete the files of a failed task. An error is only logged, so that it does not hide the task's own."""
        for name in self.names:
            try:
                with _storing(self._location, "removing staged dead letters"):
                    system, directory = directory_of(self._location)
                    with suppress(FileNotFoundError):  # Arrow deletes a file that it cannot finish
                        system.delete_file(f"{directory}/{_staging(self._query, self._batch)}/{name}")
            except DeadLetterError as e:
                _log.warning("%s", e)

    def _write(self) -> None:
        """Write the rows that are in memory to a new staged file."""
        with _storing(self._location, "staging dead letters"):
            system, directory = directory_of(self._location)
            staging = _staging(self._query, self._batch)
            make_directory(system, directory, staging)
            name = f"{uuid.uuid4().hex}.parquet"
            self.names.append(name)
            failpoints.reach("sink.dead_letters.before_write")
            write_parquet(system, f"{directory}/{staging}/{name}", self._rows, _ROW_SCHEMA)
            failpoints.reach("sink.dead_letters.after_write")
        self._rows, self._bytes = [], 0


def commit_dead_letters(location: Location, query: str, batch: int, names: Sequence[str]) -> None:
    """Make the dead letters of a batch visible to readers, in place of those from an earlier run of the batch.

    Called when all tasks of the batch are done.

    Args:
        names: The staged files of the successful tasks.

    Raises:
        DeadLetterError: The file system refused.
    """
    from pyarrow import fs  # noqa: PLC0415 - a tenth of a second, only where there is a dead letter

    with _storing(location, f"committing the dead letters of batch {batch}"):
        system, directory = directory_of(location)
        final, staging = f"{directory}/query={query}/batch={batch}", f"{directory}/{_staging(query, batch)}"
        failpoints.reach("sink.dead_letters.before_commit")
        if system.get_file_info(final).type != fs.FileType.NotFound:
            system.delete_dir(final)
        if names:
            make_directory(system, directory, f"query={query}/batch={batch}")
        for name in names:
            failpoints.reach("sink.dead_letters.before_move")
            system.move(f"{staging}/{name}", f"{final}/{name}")
        failpoints.reach("sink.dead_letters.after_commit")
    abort_dead_letters(location, query, batch)


def abort_dead_letters(location: Location, query: str, batch: int) -> None:
    """Delete all staged files of a batch. They never become visible to readers.

    Raises:
        DeadLetterError: The file system refused.
    """
    from pyarrow import fs  # noqa: PLC0415 - a tenth of a second, only where there is a dead letter

    with _storing(location, f"removing the staged dead letters of batch {batch}"):
        system, directory = directory_of(location)
        staging = f"{directory}/{_staging(query, batch)}"
        if system.get_file_info(staging).type != fs.FileType.NotFound:
            system.delete_dir(staging)


def _staging(query: str, batch: int) -> str:
    return f"_staging/{query}-{batch}"


@contextmanager
def _storing(location: Location, act: str) -> Iterator[None]:
    """Turn any error into a ``DeadLetterError`` that names the act and shows no secret."""
    try:
        yield
    # Each file system has its own errors, and their texts may contain a secret.
    except Exception as e:
        raise DeadLetterError(f"{act} in {location}: {without_secrets(e, location)}") from None
