"""A receiver says when it is ready: over HTTP, by a file, and to systemd. Real processes and sockets."""

from __future__ import annotations

import socket
from pathlib import Path

from click.testing import CliRunner

from tests.support import free_endpoint, wait_for
from tests.support.ports import free_port
from tests.support.programs import page, program
from zmq_datasource.cli import main


def test_a_receiver_is_ready_while_it_receives_into_its_log(tmp_path: Path) -> None:
    options = ["receive", "--socket-type", "PULL", "--bind", free_endpoint()]
    options += ["--wal-location", str(tmp_path / "log")]
    first, standby = tmp_path / "first.ready", tmp_path / "standby.ready"
    standby.touch()  # left by a process that was killed
    ports = free_port(), free_port()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "systemd"))
        systemd.settimeout(30)

        def ready(file: Path, port: int) -> list[str]:
            return [*options, "--ready-file", str(file), "--prometheus", str(port)]

        notified = {"NOTIFY_SOCKET": str(tmp_path / "systemd")}
        with program(*ready(first, ports[0]), **notified) as running:
            assert systemd.recv(100) == b"READY=1"
            assert first.exists()
            assert page(ports[0], "/ready")[0] == 200
            with program(*ready(standby, ports[1]), **notified):
                wait_for(lambda: page(ports[1], "/ready")[0] == 503, "a standby, which is not ready")
                assert not standby.exists()
                running.terminate()
                assert running.wait(30) == 0
                assert not first.exists()
                assert systemd.recv(100) == b"READY=1"
                assert standby.exists()
                assert page(ports[1], "/ready")[0] == 200


def test_a_ready_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    arguments = ["receive", "--connect", free_endpoint(), "--wal-location", str(tmp_path / "log")]
    refused = CliRunner().invoke(main, [*arguments, "--ready-file", str(tmp_path / "none" / "ready")])
    assert refused.exit_code == 2
    assert f"--ready-file {tmp_path / 'none' / 'ready'}: No such file" in refused.output
