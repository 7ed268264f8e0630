"""Rows of a real log for a durable subscriber, in answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import batch_of
from zmq_datasource.log import LogStorage, LogWriter, SubscriberNotes
from zmq_datasource.serving import reading
from zmq_datasource.serving.protocol import Fetch
from zmq_datasource.serving.reading import LogRows
from zmq_datasource.serving.server import Read, Waiting


@pytest.mark.parametrize("most_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("turn_seconds", [0.0, 10.0])
def test_answers_follow_each_other_also_while_the_log_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int, turn_seconds: float
) -> None:
    monkeypatch.setattr(reading, "_TURN_SECONDS", turn_seconds)
    log = LogWriter(LogStorage(str(tmp_path)), chunk_bytes=1 << 20, max_bytes=1 << 30)
    log.merge_seconds = 1e6
    log.open()
    rows, got = LogRows(LogStorage(str(tmp_path)), log), list[int]()
    for end in (7, 20, 21):
        for first in range(log.durable_end, end, 5):  # each is a batch of the chunk
            log.append(batch_of([b"%d" % i for i in range(first, min(first + 5, end))]))
        log.cut().result(30)
        while len(got) < end:
            fetch = Fetch(name="me", session=1, first=len(got), done=0)
            wanted = Read("me", Waiting(b"", fetch, 0.0, len(got)), end, SubscriberNotes(1, []), None)
            batch, next_id = rows.read(wanted, most_bytes)
            assert batch is not None
            got += batch.column("id").to_pylist()
            assert len(got) == next_id
    assert got == list(range(21))
    log.close()
