"""Lines of JSON between processes that end together."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
from typing import Any

__all__ = ["Lines", "Newest", "say", "set_up_logging"]

_READ_BYTES = 1 << 16


def set_up_logging() -> None:
    """Log lines go to standard error, as text."""
    if not logging.getLogger().handlers:
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
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
        self._part = b""
        self.ended = False

    def read(self) -> list[str]:
        """What is there now; never waits."""
        lines: list[str] = []
        while not self.ended:
            try:
                content = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            if not content:
                self.ended = True
                break
            *whole, self._part = (self._part + content).split(b"\n")
            lines += [line.decode() for line in whole]
        return lines

    def wait(self, seconds: float | None = None) -> str:
        """The next line; it must be the only one that is there.

        Raises:
            EOFError: The other side is gone without one.
            TimeoutError: It did not come in time.
        """
        while True:
            ready, _, _ = select.select([self.descriptor], [], [], seconds)
            if not ready:
                raise TimeoutError(f"no answer within {seconds} s")
            lines = self.read()
            if lines:
                return lines[0]
            if self.ended:
                raise EOFError("the other process has ended")


class Newest:
    """Writes lines of which only the newest matters into a pipe; never waits for a reader that is slow."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)
        self._told: Any = object()

    def tell(self, message: Any) -> None:
        """Write it, if it is new and there is room; call again with what is new then."""
        if message == self._told:
            return
        line = json.dumps(message).encode() + b"\n"
        try:
            os.write(self._descriptor, line)  # short lines go in whole, or not at all
        except BlockingIOError:
            return
        self._told = message
