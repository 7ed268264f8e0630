"""A log in a bucket: what is durable is there, and any machine goes on with it.

The bucket is in memory. ``test_store`` and ``source/test_bucket`` use a server.
"""

from __future__ import annotations

import pytest

from tests.log.machines import Machines, MemoryBucket, WatchedBucket, fill, no_answer, numbered
from tests.support import batch_of, need, wait_for
from zmq_datasource.errors import (
    DiskFaultError,
)
from zmq_datasource.log.reader import read_index, read_slices, slices
from zmq_datasource.log.storage import LogStorage


def watched(storage: LogStorage) -> WatchedBucket:
    assert isinstance(storage.store, WatchedBucket)
    return storage.store


# Two machines.


# A bucket that is away, and back.


def test_an_opening_is_repeated_wherever_the_bucket_has_not_answered(machines: Machines) -> None:
    log = machines.writer()
    for value in (b"0", b"1"):
        fill(log, value)
    machines.end(log)
    refused = 0
    for number in range(1000):
        storage, asked = machines.storage(), []

        def once(verb: str, key: str, number: int = number, asked: list[str] = asked) -> None:
            asked.append(verb)
            if len(asked) == number + 1:
                no_answer(verb, key)

        watched(storage).before = once
        log = machines.writer(storage, retry_timeout=60.0)
        watched(storage).before = None
        assert log.durable_end == number + 2
        fill(log, b"%d" % (number + 2))
        machines.end(log)
        if len(asked) <= number:
            break
        refused += 1
    assert refused > 5
    assert machines.rows() == numbered(*(b"%d" % n for n in range(refused + 3)))


# Large chunks, which are read by ranges.


def large_chunk(machines: Machines) -> tuple[LogStorage, list[bytes]]:
    rows = [bytes([i]) * 300_000 for i in range(20)]
    log = machines.writer(chunk_bytes=1 << 30)
    for row in rows:
        log.append(batch_of([row]))
    log.cut().result(10)
    return machines.storage(), rows


def read_parts(storage: LogStorage) -> list[bytes]:
    index = read_index(storage)
    pieces = slices(index.all, 0, index.durable_end)
    batches = read_slices(storage, pieces)
    return [value for batch in batches for value in batch.column("value").to_pylist()]


@pytest.mark.parametrize("for_good", [False, True])
def test_a_bucket_that_goes_away_within_a_large_chunk_is_no_damage(
    machines: Machines, for_good: bool
) -> None:
    storage, rows = large_chunk(machines)

    def interrupt(verb: str, key: str) -> None:
        count = watched(storage).calls["read_range"]
        if verb == "read_range" and (count == 5 or (for_good and count > 5)):
            no_answer(verb, key)

    watched(storage).before = interrupt
    storage.retry_seconds = 0.2 if for_good else 30.0
    if for_good:
        with pytest.raises(DiskFaultError, match="no answer"):
            read_parts(storage)
    else:
        assert read_parts(storage) == rows


# Readers.


def test_a_log_that_is_away_deletes_nothing(machines: Machines, memory: MemoryBucket) -> None:
    log = machines.writer()
    for value in (b"0", b"1"):
        fill(log, value)
    memory.empty()
    log.retention.tidy()
    assert memory.names() == []
    assert log.earliest == 0
    memory.restore()
    need(machines.storage(), 2)
    wait_for(lambda: log.earliest == 1, "the deletion")
    assert machines.rows() == [(1, b"1")]
