"""Machines that see nothing of each other but one store, and a store that a test takes away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import obstore
import pyarrow as pa
from obstore.store import MemoryStore

from tests.support import batch_of
from zmq_datasource.errors import DiskFaultError
from zmq_datasource.log.bucket_store import BucketStore
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.log.layout import LOCK_NAME
from zmq_datasource.log.reader import read_index, read_slices, slices
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Content, Entry, Store
from zmq_datasource.log.writer import LogWriter

__all__ = ["Machines", "MemoryBucket", "Watched", "WatchedBucket", "WatchedDirectory", "fill", "numbered"]


class Watched:
    """Counts what is asked of a store.

    Attributes:
        calls: How often each verb was called.
        before: Called with the verb and the key before each call; may raise what the store would.
    """

    before: Callable[[str, str], None] | None = None

    @property
    def calls(self) -> Counter[str]:
        return self.__dict__.setdefault("_calls", Counter())

    def _watch(self, verb: str, key: str) -> Any:
        self.calls[verb] += 1
        if self.before is not None:
            self.before(verb, key)
        return super()

    def list(self, prefix: str = "") -> list[Entry]:
        return list(self._watch("list", prefix).list(prefix))

    def find(self, key: str) -> Entry | None:
        found: Entry | None = self._watch("find", key).find(key)
        return found

    def open(self, key: str) -> pa.NativeFile:
        return self._watch("open", key).open(key)

    def read_range(self, key: str, begin: int, end: int) -> memoryview:
        found: memoryview = self._watch("read_range", key).read_range(key, begin, end)
        return found

    def put_new(self, key: str, content: Content) -> None:
        self._watch("put_new", key).put_new(key, content)

    def put(self, key: str, content: bytes) -> None:
        self._watch("put", key).put(key, content)

    def delete(self, key: str) -> None:
        self._watch("delete", key).delete(key)


class WatchedDirectory(Watched, DirectoryStore):
    """A directory."""


class WatchedBucket(Watched, BucketStore):
    """A bucket."""


def no_answer(verb: str, key: str) -> None:
    """For ``Watched.before``: a store that is away."""
    raise DiskFaultError(f"{verb} {key}: no answer")


class MemoryBucket:
    """A bucket in memory, for ``Bucket.connect``."""

    def __init__(self) -> None:
        self.held = MemoryStore()
        self._away: dict[str, bytes] = {}

    def connect(self, *_: object, **__: object) -> MemoryStore:
        return self.held

    def names(self) -> list[str]:
        return sorted(about["path"] for page in obstore.list(self.held) for about in page)

    def empty(self) -> None:
        """Delete all that is in it, for ``restore``."""
        for key in self.names():
            self._away[key] = bytes(obstore.get(self.held, key).bytes())
            obstore.delete(self.held, key)

    def restore(self, name: str = "") -> None:
        """Put back what ``empty`` has deleted; only what ends in this name."""
        for key, content in self._away.items():
            if key.endswith(name):
                obstore.put(self.held, key, content)


class Machines:
    """Writers and readers of one log, each with a connection of its own.

    Args:
        connect: Makes a store.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        self.connect = connect
        self.running: list[LogWriter] = []

    def storage(self) -> LogStorage:
        return LogStorage(self.connect())

    def writer(self, storage: LogStorage | None = None, wait: float = 0.0, **changes: Any) -> LogWriter:
        settings = {"chunk_bytes": 1 << 20, "max_bytes": 1 << 30, **changes}
        made = LogWriter(storage or self.storage(), **settings)
        made.merge_seconds = 1e6  # a test merges when it says so
        made.open(wait)
        self.running.append(made)
        return made

    def end(self, log: LogWriter) -> None:
        self.running.remove(log)
        log.close()

    def lose_lock(self) -> None:
        """As a storage that has given the lock to another host, or has lost its object: the writer is not told."""
        self.connect().delete(LOCK_NAME)

    def rows(self, retry_seconds: float = 0.0) -> list[tuple[int, bytes]]:
        """What another machine reads."""
        storage = self.storage()
        storage.retry_seconds = retry_seconds
        index = read_index(storage)
        pieces = slices(index.all, index.earliest, index.durable_end)
        found = []
        for batch in read_slices(storage, pieces):
            found += zip(batch.column("id").to_pylist(), batch.column("value").to_pylist(), strict=True)
        return found

    def names(self, prefix: str = "chunks") -> list[str]:
        """What is in a directory of the store."""
        return sorted(entry.name for entry in self.connect().list(prefix))

    def firsts(self) -> list[int]:
        """The first ids of the chunks in the store, whether or not they are of the log."""
        return [chunk.first for chunk in self.storage().chunks()]


def fill(log: LogWriter, *values: bytes) -> int:
    """A chunk of these."""
    log.append(batch_of(list(values)))
    return log.cut().result(10)


def numbered(*values: bytes) -> list[tuple[int, bytes]]:
    return list(enumerate(values))
