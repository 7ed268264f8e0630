"""The records of a log's readers: for each one file, with its position in every log partition.

The rules:

* A record says what the log must keep: nothing below ``next`` is needed by this reader any more. Where a query goes on
  is in its own checkpoint, and nowhere else.
* A new record is written, and chunks are deleted, under one lock (``placing``): what a reader has listed after it wrote
  its record is not deleted.
* The reader's lock is held while its query runs. So two queries of one name cannot run, and a writer sees which run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash

from zmq_datasource.errors import RESTORE, LogFormatError
from zmq_datasource.host import failpoints
from zmq_datasource.log.files import PartitionFiles, WriterLock, read_file, read_json, reading, writing
from zmq_datasource.log.layout import (
    LOCK_WAIT_SECONDS,
    READERS_LOCK_NAME,
    READERS_NAME,
    SUBSCRIPTIONS_NAME,
    TEMPORARY_PREFIX,
)

__all__ = ["ReaderFiles", "ReaderRecord", "ReaderTerms"]

_SUFFIX, _LOCK_SUFFIX = ".json", ".lock"
_SKIPPED = re.compile(r"([^.]+)\.([0-9]{1,10})\.([0-9]{20})-([0-9]{20})\.skipped")
_CHECKSUM = "xxh3"
_Id = Annotated[int, msgspec.Meta(ge=0)]


class ReaderTerms(msgspec.Struct, frozen=True):
    """On which terms a query would receive the feed itself.

    Attributes:
        retention: ``walRetention``, in seconds.
        replays: Whether it has a ``replayEndpoint``.
    """

    retention: float
    replays: bool


class ReaderRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a log keeps for one reader; the content of its file.

    Attributes:
        next: By log partition, the first id that the reader still needs. It needs all of a partition that is missing.
        timeout: Seconds for which the messages are kept after the query has ended; None for a query without a name,
            for which the writer of the log decides.
        begins: Whether a query without a checkpoint begins at ``next``: one of this name has chosen to begin there and
            has finished no batch, or the position was set by hand.
        terms: None of a query that only reads.
    """

    next: dict[_Id, _Id]
    timeout: float | None = None
    begins: bool = False
    terms: ReaderTerms | None = None

    @property
    def named(self) -> bool:
        """Whether the user has named the reader."""
        return self.timeout is not None

    def needs(self, partition: int) -> int:
        """The first id of this partition that the reader still needs."""
        return self.next.get(partition, 0)


class ReaderFiles(PartitionFiles):
    """Small JSON files beside the log partitions, each replaced as a whole."""

    @property
    def _readers(self) -> Path:
        return self._root / READERS_NAME

    def _reader_path(self, name: str) -> Path:
        return self._readers / f"{name}{_SUFFIX}"

    def reader_path(self, name: str) -> str:
        """Where a reader's record is, for messages."""
        return str(self._reader_path(name))

    def write_reader(self, name: str, record: ReaderRecord) -> None:
        """Record, durably, what a reader needs.

        Raises:
            LogWriteError: The file system refused.
        """
        failpoints.reach("log.position.before_write")
        content = msgspec.to_builtins(record, str_keys=True)
        self._replace(self._reader_path(name), content | {_CHECKSUM: _checksum(content)})
        failpoints.reach("log.position.after_write")

    def remove_reader(self, name: str) -> None:
        """Delete a reader's record, and what its tasks have recorded: the log keeps nothing for it any more."""
        self._forget(self._reader_path(name))
        for found in filter(None, map(_SKIPPED.fullmatch, self._reader_files())):
            if found[1] == name:
                self._forget(self._readers / found[0])

    def moved_at(self, name: str) -> float | None:
        """When a reader's record was last written or touched, in seconds since the epoch; None if there is none."""
        path = self._reader_path(name)
        with suppress(FileNotFoundError), reading(path):
            return path.stat().st_mtime
        return None

    def touch_reader(self, name: str) -> None:
        """Make ``moved_at`` now; does nothing if there is no record."""
        path = self._reader_path(name)
        with writing(f"touching {path}"), suppress(FileNotFoundError):
            os.utime(path)

    def reader(self, name: str) -> ReaderRecord | None:
        """The record of a reader; None if there is none.

        Raises:
            LogFormatError: The file is damaged.
        """
        content = self._read_json(self._reader_path(name))
        if content is None:
            return None
        try:
            record = msgspec.convert(content, ReaderRecord, str_keys=True)
            written = msgspec.to_builtins(record, str_keys=True)
            if content != written | {_CHECKSUM: _checksum(written)}:
                raise ValueError("its checksum differs; the file was changed after it was written")
        except (msgspec.ValidationError, ValueError) as e:
            raise LogFormatError(
                f"reading {self.reader_path(name)}: it is no record of a reader ({e}). {RESTORE}; or, to keep nothing "
                f"for this reader: zmq-datasource log readers drop {self.root} {name}"
            ) from e
        return record

    def readers(self) -> dict[str, ReaderRecord]:
        """The records of all readers, by name.

        Raises:
            LogFormatError: A file is damaged.
        """
        found = {}
        for name in self.reader_names():
            record = self.reader(name)
            if record is not None:
                found[name] = record
        return found

    def _skipped_path(self, reader: str, first: int, end: int) -> Path:
        return self._readers / f"{reader}.{self.partition}.{first:020d}-{end:020d}.skipped"

    def write_skipped(self, reader: str, first: int, end: int) -> None:
        """Record that a task of this reader has skipped the ids ``[first, end)``, because they were deleted.

        Raises:
            LogWriteError: The file system refused.
        """
        self._replace(self._skipped_path(reader, first, end), {})

    def skipped(self, reader: str) -> list[range]:
        """The ids that ``write_skipped`` has recorded, in order. Two tasks, or two attempts, may have the same ids."""
        found = filter(None, map(_SKIPPED.fullmatch, self._reader_files()))
        ids = [
            range(int(it[3]), int(it[4])) for it in found if (it[1], it[2]) == (reader, str(self.partition))
        ]
        return sorted(ids, key=lambda it: (it.start, it.stop))

    def forget_skipped(self, reader: str, ids: range) -> None:
        """Delete one of these records."""
        self._forget(self._skipped_path(reader, ids.start, ids.stop))

    def reader_names(self) -> list[str]:
        """The names of all readers that have a record."""
        return sorted(_name_of(file) for file in self._reader_files() if _is_record(file))

    def _reader_files(self) -> list[str]:
        """The names of the files about readers."""
        try:
            with reading(self._readers):
                return os.listdir(self._readers)
        except FileNotFoundError:
            return []

    @contextmanager
    def placing(self, wait: float = LOCK_WAIT_SECONDS) -> Iterator[None]:
        """Keep others from writing new records, and writers from deleting, for a moment.

        Raises:
            LogLockedError: Another process has the lock for longer than ``wait`` seconds.
        """
        # The lock file stays empty: a full disk would refuse a word in it.
        lock = self._lock(
            self._root / READERS_LOCK_NAME,
            wait,
            f"recording a reader of log {self.root}",
            "try again",
            sign=False,
        )
        try:
            yield
        finally:
            lock.release()

    def announce_deletion(self) -> bool:
        """Tell other machines, while ``placing``, that this writer is about to delete chunks.

        Returns:
            Whether another machine may have written a record since, because the lock does not hold there.
        """
        return False

    def end_deletion(self) -> None:
        """Tell other machines that the deletion is done."""

    def wait_for_deletion(self) -> bool:
        """Wait, while ``placing``, for a deletion that has begun before the last record was written.

        Returns:
            Whether chunks may have been deleted since the log was listed before that.
        """
        return False

    def _forget(self, path: Path) -> None:
        self._remove(path)

    def _read_json(self, path: Path) -> object:
        """What a file holds; None if there is none."""
        with suppress(FileNotFoundError):
            return read_json(path)
        return None

    def lock_reader(self, name: str, wait: float = LOCK_WAIT_SECONDS) -> WriterLock:
        """Become the one query that reads under this name, on this machine.

        Args:
            wait: Seconds to wait for a query that is just stopping.

        Raises:
            LogLockedError: Another query of this name runs; says which process.
        """
        return self._lock(
            self._readers / f"{name}{_LOCK_SUFFIX}",
            wait,
            f"reading log {self.root} as reader={name}",
            "give each query a reader of its own",
        )

    def hold_reader(self, name: str, wait: float = LOCK_WAIT_SECONDS) -> WriterLock:
        """``lock_reader`` for the query itself, which other machines can see as running meanwhile."""
        return self.lock_reader(name, wait)

    def is_reading_elsewhere(self, name: str) -> bool:
        """Whether a query of this name may run on a machine where its lock does not hold."""
        return False

    def is_reading(self, name: str) -> bool:
        """Whether a query of this name runs."""
        return self._lock_holder(self._readers / f"{name}{_LOCK_SUFFIX}") is not None

    def remove_reader_lock(self, name: str) -> None:
        """Delete the file of a lock. Only for its holder."""
        self._remove(self._readers / f"{name}{_LOCK_SUFFIX}")

    def read_note(self, name: str) -> object:
        """The content of a small JSON file of the partition that ``write_note`` wrote; None if there is none."""
        return self._read_json(self._directory / name)

    def write_note(self, name: str, content: object) -> None:
        """Replace, durably, a small JSON file of the partition. Only for the holder of its lock."""
        self._replace(self._directory / name, content)

    def read_subscriptions(self) -> bytes | None:
        """What ``write_subscriptions`` wrote; None if there is nothing."""
        path = self._directory / SUBSCRIPTIONS_NAME
        with suppress(FileNotFoundError), reading(path):
            return read_file(path)
        return None

    def write_subscriptions(self, content: bytes) -> None:
        """Remember, durably, a proxy's durable subscribers and their positions."""
        failpoints.reach("log.subscriptions.before_write")
        self._replace_bytes(self._directory / SUBSCRIPTIONS_NAME, content)
        failpoints.reach("log.subscriptions.after_write")

    def subscriptions_path(self) -> str:
        """Where a proxy's subscriptions are, for messages."""
        return str(self._directory / SUBSCRIPTIONS_NAME)


def _checksum(content: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def _is_record(file: str) -> bool:
    return file.endswith(_SUFFIX) and not file.startswith(TEMPORARY_PREFIX)


def _name_of(file: str) -> str:
    return file.removesuffix(_SUFFIX)
