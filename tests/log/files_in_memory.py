"""A partition's storage that only counts: for what decides about files and reads none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
from zmq_datasource.log.reader_files import ReaderRecord

from zmq_datasource.errors import LogLockedError
from zmq_datasource.log.layout import Chunk, chunk_name, parse_chunk_name
from zmq_datasource.log.storage import LogStorage


class FilesInMemory(LogStorage):
    """Chunks are names.

    Attributes:
        did: What was asked of it, in order.
        refuses: Raised by what writes or deletes, once for each.
        marks: What readers still need.
        placed: Whether somebody marks a place.
    """

    def __init__(self) -> None:
        super().__init__("/nowhere")
        self.did: list[str] = []
        self.refuses: list[Exception] = []
        self.marks: dict[str, int] = {}
        self.placed = False

    def _do(self, what: str) -> None:
        if self.refuses:
            raise self.refuses.pop(0)
        self.did.append(what)

    def write_chunk(self, name: str, write: Callable[[pa.NativeFile], None], sync: bool) -> Chunk:
        self._do(f"write {name}")
        ids = parse_chunk_name(name)
        assert ids is not None
        return Chunk(*ids, 100, 0.0)

    def remove_chunk(self, name: str) -> None:
        self._do(f"remove {name}")

    def readers(self) -> dict[str, ReaderRecord]:
        return {name: ReaderRecord({self.partition: needed}, 1e9) for name, needed in self.marks.items()}

    def moved_at(self, name: str) -> float | None:
        return time.time()

    @contextmanager
    def placing(self, wait: float) -> Iterator[None]:
        if self.placed:
            raise LogLockedError("somebody marks a place")
        yield


def removals(*firsts: int) -> list[str]:
    """What deleting the chunks of ten ids that begin there leaves in ``did``."""
    return [f"remove {chunk_name(first, first + 10)}" for first in firsts]
