"""One log that several machines use: in a bucket, or in a directory that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.log.machines import Machines, MemoryBucket, WatchedBucket, WatchedDirectory
from zmq_datasource.errors import LogError
from zmq_datasource.log.buckets import Bucket
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.options.types import Location


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    """What is in each bucket of this test."""
    made = MemoryBucket()
    monkeypatch.setattr(Bucket, "connect", made.connect)
    monkeypatch.setattr(LogStorage, "request_interval", 0.0)
    return made


def _closed(machines: Machines) -> Iterator[Machines]:
    yield machines
    for log in machines.running:
        with suppress(LogError):
            log.close()


@pytest.fixture
def machines(memory: MemoryBucket) -> Iterator[Machines]:
    """Around a bucket."""
    yield from _closed(Machines(lambda: WatchedBucket(Location("s3://bucket/log"))))


@pytest.fixture(params=["directory", "bucket"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machines]:
    """Around a bucket, and around a directory."""
    if request.param == "bucket":
        yield request.getfixturevalue("machines")
    else:
        yield from _closed(Machines(lambda: WatchedDirectory(tmp_path / "log")))
