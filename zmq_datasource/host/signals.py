"""SIGTERM and SIGINT: noted at once, and obeyed where nothing is half done.

A signal handler runs between any two bytecodes of the main thread. One that raises there may do so between the taking
of a lock and the block that gives it back, and one that sets a ``threading.Event`` takes a lock that the very same
thread may hold: either way the process hangs for ever. So a handler here only sets a flag, and whoever waits looks at
it again and again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import ParamSpec, TypeVar

__all__ = [
    "StopFlag",
    "check_signals",
    "checks_signals",
    "finish",
    "ignore_signals",
    "is_signalled",
    "obey_signals",
]

P = ParamSpec("P")
T = TypeVar("T")

_TICK_SECONDS = 0.05
_PACKAGE = __name__.partition(".")[0]
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopFlag:
    """Whether a program was told to stop: a ``threading.Event`` that a signal handler may set."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self, *_: object) -> None:
        """Set it; by any thread, and as a signal handler."""
        self._is_set = True

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Wait until it is set, or so many seconds; whether it is."""
        deadline = time.monotonic() + seconds
        while not self._is_set and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _TICK_SECONDS))
        return self._is_set

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Have SIGTERM and SIGINT set it, in a block of the main thread, and break off waits until ``finish``.

        A wait that is broken off so ends the block.
        """
        global _told
        before = [(number, signal.signal(number, self.set)) for number in _SIGNALS]
        _told = self
        try:
            yield
        except SystemExit:
            if not self._is_set:
                raise
        finally:
            finish()
            for number, handler in before:
                signal.signal(number, handler)


# Signals are the whole process' own, and so is what was heard of them.
_told = StopFlag()
_exit_code = 0


def obey_signals() -> None:
    """From now on SIGTERM, and SIGINT where nobody else wants it, end this process by ``SystemExit``.

    It is raised at once while none of this package's code runs in the main thread, else at the next
    ``check_signals``. Called by another thread than the main one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        if number == signal.SIGTERM or signal.getsignal(number) is signal.default_int_handler:
            signal.signal(number, _hear)


def _hear(number: int, frame: FrameType | None) -> None:
    global _exit_code
    _exit_code = 128 + number
    _told.set()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            return
        frame = frame.f_back
    raise SystemExit(_exit_code)


def is_signalled() -> bool:
    """Whether this process was told to end, and nobody has begun to see to it."""
    return _told.is_set()


def check_signals() -> None:
    """Where a wait may be broken off.

    Raises:
        SystemExit: This process was told to end, and this is its main thread.
    """
    if _told.is_set() and threading.current_thread() is threading.main_thread():
        raise SystemExit(_exit_code)


def checks_signals(method: Callable[P, T]) -> Callable[P, T]:
    """Of a method that somebody else calls: it ends with ``check_signals``, whatever came of it."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        finally:
            check_signals()

    return call


def finish() -> None:
    """For who sees to it from here on: no wait is broken off any more."""
    global _told
    _told = StopFlag()


def ignore_signals() -> None:
    """For who has begun to stop in good order: from now on nothing cuts that short."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    finish()
