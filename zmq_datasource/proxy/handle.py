"""A proxy from Python: a process of its own, for as long as a ``with`` block."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from zmq_datasource.errors import SocketError
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import describe, parse
from zmq_datasource.proxy.pipes import start_line
from zmq_datasource.proxy.process import error_of

__all__ = ["Proxy"]

_log = logging.getLogger(__name__)

_START_SECONDS = 90.0
_END_SECONDS = 60.0


class Proxy:
    """An XSUB/XPUB proxy that writes down what passes, and gives it again.

    >>> with Proxy(bind="tcp://*:5557", publish="tcp://*:5556", durable="tcp://*:5558", wal_location="/data/wal"):
    ...     ...  # doctest: +SKIP

    It runs in processes of its own: a busy notebook does not slow it, and it ends with this one. What they log goes to
    standard error, from the level on that ``logging.getLogger("zmq_datasource")`` has when it starts. All its
    options are in docs/options.md; here they are keywords, in snake_case or as there.

    Raises:
        OptionError: On construction, if they do not go together.
    """

    def __init__(self, **options: object) -> None:
        names = {option.field: option.name for option in describe(ProxyOptions)}
        self._given = {
            names.get(name, name.replace("zmq_", "zmq.", 1)): _text(value)
            for name, value in options.items()
            if value is not None
        }
        self.options = parse(ProxyOptions, self._given)
        self._process: subprocess.Popen[bytes] | None = None
        self._status: dict[str, Any] = {}
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._ready = False
        self._ended = False

    def __repr__(self) -> str:
        return f"Proxy({self.options.wal_location!r}, {'running' if self.running else 'not running'})"

    def __enter__(self) -> Self:
        """Start it, and wait until its endpoints are bound.

        Raises:
            ZmqDataSourceError: What prevents it.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from zmq_datasource.proxy.process import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._listener = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._listener.start()
        with suppress(BrokenPipeError):  # it says why
            self._process.stdin.write(
                json.dumps(start_line(self._given, _log.getEffectiveLevel())).encode() + b"\n"
            )
            self._process.stdin.flush()
        try:
            with self._changed:
                self._changed.wait_for(lambda: (self._ready and self._status) or self._ended, _START_SECONDS)
        except BaseException:  # Ctrl-C
            self._end()
            raise
        if not self._ready:
            self._end()
            self._raise_error()
            raise SocketError(f"starting the proxy: it was not ready within {_START_SECONDS:.0f} s")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take what is on its way, and end.

        Raises:
            ZmqDataSourceError: Why it had ended before, or what went wrong at the end.
        """
        self._end()
        if kind is None:
            self._raise_error()

    def _end(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            _log.error("the proxy does not end; it is killed")
            process.kill()
            process.wait()
        self._listener.join()
        process.stdout.close()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            with self._changed:
                if "ready" in said:
                    self._ready = True
                elif "error" in said:
                    self._error = error_of(said["error"])
                else:
                    self._status = said["status"]
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
        assert self._process is not None
        code = self._process.returncode
        if code:
            raise SocketError(f"the proxy has ended by itself (exit code {code}); its own lines say more")

    @property
    def running(self) -> bool:
        return self._ready and not self._ended

    @property
    def pid(self) -> int:
        """Of the live process."""
        assert self._process is not None
        return self._process.pid

    def status(self) -> Mapping[str, Any]:
        """The newest account, twice a second: see docs/proxy.md for what it holds.

        Raises:
            ZmqDataSourceError: Why it has ended.
        """
        if self._ended:
            assert self._process is not None
            self._process.wait(_END_SECONDS)
            self._raise_error()
        return self._status


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return json.dumps(list(value)) if any("," in str(v) for v in value) else ",".join(map(str, value))
    return str(value)
