"""A proxy from Python: a process of its own, for as long as a ``with`` block."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from zmq_datasource.errors import SocketError
from zmq_datasource.host.machine import ThisProcess
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse, texts_of
from zmq_datasource.proxy.child import Child

__all__ = ["Proxy"]

_START_SECONDS = 90.0
# More than the live process allows itself at its end beside its linger: for the disk, transactions and its server.
_END_SECONDS = 300.0


class Proxy:
    """An XSUB/XPUB proxy that writes down what passes, and gives it again.

    ```python
    with Proxy(bind="tcp://*:5557", publish="tcp://*:5556", durable="tcp://*:5558", wal_location="/data/wal") as proxy:
        print(proxy.status())
    ```

    It runs in processes of its own: a busy notebook does not slow it, and it ends with this one, whatever this one has
    forked. What they log goes to
    standard error, from the level on that ``logging.getLogger("zmq_datasource")`` has when it starts. All its
    options are in docs/options.md; here they are keywords, in snake_case or as there.

    Attributes:
        end_seconds: How long its end may take, beside twice its linger. Then its processes are killed.

    Raises:
        OptionError: On construction, if they do not go together.
    """

    def __init__(self, **options: object) -> None:
        self._given = texts_of(ProxyOptions, options)
        self.options = parse(ProxyOptions, self._given)
        self._process = ThisProcess("the Proxy")
        self.end_seconds = _END_SECONDS
        self._child: Child | None = None
        self._changed = threading.Condition()
        self._ended = False
        self._code = 0

    def __repr__(self) -> str:
        return f"Proxy({self.options.wal_location!r}, {'running' if self.running else 'not running'})"

    def __enter__(self) -> Self:
        """Start the proxy's processes, and wait until their endpoints are bound.

        Raises:
            ZmqDataSourceError: What prevents it.
        """
        self._process = ThisProcess("the Proxy")
        self._child = child = Child("zmq_datasource.proxy.process", self._given)
        self._ended, self._code = False, 0  # of the one before
        self._listener = threading.Thread(target=self._listen, args=(child,), daemon=True)
        self._listener.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: child.status or self._ended, _START_SECONDS)
        except BaseException:  # Ctrl-C
            self._end()
            raise
        if not child.ready:
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
        """Take what is on its way, and end. A forked child that leaves the block ends nothing.

        Raises:
            ZmqDataSourceError: Why it had ended before, or what went wrong at the end.
        """
        if self._process.is_left:
            return
        self._end()
        if kind is None:
            self._raise_error()

    def _end(self) -> None:
        child = self._started
        child.close_input()
        self._code = child.wait(self._end_seconds)
        self._listener.join()
        child.close_output()

    @property
    def _end_seconds(self) -> float:
        """It lingers twice: for what it has still to give libzmq, and for what libzmq has."""
        return self.end_seconds + 2 * self.options.linger / 1000

    def _listen(self, child: Child) -> None:
        going = True
        while going:
            going = child.hear_one()
            with self._changed:
                self._ended = not going
                self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._started.error is not None:
            raise self._started.error
        if self._started.killed:
            raise SocketError(
                f"ending the proxy: it did not end within {self._end_seconds:g} s, and was killed; what it had not "
                "written is lost, and its own lines say more"
            )
        if self._code:
            raise SocketError(
                f"the proxy has ended by itself (exit code {self._code}); its own lines say more"
            )

    @property
    def _started(self) -> Child:
        assert self._child is not None, "a Proxy runs within its with block"
        return self._child

    @property
    def running(self) -> bool:
        return not self._process.is_left and self._child is not None and self._child.ready and not self._ended

    @property
    def pid(self) -> int:
        """The process id of the live process."""
        return self._started.pid

    def status(self) -> Mapping[str, Any]:
        """The newest account, twice a second: see docs/proxy.md for what it holds.

        Raises:
            ZmqDataSourceError: Why it has ended.
        """
        self._process.check()
        if self._ended:
            self._code = self._started.wait(self._end_seconds)
            self._raise_error()
        return self._child.status if self._child is not None else {}
