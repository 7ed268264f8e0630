"""Two processes that end together: one starts the other, and both write lines of JSON into pipes.

The *child* reads its standard input: one line with its options and its log level, then lines of which only the newest
counts. The child ends when this pipe closes. On its standard output it writes its status again and again, as soon as
its endpoints are bound; ``asked_end`` when it changes; and one line with the error, if an error ends it. If a pipe is
full, only the options and the error wait for room; other lines are dropped.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from zmq_datasource import errors
from zmq_datasource.errors import SocketError, ZmqDataSourceError

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 16


class NewestWriter:
    """Writes values into a pipe, for a reader that needs only the newest one.

    Args:
        descriptor: The pipe; it does not block from now on.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)
        self._sent: Any = object()
        self._rest = b""  # of a line that the pipe had room for only in part

    def send(self, value: Any) -> None:
        """Write a value if it differs from the one before and the pipe has room; otherwise drop it.

        Does nothing if the reader has ended.
        """
        with suppress(BlockingIOError, BrokenPipeError):
            if self._rest:
                self._rest = self._rest[os.write(self._descriptor, self._rest) :]
            if self._rest or value == self._sent:
                return
            line = json.dumps(value).encode() + b"\n"
            self._rest = line[os.write(self._descriptor, line) :]
            self._sent = value

    def send_last(self, value: Any) -> None:
        """Write the last value; wait until the reader has made room for it."""
        os.set_blocking(self._descriptor, True)
        rest = self._rest + json.dumps(value).encode() + b"\n"
        with suppress(BrokenPipeError):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]


class NewestReader:
    """Reads the values of a ``NewestWriter``.

    Attributes:
        ended: Whether the writer has closed the pipe.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.ended = False
        self._part = b""  # of a line that is not whole yet

    def wait(self) -> Any:
        """Wait for the next value, and return it. Called only before ``newest``.

        Raises:
            EOFError: The writer has closed the pipe.
        """
        # Without a buffer, so that the bytes of later values stay in the pipe.
        with open(self.descriptor, "rb", buffering=0, closefd=False) as pipe:
            line = pipe.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the other process has ended")
        return json.loads(line)

    def wait_until_closed(self) -> None:
        """Wait until the writer closes the pipe."""
        while os.read(self.descriptor, _READ_BYTES):
            pass

    def newest(self) -> Any:
        """The newest value since the last call, or None. Never waits."""
        os.set_blocking(self.descriptor, False)
        lines: list[bytes] = []
        while not self.ended:
            try:
                content = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            self.ended = not content
            *whole, self._part = (self._part + content).split(b"\n")
            lines = whole or lines
        return json.loads(lines[-1]) if lines else None


class Parent:
    """In a child: the process that has started it.

    Attributes:
        options: The child's options, as text.
        values: Reads the lines after the options.

    Raises:
        EOFError: The process has ended.
    """

    def __init__(self) -> None:
        self.values = NewestReader(sys.stdin.fileno())
        start = self.values.wait()
        set_up_logging(start["logLevel"])
        self.options: dict[str, str] = start["options"]
        self._writer = NewestWriter(sys.stdout.fileno())

    def report(self, status: Mapping[str, Any]) -> None:
        """Send a status. The first one says that the child's endpoints are bound."""
        self.send({"status": status})

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a ``status``, an ``askedEnd``, or both, as ``NewestWriter.send``."""
        self._writer.send(message)

    def exit_with(self, error: ZmqDataSourceError) -> NoReturn:
        """Send the error that ends the child, and exit."""
        self._writer.send_last({"error": [type(error).__name__, str(error)]})
        sys.exit(1)


def set_up_logging(level: int = logging.INFO) -> None:
    """Write log lines to standard error, unless logging is set up already."""
    if not logging.getLogger().handlers:
        logging.basicConfig(
            level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )


class Child:
    """A process that this one starts. A thread reads the status lines that the process writes.

    Args:
        module: The process runs ``main`` of this module.
        options: Its options, as text.
        notify: Called in that thread after each line.

    Attributes:
        status: Its newest status; empty until its endpoints are bound.
        asked_end: A durable subscriber has asked it for what follows this id of the log, and found nothing.
        error: The error that it has sent before it ended.
        ended: Whether it has closed its standard output, which it does when it ends.
        killed: Whether ``end`` had to kill it.

    Raises:
        OSError: The system has no room for another process.
    """

    def __init__(
        self, module: str, options: Mapping[str, str], notify: Callable[[], None] = lambda: None
    ) -> None:
        self._notify = notify
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches only this process, which then ends the child
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.status: dict[str, Any] = {}
        self.asked_end = -1
        self.error: Exception | None = None
        self.ended = self.killed = False
        self._changed = threading.Condition()
        start = {"options": dict(options), "logLevel": _log.getEffectiveLevel()}
        with suppress(BrokenPipeError):  # it has ended already, which the reading thread notices
            self._input.write(json.dumps(start).encode() + b"\n")
            self._input.flush()
        self._writer = NewestWriter(self._input.fileno())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        _started.add(self)

    def _read(self) -> None:
        for line in self._output:
            if not line.endswith(b"\n"):  # it was killed while it wrote
                break
            message = json.loads(line)
            with self._changed:
                self.status = message.get("status", self.status)
                self.asked_end = message.get("askedEnd", self.asked_end)
                if "error" in message:
                    name, text = message["error"]
                    self.error = getattr(errors, name, SocketError)(text)
                self._changed.notify_all()
            self._notify()
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, seconds: float) -> bool:
        """Wait for the first status, or until the process ends; return whether its endpoints are bound."""
        with self._changed:
            self._changed.wait_for(lambda: self.status or self.ended, seconds)
        return bool(self.status)

    def send(self, value: Any) -> None:
        """Send a value to the process, as ``NewestWriter.send``."""
        self._writer.send(value)

    def end(self, seconds: float) -> int:
        """Close the pipe to the process, which ends it; kill it if it still runs after so many seconds.

        Returns:
            Its exit code.
        """
        with suppress(BrokenPipeError):
            self._input.close()
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            _log.error("process %d of the proxy has not ended within %.0f s; killed it", self.pid, seconds)
            self.killed = True
            self._process.kill()
            code = self._process.wait()
        self._reader.join()
        self._output.close()
        return code

    def close_in_fork(self) -> None:
        """In a fork of this process, close the pipe to the child: the fork's copy would keep the child alive."""
        with suppress(ValueError):  # ``end`` has closed it
            nothing = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nothing, self._input.fileno(), inheritable=False)
            finally:
                os.close(nothing)


_started: weakref.WeakSet[Child] = weakref.WeakSet()


def _close_all_in_fork() -> None:
    for child in list(_started):
        child.close_in_fork()


os.register_at_fork(after_in_child=_close_all_in_fork)
