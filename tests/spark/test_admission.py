"""Trigger limits, applied together."""

from __future__ import annotations

import pytest

from tests.support import stream_options
from zmq_datasource.spark.admission import Admission


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ten_bytes_each(begin: int, end: int, size: int) -> int:
    return min(end, begin + size // 10)


def end_of(admission: Admission, begin: int, available: int, *, wait: bool = True) -> int:
    return admission.end(begin, available, ten_bytes_each, wait=wait)


@pytest.mark.parametrize(
    ("options", "available", "end"),
    [
        ({}, 100, 100),
        ({}, 5, 5),
        ({"maxMessagesPerTrigger": 10}, 100, 15),
        ({"maxMessagesPerTrigger": 10}, 8, 8),
        ({"maxBytesPerTrigger": 30}, 100, 8),
        ({"maxBytesPerTrigger": 1}, 100, 6),
        ({"maxBytesPerTrigger": 1}, 5, 5),
        ({"maxMessagesPerTrigger": 2, "maxBytesPerTrigger": 30}, 100, 7),
        ({"maxMessagesPerTrigger": 20, "maxBytesPerTrigger": 30}, 100, 8),
        ({"minMessagesPerTrigger": 10}, 14, 5),
        ({"minMessagesPerTrigger": 10}, 15, 15),
        ({"minMessagesPerTrigger": 10, "maxMessagesPerTrigger": 12}, 100, 17),
    ],
)
def test_limits(options: dict[str, int], available: int, end: int) -> None:
    admission = Admission(stream_options(connect="tcp://a:1", **options), Clock())
    assert end_of(admission, 5, available) == end


def test_a_small_batch_waits_no_longer_than_the_delay() -> None:
    clock = Clock()
    options = stream_options(connect="tcp://a:1", minMessagesPerTrigger=10, maxTriggerDelay="60s")
    admission = Admission(options, clock)
    assert end_of(admission, 0, 3) == 0
    clock.now += 59
    assert end_of(admission, 0, 4) == 0
    clock.now += 1
    assert end_of(admission, 0, 4) == 4
    assert end_of(admission, 4, 5) == 4
    clock.now += 60
    assert end_of(admission, 4, 5) == 5


def test_available_now_does_not_wait_for_more() -> None:
    admission = Admission(stream_options(connect="tcp://a:1", minMessagesPerTrigger=10), Clock())
    assert end_of(admission, 0, 3, wait=False) == 3
