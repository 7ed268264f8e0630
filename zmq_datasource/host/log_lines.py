"""Lines of the log: text from a peer is made safe to show, and lines of one kind come at a limited rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


def printable(text: str | bytes, most: int) -> str:
    """Escape the unprintable characters of a text, and cut it to ``most`` characters.

    Unprintable characters control a terminal or hide text: control characters, line ends, marks of the
    writing direction. Bytes that are not UTF-8 are escaped too, as in ``\\xff``.

    Args:
        text: Of any size; only its beginning is read.
        most: Limit of the result's characters, at least 1. A text that is cut ends with ``…``.
    """
    if isinstance(text, bytes):
        # A character has up to 4 bytes. If the cut goes through one, it is cut off again below.
        text = text[: 4 * (most + 1)].decode("utf-8", "backslashreplace")
    shown = text[: most + 1]
    if not shown.isprintable():
        shown = "".join(map(_escaped, shown))
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


# Characters of each text in a line, because a peer may have sent it.
_MOST_SHOWN = 1000


class LimitedLog:
    """Writes at most ``lines`` log lines of one kind in ``seconds``, and then one line with the number left out.

    Args:
        name: The logger's name.
        what: The kind, in the plural, for the line with the number.
        clock: Returns monotonic seconds.
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
        """Log a warning, or count it if the limit is reached."""
        self._write(logging.WARNING, message, args)

    def fault(self, message: str, *args: object, error: BaseException) -> None:
        """Log an error with its traceback, or count it if the limit is reached."""
        self._write(logging.ERROR, message, args, error)

    def info(self, message: str, *args: object) -> None:
        """Log an information, or count it if the limit is reached."""
        self._write(logging.INFO, message, args)

    def _write(
        self, level: int, message: str, args: tuple[object, ...], error: BaseException | None = None
    ) -> None:
        self.flush()
        if self._lines < self._most_lines:
            self._lines += 1
            # Errors become text: a handler that keeps records would keep their tracebacks, and so the refused messages.
            args = tuple(
                printable(str(arg), _MOST_SHOWN) if isinstance(arg, (str, BaseException)) else arg
                for arg in args
            )
            self._log.log(level, message, *args, exc_info=error)
        else:
            self._left_out += 1

    def flush(self) -> None:
        """Log how many lines were left out, if ``seconds`` have passed. Called now and then."""
        now = self._clock()
        if now < self._until:
            return
        if self._left_out:
            self._log.warning("%d more %s in the last %.0f s", self._left_out, self._what, self._seconds)
        self._until, self._lines, self._left_out = now + self._seconds, 0, 0
