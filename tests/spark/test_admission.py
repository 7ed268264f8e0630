"""Trigger limits, applied together."""

from __future__ import annotations

import pytest

from tests.support import stream_options
from zmq_datasource.spark.admission import batch_end


def ten_bytes_each(begin: int, end: int, size: int) -> int:
    return min(end, begin + size // 10)


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
        ({"maxMessagesPerTrigger": 10, "maxBytesPerTrigger": 30}, 3, 5),
    ],
)
def test_limits(options: dict[str, int], available: int, end: int) -> None:
    assert batch_end(stream_options(connect="tcp://a:1", **options), 5, available, ten_bytes_each) == end
