"""How many rows are kept to be sent again."""

from __future__ import annotations

from zmq_datasource.sink.in_flight import InFlight, RowBatch


def test_the_newest_bytes_stay_and_at_twice_as_many_the_task_must_wait() -> None:
    in_flight = InFlight(keep=1000)
    for first in range(0, 5000, 10):
        in_flight.add(RowBatch(None, None, None, first, sent=10, sent_bytes=100))
        assert in_flight.bytes == sum(batch.size for batch in in_flight.batches)
        assert in_flight.is_full == (in_flight.bytes >= 2000)
        if in_flight.is_full:
            in_flight.forget_old()
        assert in_flight.bytes >= min(1000, first * 26)
        assert in_flight.bytes <= 2000
    assert in_flight.batches[-1].first == 4990


def test_rows_that_were_given_up_meanwhile_do_not_count() -> None:
    in_flight = InFlight(keep=1000)
    for first in range(9):
        in_flight.add(RowBatch(None, None, None, first, sent=10, sent_bytes=100))
    in_flight.batches[0].sent = in_flight.batches[0].sent_bytes = 0
    in_flight.forget_old()
    assert (in_flight.bytes, len(in_flight.batches)) == (4 * 260, 4)
