"""The rows that are read for a FETCH."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest

from zmq_datasource.messages.columns import MESSAGE_SCHEMA
from zmq_datasource.proxy import waiting
from zmq_datasource.proxy.fetch_protocol import MOST_WAIT_MS, Fetch
from zmq_datasource.proxy.waiting import Waiting


class Clock:
    """Monotonic seconds that only reading moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class OtherTopics:
    """A cursor in a log of one topic, each message of which takes its time."""

    def __init__(self, clock: Clock) -> None:
        self.position = 0
        self._clock = clock

    def read(self, rows: int, most_bytes: int) -> pa.RecordBatch:
        self._clock.now += 0.01
        self.position += 1
        columns = {"id": self.position, "topic": "other", "value": b""}
        row = {name: columns.get(name) for name in MESSAGE_SCHEMA.names}
        return pa.RecordBatch.from_pylist([row], MESSAGE_SCHEMA)


def test_a_search_for_a_rare_topic_is_answered_before_the_client_asks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    fetch = Fetch(name="me", session=1, first=0, done=0, max_bytes=1000, wait=MOST_WAIT_MS)
    asked = Waiting(b"peer", fetch, (b"rare",), OtherTopics(clock))  # type: ignore[arg-type]
    position = SimpleNamespace(notes=SimpleNamespace(snapshot=0))
    while asked.read(1_000_000, 1000, position):  # type: ignore[arg-type]
        assert clock.now <= MOST_WAIT_MS / 1000, "it has no answer after its wait"
    assert not asked.rows
    assert asked.cursor.position == MOST_WAIT_MS / 10
