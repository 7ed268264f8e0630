"""A proxy from Python: a process of its own, for as long as a ``with`` block.

A pipe joins the two. The process gets one object of JSON: its options, its log level, and the process that has started
it, with which it ends. It sends objects of JSON: its figures, twice a second, and the error that has ended it.
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
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Self

from zmq_datasource import errors
from zmq_datasource.errors import SocketError, ZmqDataSourceError
from zmq_datasource.host.machine import ThisProcess
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse, texts_of

_log = logging.getLogger(__name__)

_REPORT_SECONDS, _START_TICK = 0.5, 0.02


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
        pid: The process id of the proxy, within the block.

    Raises:
        OptionError: On construction, if an option is wrong.
    """

    pid: int
    _child: subprocess.Popen[bytes]

    def __init__(self, **options: object) -> None:
        self._given = texts_of(ProxyOptions, options)
        parse(ProxyOptions, self._given)
        self._process = ThisProcess("the Proxy")
        self._status: dict[str, Any] = {}
        self._error: Exception | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Start the process, and wait until its endpoints are bound. If another process has the log, wait for its end.

        Raises:
            ZmqDataSourceError: The error that has ended it.
        """
        self._process, self._status, self._error = ThisProcess("the Proxy"), {}, None
        pipe, theirs = Pipe()
        with theirs:
            program = f"from zmq_datasource.receive import main; main({theirs.fileno()})"
            self._child = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C reaches only this process, which then ends the other
            )
        self.pid = self._child.pid
        start = {"options": dict(self._given), "logLevel": _log.getEffectiveLevel(), "parent": os.getpid()}
        self._reader = threading.Thread(target=self._read, args=(pipe, start), daemon=True)
        self._reader.start()
        try:
            while not self.status():
                time.sleep(_START_TICK)
        except BaseException:  # Ctrl-C
            with suppress(ZmqDataSourceError):
                self._end()
            raise
        return self

    def _read(self, pipe: Connection, start: Mapping[str, Any]) -> None:
        with suppress(EOFError, OSError), pipe:  # the process has ended
            pipe.send_bytes(json.dumps(start).encode())
            while True:
                message = json.loads(pipe.recv_bytes())
                if "error" in message:
                    name, text = message["error"]
                    self._error = getattr(errors, name, SocketError)(text)
                elif message:
                    self._status = message

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Receive and publish the messages on their way, and end. In a forked child this does nothing.

        Raises:
            ZmqDataSourceError: The error that has ended the proxy before, or that it had at its end.
        """
        if self._process.is_forked:
            return
        try:
            self._end()
        except ZmqDataSourceError:
            if kind is None:
                raise

    def status(self) -> Mapping[str, Any]:
        """The newest figures, which the proxy sends twice a second: see docs/proxy.md.

        Raises:
            ZmqDataSourceError: The error that has ended it.
        """
        self._process.check()
        if self._reader is not None and not self._reader.is_alive():
            self._end()
        return self._status

    def _end(self) -> None:
        """Tell the process to end, wait until it has ended, and raise its error if it had one."""
        assert self._reader is not None, "a Proxy runs within its with block"
        self._child.terminate()
        code = self._child.wait()
        self._reader.join()
        if self._error is not None:
            raise self._error
        if code or not self._status:
            raise SocketError(f"the proxy has ended by itself (exit code {code}); its own lines say more")


class Parent:
    """In the process: the ``Proxy`` that has started it.

    Args:
        descriptor: The process's end of the pipe.

    Attributes:
        options: The options, as text.
    """

    def __init__(self, descriptor: int) -> None:
        self._pipe, self._sending = Connection(descriptor), threading.Lock()
        start = json.loads(self._pipe.recv_bytes())
        self.options: dict[str, str] = start["options"]
        self._process_id = start["parent"]
        logging.basicConfig(level=start["logLevel"], format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def report(self, status: Callable[[], Mapping[str, Any]], stop: Callable[[], None]) -> None:
        """Send the figures twice a second until the process of the ``Proxy`` has ended. Then call ``stop``.

        Args:
            status: Returns the figures; none until the endpoints are bound.
            stop: Ends this process.
        """
        try:
            while os.getppid() == self._process_id:
                self._send(figures := status())
                time.sleep(_REPORT_SECONDS if figures else _START_TICK)
        finally:
            stop()

    @contextmanager
    def telling_errors(self) -> Iterator[None]:
        """Send the error that ends the block, and exit."""
        try:
            yield
        except ZmqDataSourceError as e:
            self._send({"error": [type(e).__name__, str(e)]})
            sys.exit(1)

    def _send(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError), self._sending:
            self._pipe.send_bytes(json.dumps(message).encode())
