"""How many rows are kept to be sent again."""

from __future__ import annotations

from zmq_datasource.sink.in_flight import InFlight, RowBatch


def rows(first: int) -> RowBatch:
    return RowBatch(None, None, None, first, sent=10, sent_bytes=100)


def test_at_least_the_newest_bytes_are_kept() -> None:
    in_flight = InFlight(keep=1000)
    for first in range(0, 5000, 10):
        if in_flight.add(rows(first)):
            in_flight.looked(empty=True)
        assert in_flight.bytes >= min(1000, first * 26)
        assert in_flight.bytes <= 2000
    assert in_flight.batches[-1].first == 4990


def test_while_the_queues_are_not_empty_no_row_is_forgotten_and_the_looks_become_rarer() -> None:
    in_flight, looks = InFlight(keep=1000), 0
    for first in range(0, 10_000, 10):
        if in_flight.add(rows(first)):
            in_flight.looked(empty=False)
            looks += 1
    assert in_flight.batches[0].first == 0
    assert looks == 7  # at 2,000 bytes, 4,000, ... and 128,000
