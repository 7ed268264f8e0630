"""How the live process and the server process bear what the system refuses them for a while."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import wait_for
from tests.support.proxies import endpoints
from zmq_datasource.errors import DiskFaultError, LogWriteError, SocketError
from zmq_datasource.log.layout import LOCK_WAIT_SECONDS
from zmq_datasource.log.reader_records import ReaderRecord, ReaderRecords, SubscriberNotes
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.proxy import process, server
from zmq_datasource.proxy.view import Progress


class Child:
    """A server process that needs no process."""

    refusal: OSError | None = None
    started = 0
    newest: Child

    def __init__(self, *_: object) -> None:
        if Child.refusal is not None:
            raise Child.refusal
        Child.started += 1
        Child.newest = self
        self.descriptor, self.ready, self.error, self.status = 0, True, None, {"started": Child.started}
        self.alive = True

    def hear(self) -> bool:
        return self.alive

    def tell(self, _: object) -> None: ...

    def close_input(self) -> None: ...

    def close_output(self) -> None: ...

    def wait(self, _: float) -> int:
        return 0


class Flow:
    """What the live process has, as far as its companion asks."""

    def __init__(self) -> None:
        self.journal = SimpleNamespace(progress=Progress(0, 0, None))
        self.hear: Callable[[], None] | None = None

    def watch(self, _: int, on_wake: Callable[[], None]) -> None:
        self.hear = on_wake

    def unwatch(self) -> None:
        self.hear = None


def test_a_server_process_that_cannot_be_started_again_is_tried_until_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "Child", Child)
    monkeypatch.setattr(Child, "started", 0)
    flow: Any = Flow()
    companion = process.Companion({}, serves=True, least_life=0.01)
    companion.start(flow)
    Child.newest.alive = False
    assert flow.hear is not None
    flow.hear()
    monkeypatch.setattr(Child, "refusal", OSError(errno.EMFILE, os.strerror(errno.EMFILE)))

    def refused() -> bool:
        companion.step(flow)
        return caplog.text.count("Too many open files; it is tried again") >= 2

    wait_for(refused, "refused twice")
    companion.end()
    monkeypatch.setattr(Child, "refusal", None)

    def runs() -> bool:
        companion.step(flow)
        return companion.status.get("started") == 2

    wait_for(runs, "started again")
    assert flow.hear is not None


def test_a_server_process_that_cannot_be_started_at_first_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "Child", Child)
    monkeypatch.setattr(Child, "refusal", OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    with pytest.raises(SocketError, match="starting the proxy's server process: Cannot allocate memory"):
        process.Companion({}, serves=True).start(Flow())  # type: ignore[arg-type]


def test_what_a_subscriber_needs_is_kept_by_a_server_process_that_begins_again(tmp_path: Path) -> None:
    """Its record is all that a killed one has left."""
    storage = opened(tmp_path)
    records, notes = ReaderRecords(storage), SubscriberNotes("me", 1, [], 0.0)
    given = {"walLocation": str(tmp_path), "walSync": "false", **endpoints("pull", "durable")}
    options = parse(ProxyOptions, given)
    for next_id in (0, None):
        if next_id is None:
            records.remove("subscriber.me")
        else:
            records.write("subscriber.me", ReaderRecord({0: next_id}, 1e9, subscriber=notes))
        it = server.enter(options, Progress(0, 0, None))
        assert [account["name"] for account in it.status()["durable"]] == ["me"] * (next_id is not None)
        it.__exit__()


def opened(location: Path) -> LogStorage:
    storage = LogStorage(str(location))
    log = LogWriter(storage, chunk_bytes=1 << 20, max_bytes=1 << 30, retention=0)
    log.open(LOCK_WAIT_SECONDS)
    log.close()
    return storage


def test_a_disk_that_refuses_while_the_server_process_starts_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = SubscriberNotes("me", 1, [], 0.0)
    ReaderRecords(opened(tmp_path)).write("subscriber.me", ReaderRecord({0: 0}, 1e9, subscriber=notes))
    faults = [DiskFaultError("too many open files")] * 2
    read = LogStorage.read

    def refuse(self: LogStorage, key: str) -> bytes | None:
        if faults and key.endswith("readers/subscriber.me.json"):
            raise faults.pop()
        return read(self, key)

    monkeypatch.setattr(LogStorage, "read", refuse)
    given = {"walLocation": str(tmp_path), "walSync": "false", **endpoints("pull", "durable")}
    server.enter(parse(ProxyOptions, given), Progress(0, 0, None)).__exit__()
    assert not faults
    faults += [DiskFaultError("too many open files")] * 1000
    with pytest.raises(LogWriteError, match=r"too many open files.*walRetryTimeout=0\.1s"):
        server.enter(parse(ProxyOptions, given | {"walRetryTimeout": "100ms"}), Progress(0, 0, None))
