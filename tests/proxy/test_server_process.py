"""The live process and the server process wait out faults of the system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support import wait_for
from zmq_datasource.errors import SocketError
from zmq_datasource.proxy import process
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
        self.error, self.status, self.asked_end = None, {"started": FakeChild.started}, -1
        self.ended = False

    def send(self, _: object) -> None: ...

    def end(self, _: float) -> int:
        return 0


PROGRESS = Progress(0, 0)


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
