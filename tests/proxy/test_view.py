"""The log as the server process reads it, while the live process writes and deletes."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from tests.support import batch_of, facts_of
from zmq_datasource.log.chunk import write_chunk
from zmq_datasource.log.head import HeadWriter
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.proxy.view import Cursor, LogView, Progress


def test_a_cursor_does_not_read_past_deleted_ids(tmp_path: Path) -> None:
    log = LogStorage(str(tmp_path))
    log.open_log()
    Path(log.path_of("")).mkdir(exist_ok=True)
    names = []
    for first in (0, 10, 20):
        parts = [batch_of([b"%d" % i for i in range(first, first + 10)])]
        names.append(write_chunk(log, parts, facts_of(parts, first)).name)
    view = LogView(log)
    view.follow(Progress(0, 30))
    cursor = Cursor(view, 0)
    read = cursor.read(10, 1 << 20)
    assert read is not None
    assert read.column("id").to_pylist() == list(range(10))
    head = HeadWriter(log)
    head.write(replace(head.take_over(), deleted=20))
    for name in names[:2]:
        Path(log.path_of(name)).unlink()
    view.follow(Progress(20, 30))
    assert [cursor.read(10, 1 << 20) for _ in range(3)] == [None] * 3
    assert (cursor.position, view.earliest) == (10, 20)
    behind = Cursor(view, 20).read(10, 1 << 20)
    assert behind is not None
    assert behind.column("id").to_pylist() == list(range(20, 30))
