"""The attempts that are staged: which there are, and their files (``attempt_files``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.acknowledged.attempt_files import Attempt, AttemptFiles, bytes_on_disk
from zmq_datasource.acknowledged.protocol import digest_of_rows
from zmq_datasource.errors import LogWriteError
from zmq_datasource.log import Times
from zmq_datasource.messages.columns import data_bytes

_log = logging.getLogger(__name__)


class StagedFile:
    """The file of an attempt that is being received. ``write`` writes what was appended, and may be repeated."""

    def __init__(self, files: AttemptFiles, attempt: str, producer: str, number: int, partition: int) -> None:
        self._files, self._attempt = files, attempt
        self.part = (producer, number, partition)
        self._unwritten: list[pa.RecordBatch] = []
        self._size = self._written = 0
        self._times: Times | None = None
        self.rows = self.digest = self.value_bytes = 0
        self.is_ended = False

    @property
    def bytes(self) -> int:
        return bytes_on_disk(self._size) if self._size else 0

    def append(self, batch: pa.RecordBatch) -> None:
        self._unwritten.append(batch)

    def write(self) -> None:
        while self._unwritten:
            batch = self._unwritten[0]
            self._size = self._files.append(self._attempt, self._size, batch, self.rows)
            times = pc.min_max(batch.column("timestamp"))
            found = Times(times["min"].value, times["max"].value)
            self._times = found if self._times is None else self._times.union(found)
            self.rows += batch.num_rows
            self.digest += digest_of_rows(batch)
            self.value_bytes += data_bytes(batch.column("value"))
            self._unwritten.pop(0)

    def finish(self) -> Attempt:
        digest = self.digest % (1 << 64)
        times = self._times or Times(0, 0)
        figures = Attempt(*self.part, self.rows, digest, self.value_bytes, times)
        self._size = self._files.finish(self._attempt, self._size, figures)
        return figures

    def discard(self) -> None:
        _remove(self._files, self._attempt)


class _Staged(NamedTuple):
    attempt: Attempt
    size: int
    since: float

    @property
    def part(self) -> tuple[str, int, int]:
        return self.attempt.producer, self.attempt.number, self.attempt.partition


class Staging:
    """The finished attempts, for the receiver. ``now`` is in monotonic seconds."""

    def __init__(self, files: AttemptFiles) -> None:
        self.files = files
        self._staged: dict[str, _Staged] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._staged)

    def recover(self, now: float, is_committed: Callable[[str, int], bool]) -> None:
        for name, attempt, size in self.files.recover():
            if attempt is None:
                # If it was not committed, its sender sends it again.
                _log.warning("removing staged attempt %s, which cannot be read", name)
            elif not is_committed(attempt.producer, attempt.number):
                self.add(name, attempt, bytes_on_disk(size), now)
                continue
            self.files.remove(name)

    def add(self, name: str, attempt: Attempt, size: int, now: float) -> None:
        self._staged[name] = _Staged(attempt, size, now)
        self.bytes += size

    def get(self, name: str) -> Attempt | None:
        staged = self._staged.get(name)
        return None if staged is None else staged.attempt

    def attempts_of(self, producer: str, up_to: int) -> list[str]:
        found = [(name, staged.attempt) for name, staged in self._staged.items()]
        return [name for name, attempt in found if attempt.producer == producer and attempt.number <= up_to]

    def abandoned(self, seconds: float, active: Collection[str], now: float) -> list[str]:
        newest = {staged.attempt.producer: staged.since for staged in self._staged.values()}
        silent = {producer for producer, since in newest.items() if since < now - seconds} - {*active}
        return [name for name, staged in self._staged.items() if staged.attempt.producer in silent]

    def remove(self, names: list[str]) -> None:
        for name in names:
            if (staged := self._staged.pop(name, None)) is not None:
                self.bytes -= staged.size
            _remove(self.files, name)

    def superseded(self) -> list[str]:
        newest = {staged.part: name for name, staged in self._staged.items()}  # in order of arrival
        return [name for name, staged in self._staged.items() if newest[staged.part] != name]


def _remove(files: AttemptFiles, attempt: str) -> None:
    """Delete a file. The next writer finds it otherwise, and sees that it is done."""
    try:
        files.remove(attempt)
    except LogWriteError as e:
        _log.warning("%s", e)
