"""A proxy from Python: a process of its own, for as long as a ``with`` block.

The process reads one object of JSON from its standard input: its options, its log level, and the process that has
started it, with which it ends. On its standard output it writes lines of JSON: its figures, twice a second, and the
error that has ended it. A line that is neither is ignored, and a status that finds no room in the pipe is left out.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Self

from zmq_datasource import errors
from zmq_datasource.errors import SocketError, ZmqDataSourceError
from zmq_datasource.host.machine import ThisProcess
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse, texts_of

_log = logging.getLogger(__name__)

_START_SECONDS = 360.0  # longer than the process waits for a disk that refuses
# More than the process needs at its end: for the disk and for subscribers.
_END_SECONDS = 300.0
# How often the process looks whether the one that has started it has ended.
_WATCH_SECONDS = 0.2


class Proxy:
    """A proxy that keeps the messages in a log, and serves them again.

    ```python
    with Proxy(bind="tcp://*:5557", publish="tcp://*:5556", durable="tcp://*:5558", wal_location="/data/wal") as proxy:
        print(proxy.status())
    ```

    It runs in a process of its own, so a busy notebook does not slow it. That ends with this process, also if this
    process has forked others. It writes log lines to standard error, at the level that
    ``logging.getLogger("zmq_datasource")`` has when it starts. The options are keywords, in snake_case or as in
    docs/options.md.

    Attributes:
        end_seconds: How long the end of the block may take. Then the process is killed.

    Raises:
        OptionError: On construction, if an option is wrong.
    """

    def __init__(self, **options: object) -> None:
        self._given = texts_of(ProxyOptions, options)
        self.options = parse(ProxyOptions, self._given)
        self._process = ThisProcess("the Proxy")
        self.end_seconds = _END_SECONDS
        self._child: _Child | None = None

    def __repr__(self) -> str:
        return f"Proxy({self.options.wal_location!r}, {'running' if self.running else 'not running'})"

    def __enter__(self) -> Self:
        """Start the process, and wait until its endpoints are bound.

        Raises:
            ZmqDataSourceError: The error that has ended it.
        """
        self._process = ThisProcess("the Proxy")
        self._child = child = _Child(self._given)
        try:
            is_ready = child.wait_until_ready(_START_SECONDS)
        except BaseException:  # Ctrl-C
            child.end(self.end_seconds)
            raise
        if not is_ready:
            child.end(self.end_seconds)
            child.raise_error()
            raise SocketError(f"starting the proxy: it was not ready within {_START_SECONDS:.0f} s")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Receive and publish the messages on their way, and end. In a forked child this does nothing.

        Raises:
            ZmqDataSourceError: The error that has ended the proxy before, or that it had at its end.
        """
        if self._process.is_forked:
            return
        self._started.end(self.end_seconds)
        if kind is None:
            self._started.raise_error()

    @property
    def _started(self) -> _Child:
        assert self._child is not None, "a Proxy runs within its with block"
        return self._child

    @property
    def running(self) -> bool:
        """Whether its endpoints are bound and it has not ended."""
        child = self._child
        return child is not None and not self._process.is_forked and bool(child.status) and not child.ended

    @property
    def pid(self) -> int:
        """The process id of the proxy."""
        return self._started.process.pid

    def status(self) -> Mapping[str, Any]:
        """The newest figures, which the proxy sends twice a second: see docs/proxy.md.

        Raises:
            ZmqDataSourceError: The error that has ended it.
        """
        self._process.check()
        if self._child is None:
            return {}
        if self._child.ended:
            self._child.end(self.end_seconds)
            self._child.raise_error()
        return self._child.status


class _Child:
    """The process. A thread reads what it writes.

    Attributes:
        status: Its newest figures; empty until its endpoints are bound.
        ended: Whether it has closed its standard output, which it does when it ends.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from zmq_datasource.receive import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # so that Ctrl-C reaches only this process, which then ends the other
            )
        except OSError as e:
            raise SocketError(f"starting the proxy: {e.strerror or e}") from e
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._output = self.process.stdout
        self.status: dict[str, Any] = {}
        self.ended = self._killed = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        start = {"options": dict(options), "logLevel": _log.getEffectiveLevel(), "parent": os.getpid()}
        with (
            suppress(BrokenPipeError),
            self.process.stdin as pipe,
        ):  # it has ended: the reading thread notices
            pipe.write(json.dumps(start).encode())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            try:
                message = json.loads(line)
                if "status" in message:
                    self.status = message["status"]
                elif "error" in message:
                    name, text = message["error"]
                    self._error = getattr(errors, name, SocketError)(text)
            except (ValueError, TypeError):  # not ours, or cut off
                continue
            with self._changed:
                self._changed.notify_all()
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def wait_until_ready(self, seconds: float) -> bool:
        """Wait for the first figures, or until the process ends; return whether its endpoints are bound."""
        with self._changed:
            self._changed.wait_for(lambda: self.status or self.ended, seconds)
        return bool(self.status)

    def end(self, seconds: float) -> None:
        """Tell the process to end; kill it if it still runs after so many seconds."""
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._killed = True
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self._output.close()

    def raise_error(self) -> None:
        """Raise the error with which the process has ended, if there is one. Call it after ``end``."""
        code = self.process.returncode
        if self._error is not None:
            raise self._error
        if self._killed:
            raise SocketError(
                "ending the proxy: it did not end in time, and was killed; what it had not written is lost, and its "
                "own lines say more"
            )
        if code:
            raise SocketError(f"the proxy has ended by itself (exit code {code}); its own lines say more")


class Parent:
    """In the process: the ``Proxy`` that has started it.

    Args:
        stop: Called in a thread when the process of the ``Proxy`` has ended.

    Attributes:
        options: The options, as text.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        start = json.load(sys.stdin)
        self.options: dict[str, str] = start["options"]
        logging.basicConfig(
            level=start["logLevel"],
            stream=sys.stderr,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        self._pipe = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what others print is not for the Proxy
        os.set_blocking(self._pipe, False)  # a Proxy that reads nothing must not stop this process
        self._is_cut = False

        def watch() -> None:
            while os.getppid() == start["parent"]:
                time.sleep(_WATCH_SECONDS)
            stop()

        threading.Thread(target=watch, daemon=True).start()

    def report(self, status: Mapping[str, Any]) -> None:
        """Send the figures, if the pipe has room."""
        self._send({"status": status})

    @contextmanager
    def telling_errors(self) -> Iterator[None]:
        """Send the error that ends the block, and exit."""
        try:
            yield
        except ZmqDataSourceError as e:
            os.set_blocking(self._pipe, True)
            self._send({"error": [type(e).__name__, str(e)]})
            sys.exit(1)

    def _send(self, message: Mapping[str, Any]) -> None:
        line = b"\n" * self._is_cut + json.dumps(message).encode() + b"\n"
        with suppress(BlockingIOError, BrokenPipeError):
            self._is_cut = os.write(self._pipe, line) < len(line)
