"""Lines of JSON between processes that end together."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

__all__ = ["Lines", "Newest", "read_start", "say", "set_up_logging", "start_line"]

_READ_BYTES = 1 << 16


def start_line(given: Mapping[str, str], level: int) -> dict[str, Any]:
    """What a process gets first: its options, as text, and from which level on it logs."""
    return {"options": dict(given), "logLevel": level}


def read_start(line: str) -> dict[str, str]:
    """The options of a process that was just started; sets up its logging."""
    said = json.loads(line)
    set_up_logging(said["logLevel"])
    options: dict[str, str] = said["options"]
    return options


def set_up_logging(level: int = logging.INFO) -> None:
    """Log lines go to standard error, as text."""
    if not logging.getLogger().handlers:
        logging.basicConfig(
            level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )


def say(message: object) -> None:
    """Write a line to standard output, whole. Whoever started this process reads them, or is gone."""
    try:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads; the end of the input ends this process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Lines:
    """The lines that come through a pipe.

    Attributes:
        ended: Whether the other side is gone.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        os.set_blocking(descriptor, False)
        self._part = bytearray()
        self._whole: deque[str] = deque()
        self.ended = False

    def _fill(self) -> None:
        while not self.ended:
            try:
                content = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            if not content:
                self.ended = True
                return
            self._part += content
            if b"\n" in content:
                *whole, self._part = self._part.split(b"\n")
                self._whole += (line.decode() for line in whole)

    def read(self) -> list[str]:
        """What is there now; never waits."""
        self._fill()
        lines = list(self._whole)
        self._whole.clear()
        return lines

    def wait(self) -> str:
        """Wait for the next line.

        Raises:
            EOFError: The other side is gone without one.
        """
        while not self._whole:
            if self.ended:
                raise EOFError("the other process has ended")
            poller = select.poll()  # select() knows no descriptor above 1023
            poller.register(self.descriptor, select.POLLIN)
            poller.poll()
            self._fill()
        return self._whole.popleft()


class Newest:
    """Writes lines of which only the newest matters into a pipe; never waits for a reader that is slow."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)
        self._sent: Any = object()
        self._rest = b""  # of a line of which the pipe took a part

    def tell(self, message: Any) -> None:
        """Write it, if it is new and there is room; call again with what is new then.

        Raises:
            BrokenPipeError: Nobody reads any more.
        """
        try:
            if self._rest:
                self._rest = self._rest[os.write(self._descriptor, self._rest) :]
            if self._rest or message == self._sent:
                return
            line = json.dumps(message).encode() + b"\n"
            self._rest = line[os.write(self._descriptor, line) :]
            self._sent = message
        except BlockingIOError:
            return

    def finish(self) -> None:
        """From now on whoever writes waits; first for the rest of a line."""
        os.set_blocking(self._descriptor, True)
        with suppress(BrokenPipeError):
            while self._rest:
                self._rest = self._rest[os.write(self._descriptor, self._rest) :]
