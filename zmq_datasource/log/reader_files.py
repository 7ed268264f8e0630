"""The files of those who read a log: where each began, how far it has come, and what it was given.

The rules:

* Whoever reads a log that another process writes has a *position*: below ``next`` it needs nothing. Positions are
  recorded, and chunks deleted, under one lock: what a reader has listed after it recorded its position is not deleted.
* An id that was handed to a query is noted before, durably (``given``). Whoever opens the log to write compares it
  with the log's end, so that an id whose message is gone is not given to another message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from zmq_datasource.errors import LogFormatError
from zmq_datasource.log.files import PartitionFiles, WriterLock, reading
from zmq_datasource.log.layout import (
    GIVEN_NAME,
    LOCK_WAIT_SECONDS,
    POSITIONS_LOCK_NAME,
    READERS_NAME,
    START_NAME,
    SUBSCRIPTIONS_NAME,
    TEMPORARY_PREFIX,
)

__all__ = ["ReaderFiles", "ReaderPosition"]


class ReaderPosition(NamedTuple):
    """Of one reader: the first id that it still needs, and the one after the last that it was ever given.

    ``given`` is None in a file that an earlier release has written.
    """

    next: int
    given: int | None


class ReaderFiles(PartitionFiles):
    """Small JSON files, each replaced as a whole."""

    def _start_path(self, reader: str | None) -> Path:
        name = START_NAME if reader is None else f"{READERS_NAME}/{reader}.{START_NAME}"
        return self._directory / name

    def start_path(self, reader: str | None) -> str:
        """Where ``write_start`` writes, for messages."""
        return str(self._start_path(reader))

    def read_start(self, reader: str | None = None) -> tuple[int, str] | None:
        """What ``write_start`` wrote: first id and reason, while the query's first batch is not done.

        Args:
            reader: Which query, of those that read a log that somebody else writes.
        """
        path = self._start_path(reader)
        match self._read_json(path):
            case None:
                return None
            case {"next": int(next_id), "startingOffsets": str(position)}:
                return next_id, position
        raise LogFormatError(f"reading {path}: it holds no message id")

    def write_start(self, next_id: int, position: str, reader: str | None = None) -> None:
        """Remember, durably, the first id that a query was given, and by which ``startingOffsets``."""
        path = self._start_path(reader)
        self._replace(path, {"next": next_id, "startingOffsets": position})

    def remove_start(self, reader: str | None = None) -> None:
        """Delete a query's start: its first batch is done."""
        self._remove(self._start_path(reader))

    def _reader_path(self, reader: str) -> Path:
        return self._directory / READERS_NAME / f"{reader}.json"

    def reader_path(self, reader: str) -> str:
        """Where a reader's position is, for messages."""
        return str(self._reader_path(reader))

    def write_reader(self, reader: str, next_id: int, given: int | None = None) -> None:
        """A query that does not write the log is done with everything below ``next_id``."""
        content = {"next": next_id} if given is None else {"next": next_id, "given": given}
        self._replace(self._reader_path(reader), content)

    def remove_reader(self, reader: str) -> None:
        """Delete a reader's position: it needs no messages any more."""
        self._remove(self._reader_path(reader))

    def position(self, reader: str) -> ReaderPosition | None:
        """What ``write_reader`` wrote; None if there is no such reader, or it is gone for ever."""
        path = self._reader_path(reader)
        match self._read_json(path):
            case None:
                return None
            case {"next": int(next_id), "given": int(given)}:
                return ReaderPosition(next_id, given)
            case {"next": int(next_id)}:
                return ReaderPosition(next_id, None)
        raise LogFormatError(f"reading {path}: it holds no position of a reader")

    def positions(self) -> dict[str, ReaderPosition]:
        """The positions of all readers, by name."""
        found = {}
        directory = self._directory / READERS_NAME
        with reading(directory):
            paths = list(directory.glob("*.json"))
        for path in paths:
            name = path.name.removesuffix(".json")
            if name.startswith(TEMPORARY_PREFIX) or name.endswith(".start"):
                continue
            position = self.position(name)
            if position is not None:
                found[name] = position
        return found

    def readers(self) -> dict[str, int]:
        """The first id that each reader still needs."""
        return {name: position.next for name, position in self.positions().items()}

    @contextmanager
    def placing(self, wait: float = LOCK_WAIT_SECONDS) -> Iterator[None]:
        """Keep others from recording positions, and the writer from deleting, for a moment.

        Raises:
            LogLockedError: Somebody else does, for longer than ``wait`` seconds.
        """
        path = self._directory / POSITIONS_LOCK_NAME
        # Without a word in it, which a full disk would refuse.
        lock = self._lock(path, wait, f"marking a place in log {self.root}", "try again", False)
        try:
            yield
        finally:
            lock.release()

    def write_given(self, next_id: int) -> None:
        """The log's own query is about to be given the ids below ``next_id``."""
        self._replace(self._directory / GIVEN_NAME, {"next": next_id})

    def read_given(self) -> int:
        """What ``write_given`` wrote last; 0 if nothing ever was."""
        path = self._directory / GIVEN_NAME
        match self._read_json(path):
            case None:
                return 0
            case {"next": int(next_id)}:
                return next_id
        raise LogFormatError(f"reading {path}: it holds no message id")

    def given(self) -> tuple[int, str]:
        """The id after the last one that any query was given, as far as that was noted, and where it says so."""
        found = [(self.read_given(), str(self._directory / GIVEN_NAME))]
        for name, position in self.positions().items():
            found.append((max(position.next, position.given or 0), self.reader_path(name)))
        return max(found)

    def _read_json(self, path: Path) -> object:
        """What a file holds; None if there is none."""
        with suppress(FileNotFoundError), reading(path):
            return json.loads(path.read_bytes())
        return None

    def lock_reader(self, reader: str) -> WriterLock:
        """Become the one query that reads along under this name.

        Raises:
            LogLockedError: Another one does; says who.
        """
        path = self._directory / READERS_NAME / f"{reader}.lock"
        return self._lock(
            path,
            LOCK_WAIT_SECONDS,
            f"reading along log {self.root} as {reader!r}",
            "give each such query a reader of its own",
        )

    def read_subscriptions(self) -> bytes | None:
        """What ``write_subscriptions`` wrote; None if nothing ever was."""
        with suppress(FileNotFoundError):
            return (self._directory / SUBSCRIPTIONS_NAME).read_bytes()
        return None

    def write_subscriptions(self, content: bytes) -> None:
        """Remember, durably, a proxy's durable subscribers and their positions."""
        self._replace_bytes(self._directory / SUBSCRIPTIONS_NAME, content)

    def subscriptions_path(self) -> str:
        """Where a proxy's subscriptions are, for messages."""
        return str(self._directory / SUBSCRIPTIONS_NAME)
