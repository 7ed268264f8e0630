"""A storage that only counts: for what decides about chunks and reads none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from zmq_datasource.errors import LogLockedError
from zmq_datasource.log.layout import Chunk, chunk_name
from zmq_datasource.log.reader_records import ReaderRecord, ReaderRecords
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Content


class FilesInMemory(LogStorage):
    """Chunks are names.

    Attributes:
        did: What was asked of it, in order.
        uncached: The first ids of the chunks that it was asked to drop from memory.
        refuses: Raised by what writes or deletes, once for each.
        before_put: Called before a chunk is written.
    """

    def __init__(self) -> None:
        super().__init__("/nowhere")
        self.did: list[str] = []
        self.uncached: list[int] = []
        self.refuses: list[Exception] = []
        self.before_put: Callable[[], object] = lambda: None

    def _do(self, what: str) -> None:
        if self.refuses:
            raise self.refuses.pop(0)
        self.did.append(what)

    def put_chunk(self, first: int, content: Content) -> None:
        self.before_put()
        self._do(f"write {chunk_name(first)}")

    def delete_chunk(self, chunk: Chunk) -> None:
        self._do(f"delete {chunk.name}")

    def uncache_chunk(self, chunk: Chunk) -> None:
        self.uncached.append(chunk.first)


class RecordsInMemory:
    """The records of readers, in place of those of all logs.

    Attributes:
        needs: What readers still need, by name.
        placed: Whether a reader writes its first record.
        error: Raised by what reads them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.needs: dict[str, int] = {}
        self.placed = False
        self.error: Exception | None = None
        monkeypatch.setattr(ReaderRecords, "all", lambda _: self._all())
        monkeypatch.setattr(ReaderRecords, "written_at", lambda *_: time.time())
        monkeypatch.setattr(ReaderRecords, "exclusive", lambda *_: self._placing())

    def _all(self) -> dict[str, ReaderRecord]:
        if self.error is not None:
            raise self.error
        return {name: ReaderRecord(needed, 1e9) for name, needed in self.needs.items()}

    @contextmanager
    def _placing(self) -> Iterator[None]:
        if self.placed:
            raise LogLockedError("a reader writes its first record")
        yield


def deletions(*firsts: int) -> list[str]:
    """What deleting the chunks that begin there leaves in ``did``."""
    return [f"delete {chunk_name(first)}" for first in firsts]
