"""The files of those who read a log: where each began, and how far it has come."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from zmq_datasource.errors import LogFormatError
from zmq_datasource.wal.files import PartitionFiles, WriterLock, writing
from zmq_datasource.wal.layout import READERS_NAME, START_NAME, SUBSCRIPTIONS_NAME, TEMPORARY_PREFIX

__all__ = ["ReaderFiles"]


class ReaderFiles(PartitionFiles):
    """Small JSON files, each replaced as a whole."""

    def _start_path(self, partition: int, reader: str | None) -> Path:
        name = START_NAME if reader is None else f"{READERS_NAME}/{reader}.{START_NAME}"
        return self._directory(partition) / name

    def read_start(self, partition: int, reader: str | None = None) -> tuple[int, str] | None:
        """What ``write_start`` wrote: first id and reason, while the query's first batch is not done.

        Args:
            reader: Which query, of those that read a log that somebody else writes.
        """
        path = self._start_path(partition, reader)
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as e:
            raise LogFormatError(f"reading {path}: {e}") from e
        match data:
            case {"next": int(next_id), "startingOffsets": str(position)}:
                return next_id, position
        raise LogFormatError(f"reading {path}: it holds no message id")

    def write_start(self, partition: int, next_id: int, position: str, reader: str | None = None) -> None:
        """Remember, durably, the first id that a query is told, and by which ``startingOffsets``."""
        path = self._start_path(partition, reader)
        self._replace(path, {"next": next_id, "startingOffsets": position})

    def remove_start(self, partition: int, reader: str | None = None) -> None:
        """Forget it: the query's first batch is done."""
        path = self._start_path(partition, reader)
        with writing(f"removing {path}"):
            path.unlink(missing_ok=True)

    def write_reader(self, partition: int, reader: str, next_id: int) -> None:
        """A query that does not write the log is done with everything below ``next_id``."""
        self._replace(self._directory(partition) / READERS_NAME / f"{reader}.json", {"next": next_id})

    def readers(self, partition: int) -> dict[str, int]:
        """What ``write_reader`` wrote, by reader."""
        found = {}
        directory = self._directory(partition) / READERS_NAME
        try:
            paths = list(directory.glob("*.json"))
        except OSError as e:
            raise LogFormatError(f"listing {directory}: {e.strerror}") from e
        for path in paths:
            name = path.name.removesuffix(".json")
            if name.startswith(TEMPORARY_PREFIX) or name.endswith(".start"):
                continue
            try:
                content = json.loads(path.read_bytes())
            except FileNotFoundError:
                continue  # removed: the reader is gone for ever
            except (ValueError, OSError) as e:
                raise LogFormatError(f"reading {path}: {e}") from e
            match content:
                case {"next": int(next_id)}:
                    found[name] = next_id
                case _:
                    raise LogFormatError(f"reading {path}: it holds no position of a reader")
        return found

    def lock_reader(self, partition: int, reader: str) -> WriterLock:
        """Become the one query that reads along under this name.

        Raises:
            LogLockedError: Another one does; says who.
        """
        path = self._directory(partition) / READERS_NAME / f"{reader}.lock"
        return self._lock(
            path,
            15.0,
            f"reading along log {self.root} as {reader!r}",
            "give each such query a reader of its own",
        )

    def read_subscriptions(self, partition: int) -> bytes | None:
        """What ``write_subscriptions`` wrote; None if nothing ever was."""
        path = self.subscriptions_path(partition)
        with suppress(FileNotFoundError):
            return path.read_bytes()
        return None

    def write_subscriptions(self, partition: int, content: bytes) -> None:
        """Remember, durably, a proxy's durable subscribers and their positions."""
        self._replace_bytes(self.subscriptions_path(partition), content)

    def subscriptions_path(self, partition: int) -> Path:
        """Where they are, for messages."""
        return self._directory(partition) / SUBSCRIPTIONS_NAME
