"""A proxy from Python: processes of its own, for as long as a ``with`` block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from zmq_datasource.errors import SocketError
from zmq_datasource.host.machine import ThisProcess
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse, texts_of
from zmq_datasource.proxy.child import Child

_START_SECONDS = 90.0
# More than the live process needs at its end: for the disk, transactions, subscribers, and the server process.
_END_SECONDS = 300.0


class Proxy:
    """An XSUB/XPUB proxy that keeps the messages in a log, and sends them again.

    ```python
    with Proxy(bind="tcp://*:5557", publish="tcp://*:5556", durable="tcp://*:5558", wal_location="/data/wal") as proxy:
        print(proxy.status())
    ```

    It runs in processes of its own, so a busy notebook does not slow it. They end with this process, also if this
    process has forked others. They write log lines to standard error, at the level that
    ``logging.getLogger("zmq_datasource")`` has when they start. The options are keywords, in snake_case or as in
    docs/options.md.

    Attributes:
        end_seconds: How long the end of the block may take. Then the processes are killed.

    Raises:
        OptionError: On construction, if an option is wrong.
    """

    def __init__(self, **options: object) -> None:
        self._given = texts_of(ProxyOptions, options)
        self.options = parse(ProxyOptions, self._given)
        self._process = ThisProcess("the Proxy")
        self.end_seconds = _END_SECONDS
        self._child: Child | None = None
        self._code = 0

    def __repr__(self) -> str:
        return f"Proxy({self.options.wal_location!r}, {'running' if self.running else 'not running'})"

    def __enter__(self) -> Self:
        """Start the proxy's processes, and wait until their endpoints are bound.

        Raises:
            ZmqDataSourceError: The error that has ended them.
        """
        self._process = ThisProcess("the Proxy")
        self._code = 0
        self._child = Child("zmq_datasource.proxy.process", self._given)
        try:
            is_ready = self._child.wait_until_ready(_START_SECONDS)
        except BaseException:  # Ctrl-C
            self._end()
            raise
        if not is_ready:
            self._end()
            self._raise_error()
            raise SocketError(f"starting the proxy: it was not ready within {_START_SECONDS:.0f} s")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Receive and publish the messages on their way, and end. In a forked child this does nothing.

        Raises:
            ZmqDataSourceError: The error that has ended the proxy before, or that it had at its end.
        """
        if self._process.is_forked:
            return
        self._end()
        if kind is None:
            self._raise_error()

    def _end(self) -> None:
        self._code = self._started.end(self.end_seconds)

    def _raise_error(self) -> None:
        if self._started.error is not None:
            raise self._started.error
        if self._started.killed:
            raise SocketError(
                f"ending the proxy: it did not end within {self.end_seconds:g} s, and was killed; what it had not "
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
        """Whether its endpoints are bound and it has not ended."""
        child = self._child
        return child is not None and not self._process.is_forked and bool(child.status) and not child.ended

    @property
    def pid(self) -> int:
        """The process id of the live process."""
        return self._started.pid

    def status(self) -> Mapping[str, Any]:
        """The newest figures, which the proxy sends twice a second: see docs/proxy.md.

        Raises:
            ZmqDataSourceError: The error that has ended it.
        """
        self._process.check()
        if self._child is None:
            return {}
        if self._child.ended:
            self._end()
            self._raise_error()
        return self._child.status
