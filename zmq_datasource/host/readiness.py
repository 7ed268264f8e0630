"""Tells a supervisor that a program is ready: by a file, and by systemd's notification socket (sd_notify(3))."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from zmq_datasource.errors import OptionError

_log = logging.getLogger(__name__)


class Readiness:
    """Whether a program is ready.

    Args:
        file: Exists while the program is ready; None for no file. One that a killed process has left is removed.

    Raises:
        OptionError: The file cannot be made.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.is_ready = False
        try:
            self._show(True)
            self._show(False)
        except OSError as e:
            raise OptionError(
                f"--ready-file {file}: {e.strerror}; name a file in a directory that can be written"
            ) from e

    def set(self, is_ready: bool) -> None:
        """Say whether the program is ready. A failure is logged, and affects nothing else."""
        if is_ready == self.is_ready:
            return
        self.is_ready = is_ready
        try:
            self._show(is_ready)
            systemd = os.environ.get("NOTIFY_SOCKET")
            if is_ready and systemd:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                    sock.sendto(b"READY=1", systemd.replace("@", "\0", 1) if systemd[0] == "@" else systemd)
        except OSError as e:
            _log.warning("saying whether this program is ready: %s", e)

    def _show(self, is_ready: bool) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            if is_ready:
                self._file.touch(mode=0o644, exist_ok=False)  # follows no link
