"""Repeats what a store refuses for now: the disk is full, no descriptor is free, the network is down.

``Retrier`` repeats whole acts, such as opening the log or writing a chunk, and not single verbs of the store. An act
releases the holds that it has taken before it is repeated. So a reader that waits for room on a full disk does not keep
the writer from making room. ``retry_reading`` repeats the reading of a chunk.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

from zmq_datasource.errors import DiskFaultError, LogWriteError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log.files import is_transient

T = TypeVar("T")

_log = logging.getLogger(__name__)

# How long a process waits for a store that refuses, with receiving paused. Most faults of disks and buckets that pass
# have passed by then. After it, Spark or a supervisor learns of the fault by the error.
STORE_RETRY_SECONDS = 300.0

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_FIRST_READING_PAUSE = 0.1
_LINE_SECONDS = 10.0


def retry_reading(read: Callable[[], T], seconds: float) -> T:
    """Call ``read`` again while the store refuses for now; a warning reports the first refusal.

    Raises:
        DiskFaultError, OSError: The store has refused for ``seconds``.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_READING_PAUSE
    level = logging.WARNING
    while True:
        try:
            return read()
        except (DiskFaultError, OSError) as e:
            if not (isinstance(e, DiskFaultError) or is_transient(e)) or time.monotonic() >= deadline:
                raise
            _log.log(level, "%s; trying again for up to %.0f s", e, max(0.0, deadline - time.monotonic()))
            level = logging.DEBUG
            check_signals()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


class Retrier:
    """Repeats acts that the store refuses for now. For one thread; any thread may read ``fault``.

    Args:
        seconds: How long to repeat an act; 0 for not at all.
        meanwhile: Called between two attempts; may make room.

    Attributes:
        fault: Why the store refuses at present; None if it does not.
    """

    def __init__(self, seconds: float, meanwhile: Callable[[], None] | None = None) -> None:
        self._seconds = seconds
        self._meanwhile = meanwhile
        self._deadline = math.inf
        self._faults = LimitedLog(__name__, "failures to make room")
        self.fault: str | None = None

    def end_within(self, seconds: float) -> None:
        """Limit all repetition to this time from now on."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def retry(self, act: Callable[[], T]) -> T:
        """Call ``act`` until it raises no ``DiskFaultError``; every 10 s a warning reports the refusal.

        Raises:
            LogWriteError: The store has refused until the end, or for a reason that stays.
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
                    raise LogWriteError(f"{e}. It was tried again for {now - began:.1f} s") from e
                if now >= next_line:
                    next_line = now + _LINE_SECONDS
                    _log.warning("%s; trying again for up to %.0f s", e, left)
                check_signals()
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
                if self._meanwhile is not None:
                    try:
                        self._meanwhile()
                    except Exception as e:  # the next attempt may succeed without it
                        self._faults.fault("making room while the disk refuses", error=e)
            else:
                if self.fault is not None:
                    _log.warning("the disk accepts writes again after %.1f s", time.monotonic() - began)
                    self.fault = None
                return result
