"""Tells a supervisor that a program is ready: by a file, and by systemd's notification socket (sd_notify(3))."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from zmq_datasource.errors import OptionError

_log = logging.getLogger(__name__)

_MODE = 0o644


class Readiness:
    """Whether a program is ready.

    Args:
        file: Exists while the program is ready; None for no file. One that a killed process has left is removed here.

    Raises:
        OptionError: The file cannot be made.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.is_ready = False
        if file is not None:
            try:
                file.unlink(missing_ok=True)
                file.touch(mode=_MODE, exist_ok=False)  # follows no link
                file.unlink()
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
            if self._file is not None and is_ready:
                self._file.touch(mode=_MODE, exist_ok=False)
            elif self._file is not None:
                self._file.unlink(missing_ok=True)
            if is_ready:
                _notify(b"READY=1")
        except OSError as e:
            _log.warning("saying that this program is %s: %s", "ready" if is_ready else "not ready", e)


def _notify(state: bytes) -> None:
    """Send systemd a state, if it has started this program with ``Type=notify``."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.connect("\0" + address[1:] if address.startswith("@") else address)
            systemd.send(state)
