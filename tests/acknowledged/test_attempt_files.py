"""The files of attempts: what a restart finds, and what damage and a refusing disk do."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.acknowledged.test_kills import LARGE, Receiver, committed
from tests.support import batch_of
from zmq_datasource.acknowledged.attempt_files import AttemptFiles, Stored
from zmq_datasource.errors import DamagedChunkError, DiskFaultError
from zmq_datasource.host import failpoints

A, B = "a" * 32, "b" * 32


def finished(files: AttemptFiles, name: str, *values: bytes) -> Stored:
    """An attempt with a data message for each value."""
    stored = Stored("q", 7, 1)
    for value in values:
        stored = files.append(name, stored, batch_of([value]))
    return files.finish(name, stored)


def values(files: AttemptFiles, *names: str) -> list[bytes]:
    return [value for rows in files.read(names) for value in rows.column("value").to_pylist()]


@pytest.fixture
def files(tmp_path: Path) -> AttemptFiles:
    it = AttemptFiles(tmp_path)
    assert list(it.recover()) == []
    return it


def test_a_restart_finds_the_attempts_that_are_whole(files: AttemptFiles, tmp_path: Path) -> None:
    stored = finished(files, A, b"one", b"two")
    finished(files, B, b"three")
    files.append("c" * 32, Stored("q", 7, 1), batch_of([b"of a crashed writer"]))
    torn = tmp_path / "staging" / B
    torn.write_bytes(torn.read_bytes()[:-1])
    (torn.parent / ("d" * 32)).write_bytes(b"")
    os.mkfifo(torn.parent / ("e" * 32))
    (torn.parent / "of another program").touch()
    again = AttemptFiles(tmp_path)
    assert list(again.recover()) == [(A, stored)]
    assert (stored.messages, stored.rows, stored.value_bytes) == (2, 2, 6)
    assert values(again, A) == [b"one", b"two"]
    assert sorted(path.name for path in torn.parent.iterdir()) == [A, "of another program"]


@pytest.mark.parametrize("place", [0, 20, 200, -100, -1])
def test_a_changed_byte_is_damage(place: int, files: AttemptFiles, tmp_path: Path) -> None:
    finished(files, A, b"one", b"two")
    path = tmp_path / "staging" / A
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        DamagedChunkError, match=rf"{A}.*not committed: remove it, and start the receiver again"
    ):
        values(files, A)


def test_a_refused_write_leaves_the_file_as_it_was_and_may_be_repeated(
    files: AttemptFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = files.append(A, Stored("q", 7, 1), batch_of([b"one"]))

    def refuse(name: str) -> None:
        if name == "acknowledged.file.after_write":
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "reach", refuse)
        with pytest.raises(DiskFaultError):
            files.append(A, stored, batch_of([b"two"]))
    files.finish(A, files.append(A, stored, batch_of([b"2"])))
    assert values(files, A) == [b"one", b"2"]


def test_without_its_file_an_attempt_is_waited_for(files: AttemptFiles) -> None:
    finished(files, A, b"one")
    files.remove(A)
    with pytest.raises(DiskFaultError):
        values(files, A)


def test_a_commit_has_few_data_messages_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, seen, most = AttemptFiles.read, list[weakref.ref[Any]](), 0

    def counted(self: AttemptFiles, names: list[str]) -> object:
        nonlocal most
        for rows in read(self, names):
            seen.append(weakref.ref(rows))
            most = max(most, sum(it() is not None for it in seen))
            yield rows

    monkeypatch.setattr(AttemptFiles, "read", counted)
    with Receiver(tmp_path) as receiver:
        attempts = [receiver.stage(LARGE, partition=part) for part in range(4)]
        receiver.commit(attempts, 4 * LARGE)
        assert committed(receiver.settled()) == [("q", 0, False)]
    assert 0 < most <= 3
