"""The live process and the server process wait out faults of the system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

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
from zmq_datasource.proxy.child import Child
from zmq_datasource.proxy.view import Progress


class FakeChild:
    """Takes the place of ``child.Child``, without a process."""

    refusal: OSError | None = None
    started = 0
    newest: FakeChild

    def __init__(self, *_: object) -> None:
        if FakeChild.refusal is not None:
            raise FakeChild.refusal
        FakeChild.started += 1
        FakeChild.newest = self
        self.error, self.status = None, {"started": FakeChild.started}
        self.ended = False

    def send(self, _: object) -> None: ...

    def end(self, _: float) -> int:
        return 0


PROGRESS = Progress(0, 0, None)


def test_a_server_process_that_cannot_be_started_again_is_tried_until_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeChild, "started", 0)
    server = process.ServerProcess({}, restart_seconds=0.01, child=FakeChild)
    server.start(PROGRESS)
    server.step(PROGRESS)
    FakeChild.newest.ended = True
    monkeypatch.setattr(FakeChild, "refusal", OSError(errno.EMFILE, os.strerror(errno.EMFILE)))

    def refused() -> bool:
        server.step(PROGRESS)
        return caplog.text.count("Too many open files; trying again") >= 2

    wait_for(refused, "refused twice")
    assert server.status == {"started": 1}, "the last status stays"
    server.end()
    monkeypatch.setattr(FakeChild, "refusal", None)

    def runs() -> bool:
        server.step(PROGRESS)
        return server.status == {"started": 2}

    wait_for(runs, "started again")


def test_a_server_process_that_cannot_be_started_at_first_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeChild, "refusal", OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    with pytest.raises(SocketError, match="starting the proxy's server process: Cannot allocate memory"):
        process.ServerProcess({}, child=FakeChild).start(PROGRESS)


def test_a_line_that_a_process_has_not_finished_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys\ndef main():\n    sys.stdin.readline()\n    sys.stdout.write({text!r})\n"
    text = '{"status": {"sent": 1}}\n{"status": {"se'
    (tmp_path / "killed_while_it_writes.py").write_text(program.format(text=text))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Child("killed_while_it_writes", {})
    assert child.end(30) == 0
    assert (child.status, child.ended, child.error) == ({"sent": 1}, True, None)


def test_a_server_process_that_starts_again_knows_its_subscribers(tmp_path: Path) -> None:
    """A killed server process leaves nothing but the records."""
    storage = opened(tmp_path)
    records, notes = ReaderRecords(storage), SubscriberNotes("me", 1, [], 0.0)
    given = {"walLocation": str(tmp_path), "walSync": "false", **endpoints("pull", "durable")}
    options = parse(ProxyOptions, given)
    for next_id in (0, None):
        if next_id is None:
            records.remove("subscriber.me")
        else:
            records.write("subscriber.me", ReaderRecord({0: next_id}, 1e9, subscriber=notes))
        it = server.open_server(options, PROGRESS)
        assert [account["name"] for account in it.status()["durable"]] == ["me"] * (next_id is not None)
        it.close()


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
    server.open_server(parse(ProxyOptions, given), PROGRESS).close()
    assert not faults
    faults += [DiskFaultError("too many open files")] * 1000
    with pytest.raises(LogWriteError, match=r"too many open files.*walRetryTimeout=0\.1s"):
        server.open_server(parse(ProxyOptions, given | {"walRetryTimeout": "100ms"}), PROGRESS)
