"""The readers' records of a log in object storage.

They are in the storage alone. The lock under which they are written and chunks deleted holds on one machine. Between
machines the writer announces a deletion before it reads the records, and a reader looks for such an announcement after
it has written its record.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zmq_datasource.errors import RESTORE, LogError, LogFormatError
from zmq_datasource.host import failpoints
from zmq_datasource.host.object_store import ObjectStore
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log.files import WriterLock, make_directory, read_file, reading
from zmq_datasource.log.layout import LOCK_WAIT_SECONDS, READERS_NAME
from zmq_datasource.log.reader_files import ReaderRecord
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.tenure import SILENT_SECONDS, Tenure

__all__ = ["StoredPositions"]

_log = logging.getLogger(__name__)

_POSITIONS_SECONDS = 1.0
_POSITION_BYTES = 1024
# A query that runs says so three times in so many seconds.
_READING_SECONDS = 180.0
_DELETING, _READING = "deleting", "reading"
_JOIN_SECONDS = 5.0
_DELETION_LOOK_SECONDS = 0.2


class StoredPositions(LogStorage):
    """What ``StoredLog`` has of them.

    Attributes:
        store: Where the log is.
    """

    def __init__(self, location: str, partition: int, store: ObjectStore) -> None:
        super().__init__(location, partition)
        self.store = store
        self._tenure: Tenure | None = None  # of this object, if it writes
        self._positions: tuple[float, dict[str, ReaderRecord]] = (0.0, {})
        self._is_placing = False

    def key(self, *parts: str) -> str:
        """The key of an object of this partition."""
        return "/".join((str(self.partition), *parts))

    def put_local_positions(self) -> None:
        """Put the positions into the storage that were recorded when the log was in its directory alone."""
        for path in self._readers.glob("*.json"):
            with reading(path):
                self.store.put(self._reader_key(path), read_file(path))

    def _add_directory(self, path: Path) -> None:
        if self._tenure is None:  # of a reader only locks are here
            make_directory(path)
        else:
            super()._add_directory(path)

    def _reader_key(self, path: Path) -> str:
        """The key of what is beside the chunks: a reader's record, or a note of the writer."""
        return "/".join(path.relative_to(self._root).parts)

    def _replace(self, path: Path, content: object) -> None:
        text = json.dumps(content).encode()
        # S3 is asked for the size, and then for so many bytes. Of what was replaced in between by something longer only
        # a part would be read: so all are of one length.
        self.store.put(self._reader_key(path), text.ljust(-(-len(text) // _POSITION_BYTES) * _POSITION_BYTES))

    def _forget(self, path: Path) -> None:
        self.store.delete(self._reader_key(path))

    def _read_json(self, path: Path) -> object:
        key = self._reader_key(path)
        try:
            return json.loads(self.store.get(key))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as e:
            raise LogFormatError(f"reading {self.store}/{key}: {e}. {RESTORE}") from e

    def _reader_files(self) -> list[str]:
        return [found.key for found in self.store.objects(READERS_NAME)]

    def reader_path(self, name: str) -> str:
        return f"{self.store}/{self._reader_key(self._reader_path(name))}"

    def moved_at(self, reader: str) -> float | None:
        found = self.store.find(self._reader_key(self._reader_path(reader)))
        return None if found is None else found.modified

    def hold_reader(self, reader: str, wait: float = LOCK_WAIT_SECONDS) -> WriterLock:
        lock = self.lock_reader(reader, wait)
        try:
            return _ReadingLock(self, reader, lock)
        except BaseException:
            lock.release()
            raise

    def say_reading(self, reader: str) -> None:
        """Tell other machines that a query of this name runs here."""
        self.store.put(_reading_key(reader), self._place.encode())

    def end_reading(self, reader: str) -> None:
        """Tell them that it has ended, unless one of the same name runs elsewhere by now."""
        key = _reading_key(reader)
        with suppress(FileNotFoundError):
            if self.store.get(key) == self._place.encode():
                self.store.delete(key)

    @property
    def _place(self) -> str:
        return f"{socket.gethostname()} {self.root}"

    def is_reading_elsewhere(self, reader: str) -> bool:
        key = _reading_key(reader)
        found = self.store.find(key)
        if found is None or time.time() - found.modified >= _READING_SECONDS:
            return False
        try:
            return self.store.get(key) != self._place.encode()
        except FileNotFoundError:
            return False

    def is_reading(self, reader: str) -> bool:
        return self.is_reading_elsewhere(reader) or super().is_reading(reader)

    def touch_reader(self, reader: str) -> None:
        record = self.reader(reader)
        if record is not None:
            self.write_reader(reader, record)

    def readers(self) -> dict[str, ReaderRecord]:
        now = time.monotonic()
        if self._is_placing or now >= self._positions[0]:
            self._positions = now + _POSITIONS_SECONDS, super().readers()
        return dict(self._positions[1])

    @contextmanager
    def placing(self, wait: float = LOCK_WAIT_SECONDS) -> Iterator[None]:
        with super().placing(wait):
            self._is_placing = True
            try:
                yield
            finally:
                self._is_placing = False

    def announce_deletion(self) -> bool:
        assert self._tenure is not None, "only the writer deletes"
        self._tenure.check()  # one that has lost the log must not delete for the other
        self.store.put(self.key(_DELETING, self._tenure.claim), b"")
        failpoints.reach("log.stored_deletion.after_announce")
        return True

    def end_deletion(self) -> None:
        assert self._tenure is not None, "only the writer deletes"
        failpoints.reach("log.stored_deletion.before_end")
        try:
            self.store.delete(self.key(_DELETING, self._tenure.claim))
        except LogError as e:
            _log.warning("%s; a query that begins now waits for %.0f s", e, SILENT_SECONDS)

    def wait_for_deletion(self) -> bool:
        # Who has begun it and died is waited for no longer than for a writer; the next writer removes it.
        deadline = time.monotonic() + SILENT_SECONDS
        while time.monotonic() < deadline and any(
            self.store.objects(self.of(partition).key(_DELETING)) for partition in self.partitions()
        ):
            check_signals()
            time.sleep(_DELETION_LOOK_SECONDS)
        return True  # by one that has ended, if by none that was waited for


def _reading_key(reader: str) -> str:
    return f"{_READING}/{reader}"


class _ReadingLock(WriterLock):
    """Of the one query that reads under a name, as other machines see it."""

    def __init__(self, storage: StoredPositions, reader: str, lock: WriterLock) -> None:
        self._storage, self._reader, self._lock = storage, reader, lock
        storage.say_reading(reader)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="zmq-reader-alive", daemon=True)
        self._thread.start()

    def check(self) -> None:
        self._lock.check()

    def release(self) -> None:
        self._ending.set()
        self._thread.join(_JOIN_SECONDS)
        try:
            self._storage.end_reading(self._reader)
        except LogError as e:
            _log.warning("%s; on other machines the query %r runs for some minutes more", e, self._reader)
        self._lock.release()

    def _go_on(self) -> None:
        while not self._ending.wait(_READING_SECONDS / 3):
            try:
                self._storage.say_reading(self._reader)
            except LogError as e:
                _log.warning("%s; it is tried again", e)
