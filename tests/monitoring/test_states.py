"""The log of a sink's states: a line when rows begin not to be sent, and one with the total when that ends."""

from __future__ import annotations

from collections import Counter

import pytest

from zmq_datasource.counters import SinkCounters
from zmq_datasource.monitoring.batches import BatchHistory, BatchWrite
from zmq_datasource.monitoring.states import SinkState


def counters(rows: int, dropped: int = 0, letters: int = 0) -> SinkCounters:
    return SinkCounters(
        rows=rows,
        sent=rows - dropped - letters,
        dropped=+Counter(hwm=dropped),
        dead_lettered=+Counter(timeout=letters),
    )


def test_many_batches_that_drop_are_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    state = SinkState()
    state.note("sink PUSH a", 0, counters(10))
    for batch in range(1, 50):
        state.note("sink PUSH a", batch, counters(10, dropped=4, letters=1))
    assert [r.message for r in caplog.records] == [
        "sink PUSH a: rows are not being sent since batch 1: 4 dropped (hwm), 1 kept as dead letters (timeout)"
    ]
    state.note("sink PUSH a", 50, counters(10))
    state.note("sink PUSH a", 51, counters(10))
    assert [r.message for r in caplog.records][1:] == [
        "sink PUSH a: rows are sent again since batch 50; from batch 1 on 245 of 490 were not: "
        "196 dropped (hwm), 49 kept as dead letters (timeout)"
    ]


def test_queries_and_sinks_have_states_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    history = BatchHistory()
    history.add(BatchWrite("q", "e0", 0, "PUSH a", counters(10, dropped=1), name="orders"))
    history.add(BatchWrite("other", "e1", 0, "PUSH a", counters(10)))
    history.add(BatchWrite("q", "e2", 1, "PUSH b", counters(10)))
    assert [r.message for r in caplog.records] == [
        "sink PUSH a of query orders: rows are not being sent since batch 0: 1 dropped (hwm)"
    ]
    history.add(BatchWrite("q", "e2", 1, "PUSH a", counters(10)))
    assert len(caplog.records) == 2
