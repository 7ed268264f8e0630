"""The rows that a sink does not send: each is tried again, and then dropped or kept as a dead letter, with its reason.

Dead letters are Parquet files on any file system of pyarrow; ``spark.read.parquet(location)`` reads them. Each task
stages files below ``_staging``, which Spark does not read (``StagedDeadLetters``). The commit of the batch moves the
files of its successful tasks to ``query=<id>/batch=<n>``, in place of the files from an earlier run of the batch
(``commit_dead_letters``). So each dead letter is there once, however often Spark repeats tasks and batches.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import DeadLetterError
from zmq_datasource.host import failpoints
from zmq_datasource.host.locations import directory_of, make_directory, without_secrets, write_parquet
from zmq_datasource.messages.columns import FRAMES
from zmq_datasource.options import WriteOptions
from zmq_datasource.options.types import Location
from zmq_datasource.sink.in_flight import RowBatch

_LONGEST_INTERVAL = 10.0
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


class Unsent:
    """Tries rows again that found no room, drops them or keeps them as dead letters, and counts them.

    Args:
        dead_letters: Keeps the rows; None to drop them.
        counters: The counters of the task.

    Attributes:
        continues: Whether a task continues when a row cannot be sent. If not, the first such row fails the task.
    """

    def __init__(
        self, options: WriteOptions, dead_letters: StagedDeadLetters | None, counters: SinkCounters
    ) -> None:
        self._options = options
        self._dead_letters = dead_letters
        self._counters = counters
        self.continues = options.noblock or dead_letters is not None

    def leave_out_nulls(self, batch: RowBatch) -> None:
        """Drop or keep the rows whose value is null. They keep their numbers in the task."""
        if batch.values is not None and batch.values.null_count:
            for at in pc.indices_nonzero(batch.values.is_null()).to_pylist():
                self._give_up(batch, at, "null")

    def retry(self, send: Callable[[], bool]) -> bool:
        """Try to send a row up to ``maxRetries`` times, after pauses that double. Returns whether it was sent."""
        interval = float(self._options.retry_interval)
        for _ in range(self._options.max_retries):
            time.sleep(interval)
            self._counters.blocked_seconds += interval
            self._counters.retries += 1
            interval = min(interval * 2, _LONGEST_INTERVAL)
            if send():
                return True
        return False

    def give_up(self, batch: RowBatch, at: int, has_peers: bool) -> None:
        """Drop or keep a row for which no queue has room.

        Args:
            at: Its position in ``batch``.
            has_peers: Whether a peer is connected.
        """
        self._give_up(
            batch, at, "no_peer" if not has_peers else "hwm" if self._options.noblock else "timeout"
        )

    def write_off(self, batches: Iterable[RowBatch]) -> int:
        """Count rows as dropped with a connection, and no longer as sent. Returns how many rows."""
        lost = 0
        for batch in batches:
            lost += batch.sent
            self._counters.bytes -= batch.sent_bytes
        self._counters.sent -= lost
        self._counters.dropped["connection_lost"] += lost
        return lost

    def _give_up(self, batch: RowBatch, at: int, reason: str) -> None:
        batch.given_up.add(at)
        if self._dead_letters is None:
            self._counters.dropped[reason] += 1
        else:
            columns = (batch.topics, batch.values, batch.frames)
            self._dead_letters.add(reason, *(None if each is None else each[at].as_py() for each in columns))
            self._counters.dead_lettered[reason] += 1


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
        kept = False
        try:
            if kind is None and self._rows:
                self._write()
            kept = kind is None
        finally:
            if not kept:
                self._discard()

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

    def _discard(self) -> None:
        # No reader sees a file that stays, and the commit of the repeated batch deletes it.
        with suppress(Exception):
            system, directory = directory_of(self._location)
            for name in self.names:
                system.delete_file(f"{directory}/{self._staging}/{name}")


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


def abort_dead_letters(location: Location, query: str, batch: int) -> None:
    """Delete all staged files of a batch. They never become visible to readers.

    Raises:
        DeadLetterError: The file system refused.
    """
    with _storing(location, f"removing the staged dead letters of batch {batch}"):
        system, directory = directory_of(location)
        _remove(system, f"{directory}/{_staging(query, batch)}")


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
