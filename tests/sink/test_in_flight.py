"""How many rows are kept to be sent again, and how often they are."""

from __future__ import annotations

import pytest

from zmq_datasource.errors import ConnectionLostError
from zmq_datasource.sink.in_flight import InFlight, ResendLimit, RowBatch


def test_at_least_the_newest_bytes_are_kept() -> None:
    in_flight = InFlight(keep=1000)
    for first in range(0, 5000, 10):
        if in_flight.add(RowBatch(None, None, None, first, sent=10, sent_bytes=100)):
            in_flight.checked(all_sent=first % 3 == 0)
        kept = in_flight.bytes
        assert min(kept, first * 26) >= min(1000, first * 26)
        assert kept < 4000
    assert in_flight.batches[-1].first == 4990


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(round(seconds, 3))


def test_pauses_grow_and_attempts_end_after_the_timeout() -> None:
    clock = Clock()
    attempts = ResendLimit(10.0, "tcp://consumer:1", lambda: clock.now, clock.sleep)
    with pytest.raises(ConnectionLostError, match=r"tcp://consumer:1: \d+ connections were lost.* for 10\.0"):
        for _ in range(100):
            attempts.next()
    assert clock.slept == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0]


def test_three_attempts_are_made_even_after_the_timeout() -> None:
    clock = Clock()
    attempts = ResendLimit(0.01, "tcp://consumer:1", lambda: clock.now, clock.sleep)
    for _ in range(3):
        clock.now += 60  # each takes long
        attempts.next()
    with pytest.raises(ConnectionLostError, match="4 connections were lost"):
        attempts.next()
