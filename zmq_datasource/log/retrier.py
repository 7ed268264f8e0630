"""Waiting out a store that refuses for now: a full disk, no file descriptors left, a network that is down.

What is repeated is a whole act of the log, and not a single verb of the store. An act gives up the holds that it has
taken before it is repeated. So a reader that waits for room on a full disk does not keep the writer from making room.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

from zmq_datasource.errors import DiskFaultError, LogWriteError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.host.signals import check_signals

__all__ = ["Retrier"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_LINE_SECONDS = 10.0


class Retrier:
    """Repeats an act that the store refuses for now. For one thread; ``fault`` may be read by any.

    Args:
        seconds: How long to repeat it; 0 for not at all.
        meanwhile: Called between two attempts; it may make room.

    Attributes:
        fault: Why the disk refuses at present; None while it does not.
    """

    def __init__(self, seconds: float, meanwhile: Callable[[], None] | None = None) -> None:
        self._seconds = seconds
        self._meanwhile = meanwhile
        self._deadline = math.inf
        self._faults = LimitedLog(__name__, "failures to make room")
        self.fault: str | None = None

    def end_within(self, seconds: float) -> None:
        """Repeat nothing for longer than this from now on."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def retry(self, act: Callable[[], T]) -> T:
        """Call ``act`` until it raises no ``DiskFaultError``; every 10 s a warning says what is waited for.

        Raises:
            LogWriteError: The store has refused for all the time there was, or for a reason that stays.
        """
        began = time.monotonic()
        pause, next_line = _FIRST_PAUSE, began
        while True:
            try:
                result = act()
            except DiskFaultError as e:
                now = time.monotonic()
                left = min(began + self._seconds, self._deadline) - now
                self.fault = str(e)
                if left <= 0:
                    if self._seconds == 0:
                        raise
                    raise LogWriteError(
                        f"{e}. It was tried again for {now - began:.1f} s (walRetryTimeout={self._seconds:g}s)"
                    ) from e
                if now >= next_line:
                    next_line = now + _LINE_SECONDS
                    _log.warning("%s; trying again for up to %.0f s", e, left)
                check_signals()
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
                if self._meanwhile is not None:
                    try:
                        self._meanwhile()
                    except Exception as e:  # the disk may take it all the same
                        self._faults.fault("making room while the disk refuses", error=e)
            else:
                if self.fault is not None:
                    _log.warning("the disk takes it again after %.1f s", time.monotonic() - began)
                    self.fault = None
                return result
