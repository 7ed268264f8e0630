"""Files with messages are readable by their owner only, with any umask and in a directory that others may enter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.acknowledged.test_acknowledged import receiving, stage
from tests.sink.test_dead_letters import stage as stage_letters
from tests.source.test_feed import _in_this_process, querying, send  # noqa: F401 - a fixture
from tests.support import Socket, bound, free_endpoint
from tests.support.proxies import ProxyThreads, endpoints
from zmq_datasource import DurableSubscriber
from zmq_datasource.options.types import Location
from zmq_datasource.sink.dead_letters import commit_dead_letters

Context = zmq.Context[Socket]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory that every user may enter, under a umask of 0."""
    before = os.umask(0)
    try:
        place = tmp_path / "place"
        for path in (place, place / "log", place / "log" / "chunks"):
            path.mkdir()
        yield place
    finally:
        os.umask(before)


def files(place: Path) -> set[str]:
    """The names of the files, after a check that none is readable by others."""
    found = [path for path in place.rglob("*") if path.is_file()]
    assert not [path for path in found if path.stat().st_mode & 0o077]
    return {path.name for path in found}


def test_the_log_of_a_query_is_private(context: Context, place: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with querying(place / "log", connect=endpoint) as query:
        query.step()
        for _ in range(10):
            push.send(b"x")
        query.until(10)
        files(place)
    names = files(place)
    assert "writer.lock" in names
    assert {".arrow", ".json", ".lock"} <= {Path(name).suffix for name in names}


def test_a_staged_transaction_is_private(place: Path) -> None:
    endpoint = free_endpoint()
    with receiving(place / "log", endpoint) as ingest:
        attempt = stage(endpoint, "a")
        assert attempt in files(place)
        ingest.seal()


def test_the_log_of_a_proxy_is_private(context: Context, place: Path) -> None:
    with (
        ProxyThreads(place / "log", endpoints("pull", "durable")) as proxy,
        DurableSubscriber(proxy.sides["durable"], "me") as me,
    ):
        push = context.socket(zmq.PUSH)
        push.connect(proxy.sides["pull"])
        push.send(b"x")
        assert me.receive(30) is not None
        files(place)
    assert "subscriber.me.json" in files(place)


def test_dead_letters_of_a_sink_are_private(place: Path) -> None:
    (name,) = stage_letters(place, [b"x"])
    assert name in files(place)
    commit_dead_letters(Location(place), "q", 7, [name])
    assert name in files(place)
