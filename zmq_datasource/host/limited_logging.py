"""Log lines at a bounded rate, and the number of those that were left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from zmq_datasource.host.printable import printable

__all__ = ["LimitedLog"]

# Characters of each text in a line: it may be of a peer.
_MOST_SHOWN = 1000


class LimitedLog:
    """Lines of one kind, of which there may be a great many.

    Args:
        name: Of the logger.
        what: The kind, for the line that tells how many were left out.
        clock: Seconds, monotonic.
        lines, seconds: So many lines in so many seconds; the others are reported by their number.
    """

    def __init__(
        self,
        name: str,
        what: str,
        clock: Callable[[], float] = time.monotonic,
        lines: int = 5,
        seconds: float = 10.0,
    ) -> None:
        self._most_lines, self._seconds = lines, seconds
        self._log = logging.getLogger(name)
        self._what = what
        self._clock = clock
        self._until = 0.0
        self._lines = 0
        self._left_out = 0

    def warn(self, message: str, *args: object) -> None:
        """Log a warning, or count it."""
        self._write(logging.WARNING, message, args)

    def fault(self, message: str, *args: object, error: BaseException) -> None:
        """Log an error with its traceback, or count it."""
        self._write(logging.ERROR, message, args, error)

    def info(self, message: str, *args: object) -> None:
        """Log what is going on, or count it."""
        self._write(logging.INFO, message, args)

    def _write(
        self, level: int, message: str, args: tuple[object, ...], error: BaseException | None = None
    ) -> None:
        self.flush()
        if self._lines < self._most_lines:
            self._lines += 1
            # A handler that keeps records must not keep, by an error's traceback, the messages that it is about.
            args = tuple(
                printable(str(arg), _MOST_SHOWN) if isinstance(arg, (str, BaseException)) else arg
                for arg in args
            )
            self._log.log(level, message, *args, exc_info=error)
        else:
            self._left_out += 1

    def flush(self) -> None:
        """Tell what was left out, once its time is over."""
        now = self._clock()
        if now < self._until:
            return
        if self._left_out:
            self._log.warning("%d more %s in the last %.0f s", self._left_out, self._what, self._seconds)
        self._until, self._lines, self._left_out = now + self._seconds, 0, 0
