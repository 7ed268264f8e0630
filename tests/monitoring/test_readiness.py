"""A receiver says when it is ready: over HTTP, by a file, and to systemd. Real processes and sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from click.testing import CliRunner

from tests.support import free_endpoint, wait_for
from tests.support.ports import free_port
from zmq_datasource.cli import main


class Receiver:
    """``zmq-datasource receive`` into the log ``log`` of a directory, as a supervisor sees it."""

    def __init__(self, directory: Path, name: str) -> None:
        self._port = free_port()
        self._ready_file = directory / f"{name}.ready"
        self._ready_file.touch()  # left by a process that was killed
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(str(directory / f"{name}.notify"))
        self._notified.settimeout(30)
        command = [
            sys.executable,
            "-m",
            "zmq_datasource",
            "receive",
            "--socket-type",
            "PULL",
            "--bind",
            free_endpoint(),
        ]
        command += ["--wal-location", str(directory / "log"), "--prometheus", str(self._port)]
        command += ["--ready-file", str(self._ready_file)]
        environment = os.environ | {"NOTIFY_SOCKET": str(directory / f"{name}.notify")}
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)

    @property
    def answer(self) -> int | None:
        """The status of ``/ready``; None while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/ready", timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as e:
            return e.code
        except OSError:
            return None

    @property
    def has_file(self) -> bool:
        return self._ready_file.exists()

    def notification(self) -> bytes:
        """What systemd is told next."""
        return self._notified.recv(1000)

    def stop(self) -> None:
        """End it. A second call does nothing."""
        self._process.terminate()
        assert self._process.wait(30) == 0
        self._notified.close()


@contextmanager
def receiving(directory: Path, name: str) -> Iterator[Receiver]:
    receiver = Receiver(directory, name)
    try:
        yield receiver
    finally:
        receiver.stop()


def test_a_receiver_is_ready_while_it_receives_into_its_log(tmp_path: Path) -> None:
    with receiving(tmp_path, "first") as first:
        assert first.notification() == b"READY=1"
        assert first.has_file
        wait_for(lambda: first.answer == 200, "an answer")
        with receiving(tmp_path, "standby") as standby:
            wait_for(lambda: standby.answer == 503, "a standby, which is not ready")
            assert not standby.has_file
            first.stop()
            assert not first.has_file
            assert standby.notification() == b"READY=1"
            assert standby.has_file
            assert standby.answer == 200


def test_a_ready_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    arguments = ["receive", "--connect", free_endpoint(), "--wal-location", str(tmp_path / "log")]
    refused = CliRunner().invoke(main, [*arguments, "--ready-file", str(tmp_path / "none" / "ready")])
    assert refused.exit_code == 2
    assert f"--ready-file {tmp_path / 'none' / 'ready'}: No such file" in refused.output
