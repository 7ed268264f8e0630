"""One of the proxy's processes, as whoever has started it holds it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from zmq_datasource import errors
from zmq_datasource.errors import SocketError, ZmqDataSourceError
from zmq_datasource.proxy.pipes import Lines, Newest, start_line

__all__ = ["Child"]

_log = logging.getLogger(__name__)


class Child:
    """A process that gets its options, and then lines of which the newest counts; the end of these ends it.

    It says once that it is ready, then how it is, or why it ends.

    Args:
        module: Whose ``main`` it runs.
        given: Its options, as text.

    Attributes:
        ready: Whether its endpoints are bound.
        status: How it was when it said so last.
        error: Why it ends, if it could say so.
        killed: Whether it did not end in time, and was killed.
    """

    def __init__(self, module: str, given: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is ours to pass on
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._lines = Lines(self._output.fileno())
        self.ready = False
        self.status: dict[str, Any] = {}
        self.error: Exception | None = None
        self.killed = False
        with suppress(BrokenPipeError):  # what it says, or its end, tells why
            self._input.write(json.dumps(start_line(given, _log.getEffectiveLevel())).encode() + b"\n")
            self._input.flush()
        self._newest = Newest(self._input.fileno())
        _started.add(self)

    @property
    def descriptor(self) -> int:
        """Readable when it has said something."""
        return self._lines.descriptor

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: Any) -> None:
        """Tell it something, if that is new; never waits."""
        with suppress(BrokenPipeError):  # its end is heard
            self._newest.tell(message)

    def hear(self) -> bool:
        """Take in what it has said; never waits.

        Returns:
            Whether it may say more.
        """
        for line in self._lines.read():
            self._take(line)
        return not self._lines.ended

    def hear_one(self) -> bool:
        """Wait for one line of the process, and take it in.

        Returns:
            Whether it has: it may have ended.
        """
        try:
            self._take(self._lines.wait())
        except EOFError:
            return False
        return True

    def _take(self, line: str) -> None:
        said = json.loads(line)
        if "ready" in said:
            self.ready = True
        elif "error" in said:
            self.error = _error_of(said["error"])
        else:
            self.status = said["status"]

    def close_input(self) -> None:
        """Close the pipe to the process, which ends it."""
        with suppress(BrokenPipeError):
            self._input.close()

    def let_go(self) -> None:
        """Give up the pipe to the process in a forked child: else the process would not end with the parent."""
        with suppress(ValueError):  # it is closed already
            nothing = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nothing, self._input.fileno(), inheritable=False)
            finally:
                os.close(nothing)

    def close_output(self) -> None:
        """Close the pipe from the process."""
        self._output.close()

    def wait(self, seconds: float) -> int:
        """Wait for its end, or kill it.

        Returns:
            Its exit code.
        """
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            _log.error("process %d of the proxy does not end; it is killed", self.pid)
            self.killed = True
            self._process.kill()
            return self._process.wait()


# All that this process has started.
_started: weakref.WeakSet[Child] = weakref.WeakSet()


def _let_go() -> None:
    for child in list(_started):
        child.let_go()


os.register_at_fork(after_in_child=_let_go)


def _error_of(said: list[str]) -> Exception:
    """An error that another process has reported."""
    name, message = said
    kind = getattr(errors, name, SocketError)
    return kind(message) if issubclass(kind, ZmqDataSourceError) else SocketError(message)
