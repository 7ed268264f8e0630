"""The files of those who read a log: where each began, how far it has come, and what it was given.

The rules:

* Every query that reads a log has a *position*: below ``next`` it needs nothing. Positions are
  recorded, and chunks deleted, under one lock: what a reader has listed after it recorded its position is not deleted.
* An id that was handed to a query is noted before, durably (``given``). Whoever opens the log to write compares it
  with the log's end, so that an id whose message is gone is not given to another message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from zmq_datasource.errors import RESTORE, LogFormatError, LogLockedError
from zmq_datasource.host import failpoints
from zmq_datasource.log.files import PartitionFiles, WriterLock, read_file, read_json, reading, writing
from zmq_datasource.log.layout import (
    LOCK_WAIT_SECONDS,
    POSITIONS_LOCK_NAME,
    READERS_NAME,
    SUBSCRIPTIONS_NAME,
    TEMPORARY_PREFIX,
)

__all__ = ["ReaderFiles", "ReaderPosition", "ReaderTerms"]

_POSITION_SUFFIX, _START_SUFFIX = ".json", ".start.json"
_SKIPPED = re.compile(r"(?P<reader>.+)\.(?P<first>[0-9]{20})-(?P<end>[0-9]{20})\.skipped")


class ReaderTerms(NamedTuple):
    """On which terms a query would receive the feed itself.

    Attributes:
        retention: ``walRetention``, in seconds.
        replays: Whether it has a ``replayEndpoint``.
    """

    retention: float
    replays: bool


class ReaderPosition(NamedTuple):
    """Of one reader: the first id that it still needs, and the one after the last that it was ever given.

    Attributes:
        given: None where the chunks themselves vouch for what was given: the log's own query, with ``walSync``.
        named: Whether its user has named it. One that nobody has named gives way when the log needs the room.
        terms: None of one that only reads.
    """

    next: int
    given: int | None = None
    named: bool = True
    terms: ReaderTerms | None = None


def _terms_of(content: object) -> ReaderTerms | None:
    match content:
        case {"retention": float(retention), "replays": bool(replays)}:
            return ReaderTerms(retention, replays)
    return None


class ReaderFiles(PartitionFiles):
    """Small JSON files, each replaced as a whole."""

    def _start_path(self, reader: str) -> Path:
        return self._directory / READERS_NAME / f"{reader}{_START_SUFFIX}"

    def start_path(self, reader: str) -> str:
        """Where ``write_start`` writes, for messages."""
        return str(self._start_path(reader))

    def read_start(self, reader: str) -> tuple[int, str] | None:
        """What ``write_start`` wrote: first id and reason, while the query's first batch is not done."""
        path = self._start_path(reader)
        match self._read_json(path):
            case None:
                return None
            case {"next": int(next_id), "startingOffsets": str(position)}:
                return next_id, position
        raise LogFormatError(f"reading {path}: it holds no message id. {RESTORE}")

    def write_start(self, reader: str, next_id: int, position: str) -> None:
        """Remember, durably, the first id that a query was given, and by which ``startingOffsets``."""
        path = self._start_path(reader)
        self._replace(path, {"next": next_id, "startingOffsets": position})
        failpoints.reach("log.start.after_write")

    def remove_start(self, reader: str) -> None:
        """Delete a query's start: its first batch is done."""
        failpoints.reach("log.start.before_remove")
        self._forget(self._start_path(reader))

    def starting(self) -> list[str]:
        """The readers whose first batch is not done."""
        return [name.removesuffix(_START_SUFFIX) for name in self._reader_names(_START_SUFFIX)]

    def _reader_path(self, reader: str) -> Path:
        return self._directory / READERS_NAME / f"{reader}{_POSITION_SUFFIX}"

    def reader_path(self, reader: str) -> str:
        """Where a reader's position is, for messages."""
        return str(self._reader_path(reader))

    def write_reader(self, reader: str, position: ReaderPosition) -> None:
        """Record, durably, the position of a reader."""
        content: dict[str, object] = {"next": position.next}
        if position.given is not None:
            content["given"] = position.given
        if not position.named:
            content["named"] = False
        if position.terms is not None:
            content["terms"] = position.terms._asdict()
        failpoints.reach("log.position.before_write")
        self._replace(self._reader_path(reader), content)
        failpoints.reach("log.position.after_write")

    def remove_reader(self, reader: str) -> None:
        """Delete a reader's position and start: it needs no messages any more."""
        self._forget(self._reader_path(reader))
        self._forget(self._start_path(reader))
        for ids in self.skipped(reader):
            self.forget_skipped(reader, ids)

    def moved_at(self, reader: str) -> float | None:
        """When a reader's position was last recorded, in seconds since the epoch; None if it is gone."""
        path = self._reader_path(reader)
        with suppress(FileNotFoundError), reading(path):
            return path.stat().st_mtime
        return None

    def touch_reader(self, reader: str) -> None:
        """Make ``moved_at`` now; a position that is gone stays gone."""
        path = self._reader_path(reader)
        with writing(f"touching {path}"), suppress(FileNotFoundError):
            os.utime(path)

    def position(self, reader: str) -> ReaderPosition | None:
        """What ``write_reader`` wrote; None if there is no such reader, or it is gone for ever."""
        path = self._reader_path(reader)
        match self._read_json(path):
            case None:
                return None
            case {"next": int(next_id), **rest}:
                given, named = rest.get("given"), rest.get("named", True)
                if isinstance(named, bool) and (given is None or isinstance(given, int)):
                    return ReaderPosition(next_id, given, named, _terms_of(rest.get("terms")))
        raise LogFormatError(f"reading {path}: it holds no position of a reader. {RESTORE}")

    def positions(self) -> dict[str, ReaderPosition]:
        """The positions of all readers, by name."""
        found = {}
        for file in self._reader_names(_POSITION_SUFFIX):
            if file.endswith(_START_SUFFIX):
                continue
            name = file.removesuffix(_POSITION_SUFFIX)
            position = self.position(name)
            if position is not None:
                found[name] = position
        return found

    def _skipped_path(self, reader: str, first: int, end: int) -> Path:
        return self._directory / READERS_NAME / f"{reader}.{first:020d}-{end:020d}.skipped"

    def write_skipped(self, reader: str, first: int, end: int) -> None:
        """Record that a task of this reader has skipped the ids ``[first, end)``, because they were deleted.

        Raises:
            LogWriteError: The file system refused.
        """
        self._replace(self._skipped_path(reader, first, end), {})

    def skipped(self, reader: str) -> list[range]:
        """The ids that ``write_skipped`` has recorded, in order. Two tasks, or two attempts, may have the same ids."""
        found = (_SKIPPED.fullmatch(name) for name in self._reader_names(".skipped"))
        ids = [range(int(it["first"]), int(it["end"])) for it in found if it and it["reader"] == reader]
        return sorted(ids, key=lambda it: (it.start, it.stop))

    def forget_skipped(self, reader: str, ids: range) -> None:
        """Delete one of these records."""
        self._forget(self._skipped_path(reader, ids.start, ids.stop))

    def _reader_names(self, suffix: str) -> list[str]:
        directory = self._directory / READERS_NAME
        try:
            with reading(directory):
                names = os.listdir(directory)
        except FileNotFoundError:
            return []
        return [name for name in names if name.endswith(suffix) and not name.startswith(TEMPORARY_PREFIX)]

    @contextmanager
    def placing(self, wait: float = LOCK_WAIT_SECONDS) -> Iterator[None]:
        """Keep others from recording positions, and the writer from deleting, for a moment.

        Raises:
            LogLockedError: Somebody else does, for longer than ``wait`` seconds.
        """
        path = self._directory / POSITIONS_LOCK_NAME
        # Without a word in it, which a full disk would refuse.
        lock = self._lock(path, wait, f"recording a position in log {self.root}", "try again", False)
        try:
            yield
        finally:
            lock.release()

    def announce_deletion(self) -> bool:
        """Say, while ``placing``, that chunks are about to be deleted.

        Returns:
            Whether somebody may have recorded a position since, because there is a place where no lock holds.
        """
        return False

    def end_deletion(self) -> None:
        """Say that it is done."""

    def wait_for_deletion(self) -> bool:
        """Wait, while ``placing``, for a deletion that has begun before the last position was recorded.

        Returns:
            Whether something may have been deleted since the log was listed before that.
        """
        return False

    def given(self) -> tuple[int, str] | None:
        """The id after the last one that any query was given, as far as that was noted, and where it says so."""
        return max(
            (
                (max(position.next, position.given or 0), self.reader_path(name))
                for name, position in self.positions().items()
            ),
            default=None,
        )

    def _forget(self, path: Path) -> None:
        """Delete what ``_replace`` wrote."""
        self._remove(path)

    def _read_json(self, path: Path) -> object:
        """What a file holds; None if there is none."""
        with suppress(FileNotFoundError):
            return read_json(path)
        return None

    def lock_reader(self, reader: str, wait: float = LOCK_WAIT_SECONDS) -> WriterLock:
        """Become the one query that reads under this name.

        Args:
            wait: Seconds to wait for one that is just stopping.

        Raises:
            LogLockedError: Another one does; says who.
        """
        path = self._directory / READERS_NAME / f"{reader}.lock"
        return self._lock(
            path, wait, f"reading log {self.root} as {reader!r}", "give each query a reader of its own"
        )

    def hold_reader(self, reader: str, wait: float = LOCK_WAIT_SECONDS) -> WriterLock:
        """``lock_reader``, for the query itself, of which others are to know that it runs."""
        return self.lock_reader(reader, wait)

    def is_reading_elsewhere(self, reader: str) -> bool:
        """Whether a query of this name may run where its lock does not hold."""
        return False

    def is_reading(self, reader: str) -> bool:
        """Whether a query of this name runs."""
        try:
            self.lock_reader(reader, 0.0).release()
        except LogLockedError:
            return True
        return False

    def remove_reader_lock(self, reader: str) -> None:
        """Delete the file of a lock. Only for its holder."""
        self._remove(self._directory / READERS_NAME / f"{reader}.lock")

    def read_note(self, name: str) -> object:
        """The content of a small JSON file of the partition that ``write_note`` wrote; None if there is none."""
        return self._read_json(self._directory / name)

    def write_note(self, name: str, content: object) -> None:
        """Replace, durably, a small JSON file of the partition. Only for the holder of its lock."""
        self._replace(self._directory / name, content)

    def read_subscriptions(self) -> bytes | None:
        """What ``write_subscriptions`` wrote; None if nothing ever was."""
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
