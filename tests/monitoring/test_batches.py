"""The history of batches: a batch counts once, however often it was run, and totals are sums of batches."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from zmq_datasource.counters import SinkCounters
from zmq_datasource.monitoring.batches import BatchHistory, BatchWrite
from zmq_datasource.monitoring.catalogue import SINK, SOURCE, TOTAL
from zmq_datasource.monitoring.figures import sink_counters, sink_metrics


def sent(rows: int, dropped: int = 0) -> SinkCounters:
    return SinkCounters(
        rows=rows, sent=rows - dropped, bytes=rows * 10, dropped=Counter(hwm=dropped), peers=1
    )


def entry(
    batch: int, counters: SinkCounters, execution: str = "e", query: str = "q", sink: str = "PUSH a"
) -> BatchWrite:
    return BatchWrite(query, execution, batch, sink, counters)


def test_a_total_is_the_sum_of_the_batches_so_far() -> None:
    history = BatchHistory()
    for batch in range(5):
        history.add(entry(batch, sent(10, dropped=batch)))
    totals = history.totals("q", [3])[3]["PUSH a"]
    assert (totals.batch.rows, totals.batch.dropped["hwm"]) == (10, 3)
    assert (totals.total.rows, totals.total.dropped["hwm"], totals.batches) == (40, 6, 4)
    assert totals.total.balanced


def test_a_batch_that_is_executed_again_counts_once() -> None:
    history = BatchHistory()
    history.add(entry(0, sent(10)))
    history.add(entry(1, sent(10), execution="first"))
    history.add(entry(1, sent(10, dropped=4), execution="second"))
    totals = history.totals("q", [1])[1]["PUSH a"]
    assert (totals.batch.sent, totals.total.rows, totals.total.sent, totals.batches) == (6, 20, 16, 2)


def test_two_writes_of_one_execution_to_one_sink_add_up() -> None:
    history = BatchHistory()
    history.add(entry(0, sent(10)))
    history.add(entry(0, sent(5)))
    totals = history.totals("q", [0])[0]["PUSH a"]
    assert (totals.batch.rows, totals.batches) == (15, 1)


def test_sinks_and_queries_do_not_mix() -> None:
    history = BatchHistory()
    history.add(entry(0, sent(1)))
    history.add(entry(0, sent(2), sink="PUB b"))
    history.add(entry(0, sent(4), query="other"))
    mine = history.totals("q", [0])[0]
    assert {name: totals.total.rows for name, totals in mine.items()} == {"PUSH a": 1, "PUB b": 2}
    assert history.totals("nobody", [0]) == {0: {}}


def test_a_batch_without_a_write_shows_zeros_and_the_total_before() -> None:
    history = BatchHistory()
    history.add(entry(3, sent(7)))
    totals = history.totals("q", [5])[5]["PUSH a"]
    assert (totals.batch.rows, totals.total.rows) == (0, 7)
    assert history.totals("q", [2])[2]["PUSH a"].total.rows == 0


def test_a_batch_before_the_newest_can_be_executed_again() -> None:
    history = BatchHistory()
    for batch in range(5):
        history.add(entry(batch, sent(10)))
    history.add(entry(2, sent(3), execution="again"))
    totals = [history.totals("q", [batch])[batch]["PUSH a"].total.rows for batch in range(5)]
    assert totals == [10, 20, 23, 33, 43]


def test_memory_is_bounded_and_totals_forget_nothing() -> None:
    history = BatchHistory()
    for batch in range(3000):
        history.add(entry(batch, sent(1)))
    totals = history.totals("q", [2999])[2999]["PUSH a"]
    assert (totals.total.rows, totals.batches) == (3000, 3000)
    assert history.totals("q", [5, 2500])[5] == {}  # rather nothing than something wrong
    assert history.totals("q", [2500])[2500]["PUSH a"].total.rows == 2501
    assert len(history._queries["q"]["PUSH a"]._batches) == 1000
    for number in range(3000):
        history.add(entry(0, sent(1), query=f"q{number}"))
        if number % 500 == 0:
            history.add(entry(3000 + number, sent(1)))
    assert len(history._queries) == 1000
    assert history.totals("q", [9999])[9999]["PUSH a"].total.rows == 3006  # it is still heard of


def test_an_idle_query_shows_its_sockets_as_they_were() -> None:
    history = BatchHistory()
    history.add(entry(0, SinkCounters(rows=1, sent=1, peers=3, sndhwm=50)))
    history.add(entry(1, SinkCounters(rows=1, sent=1, peers=1, sndhwm=50)))
    history.add(entry(2, SinkCounters(tasks=1)))  # without rows there is no socket
    for batch in (2, 3):
        totals = history.totals("q", [batch])[batch]["PUSH a"]
        assert (totals.total.peers, totals.total.sndhwm) == (1, 50)
    assert (totals.batch.rows, totals.batch.peers, totals.batch.sndhwm) == (0, 1, 50)


counts = st.integers(0, 2**40)


@given(
    st.builds(
        SinkCounters,
        rows=counts,
        sent=counts,
        bytes=counts,
        dropped=st.dictionaries(st.sampled_from(["hwm", "no_peer"]), st.integers(1, 2**40)).map(Counter),
        dead_lettered=st.dictionaries(
            st.sampled_from(["hwm", "no_peer", "timeout"]), st.integers(1, 2**40)
        ).map(Counter),
        retries=counts,
        unflushed_tasks=counts,
        tasks=counts,
        blocked_seconds=counts.map(lambda ms: ms / 1000),
        peers=counts,
        sndhwm=counts,
        metrics_failures=counts,
    )
)
def test_an_account_survives_its_json(counters: SinkCounters) -> None:
    assert sink_counters(sink_metrics(counters)) == counters


def test_every_metric_of_a_sink_is_declared_in_its_order() -> None:
    assert tuple(sink_metrics(SinkCounters())) == tuple(metric.name for metric in SINK)
    assert [metric.name for metric in TOTAL] == ["batches", *(metric.name for metric in SINK)]
    series = [metric.series for metric in (*SOURCE, *TOTAL) if metric.series]
    assert len(series) == len(set(series))
