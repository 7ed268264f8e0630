"""SIGTERM and SIGINT: recorded at once, and obeyed where no lock can stay taken.

Python runs a signal handler between any two bytecodes of the main thread. If the handler raises an exception there, a
lock that was just acquired is never released. If it sets a ``threading.Event``, it waits for a lock that the
same thread may hold. So while code that may hold a lock runs, the handlers here only set a flag, and loops that wait
check this flag. Outside of such code, ``exit_on_signals`` has the handler raise ``SystemExit``.
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

P = ParamSpec("P")
T = TypeVar("T")

_TICK_SECONDS = 0.05
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopFlag:
    """A flag like ``threading.Event`` that a signal handler may set, because it has no lock."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self, *_: object) -> None:
        """Set the flag. Any thread may call this, and it can serve as a signal handler."""
        self._is_set = True

    def is_set(self) -> bool:
        """Whether the flag is set."""
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Wait until the flag is set, for at most ``seconds``; return whether it is set."""
        deadline = time.monotonic() + seconds
        while not self._is_set and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _TICK_SECONDS))
        return self._is_set

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """In a block of the main thread: SIGTERM and SIGINT set the flag, and end a wait that calls ``check_signals``.

        A wait that ends this way ends the block. After ``forget_signal`` the signals only set the flag.
        """
        global _pending
        before = [(number, signal.signal(number, self.set)) for number in _SIGNALS]
        _pending = self
        try:
            yield
        except SystemExit:
            if not self._is_set:
                raise
        finally:
            forget_signal()
            for number, handler in before:
                signal.signal(number, handler)


# Signals belong to the process and not to an object, so their state does too.
_pending = StopFlag()
_exit_code = 0
_deferring = 0  # how many calls of functions with ``defers_signals`` are running


def exit_on_signals() -> None:
    """Make SIGTERM end this process by ``SystemExit``; SIGINT too, if Python's default handler is installed for it.

    The exception is raised at once, or, while a function with ``defers_signals`` runs, at its next
    ``check_signals`` or at its end. A second signal raises nothing, so that it cannot interrupt the exit.

    Called when a query starts. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        if number == signal.SIGTERM or signal.getsignal(number) is signal.default_int_handler:
            signal.signal(number, _on_signal)


def _on_signal(number: int, _frame: FrameType | None) -> None:
    global _exit_code
    is_first = not _pending.is_set()
    _exit_code = 128 + number
    _pending.set()
    if is_first and not _deferring:
        raise SystemExit(_exit_code)


def is_signalled() -> bool:
    """Whether a signal has arrived since the last ``forget_signal``."""
    return _pending.is_set()


def check_signals() -> None:
    """End the wait that calls this, if a signal has arrived. Loops that wait call it in each round.

    Raises:
        SystemExit: A signal has arrived, and this is the main thread.
    """
    if _pending.is_set() and threading.current_thread() is threading.main_thread():
        raise SystemExit(_exit_code)


def defers_signals(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method that Spark calls: a signal meanwhile is obeyed at ``check_signals`` or at the call's end."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        global _deferring
        _deferring += 1
        try:
            return method(*args, **kwargs)
        finally:
            _deferring -= 1
            check_signals()

    return call


def forget_signal() -> None:
    """Let ``check_signals`` raise nothing until the next signal. Called when a stop in good order begins."""
    global _pending
    _pending = StopFlag()


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT from now on, so that nothing interrupts a stop that has begun."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    forget_signal()
