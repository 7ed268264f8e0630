"""The rows that a sink does not send: each is dropped or becomes a dead letter, and is counted with its reason.

Dead letters are Parquet files on any file system of pyarrow; ``spark.read.parquet(location)`` reads them. Each task
stages files below ``_staging``, which Spark does not read (``StagedDeadLetters``). The commit of the batch moves the
files of its successful tasks to ``query=<id>/batch=<n>``, in place of the files from an earlier run of the batch
(``commit_dead_letters``). So each dead letter is there once, however often Spark repeats tasks and batches.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Self

import pyarrow as pa

from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import DeadLetterError
from zmq_datasource.host import failpoints
from zmq_datasource.host.locations import directory_of, make_directory, without_secrets, write_parquet
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.messages.columns import FRAMES
from zmq_datasource.options import WriteOptions
from zmq_datasource.options.types import Location
from zmq_datasource.sink.in_flight import RowBatch

__all__ = ["StagedDeadLetters", "Unsent", "abort_dead_letters", "commit_dead_letters"]

_log = logging.getLogger(__name__)

# The reason of rows that may have been lost with a connection.
_LOST = "connection_lost"
_LOG_SECONDS = 5.0


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

    def add(
        self, reason: str, topic: bytes | None, value: bytes | None, frames: list[bytes] | None = None
    ) -> None:
        """Keep a row with the reason why it was not sent. It is in a file when the ``with`` block has ended.

        Raises:
            DeadLetterError: The file system has refused an operation.
        """
        self._rows.append(
            {
                "timestamp": time.time_ns() // 1000,
                "reason": reason,
                "topic": topic,
                "value": value,
                "frames": frames,
                "partition": self._partition,
            }
        )
        self._bytes += len(topic or b"") + len(value or b"") + sum(map(len, frames or ())) + 200
        if self._bytes >= _STAGED_BYTES:
            self._write()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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


class Unsent:
    """Drops the rows that a task does not send, or keeps them as dead letters, and counts them.

    Args:
        dead_letters: Keeps the rows; None to drop them (``noblock``).
        counters: The counters of the task.

    Attributes:
        continues: Whether a task continues when a row cannot be sent. If not, the first such row fails the task.
        needs_rows: Whether the content of sent rows is kept as long as they may be lost with a connection: then the
            task sends them again, or makes them dead letters. If not, it keeps only their number.
    """

    def __init__(
        self,
        options: WriteOptions,
        dead_letters: StagedDeadLetters | None,
        counters: SinkCounters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._noblock = options.noblock
        self._dead_letters = dead_letters
        self._counters = counters
        self._clock = clock
        self._logs: dict[str, LimitedLog] = {}
        self.continues = options.noblock or dead_letters is not None
        self.needs_rows = not options.noblock or dead_letters is not None

    def give_up(self, batch: RowBatch, at: int, has_peers: bool) -> None:
        """Drop or keep a row for which no queue has room.

        Args:
            at: Its position in ``batch``.
            has_peers: Whether a peer is connected.
        """
        reason = "no_peer" if not has_peers else "hwm" if self._noblock else "timeout"
        batch.given_up.add(at)
        if reason not in self._logs:
            done = "dropped" if self._dead_letters is None else "kept as dead letters"
            # Logs no line for each row, only their number every 5 s. A task that ends sooner logs nothing: the account
            # of the batch has the numbers.
            self._logs[reason] = LimitedLog(
                __name__, f"rows {done} ({reason})", self._clock, lines=0, seconds=_LOG_SECONDS
            )
        self._logs[reason].warn("a row was not sent")
        self._drop_or_keep(batch, at, reason)

    def write_off(self, batches: Iterable[RowBatch]) -> int:
        """Count rows as lost with a connection, and no longer as sent. Drop or keep them. Returns how many rows."""
        lost = 0
        for batch in batches:
            lost += batch.sent
            self._counters.sent -= batch.sent
            self._counters.bytes -= batch.sent_bytes
            if self._dead_letters is None:
                self._counters.dropped[_LOST] += batch.sent
                continue
            for at in range(len(batch)):
                if at not in batch.given_up:
                    self._drop_or_keep(batch, at, _LOST)
        return lost

    def _drop_or_keep(self, batch: RowBatch, at: int, reason: str) -> None:
        if self._dead_letters is None:
            self._counters.dropped[reason] += 1
        else:
            columns = (batch.topics, batch.values, batch.frames)
            self._dead_letters.add(reason, *(None if each is None else each[at].as_py() for each in columns))
            self._counters.dead_lettered[reason] += 1


def commit_dead_letters(location: Location, query: str, batch: int, names: Sequence[str]) -> None:
    """Make the dead letters of a batch visible to readers, in place of those from an earlier run of the batch.

    Called when all tasks of the batch are done.

    Args:
        names: The staged files of the successful tasks.

    Raises:
        DeadLetterError: The file system refused.
    """
    from pyarrow import fs  # noqa: PLC0415 - a tenth of a second, only with deadLetterLocation

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
    from pyarrow import fs  # noqa: PLC0415 - a tenth of a second, only with deadLetterLocation

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
