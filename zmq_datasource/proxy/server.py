"""The server process: it answers durable subscribers from the files of the log.

The live process starts the server process. The server process reads its options and then the progress of the log from
its standard input, exits when that closes, and writes its status to its standard output (``child``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import zmq

from zmq_datasource.errors import DiskFaultError, EndpointError, ZmqDataSourceError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.host.machine import allow_many_files
from zmq_datasource.host.wake_pipe import WakePipe
from zmq_datasource.log import STORE_RETRY_SECONDS, LogStorage, Retrier
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.proxy.child import NewestReader, Parent
from zmq_datasource.proxy.fetch_server import FetchServer
from zmq_datasource.proxy.fetch_wire import FetchWire
from zmq_datasource.proxy.names import NAME_BOUNDS, NameBounds
from zmq_datasource.proxy.positions import Positions
from zmq_datasource.proxy.view import LogView, Progress

_WAIT_MS = 100
# How soon to check again whether an answer has left, because no event says so.
_RECHECK_MS = 10
_STATUS_SECONDS = 0.25
# How long to try to bind: the server process of a killed proxy frees its ports a moment later.
_BIND_SECONDS = 5.0


class Server:
    """Serves durable subscribers; in one thread.

    Args:
        options: Endpoints, security, and the place of the log.
        progress: How far the log is.
        bounds: How much durable subscribers may ask for.

    Attributes:
        view: The rows of the log.
        positions: The positions of all durable subscribers.

    Raises:
        LogError, OptionError, EndpointError: The log or a socket cannot be opened; nothing stays open.
    """

    def __init__(self, options: ProxyOptions, progress: Progress, bounds: NameBounds = NAME_BOUNDS) -> None:
        self._poller = zmq.Poller()
        self._progress: Progress | None = None
        self._is_busy = False
        self._faults = LimitedLog(__name__, "faults of files")
        with ExitStack() as stack:
            self._wakes = WakePipe()
            stack.callback(self._wakes.close)
            self._poller.register(self._wakes.descriptor, zmq.POLLIN)
            storage = LogStorage(options.wal_location)
            self.view = LogView(storage)
            self.view.follow(progress)
            self.positions = Positions(
                storage,
                options.subscriber_expiry,
                self._wakes.wake,
                present_seconds=bounds.present_seconds,
            )
            stack.callback(self.positions.close)
            self._fetches = FetchServer(FetchWire(options), self.view, self.positions, bounds)
            stack.callback(self._fetches.close)
            self._poller.register(self._fetches.wire.socket, zmq.POLLIN)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Write the positions, and close sockets and files."""
        self._stack.close()

    def register(self, descriptor: int) -> None:
        """Let ``wait`` wait for this descriptor too."""
        self._poller.register(descriptor, zmq.POLLIN)

    def wait(self) -> None:
        """Wait until there is something to do."""
        wait = _WAIT_MS
        if self._fetches.must_recheck:
            wait = _RECHECK_MS
        if (deadline := self._fetches.waiting.next_deadline) is not None:
            wait = max(1, min(wait, round(1000 * (deadline - time.monotonic()))))
        self._poller.poll(0 if self._is_busy else wait)
        self._wakes.clear()

    def step(self, progress: Progress | None) -> None:
        """Follow the log to its newest progress, write positions, and take and answer requests.

        Args:
            progress: How far the log is; None if no newer value has come.

        Raises:
            LogError: Positions cannot be written any more, or the log cannot be read.
        """
        self._progress = progress or self._progress
        if self._progress is not None:
            try:
                self.view.follow(self._progress)
            except DiskFaultError as e:  # too many open files: the next step tries again
                self._faults.warn("reading the log on: %s", e)
            else:
                self._progress = None
        self.positions.step()
        self._is_busy = self._fetches.step()

    def status(self) -> dict[str, Any]:
        """The server's part of the proxy's status."""
        return {"durable": self._fetches.names.status()}

    @property
    def asked_end(self) -> int:
        """A subscriber has asked for what follows this id, and found nothing."""
        return self._fetches.asked_end


def main() -> None:
    """Run the server process until the pipe from the live process closes."""
    allow_many_files()
    parent = Parent()
    try:
        options, progress = parse(ProxyOptions, parent.options), Progress(*parent.values.wait())
        with closing(open_server(options, progress)) as server:
            serve(server, parent.values, parent.send)
    except ZmqDataSourceError as e:
        parent.exit_with(e)


def open_server(
    options: ProxyOptions, progress: Progress, retry_seconds: float = STORE_RETRY_SECONDS
) -> Server:
    """Open a server. While the disk refuses, try again for ``retry_seconds``.

    Raises:
        LogError, OptionError, EndpointError: It cannot be opened as asked.
    """
    return Retrier(retry_seconds).retry(lambda: _open_when_ports_are_free(options, progress))


def _open_when_ports_are_free(options: ProxyOptions, progress: Progress) -> Server:
    deadline = time.monotonic() + _BIND_SECONDS
    while True:
        try:
            return Server(options, progress)
        except EndpointError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def serve(server: Server, progress: NewestReader, report: Callable[[dict[str, Any]], None]) -> None:
    """Serve until the pipe with the progress of the log closes.

    Args:
        report: Called in each round with ``askedEnd``, and four times a second with ``status``, too.

    Raises:
        LogError: Positions cannot be written any more, or the log cannot be read.
    """
    server.register(progress.descriptor)
    next_status = 0.0
    while not progress.ended:
        now = time.monotonic()
        message: dict[str, Any] = {"askedEnd": server.asked_end}
        if now >= next_status:
            next_status = now + _STATUS_SECONDS
            message["status"] = server.status()
        report(message)
        server.wait()
        newest = progress.newest()
        server.step(None if newest is None else Progress(*newest))
