"""When a receiver seals what it has received."""

from __future__ import annotations

import math

import pytest

from zmq_datasource.source.sealing import LastSeal, seal_time

QUICK = LastSeal(began=100.0, seconds=0.001, state_bytes=0)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (QUICK, 100.02),  # 50 times a second
        (QUICK._replace(seconds=0.01), 100.1),  # a tenth of the time
        (QUICK._replace(began=0.0), 0.02),  # a message after a pause is sealed at once
    ],
)
def test_messages_that_a_subscriber_waits_for_are_sealed_soon(last: LastSeal, expected: float) -> None:
    assert seal_time(100, last) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("size", "state_bytes", "expected"),
    [
        (100, 4096, 100.02),  # a small state may be larger than the messages
        (1_000_000, 300_000, math.inf),  # that of 10,000 producers
        (3_000_000, 300_000, 100.02),
    ],
)
def test_a_large_state_is_not_written_for_a_few_messages(
    size: int, state_bytes: int, expected: float
) -> None:
    last = QUICK._replace(state_bytes=state_bytes)
    assert seal_time(size, last) == pytest.approx(expected)


def test_a_disk_that_stalls_once_is_not_slow_and_one_that_is_slow_is_known_after_some_chunks() -> None:
    last, counted = QUICK, []
    for at in range(8):
        last = last.followed_by(101.0 + at, seconds=0.1, state_bytes=0)
        counted.append(last.seconds)
    assert counted[0] == pytest.approx(0.002)
    assert counted == sorted(counted)
    assert counted[-1] == 0.1
    assert last.followed_by(200.0, 0.001, 0).seconds == 0.001
