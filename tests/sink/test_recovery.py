"""How often rows are sent again before that is in vain, by a clock that nobody waits for."""

from __future__ import annotations

import pytest

from zmq_datasource.errors import ConnectionLostError
from zmq_datasource.sink.recovery import Attempts


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(round(seconds, 3))


def test_pauses_grow_and_end_with_the_patience() -> None:
    clock = Clock()
    attempts = Attempts(10.0, "tcp://consumer:1", lambda: clock.now, clock.sleep)
    with pytest.raises(ConnectionLostError, match=r"tcp://consumer:1: \d+ connections were lost.* for 10\.0"):
        for _ in range(100):
            attempts.next()
    assert clock.slept == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0]


def test_three_attempts_are_made_in_any_case() -> None:
    clock = Clock()
    attempts = Attempts(0.01, "tcp://consumer:1", lambda: clock.now, clock.sleep)
    for _ in range(3):
        clock.now += 60  # each takes long
        attempts.next()
    with pytest.raises(ConnectionLostError, match="4 connections were lost"):
        attempts.next()
