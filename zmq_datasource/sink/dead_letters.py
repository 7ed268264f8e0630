"""The rows that a sink could not send, kept as dead letters, each with its reason.

Dead letters are Parquet files on any file system of pyarrow; ``spark.read.parquet(location)`` reads them. Each task
stages files below ``_staging``, which Spark does not read (``StagedDeadLetters``). The commit of the batch moves the
files of its successful tasks to ``query=<id>/batch=<n>``, in place of the files from an earlier run of the batch, and
deletes the others (``commit_dead_letters``). So each dead letter is there once, however often Spark repeats tasks and
batches.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import pyarrow as pa

from zmq_datasource.errors import DeadLetterError
from zmq_datasource.host import failpoints
from zmq_datasource.host.locations import directory_of, make_directory, without_secrets, write_parquet
from zmq_datasource.messages.columns import FRAMES
from zmq_datasource.options.types import Location

_STAGED_BYTES = 8 << 20
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


class StagedDeadLetters:
    """Writes the dead letters of one task to staged files; use it in a ``with`` block.

    If there is no dead letter, no file is written. No reader sees the files of a block that ends with an error.

    Args:
        location: The option ``deadLetterLocation``.
        query, batch, partition: The task, by the ids of its query, micro-batch and partition.

    Attributes:
        names: The names of the staged files, for ``commit_dead_letters``.
    """

    def __init__(self, location: Location, query: str, batch: int, partition: int) -> None:
        self._location = location
        self._staging = _staging(query, batch)
        self._partition = partition
        self._rows: list[dict[str, object]] = []
        self._bytes = 0
        self.names: list[str] = []

    def __enter__(self) -> Self:
        return self

    def add(
        self, reason: str, topic: bytes | None, value: bytes | None, frames: list[bytes] | None = None
    ) -> None:
        """Keep a row with the reason why it was not sent. It is in a file when the ``with`` block has ended.

        Raises:
            DeadLetterError: The file system has refused an operation.
        """
        now = time.time_ns() // 1000
        self._rows.append(
            dict(zip(_ROW_SCHEMA.names, (now, reason, topic, value, frames, self._partition), strict=True))
        )
        self._bytes += len(topic or b"") + len(value or b"") + sum(map(len, frames or ())) + 200
        if self._bytes >= _STAGED_BYTES:
            self._write()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._rows:
            self._write()

    def _write(self) -> None:
        """Write the rows that are in memory to a new staged file."""
        with _storing(self._location, "staging dead letters"):
            system, directory = directory_of(self._location)
            make_directory(system, directory, self._staging)
            self.names.append(f"{uuid.uuid4().hex}.parquet")
            failpoints.reach("sink.dead_letters.before_write")
            write_parquet(system, f"{directory}/{self._staging}/{self.names[-1]}", self._rows, _ROW_SCHEMA)
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
    final, staging = f"query={query}/batch={batch}", _staging(query, batch)
    with _storing(location, f"committing the dead letters of batch {batch}"):
        system, directory = directory_of(location)
        failpoints.reach("sink.dead_letters.before_commit")
        _remove(system, f"{directory}/{final}")
        if names:
            make_directory(system, directory, final)
        for name in names:
            failpoints.reach("sink.dead_letters.before_move")
            system.move(f"{directory}/{staging}/{name}", f"{directory}/{final}/{name}")
        failpoints.reach("sink.dead_letters.after_commit")
        _remove(system, f"{directory}/{staging}")


def _staging(query: str, batch: int) -> str:
    return f"_staging/{query}-{batch}"


def _remove(system: Any, directory: str) -> None:
    if system.get_file_info(directory).type.name != "NotFound":
        system.delete_dir(directory)


@contextmanager
def _storing(location: Location, act: str) -> Iterator[None]:
    """Turn any error into a ``DeadLetterError`` that names the act and shows no secret."""
    try:
        yield
    # Each file system has its own errors, and their texts may contain a secret.
    except Exception as e:
        raise DeadLetterError(f"{act} in {location}: {without_secrets(e, location)}") from None
