"""log.open_chunk: a chunk that is durable before it is sealed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import at_failpoints, batch_of, log_rows
from zmq_datasource.errors import DamagedChunkError, DiskFaultError, LogFormatError
from zmq_datasource.log import local_files
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.local_files import LocalFiles
from zmq_datasource.log.open_chunk import OpenChunkTail
from zmq_datasource.log.state import read_saved_state
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter


class Carried:
    """Keeps the number of messages that it was told of."""

    messages = 0

    def state(self) -> bytes:
        return b'{"messages": %d}' % self.messages


def writer(path: Path, carried: Carried | None = None, **options: Any) -> LogWriter:
    given: dict[str, Any] = {"chunk_bytes": 1 << 20, "max_bytes": 1 << 30, **options}
    log = LogWriter(LogStorage(str(path)), carried=carried, **given)
    log.open()
    return log


def append(log: LogWriter, *values: bytes, carried: Carried | None = None) -> int:
    log.append(batch_of(values))
    if carried is not None:
        carried.messages += len(values)
    return log.flush().result()


def crash(path: Path, to: Path) -> Path:
    """The log as a process that is killed now would leave it."""
    shutil.copytree(path, to)
    return to


def test_flushed_messages_survive_a_kill_and_the_next_writer_seals_them(tmp_path: Path) -> None:
    log = writer(tmp_path / "log")
    assert append(log, b"a", b"b") == 2
    assert append(log, b"c") == 3
    assert log.durable_end == 0  # only the other process of the proxy sees it
    left = crash(tmp_path / "log", tmp_path / "left")
    log.close()
    again = writer(left)
    assert again.durable_end == 3
    append(again, b"d")
    again.close()
    assert log_rows(left).column("value").to_pylist() == [b"a", b"b", b"c", b"d"]
    assert not list(left.glob("chunks/.open*"))


def damaged(path: Path) -> Path:
    """A log of a killed writer. Its open chunk has three groups, and the second one was changed."""
    log = writer(path / "log")
    for value in (b"first-value", b"second-value", b"third-value"):
        append(log, value)
    left = crash(path / "log", path / "left")
    log.close()
    file = next(left.glob("chunks/.open*"))
    content = bytearray(file.read_bytes())
    content[content.index(b"second-value")] ^= 1
    file.write_bytes(content)
    return left


def test_a_changed_byte_before_published_groups_is_damage(tmp_path: Path) -> None:
    left = damaged(tmp_path)
    for _ in range(2):  # and it stays one
        with pytest.raises(DamagedChunkError, match=r"ids from 1 on are not .* up to 2, are: .* rename it"):
            writer(left)
    assert len(list(left.glob("chunks/.open*"))) == 1


def after_a_hole(path: Path) -> Path:
    """A log of a killed writer, with the ids 3 and 4 in its open chunk; of the sealed chunks only id 0 is left."""
    log = writer(path / "log")
    for values in ((b"0",), (b"1", b"2")):
        append(log, *values)
        log.cut().result(30)
    append(log, b"3", b"4")
    left = crash(path / "log", path / "left")
    log.close()
    (left / "chunks" / chunk_name(1)).unlink()
    return left


def test_an_open_chunk_after_a_hole_is_refused(tmp_path: Path) -> None:
    """The ids that are only in it must not be given to other messages."""
    left = after_a_hole(tmp_path)
    for _ in range(2):  # and it stays where it is
        with pytest.raises(
            LogFormatError,
            match=r"open-0*3\.arrow: it holds the ids 3 to 4, .* ids 1 to 2 are missing\. Restore them",
        ):
            writer(left)
    file = next(left.glob("chunks/.open*"))
    file.write_bytes(b"")  # nothing of it had come to the disk
    with pytest.raises(LogFormatError, match=r"it begins at id 3, .* ids 1 to 2 are missing"):
        writer(left)
    file.rename(file.with_suffix(".old"))  # the way out for those that want none of it
    log = writer(left)
    assert log.durable_end == 1
    log.close()


@pytest.mark.parametrize("forgets", [False, True])
def test_a_group_that_the_disk_refused_is_written_again_at_its_place(
    forgets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed fsync the system may have thrown away what it was to write."""
    sync = local_files.sync_file
    refusals = iter([errno.ENOSPC, errno.EIO, errno.EIO, None, errno.EMFILE])

    def refuse(path: Path) -> None:
        if path.name.startswith(".open") and (code := next(refusals, None)) is not None:
            if forgets:
                os.truncate(path, path.stat().st_size - 100)
            raise OSError(code, os.strerror(code))
        sync(path)

    log = writer(tmp_path / "log", retry_timeout=30.0)
    append(log, b"a")
    monkeypatch.setattr(local_files, "sync_file", refuse)
    assert append(log, b"b", b"c") == 3
    assert log.fault is None
    left = crash(tmp_path / "log", tmp_path / "left")
    assert append(log, b"d" * 100_000) == 4
    log.cut().result()
    log.close()
    assert log_rows(tmp_path / "log").column("value").to_pylist() == [b"a", b"b", b"c", b"d" * 100_000]
    again = writer(left)
    assert again.durable_end == 3
    again.close()


def test_the_writers_state_is_that_of_the_last_whole_group(tmp_path: Path) -> None:
    carried = Carried()
    log = writer(tmp_path / "log", carried)
    append(log, b"a", b"b", carried=carried)
    append(log, b"c", carried=carried)
    left = crash(tmp_path / "log", tmp_path / "left")
    log.cut().result()
    assert read_saved_state(LogStorage(str(tmp_path / "log"))) == b'{"messages": 3}'
    log.close()
    again = writer(left, Carried())
    assert again.saved == b'{"messages": 3}'
    again.close()


def test_another_process_reads_along(tmp_path: Path) -> None:
    log = writer(tmp_path)
    append(log, b"a")
    tail = OpenChunkTail(LogStorage(str(tmp_path)), 0)
    try:
        for value in (b"b", b"c"):
            append(log, value)
            assert log.grown is not None
            tail.read_to(log.grown.bytes)
        assert [v for b in tail.batches for v in b.column("value").to_pylist()] == [b"a", b"b", b"c"]
        log.cut().result()  # it is renamed; the tail goes on with what it has
        assert [i for b in tail.batches for i in b.column("id").to_pylist()] == [0, 1, 2]
        with pytest.raises(FileNotFoundError):
            OpenChunkTail(LogStorage(str(tmp_path)), 0)
    finally:
        tail.close()
        log.close()


@pytest.mark.parametrize("step", ["link", "unlink"])
def test_a_chunk_that_is_there_although_the_disk_has_refused_is_the_writers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """It is known by its file."""
    refused: list[str] = []

    def refuse_once(name: str) -> None:
        if name == "log.store.after_link" and not refused:
            refused.append(name)
            raise OSError(errno.EIO, "Input/output error")

    def refuse_to_remove(it: LocalFiles, name: str) -> None:
        refused.append(name)
        raise DiskFaultError("Input/output error")

    log = writer(tmp_path, retry_timeout=20.0)
    append(log, b"0")
    if step == "link":
        at_failpoints(monkeypatch, refuse_once)
    else:
        monkeypatch.setattr(LocalFiles, "remove", refuse_to_remove)
    assert log.cut().result() == 1
    assert refused
    append(log, b"more")
    log.close()
    assert log_rows(tmp_path).column("id").to_pylist() == [0, 1]
