"""Two writers: the one that puts a chunk's key first has given out its ids, however the lock was lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.log.machines import Machines, WatchedDirectory, fill, numbered
from tests.support import batch_of, wait_for
from zmq_datasource.errors import LogLockedError


def test_an_idle_writer_notices_that_another_has_the_lock(anywhere: Machines) -> None:
    first = anywhere.writer()
    anywhere.lose_lock()
    anywhere.writer()
    assert isinstance(wait_for(lambda: first.failure, "the failure"), LogLockedError)
    with pytest.raises(LogLockedError):
        first.append(batch_of([b"0"]))


def test_the_open_chunk_of_a_lost_writer_belongs_to_the_next_writer(tmp_path: Path) -> None:
    machines = Machines(lambda: WatchedDirectory(tmp_path / "log"))
    first = machines.writer(retry_timeout=60.0)
    first.append(batch_of([b"0"]))
    assert first.flush().result(10) == 1
    machines.lose_lock()
    second = machines.writer()
    assert second.durable_end == 1
    first.append(batch_of([b"never"]))
    with pytest.raises(LogLockedError):
        first.flush().result(30)
    fill(second, b"1")
    second.close()
    assert machines.rows() == numbered(b"0", b"1")
    with pytest.raises(LogLockedError):
        first.close()
