"""The ledger: a batch counts once, however often it was run, and totals are sums of batches."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from zmq_datasource.counters import SinkCounters
from zmq_datasource.monitoring.catalogue import SINK, SOURCE, TOTAL
from zmq_datasource.monitoring.figures import sink_counters, sink_metrics
from zmq_datasource.monitoring.ledger import Entry, Ledger


def sent(rows: int, dropped: int = 0) -> SinkCounters:
    return SinkCounters(
        rows=rows, sent=rows - dropped, bytes=rows * 10, dropped=Counter(hwm=dropped), peers=1
    )


def entry(
    batch: int, counters: SinkCounters, execution: str = "e", query: str = "q", sink: str = "PUSH a"
) -> Entry:
    return Entry(query, execution, batch, sink, counters)


def test_a_total_is_the_sum_of_the_batches_so_far() -> None:
    ledger = Ledger()
    for batch in range(5):
        ledger.add(entry(batch, sent(10, dropped=batch)))
    account = ledger.accounts("q", [3])[3]["PUSH a"]
    assert (account.batch.rows, account.batch.dropped["hwm"]) == (10, 3)
    assert (account.total.rows, account.total.dropped["hwm"], account.batches) == (40, 6, 4)
    assert account.total.balanced


def test_a_batch_that_is_executed_again_counts_once() -> None:
    ledger = Ledger()
    ledger.add(entry(0, sent(10)))
    ledger.add(entry(1, sent(10), execution="first"))
    ledger.add(entry(1, sent(10, dropped=4), execution="second"))
    account = ledger.accounts("q", [1])[1]["PUSH a"]
    assert (account.batch.sent, account.total.rows, account.total.sent, account.batches) == (6, 20, 16, 2)


def test_two_writes_of_one_execution_to_one_sink_add_up() -> None:
    ledger = Ledger()
    ledger.add(entry(0, sent(10)))
    ledger.add(entry(0, sent(5)))
    account = ledger.accounts("q", [0])[0]["PUSH a"]
    assert (account.batch.rows, account.batches) == (15, 1)


def test_sinks_and_queries_do_not_mix() -> None:
    ledger = Ledger()
    ledger.add(entry(0, sent(1)))
    ledger.add(entry(0, sent(2), sink="PUB b"))
    ledger.add(entry(0, sent(4), query="other"))
    mine = ledger.accounts("q", [0])[0]
    assert {name: account.total.rows for name, account in mine.items()} == {"PUSH a": 1, "PUB b": 2}
    assert ledger.accounts("nobody", [0]) == {0: {}}


def test_a_batch_without_a_write_shows_zeros_and_the_total_before() -> None:
    ledger = Ledger()
    ledger.add(entry(3, sent(7)))
    account = ledger.accounts("q", [5])[5]["PUSH a"]
    assert (account.batch.rows, account.total.rows) == (0, 7)
    assert ledger.accounts("q", [2])[2]["PUSH a"].total.rows == 0


def test_a_batch_before_the_newest_can_be_executed_again() -> None:
    ledger = Ledger()
    for batch in range(5):
        ledger.add(entry(batch, sent(10)))
    ledger.add(entry(2, sent(3), execution="again"))
    totals = [ledger.accounts("q", [batch])[batch]["PUSH a"].total.rows for batch in range(5)]
    assert totals == [10, 20, 23, 33, 43]


def test_memory_is_bounded_and_totals_forget_nothing() -> None:
    ledger = Ledger()
    for batch in range(3000):
        ledger.add(entry(batch, sent(1)))
    account = ledger.accounts("q", [2999])[2999]["PUSH a"]
    assert (account.total.rows, account.batches) == (3000, 3000)
    assert ledger.accounts("q", [5, 2500])[5] == {}  # rather nothing than something wrong
    assert ledger.accounts("q", [2500])[2500]["PUSH a"].total.rows == 2501
    assert len(ledger._queries["q"]["PUSH a"]._batches) == 1000
    for number in range(3000):
        ledger.add(entry(0, sent(1), query=f"q{number}"))
        if number % 500 == 0:
            ledger.add(entry(3000 + number, sent(1)))
    assert len(ledger._queries) == 1000
    assert ledger.accounts("q", [9999])[9999]["PUSH a"].total.rows == 3006  # it is still heard of


def test_an_idle_query_shows_its_sockets_as_they_were() -> None:
    ledger = Ledger()
    ledger.add(entry(0, SinkCounters(rows=1, sent=1, peers=3, sndhwm=50)))
    ledger.add(entry(1, SinkCounters(rows=1, sent=1, peers=1, sndhwm=50)))
    ledger.add(entry(2, SinkCounters(tasks=1)))  # without rows there is no socket
    for batch in (2, 3):
        account = ledger.accounts("q", [batch])[batch]["PUSH a"]
        assert (account.total.peers, account.total.sndhwm) == (1, 50)
    assert (account.batch.rows, account.batch.peers, account.batch.sndhwm) == (0, 1, 50)


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
