"""The accounts of batches: a batch counts once, however often it was run, and totals are sums of batches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from zmq_datasource.counters import SinkCounters, figures
from zmq_datasource.monitoring.accounts import SINK, TOTAL, Account, BatchHistory, SinkTotals
from zmq_datasource.monitoring.source import SOURCE

SINK_NAME = "PUSH a"


def account(batch: int, rows: int = 10, dropped: int = 0, letters: int = 0, **more: Any) -> Account:
    counters = SinkCounters(
        rows=rows,
        sent=rows - dropped - letters,
        dropped=Counter(hwm=dropped),
        dead_lettered=Counter(timeout=letters),
        peers=1,
        sndhwm=50,
    )
    return of(batch, counters, **more)


def of(batch: int, counters: SinkCounters, **more: Any) -> Account:
    given = {"query": "q", "name": None, "execution": "e", "write": "e", "sink": SINK_NAME, "seconds": 0.0}
    return Account(**{**given, "batch": batch, "figures": figures(counters), **more})


def totals(history: BatchHistory, batch: int, query: str = "q", sink: str = SINK_NAME) -> SinkTotals:
    return history.totals(query, [batch])[batch][sink]


def test_a_total_is_the_sum_of_the_batches_so_far() -> None:
    history = BatchHistory()
    for batch in range(5):
        history.add(account(batch, dropped=batch))
    after = totals(history, 3)
    assert (after.batch["rows"], after.batch["dropped"], after.batch["droppedByReason"]["hwm"]) == (10, 3, 3)
    total = after.total
    assert (total["rows"], total["droppedByReason"]["hwm"], total["batches"]) == (40, 6, 4)
    assert total["rows"] == total["sent"] + total["dropped"] + total["deadLettered"]


def test_a_batch_that_is_executed_again_counts_once() -> None:
    history = BatchHistory()
    history.add(account(0))
    history.add(account(1, execution="first", write="first"))
    history.add(account(1, dropped=4, execution="second", write="second"))
    after = totals(history, 1)
    assert after.batch["sent"] == 6
    assert [after.total[name] for name in ("rows", "sent", "batches")] == [20, 16, 2]


def test_writes_of_one_execution_to_one_sink_add_up_and_count_once_each() -> None:
    history = BatchHistory()
    for _ in range(2):
        history.add(account(0, write="1"))
        history.add(account(0, rows=5, write="2"))
    after = totals(history, 0)
    assert (after.batch["rows"], after.total["batches"]) == (15, 1)


def test_sinks_and_queries_do_not_mix() -> None:
    history = BatchHistory()
    history.add(account(0, 1))
    history.add(account(0, 2, sink="PUB b"))
    history.add(account(0, 4, query="other"))
    mine = history.totals("q", [0])[0]
    assert {name: after.total["rows"] for name, after in mine.items()} == {SINK_NAME: 1, "PUB b": 2}
    assert history.totals("unknown", [0]) == {0: {}}
    both = mine[SINK_NAME] + mine["PUB b"]
    assert (both.batch["rows"], both.total["rows"], both.total["batches"]) == (3, 3, 1)


def test_a_batch_without_a_write_shows_zeros_and_the_total_before() -> None:
    history = BatchHistory()
    history.add(account(3, 7))
    after = totals(history, 5)
    assert (after.batch["rows"], after.total["rows"]) == (0, 7)
    assert totals(history, 2).total["rows"] == 0


def test_memory_is_bounded_and_totals_forget_nothing() -> None:
    history = BatchHistory(most_batches=10, most_queries=3)
    for batch in range(30):
        history.add(account(batch, 1))
    assert (totals(history, 29).total["rows"], totals(history, 29).total["batches"]) == (30, 30)
    assert history.totals("q", [5, 25])[5] == {}  # rather nothing than something wrong
    assert totals(history, 25).total["rows"] == 26
    for number in range(9):
        history.add(account(0, 1, query=f"q{number}"))
        history.add(account(30 + number, 1))
    assert totals(history, 99).total["rows"] == 39  # it has the newest accounts
    assert history.totals("q6", [0]) == {0: {}}
    assert totals(history, 0, query="q8").total["rows"] == 1


def test_an_idle_query_shows_its_sockets_as_they_were() -> None:
    history = BatchHistory()
    history.add(of(0, SinkCounters(rows=1, sent=1, peers=3, sndhwm=50)))
    history.add(of(1, SinkCounters(rows=1, sent=1, peers=1, sndhwm=50)))
    history.add(of(2, SinkCounters(tasks=1)))  # without rows there is no socket
    for batch in (2, 3):
        after = totals(history, batch)
        assert (after.total["peers"], after.total["sndhwm"]) == (1, 50)
    assert (after.batch["rows"], after.batch["peers"], after.batch["sndhwm"]) == (0, 1, 50)


def test_every_figure_and_every_series_is_declared_once() -> None:
    assert tuple(figures(SinkCounters())) == tuple(metric.name for metric in SINK)
    assert [metric.name for metric in TOTAL] == ["batches", *(metric.name for metric in SINK)]
    for names in (
        [metric.name for metric in SOURCE],
        [metric.series for metric in (*SOURCE, *TOTAL) if metric.series],
    ):
        assert len(names) == len(set(names))


def test_many_batches_that_drop_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    history = BatchHistory()
    history.add(account(0))
    for batch in range(1, 50):
        history.add(account(batch, dropped=4, letters=1))
    assert [r.message for r in caplog.records] == [
        "sink PUSH a of query q: rows are not being sent since batch 1: "
        "4 dropped (hwm), 1 kept as dead letters (timeout)"
    ]


def test_each_sink_of_each_query_has_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    history = BatchHistory()
    history.add(account(0, dropped=1, name="orders"))
    history.add(account(0, query="other"))
    history.add(account(1, sink="PUSH b"))
    assert [r.message for r in caplog.records] == [
        "sink PUSH a of query orders: rows are not being sent since batch 0: 1 dropped (hwm)"
    ]
    history.add(account(1))
    history.add(account(2, dropped=1))
    assert len(caplog.records) == 2
