"""Trigger limits, applied together."""

from __future__ import annotations

import pytest

from tests.support import stream_options
from zmq_datasource.spark.admission import Admission


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ten_bytes_each(_partition: int, begin: int, end: int, size: int) -> tuple[int, int]:
    found = min(end, begin + size // 10)
    return found, 10 * (found - begin)


def size_of(_partition: int, begin: int, end: int) -> int:
    return 10 * (end - begin)


def end_of(admission: Admission, begin: int, available: int, *, wait: bool = True) -> int:
    """Of a log with one partition."""
    return admission.ends({0: begin}, {0: available}, size_of, ten_bytes_each, wait=wait)[0]


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


@pytest.mark.parametrize(
    ("options", "available", "ends"),
    [
        ({"maxMessagesPerTrigger": 10}, (1_000_000, 1, 1), (9, 1, 0)),  # the other one comes next time
        ({"maxBytesPerTrigger": 100}, (30, 0, 10), (7, 0, 2)),
        ({"maxBytesPerTrigger": 1}, (2, 0, 3), (1, 0, 0)),  # one message is always let in
        ({"minMessagesPerTrigger": 10}, (5, 0, 5), (5, 0, 5)),
    ],
)
def test_log_partitions_share_a_batch_by_what_they_have(
    options: dict[str, int], available: tuple[int, ...], ends: tuple[int, ...]
) -> None:
    admission = Admission(stream_options(connect="tcp://a:1", **options), Clock())
    given = admission.ends(dict.fromkeys(range(3), 0), dict(enumerate(available)), size_of, ten_bytes_each)
    assert given == dict(enumerate(ends))


def test_the_bytes_of_a_batch_are_bounded_with_any_number_of_partitions() -> None:
    """And each of them comes to its turn, one with large messages too, though others have small ones without end."""
    sizes = dict.fromkeys(range(8), 10) | {3: 90, 5: 250}

    def end_within(partition: int, begin: int, end: int, size: int) -> tuple[int, int]:
        found = min(end, begin + size // sizes[partition])
        return found, sizes[partition] * (found - begin)

    def size_of(partition: int, begin: int, end: int) -> int:
        return sizes[partition] * (end - begin)

    admission = Admission(stream_options(connect="tcp://a:1", maxBytesPerTrigger=100), Clock())
    begins = dict.fromkeys(range(8), 0)
    for _ in range(60):
        ends = admission.ends(begins, dict.fromkeys(range(8), 10_000), size_of, end_within)
        taken = {partition: sizes[partition] * (ends[partition] - begins[partition]) for partition in ends}
        assert 0 < sum(taken.values()) <= 100 or taken == dict.fromkeys(range(8), 0) | {5: 250}
        begins = ends
    assert min(begins.values()) >= 60 // 8
