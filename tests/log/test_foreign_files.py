"""Foreign files in a log: each gives an error that names it, or is ignored.

A file of the log is replaced by something else, or something with a similar name is put beside it. A process that
opens, reads or follows the log then gets every message, or an error that names the file. Nothing waits for ever, and
foreign files are neither deleted nor written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import batch_of, log_rows
from zmq_datasource.errors import ZmqDataSourceError
from zmq_datasource.log.follower import LogFollower
from zmq_datasource.log.head import read_head
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.leases import Lease, LeaseFiles, SubscriberNotes
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter

CHUNKS, ROWS = 3, 12


def _nothing(_path: Path) -> None:
    pass


def _content(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


INSTEAD: dict[str, Callable[[Path], object]] = {
    "nothing": _nothing,
    "empty": _content(b""),
    "null": _content(b"null"),
    "list": _content(b"[1, 2]"),
    "deep": _content(b"[" * 200_000),
    "digits": _content(b'{"next": ' + b"9" * 10_000 + b"}"),
    "huge_number": _content(b'{"next": 1e999, "format": 1e999}'),
    "not_utf_8": _content(b'{"log": "\xff\xfe", "format": 3, "next": 1}'),
    "surrogate": _content(rb'{"log": "\ud800", "format": 3, "next": 1, "startingOffsets": "\ud800"}'),
    "noise": _content(bytes(range(256)) * 10),
    "directory": Path.mkdir,
    "fifo": os.mkfifo,
    "dangling_link": lambda path: path.symlink_to(path.parent / "nowhere"),
    "link_to_itself": lambda path: path.symlink_to(path),
    "link_to_zeros": lambda path: path.symlink_to("/dev/zero"),
    "link_to_a_directory": lambda path: path.symlink_to(path.parent),
}
PLACES = (
    "log.json",
    "chunks",
    f"chunks/{chunk_name(ROWS // CHUNKS)}",
    f"chunks/{chunk_name(2 * ROWS // CHUNKS)}",
    "writer.lock",
    "head",
    "readers",
    "readers/billing.json",
    "readers/subscriber.billing.json",
)
# Names that nothing of ours has, though some are much like it.
STRANGE = (
    b"\xff\xfe.arrow",
    b"\xff-\xfe.json",
    b"\n",
    b"x" * 255,
    b"00000000000000000004.arrow.tmp",
    b"00000000000000000004-00000000000000000008.arrow",
    "\u0660".encode() * 20 + b".arrow",
    b"9" * 21 + b".arrow",
    b"1",
    "\u0661".encode(),
    b"007",
    b"9" * 200,
)


def _fill(log: LogWriter, count: int) -> None:
    log.append(batch_of([b"value"] * count))
    log.cut().result(10)


def _writer(location: Path) -> LogWriter:
    return LogWriter(LogStorage(str(location)), chunk_bytes=1 << 20, max_bytes=1 << 30)


@pytest.fixture
def location(tmp_path: Path) -> Path:
    """A log of three chunks with a reader, a start and a durable subscriber."""
    storage = LogStorage(str(tmp_path / "log"))
    log = _writer(tmp_path / "log")
    log.open()
    for _ in range(CHUNKS):
        _fill(log, ROWS // CHUNKS)
    log.close()
    LeaseFiles(storage).write(Lease("billing", 3, 60.0, begins=True))
    notes = SubscriberNotes(1, [b"orders."])
    LeaseFiles(storage).write(Lease("billing", 3, 60.0, subscriber=notes))
    return tmp_path / "log"


def _use(location: Path) -> list[str]:
    """All that is done with a log, each by itself; the errors, if they are ours."""

    def write() -> None:
        log = _writer(location)
        log.open(lock_wait=0.2)
        try:
            _fill(log, 2)
        finally:
            log.close()

    def read() -> None:
        rows = log_rows(location)
        assert rows.column("id").to_pylist() == list(range(len(rows)))
        assert rows.column("value").to_pylist() == [b"value"] * len(rows)

    def follow() -> None:
        LogFollower(LogStorage(str(location))).open()

    def look() -> None:
        storage = LogStorage(str(location))
        storage.chunks()
        leases = LeaseFiles(storage)
        for key in leases.entries():
            leases.read(key)
        read_head(storage.store)
        storage.writer()

    errors = []
    for act in (read, follow, look, write, read):
        try:
            act()
        except ZmqDataSourceError as e:
            errors.append(str(e))
    return errors


def _within(seconds: float, location: Path) -> list[str]:
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(_use, location).result(seconds)
    finally:
        pool.shutdown(wait=False)


@pytest.mark.parametrize("kind", INSTEAD)
@pytest.mark.parametrize("place", PLACES)
def test_a_foreign_file_is_an_error_that_names_it(
    location: Path, tmp_path: Path, place: str, kind: str
) -> None:
    path = location / place
    if path.exists():
        shutil.move(path, tmp_path / "aside")
    INSTEAD[kind](path)
    for error in _within(20, location):
        assert str(location) in error, error


def test_strange_names_are_as_if_they_were_not_there(location: Path) -> None:
    made = []
    for directory in (location, location / "chunks", location / "readers"):
        for name in STRANGE:
            if directory.name == "readers" and name.endswith(b".json"):
                continue  # any name is a reader's
            path = os.path.join(os.fsencode(directory), name)
            if not os.path.exists(path):
                with open(path, "wb") as file:
                    file.write(b"of another program")
                made.append(path)
    assert _within(20, location) == []
    for path in made:
        with open(path, "rb") as file:
            assert file.read() == b"of another program", path


def test_a_log_may_be_reached_by_links(location: Path, tmp_path: Path) -> None:
    """A chunk on another disk, and the whole log by another name."""
    (tmp_path / "other").mkdir()
    for chunk in list((location / "chunks").glob("*.arrow")):
        shutil.move(chunk, tmp_path / "other" / chunk.name)
        chunk.symlink_to(tmp_path / "other" / chunk.name)
    (tmp_path / "link").symlink_to(location)
    assert _within(20, tmp_path / "link") == []
    assert len(log_rows(tmp_path / "link")) == ROWS + 2
