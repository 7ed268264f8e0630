"""Repeats what a store refuses for now: the disk is full, no descriptor is free, the network is down.

A ``Retrier`` repeats whole acts, such as opening the log or writing a chunk, and not single verbs of the store. An act
releases the holds that it has taken before it is repeated. So a reader that waits for room on a full disk does not keep
the writer from making room.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

from zmq_datasource.errors import DiskFaultError, LogWriteError
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log.files import is_transient

T = TypeVar("T")

_log = logging.getLogger(__name__)

# How long a process waits for a store that refuses, with receiving paused. Most faults of disks and buckets that pass
# have passed by then. After it, Spark or a supervisor learns of the fault by the error.
STORE_RETRY_SECONDS = 300.0

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_LINE_SECONDS = 10.0


class Retrier:
    """Repeats acts that the store refuses for now. For one thread; any thread may read ``fault``.

    Args:
        seconds: How long to repeat an act; 0 for not at all.
        last: The error of an act that was refused until the end.

    Attributes:
        fault: Why the store refuses at present; None if it does not.
    """

    def __init__(self, seconds: float, last: type[LogWriteError] = LogWriteError) -> None:
        self._seconds = seconds
        self._last = last
        self._deadline = math.inf
        self.fault: str | None = None

    def end_within(self, seconds: float) -> None:
        """Limit all repetition to this time from now on."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def retry(self, act: Callable[[], T]) -> T:
        """Call ``act`` until the store does not refuse for now; every 10 s a warning reports the refusal.

        Raises:
            LogWriteError: The store has refused until the end (``last``), or for a reason that stays.
            DiskFaultError, OSError: The store refuses for now, and ``seconds`` is 0; a file refuses to be read.
        """
        began = time.monotonic()
        pause, next_line = _FIRST_PAUSE, began
        while True:
            try:
                result = act()
            except (DiskFaultError, OSError) as e:
                if isinstance(e, OSError) and not is_transient(e):
                    raise
                now = time.monotonic()
                left = min(began + self._seconds, self._deadline) - now
                self.fault = str(e)
                if left <= 0:
                    if self._seconds == 0 or isinstance(e, OSError):
                        raise
                    raise self._last(f"{e}. It was tried again for {now - began:.1f} s") from e
                if now >= next_line:
                    next_line = now + _LINE_SECONDS
                    _log.warning("%s; trying again for up to %.0f s", e, left)
                check_signals()
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                if self.fault is not None:
                    _log.warning("the store answers again after %.1f s", time.monotonic() - began)
                    self.fault = None
                return result


def retry_reading(read: Callable[[], T], seconds: float) -> T:
    """Repeat the reading of a chunk, or of a listing.

    Raises:
        DiskFaultError, OSError: The store has refused for ``seconds``.
    """
    return Retrier(seconds, last=DiskFaultError).retry(read)
