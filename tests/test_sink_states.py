"""The log of a sink's states: a line when rows begin not to be sent, and one with the total when that ends."""

from __future__ import annotations

from collections import Counter

import pytest

from zmq_datasource.counters import SinkCounters
from zmq_datasource.monitoring.ledger import Entry
from zmq_datasource.monitoring.states import SinkStates


def entry(batch: int, rows: int, dropped: int = 0, letters: int = 0, query: str = "q") -> Entry:
    counters = SinkCounters(
        rows=rows,
        sent=rows - dropped - letters,
        dropped=+Counter(hwm=dropped),
        dead_lettered=+Counter(timeout=letters),
    )
    return Entry(query, "run", batch, "PUSH a", counters)


def test_many_batches_that_drop_are_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    states = SinkStates()
    states.note(entry(0, 10))
    for batch in range(1, 50):
        states.note(entry(batch, 10, dropped=4, letters=1))
    assert [r.message for r in caplog.records] == [
        "sink PUSH a of query q: rows are not being sent since batch 1: 4 dropped (hwm), 1 set aside (timeout)"
    ]
    states.note(entry(50, 10))
    states.note(entry(51, 10))
    assert [r.message for r in caplog.records][1:] == [
        "sink PUSH a of query q: rows are sent again since batch 50; from batch 1 on 245 of 490 were not: "
        "196 dropped (hwm), 49 set aside (timeout)"
    ]


def test_queries_have_states_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    states = SinkStates()
    states.note(entry(0, 10, dropped=1))
    states.note(entry(0, 10, query="other"))
    assert len(caplog.records) == 1
    states.note(entry(1, 10))
    assert len(caplog.records) == 2
